"""Units that are timed before a run: their experts are an engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config
from qlora_support import Packs
from run_support import options_for, write_data, write_model
from transformers import AutoModelForCausalLM

from offload.errors import OffloadError
from offload.models.expert_groups import expert_groups
from offload.train.fetching import measure_fetching
from offload.train.layout import TrainLayout, lay_out
from offload.train.made_experts import BYTE
from offload.train.packed_base import choose_base
from offload.train.preparing import prepare
from offload.train.rates import Sample, compute_seconds, made_up
from offload.train.source import CheckpointSource

EXPERTS = 12


def meta_model() -> Any:
    config = tiny_config("qwen3_moe", num_local_experts=EXPERTS)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="eager"
        )


def sample_of(model: Any, layout: TrainLayout, base: Any = None) -> Sample:
    from torch.utils._pytree import tree_flatten

    from offload.train.footprint import any_unit_calls

    unit = next(u for u in layout.units if u.groups)
    calls = any_unit_calls(model, [unit.module], 2, 16)
    leaves, spec = tree_flatten(calls[id(unit.module)])
    return Sample(unit.module, leaves, spec, (), layout=layout, trained=unit, base=base)


def test_they_compute_what_the_fused_ones_do() -> None:
    model = meta_model()
    layout = lay_out(model)
    unit = next(u for u in layout.units if u.groups)
    sample = sample_of(model, layout)
    plain = made_up(unit.module)
    with torch.no_grad():
        for group in expert_groups(plain):
            for param in group.params:
                param.tensor.view(torch.uint8).fill_(BYTE)
        from torch.utils._pytree import tree_unflatten

        args, kwargs = tree_unflatten(sample._inputs, sample._spec)
        wanted, found = plain(*args, **kwargs), sample._real(*args, **kwargs)
    if isinstance(wanted, tuple):
        wanted, found = wanted[0], found[0]
    assert torch.equal(wanted, found)
    sample.close()


def test_a_gradient_is_of_one_expert() -> None:
    """Not of all of them for each that is used, as of a fused parameter that is indexed."""
    model = meta_model()
    layout = lay_out(model)
    sample = sample_of(model, layout)
    assert sample._experts is not None
    found: dict[tuple[int, int], int] = {}
    experts, end = sample._experts, sample._experts.end

    def look() -> None:
        found.update({at: g.numel() for at, g in experts._gradients.items()})
        end()

    experts.end = look  # type: ignore[method-assign]
    sample.both()
    assert len(found) >= EXPERTS
    for (block, piece), count in found.items():
        assert layout.blocks[block].pieces[piece].count == count
    assert not experts._gradients
    sample.close()
    assert not experts._weights._entries


def test_packed_ones_are_unpacked_as_in_a_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory, packed, _ = Packs(tmp_path_factory)("qwen3_moe", "q4")
    choice = choose_base(str(packed), None)
    assert choice is not None
    base = choice.open(torch.bfloat16)
    for param in base.meta.model.parameters():
        param.requires_grad_(False)
    layout = lay_out(base.meta.model, packed=base.names)
    base.attach(layout)
    sample = sample_of(base.meta.model, layout, base)
    assert sample._experts is not None
    unit = next(u for u in layout.units if u.groups)
    block = next(iter(unit.experts.values()))[0]
    assert base.recipes[block]
    filled: list[str] = []
    unpacker = sample._experts._weights._unpacker  # type: ignore[attr-defined]
    fill = unpacker.fill
    unpacker.fill = lambda f, *rest: (filled.append(f.part.name), fill(f, *rest))
    sample.forward()
    assert filled
    sample.close()
    found = compute_seconds(base.meta.model, [unit.module], None, 2, 16, layout=layout, base=base)
    assert found is not None
    assert found.units[0][1] > 0
    assert directory


def test_weights_are_read_from_where_a_run_reads_them(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "qwen3_moe", num_local_experts=EXPERTS)
    data = write_data(tmp_path / "train.jsonl")
    run = prepare(options_for(model, data, tmp_path))
    run.close()
    asked: list[str] = []

    def open_source(layout: TrainLayout, engine: Any, staging: Any) -> CheckpointSource:
        asked.extend(b.id for b in layout.blocks)
        return CheckpointSource(layout, run.meta.mapping, engine, staging)

    def no_source(*_: Any) -> Any:
        raise OffloadError("there is none")

    worked: list[int] = []
    found = measure_fetching(run.layout, open_source, lambda: worked.append(1))
    assert found is not None
    assert found.rate > 0
    assert found.beside.compute >= 1
    assert found.beside.disk >= 1
    assert worked
    experts = {run.layout.blocks[b].id for b in run.layout.expert_blocks()}
    assert asked
    assert experts.issuperset(asked)
    assert measure_fetching(run.layout, no_source, None) is None


def test_each_run_sends_other_numbers_of_tokens_to_experts() -> None:
    """What is compiled for one of them is not there for the next, in a run as little as here."""
    model = meta_model()
    sample = sample_of(model, lay_out(model))
    (group,) = expert_groups(sample._real)
    counts = []

    def hear(_: Any, args: Any, kwargs: Any) -> None:
        (chosen,) = [
            x for x in (*args, *kwargs.values())
            if isinstance(x, torch.Tensor) and x.dtype == torch.int64
        ]  # fmt: skip
        counts.append(tuple(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()))

    group.module.register_forward_pre_hook(hear, with_kwargs=True)
    state = torch.get_rng_state()
    for _ in range(3):
        sample.forward()
    assert len(set(counts)) == 3
    assert torch.equal(torch.get_rng_state(), state)
    sample.close()
