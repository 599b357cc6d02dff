"""What a model is called, and where its pack lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pack_support import small_source

from offload.errors import StoreError
from offload.io.pack_manifest import MANIFEST
from offload.models.choose import model_directory
from offload.models.naming import model_name, packs_folder
from offload.models.pack_cache import packed
from offload.models.recipes import spill_directory
from offload.runtime.hardware_cache import cache_path
from offload.runtime.known import Known


def test_a_cached_pack_is_called_as_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = small_source()
    source.id = replace(source.id, path="/models/Some-7B-Q4_K_M.gguf")
    path = packed(source, "q8").path
    assert path.parent == packs_folder()
    assert model_name(path) == "Some-7B-Q4_K_M.gguf (q8)"
    assert model_name(packed(source, "none").path) == "Some-7B-Q4_K_M.gguf"
    assert model_name(tmp_path / "mine") == "mine"
    (path / MANIFEST).write_text("damaged")
    assert model_name(path) == path.name


def test_a_model_in_the_hubs_cache_is_not_called_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "models--org--some-7B" / "snapshots" / "0123abcd"
    assert model_name(directory) == "some-7B"
    source = small_source()
    source.id = replace(source.id, path=str(directory))
    assert model_name(packed(source, "q8").path) == "some-7B (q8)"


def test_without_a_home_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(StoreError, match="neither XDG_CACHE_HOME nor HOME is set; set one, or"):
        packed(small_source(), "q8")
    assert model_name(Path("mine")) == "mine"


@pytest.mark.parametrize("given", ["relative", "~/caches", "~no-such-user/x", ""])
def test_a_cache_directory_that_is_not_absolute_is_ignored_by_all(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs went to ~/.cache, rates and private files below the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    folder = tmp_path / "home" / ".cache" / "offload"
    found = (packs_folder(), cache_path(), Known("a.json").path, spill_directory(None))
    assert [path.parent for path in found] == [folder] * 4


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "model-without-a-suffix"
    file.write_bytes(b"GGUF\xff\xff\xff\xff" + bytes(16))
    with pytest.raises(Exception, match=r"GGUF version \d+ is not supported"):
        model_directory(file)
