"""All layers of a token in one region: the bits of layer by layer, and who may look or stop it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_packed_run import IDS, LEAN, least, load, packed, planned

from offload.cpu_ops.program import Program
from offload.errors import ClosedError, SchedulerError
from offload.models.lean_program import TokenProgram
from offload.models.pause import pause_before
from offload.scheduler.shelf import Pool

KW: dict[str, Any] = {
    "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Regions of every token that went through a program, but for those of experts."""
    found: list[int] = []
    regions: list[int] = []
    inner, run = TokenProgram.__call__, Program.run

    def counted(self: TokenProgram, *args: Any) -> Any:
        regions.clear()
        out = inner(self, *args)
        found.append(len(regions))
        return out

    def noted(self: Program, *args: int) -> int:
        regions.append(1)
        return run(self, *args)

    monkeypatch.setattr(TokenProgram, "__call__", counted)
    monkeypatch.setattr(Program, "run", noted)
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


def pinned(pack_dir: Path, ram: int, *, experts: bool) -> bool:
    """Whether all experts, or all of the layers but experts, are pinned under a budget in bytes."""
    prepared = planned(pack_dir, ram)
    plan, blocks = prepared.plan, prepared.cut.blocks
    there = plan.tiers[plan.compute_tier].pinned
    of_layers = [b for b in plan.blocks if "layers" in b]
    return all(b in there for b in of_layers if bool(blocks[b].group) == experts)


