"""All layers of a token in one region: the bits of layer by layer, and who may look or stop it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_packed_run import IDS, LEAN, least, load, packed

from offload.models.lean_program import TokenProgram
from offload.models.pause import pause_before

KW: dict[str, Any] = {
    "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Segments of every token that went through a program."""
    found: list[int] = []
    inner = TokenProgram.__call__

    def counted(self: TokenProgram, *args: Any) -> Any:
        out = inner(self, *args)
        found.append(len(self._segments))
        return out

    monkeypatch.setattr(TokenProgram, "__call__", counted)
    return found


def same(a: Any, b: Any) -> bool:
    logits = zip(a.logits, b.logits, strict=True)
    return torch.equal(a.sequences, b.sequences) and all(torch.equal(x, y) for x, y in logits)


@pytest.mark.parametrize("family", LEAN)
def test_bits_of_layer_by_layer(family: str, tmp_path: Path, runs: list[int]) -> None:
    _, pack_dir = packed(family, tmp_path, "q4")
    model = load(pack_dir)
    try:
        at_once = model.generate(IDS, **KW)
        uses = model.offload.stats()["hits"]
        assert runs == [1] * 9, "every token in one region"
        seen: list[int] = []
        layer = model.base_model.layers[1]
        hook = layer.register_forward_hook(lambda *_: seen.append(1))
        one_by_one = model.generate(IDS, **KW)
        hook.remove()
        assert (len(seen), len(runs)) == (10, 9), "a hook on a layer was passed over"
        assert same(at_once, one_by_one)
        assert model.offload.stats()["hits"] == 2 * uses
        assert same(at_once, model.generate(IDS, **KW))
    finally:
        model.offload.close()


def _layers_stay(pack_dir: Path, ram: int) -> bool:
    model = load(pack_dir, ram)
    try:
        plan, cut = model.offload.plan, model.offload.attachment.cut
        pinned = plan.tiers[plan.compute_tier].pinned
        layers = [b for b in plan.blocks if "layers" in b and not cut.blocks[b].group]
        return all(b in pinned for b in layers)
    finally:
        model.offload.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_experts_that_come_and_go(family: str, tmp_path: Path, runs: list[int]) -> None:
    """Python fetches them between two regions; the rest of the layers stays."""
    _, pack_dir = packed(family, tmp_path, "q4")
    whole = load(pack_dir)
    expected = whole.generate(IDS, **KW)
    whole.offload.close()
    del runs[:]
    low, high = least(pack_dir), 2**30
    while high - low > 4096:  # the smallest budget with which all but experts stays
        ram = (low + high) // 2
        low, high = (low, ram) if _layers_stay(pack_dir, ram) else (ram, high)
    model = load(pack_dir, high)
    try:
        got = model.generate(IDS, **KW)
        assert model.offload.stats()["misses"] > 0
        layers = len(model.base_model.layers)
        assert runs == [layers + 1] * 9
        hook = model.base_model.layers[0].register_forward_hook(lambda *_: None)
        one_by_one = model.generate(IDS, **KW)
        hook.remove()
        assert len(runs) == 9
        assert same(got, expected)
        assert same(one_by_one, expected)
        assert not model.offload.executor.held()
    finally:
        model.offload.close()


def test_a_pause_may_end_a_token_and_nothing_is_lost(tmp_path: Path, runs: list[int]) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "q4")
    model = load(pack_dir)
    try:
        expected = model.generate(IDS, **KW).sequences
        del runs[:]
        calls: list[int] = []

        class Stop(Exception):
            pass

        def pause() -> None:
            calls.append(1)
            if len(calls) == stop_at:
                raise Stop

        layers = model.base_model.layers
        pause_before(layers, pause)
        stop_at = len(layers) + 4
        cache = model.offload.new_cache()
        with pytest.raises(Stop):
            model.generate(IDS, past_key_values=cache, **KW)
        assert len(runs) == 3, "three tokens after the prompt, one pause each, and one refused"
        kept = cache.get_seq_length()
        assert kept == IDS.shape[1] + 3
        more = {**KW, "max_new_tokens": 10 - 4}
        out = model.generate(expected[:, : kept + 1], past_key_values=cache, **more)
        assert torch.equal(out.sequences, expected)
    finally:
        model.offload.close()


def test_a_replaced_layer_and_a_hook_for_all_modules_are_noticed(
    tmp_path: Path, runs: list[int]
) -> None:
    _, pack_dir = packed("llama", tmp_path, "q4")
    model = load(pack_dir)
    try:
        expected = model.generate(IDS, **KW)
        assert len(runs) == 9
        layer = model.base_model.layers[0]
        own, calls = layer.forward, []

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return own(*args, **kwargs)

        layer.forward = forward
        assert same(model.generate(IDS, **KW), expected)
        layer.forward = own
        assert (len(calls), len(runs)) == (10, 9)
        everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            assert same(model.generate(IDS, **KW), expected)
        finally:
            everywhere.remove()
        assert len(runs) == 9
        assert same(model.generate(IDS, **KW), expected)
        assert len(runs) == 18
    finally:
        model.offload.close()
