"""``--prompt-cache`` beside ``--kv bf16|q8|q4``: rounded bytes are stored, and found again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_lean_bf16 import TINY, generate, loaded, packed
from test_prefix_generate import check_equal

from offload.cpu_ops.block_layout import PART
from offload.errors import OffloadError
from offload.models.lean_cache import LeanCache

__all__ = ["packed"]

BLOCK = 32
CONTEXT = 3 * PART
IDS = torch.randint(3, 2000, (1, 2 * PART + 30), generator=torch.Generator().manual_seed(4))
SHORT = IDS[:, : 5 * BLOCK + 9]
KINDS = ("bf16", "q8", "q4")

Files = dict[str, int]


def stored(directory: Path) -> Files:
    """Bytes of files by name."""
    return {p.name: p.stat().st_size for p in directory.rglob("*.kv")}


def blocks(directory: Path | None, kind: str | None, chunk: int = BLOCK, **more: Any) -> Any:
    """The road between transformers' layers: an unpacked model, small blocks."""
    if directory is not None:
        more |= {"prompt_cache": directory, "prompt_cache_chunk": chunk}
    wish = {"attention": "offload", "context": 256, "kv_block_tokens": BLOCK, "kv": kind}
    return loaded(TINY, **{**wish, **more})


def lean(directory: Path | None, kind: str | None, path: Path, **more: Any) -> Any:
    """The fused road of a pack in RAM, whose parts are of 256 tokens."""
    if directory is not None:
        more |= {"prompt_cache": directory, "prompt_cache_chunk": PART}
    return loaded(path, **{"context": CONTEXT, "kv": kind, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_found_as_they_were_rounded(kind: str, tmp_path: Path) -> None:
    """Without a cache, without a hit, with one from RAM and from the disk: the same bits."""
    with blocks(None, kind) as model:
        want = generate(model, SHORT, prefill_chunk_size=BLOCK)
        whole = generate(model, SHORT)
        error = model.offload.stats()["kv"]["attention_error"]
    assert torch.equal(whole.sequences, want.sequences)
    found = SHORT.shape[1] if kind == "bf16" else 5 * BLOCK
    for tokens, ram in ((0, None), (found, None), (found, "320KiB")):
        with blocks(tmp_path, kind, kv_ram=ram) as model:
            check_equal(generate(model, SHORT), want)
            assert model.offload.prompts.last.tokens == tokens
            figures = model.offload.stats()["kv"]
            assert bool(figures["read_bytes"]) == (ram is not None)
            if kind != "bf16":  # what was measured when they were read is stored beside them
                assert figures["attention_error"] == pytest.approx(error, rel=1.0)
                assert figures["attention_error"] > 0


def test_files_shrink_by_the_ratio_of_bytes(tmp_path: Path) -> None:
    sizes = {}
    for kind in (None, *KINDS):
        with blocks(tmp_path / str(kind), kind, dtype="float32") as model:
            generate(model, SHORT)
            prompts, config = model.offload.prompts, model.config
            prompts.prefixes.flush()
            files = stored(tmp_path / str(kind))
            rounded = kind in ("q8", "q4")
            assert len(files) == (5 if rounded else 6), "the end of a prompt is not rounded yet"
            row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            sizes[kind] = (max(files.values()) - 2 * 4096) / (row * BLOCK)
            expected = prompts.prefixes.group_bytes
            logits = 0 if rounded else 4 * config.vocab_size
            assert max(files.values()) <= expected <= max(files.values()) + 4 * 4096 + logits
    full, bf16, q8, q4 = sizes.values()
    assert full >= 4 * 0.95
    assert bf16 <= full / 2 + 0.3
    assert q8 < full / 2
    assert q4 < q8


def test_a_cache_of_one_kind_is_none_of_another(tmp_path: Path) -> None:
    """Nor of another size of blocks: other tokens are rounded then."""
    ways: list[tuple[str | None, dict[str, Any]]] = [
        *((kind, {}) for kind in (None, *KINDS)),
        ("q8", {"kv_block_tokens": 2 * BLOCK, "chunk": 2 * BLOCK}),
        ("q8", {"chunk": 2 * BLOCK}),
    ]
    for kind, more in ways:
        with blocks(tmp_path, kind, **more) as model:
            generate(model, SHORT)
            assert not model.offload.prompts.last.tokens, (kind, more)
            generate(model, SHORT)
            assert model.offload.prompts.last.tokens, (kind, more)


def test_a_hit_ends_where_a_block_does(tmp_path: Path) -> None:
    """Shorter passes than blocks, and passes that end within one."""
    for chunk, group in ((BLOCK // 2, BLOCK), (BLOCK * 3 // 2, 3 * BLOCK)):
        with blocks(None, "q8") as model:
            want = generate(model, SHORT, prefill_chunk_size=chunk)
        for turn in range(2):
            with blocks(tmp_path, "q8", chunk) as model:
                assert model.offload.prompts.prefixes.group == group
                note = f"every {group} ("
                assert any(note in n for n in model.offload.notes)
                check_equal(generate(model, SHORT), want)
                whole = (SHORT.shape[1] - 1) // group * group
                assert model.offload.prompts.last.tokens == (whole if turn else 0)
                # Shorter than a group: on the grid of passes all the same.
                few = SHORT[:, : group - 2]
                got = generate(model, few)
                assert model.offload.prompts.last is None or not model.offload.prompts.last.tokens
        with blocks(None, "q8") as model:
            check_equal(got, generate(model, few, prefill_chunk_size=chunk))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_find_their_parts(kind: str, packed: Path, tmp_path: Path) -> None:
    with lean(None, kind, packed) as model:
        want = generate(model, IDS, prefill_chunk_size=PART)
        whole = generate(model, IDS)
        other = torch.cat([IDS[:, : PART + 90], IDS[:, :100]], 1)
        right = generate(model, other, prefill_chunk_size=PART)
        full = model.offload.new_cache().store
    assert torch.equal(whole.sequences, want.sequences)
    ends = kind == "bf16"  # others' last part is not rounded yet
    for turn in range(2):
        with lean(tmp_path, kind, packed) as model:
            check_equal(generate(model, IDS), want)
            assert isinstance(model.offload.new_cache(), LeanCache)
            found = IDS.shape[1] if ends else 2 * PART
            assert model.offload.prompts.last.tokens == (found if turn else 0)
            if kind != "bf16":
                assert model.offload.stats()["kv"]["attention_error"] > 0
            check_equal(generate(model, other), right)
            found = other.shape[1] if ends and turn else PART
            assert model.offload.prompts.last.tokens == found
    ratio = {"bf16": 2, "q8": 3.5, "q4": 6}[kind]
    row = 2 * full.layers * full.heads * full.dim * 4
    files = stored(tmp_path)
    assert len(files) == (4 if ends else 2)
    assert max(files.values()) <= row * PART / ratio + 4 * 4096
    with lean(tmp_path, "q8" if kind != "q8" else "q4", packed) as model:
        generate(model, IDS)
        assert model.offload.prompts.last.tokens == 0
    with lean(tmp_path, kind, packed, attention="offload") as model:
        generate(model, IDS)
        assert model.offload.prompts.last.tokens == 0, "blocks between layers round otherwise"


def test_damage_is_computed_again(
    packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for road, ids in ((blocks, SHORT), (lambda d, k: lean(d, k, packed), IDS)):
        directory = tmp_path / str(ids.shape[1])
        with road(directory, "q4") as model:
            want = generate(model, ids)
            model.offload.prompts.prefixes.flush()
        # The second group: what is before it stays in use.
        file = sorted(directory.rglob("*.kv"), key=lambda p: -p.stat().st_mtime_ns)[1]
        good = file.read_bytes()
        file.write_bytes(good[:300] + bytes([good[300] ^ 4]) + good[301:])
        caplog.clear()
        with road(directory, "q4") as model, caplog.at_level(logging.WARNING, "offload"):
            check_equal(generate(model, ids), want)
            last = model.offload.prompts.last
            assert (last.tokens, last.damaged) == (model.offload.prompts.prefixes.group, 1)
            assert "computed again" in caplog.text
            model.offload.prompts.prefixes.flush()
        assert file.read_bytes() == good or len(file.read_bytes()) == len(good)
        with road(directory, "q4") as model:
            check_equal(generate(model, ids), want)
            assert model.offload.prompts.last.damaged == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_conversations(kind: str, packed: Path, tmp_path: Path) -> None:
    """The way of ``chat``: one cache from turn to turn, cropped to whole blocks."""
    roads: list[tuple[Callable[..., Any], int, int]] = [
        (blocks, BLOCK, 2 * BLOCK + 3),
        (lambda d, k: lean(d, k, packed, context=4 * PART), PART, PART + 3),
    ]
    for road, grain, first in roads:
        directory = tmp_path / str(grain)
        for run in range(2):
            ids = IDS[:, :first]
            with road(directory, kind) as model, road(None, kind) as plain:
                prompts = model.offload.prompts
                cache = prompts.new_cache()
                for turn in range(3):
                    assert prompts.keep(cache, ids[0].tolist())
                    held = cache.get_seq_length()
                    assert held % grain == 0
                    assert bool(held) == bool(turn)
                    found = generate(model, ids, past_key_values=cache)
                    check_equal(found, generate(plain, ids, prefill_chunk_size=grain))
                    assert prompts.last.kept == held
                    whole = (ids.shape[1] - 1) // grain * grain
                    assert prompts.last.tokens == (whole if run else held)
                    ids = torch.cat([found.sequences, IDS[:, 20 + turn : 20 + turn + grain]], 1)


def test_a_file_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    """Whatever a checksum says: bytes of another shape never get into a cache."""
    with blocks(tmp_path, "q8") as model:
        generate(model, SHORT)
        cache = model.offload.new_cache()
        layer = cache.layers[0]
        with pytest.raises(OffloadError, match="not said"):
            layer.check_rounded([], (None, None), BLOCK)
        some = torch.zeros(1, 2, 0, 32, dtype=model.dtype)
        with pytest.raises(OffloadError, match=f"2 blocks of {BLOCK} tokens"):
            layer.check_rounded([(some, some)] * 2, (some, some), BLOCK)
        few = torch.zeros(2, 1, 9, dtype=torch.uint8)
        with pytest.raises(OffloadError, match="must be uint8"):
            layer.extend_rounded([(few, few)])
        assert layer.get_seq_length() == 0
        assert model.offload.prompts.last.tokens == 0