def budgets_about(pack_dir: Path, *, experts: bool) -> tuple[int, int]:
    """The largest budget, in bytes, with which they are not all ``pinned``, and the smallest with
    which they are, to within 2 KiB."""
    low, high = least(pack_dir), 2**30
    while high - low > 2048:
        ram = (low + high) // 2
        low, high = (low, ram) if pinned(pack_dir, ram, experts=experts) else (ram, high)
    return low, high


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_experts_that_come_and_go(family: str, tmp_path: Path, runs: list[int]) -> None:
    """Python fetches them between two regions; the rest of the layers stays."""
    _, pack_dir = packed(family, tmp_path, "q4")
    whole = load(pack_dir)
    expected = whole.generate(IDS, **KW)
    whole.offload.close()
    del runs[:]
    _, enough = budgets_about(pack_dir, experts=False)
    model = load(pack_dir, enough)
    try:
        got = model.generate(IDS, **KW)
        assert model.offload.stats()["misses"] > 0
        layers = len(model.base_model.layers)
        assert max(runs) == layers + 1
        hook = model.base_model.layers[0].register_forward_hook(lambda *_: None)
        one_by_one = model.generate(IDS, **KW)
        hook.remove()
        assert len(runs) == 9
        assert same(got, expected)
        assert same(one_by_one, expected)
        assert not model.offload.executor.held()
    finally:
        model.offload.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("guess", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_experts_that_are_there_are_not_asked_for(
    family: str, guess: bool, tmp_path: Path, runs: list[int]
) -> None:
    """As long as none is missing a token is one region; a missing one stops it, and is fetched."""
    _, pack_dir = packed(family, tmp_path, "q4")
    long: dict[str, Any] = {**KW, "max_new_tokens": 24}
    whole = load(pack_dir)
    expected = whole.generate(IDS, **long)
    uses = whole.offload.stats()["hits"]
    whole.offload.close()
    short, _ = budgets_about(pack_dir, experts=True)
    model = load(pack_dir, short, guess=guess)
    try:
        layers, executor = len(model.base_model.layers), model.offload.executor
        del runs[:]
        for _ in range(3):
            assert same(model.generate(IDS, **long), expected)
        stats = model.offload.stats()
        assert stats["hits"] + stats["misses"] == 3 * uses
        assert stats["misses"] > 0
        assert 1 in runs
        assert not executor.held()
        executor.settle()
        executor.validate()
        assert max(runs) <= layers + 1
    finally:
        model.offload.close()


def test_an_expert_that_leaves_stops_the_program(tmp_path: Path, runs: list[int]) -> None:
    """Taken out between two tokens, it is read again, and nothing but its layer is asked."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q4")
    short, _ = budgets_about(pack_dir, experts=True)
    whole, model = load(pack_dir), load(pack_dir, short)
    long: dict[str, Any] = {**KW, "max_new_tokens": 24}
    try:
        expected = whole.generate(IDS, **long)
        executor = model.offload.executor
        for _ in range(2):
            model.generate(IDS, **long)
        assert runs[-1] == 1
        residency = executor._residency
        out, at = residency._stock, residency._stock.top

        class Drops:
            tokens = 0

            def put(self, _: Any) -> None:
                self.tokens += 1
                if self.tokens % 5 == 4:
                    with executor._changed:
                        block = next(
                            b
                            for b, e in at.entries.items()
                            if e.ready and b in executor._transfers._shown
                        )
                        out.drop(at, block, at.entries[block])
                        executor._submit(out.take())

            def end(self) -> None:
                pass

        drops = Drops()
        del runs[:]
        assert same(model.generate(IDS, **long, streamer=drops), expected)
        assert drops.tokens > 20
        assert 1 in runs
        assert max(runs) > 1
        executor.settle()
        executor.validate()
    finally:
        whole.offload.close()
        model.offload.close()


def test_nothing_leaves_while_it_is_used_unasked(tmp_path: Path) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "q4")
    model = load(pack_dir, least(pack_dir))
    try:
        model.generate(IDS, **KW)
        executor = model.offload.executor
        executor.settle()
        stock = executor._residency._stock
        block, entry = next((b, e) for b, e in stock.top.entries.items() if e.pool is Pool.SLOT)
        with executor.unasked(), pytest.raises(SchedulerError, match="while all are held"):
            stock.drop(stock.top, block, entry)
        model.offload.close()
        with pytest.raises(ClosedError), executor.unasked():
            pass
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


@pytest.mark.parametrize("which", ["mlp", "self_attn", "input_layernorm", "mlp.down_proj"])
def test_a_hook_inside_a_layer_is_not_passed_over(tmp_path: Path, which: str) -> None:
    """Kernels call no module: the layer then runs as it is, its prompt and every token."""
    _, pack_dir = packed("llama", tmp_path, "none")
    model = load(pack_dir)
    try:
        plain = model.generate(IDS, **KW)

        def doubled(_: Any, args: Any, out: Any) -> Any:
            return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

        hook = model.base_model.layers[1].get_submodule(which).register_forward_hook(doubled)
        cached, stock = (model.generate(IDS, **KW, use_cache=use) for use in (True, False))
        hook.remove()
        for got, want, before in zip(cached.logits, stock.logits, plain.logits, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
            assert not torch.allclose(got, before, rtol=1e-2, atol=1e-2)
        assert same(model.generate(IDS, **KW), plain)
    finally:
        model.offload.close()


@pytest.mark.parametrize("what", ["module", "norm", "forward"])
def test_what_is_replaced_inside_a_layer_is_used(tmp_path: Path, what: str) -> None:
    _, pack_dir = packed("llama", tmp_path, "none")
    model = load(pack_dir)
    try:
        plain = model.generate(IDS, **KW)
        layer = model.base_model.layers[1]
        if what == "module":
            layer.mlp = torch.nn.Identity()
        elif what == "norm":
            weight = layer.input_layernorm.weight
            layer.input_layernorm.weight = torch.nn.Parameter(3 * weight)
        else:
            layer.mlp.forward = torch.zeros_like
        cached, stock = (model.generate(IDS, **KW, use_cache=use) for use in (True, False))
        for got, want, before in zip(cached.logits, stock.logits, plain.logits, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
            assert not torch.allclose(got, before, rtol=1e-2, atol=1e-2)
    finally:
        model.offload.close()


def test_generations_in_several_threads_come_one_after_the_other(tmp_path: Path) -> None:
    """One cache has the kernels' memory; none loses it in the middle."""
    _, pack_dir = packed("llama", tmp_path, "q4")
    model = load(pack_dir)
    try:
        want = model.generate(IDS, **KW)
        got: list[Any] = []

        def work() -> None:
            got.extend(model.generate(IDS, **KW) for _ in range(3))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 9
        assert all(same(answer, want) for answer in got)
    finally:
        model.offload.close()
