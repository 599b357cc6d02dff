"""Packing on disks that are really full or read-only, and killed at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Cli, refused
from disk_support import fill, read_only, small_filesystem

from offload.io.pack_manifest import is_pack
from offload.models.choose import model_directory


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_filesystem(tmp_path, 24) as disk:
        yield disk


def test_a_full_disk(cli: Cli, moe: Path, small: Path) -> None:
    """Said with numbers before anything is written; with room the same command does it."""
    filler = fill(small)
    refused(cli("pack", moe, small / "p", "--quant", "q4"), "small")
    assert not is_pack(small / "p")
    filler.unlink()
    assert cli("pack", moe, small / "p", "--quant", "q4").code == 0
    assert is_pack(small / "p")


def test_the_disk_fills_while_packing(
    cli: Cli, moe: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundles are reserved; what comes on top (journal, manifest, tokenizer) is not."""
    from offload.models import pack_run

    real, made = pack_run.make, [0]

    def late(*args: object, **kwargs: object) -> object:
        made[0] += 1
        if made[0] == 3:
            fill(small)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(pack_run, "make", late)
        result = cli("pack", moe, small / "p", "--quant", "q4")
    assert made[0] >= 3
    said = refused(result, str(small))  # of whichever file found no room first
    assert "No space left on device" in said or "the disk is full" in said
    assert not is_pack(small / "p")
    (small / "filler").unlink()
    again = cli("pack", moe, small / "p", "--quant", "q4")
    assert again.code == 0, again.err
    assert is_pack(small / "p")


def test_a_pack_in_a_cache_that_has_become_read_only(
    dense: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to change in it, so it is opened as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(small))
    made = model_directory(dense, "q4")
    read_only(small)
    assert model_directory(dense, "q4") == made


@pytest.mark.parametrize("there", [False, True])
def test_a_cache_that_is_read_only(
    cli: Cli, dense: Path, small: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """``--quant`` packs into the cache: the way out is another cache, or a pack of one's own."""
    cache = small / "cache"
    if there:
        (cache / "offload" / "packs").mkdir(parents=True)
    read_only(small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    words = ("generate", "-m", dense, "-p", "the disk", "-n", 2, "--ram", "1GiB")
    error = refused(cli(*words, "--quant", "q4"), "Read-only file system", "XDG_CACHE_HOME")
    assert "offload pack" in error
    own = small.parent / "own"
    assert cli("pack", dense, own, "--quant", "q4").code == 0
    assert is_pack(own)
