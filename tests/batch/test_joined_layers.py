"""Whole decoder layers for several sequences at once: who is joined, with each one's own bits, and
who is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_support import logits, opened
from families import write
from torch import nn
from torch.nn import functional as F

from offload.batch import joined_layers
from offload.batch.conductor import Conductor
from offload.batch.joined_layers import JoinedLayer, Kind, kind_of, layers_of
from offload.batch.row_attention import Pending, Replay, install
from offload.batch.row_functions import NotJoined, RowFunctions
from offload.errors import StoreError, UnsupportedModelError
from offload.models.lean_watch import LayerWatch

PROMPTS = ((5, 6, 7), tuple(range(3, 30)), (9,), (8, 7, 6, 5), (4, 4, 2))
NEW = 7


@pytest.fixture(autouse=True)
def _few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_layers, "ROWS_TRIED", 8)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each joined run of a layer had."""
    found: list[int] = []
    run = JoinedLayer.run

    def counted(self: JoinedLayer, calls: Any) -> Any:
        found.append(len(calls))
        return run(self, calls)

    monkeypatch.setattr(JoinedLayer, "run", counted)
    return found


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    found: list[Kind] = []
    init = Kind.__init__

    def made(self: Kind) -> None:
        init(self)
        found.append(self)

    monkeypatch.setattr(Kind, "__init__", made)
    return found


def check(directory: Path, ram: str = "200MiB", **options: Any) -> None:
    """Each sequence's logits beside others are those that it has alone."""
    with opened(directory, ram, sequences=len(PROMPTS), **options) as model:
        alone = [logits(model, ids, NEW) for ids in PROMPTS]
        with Conductor(model) as conductor:
            running = [conductor.start(lambda ids=ids: logits(model, ids, NEW)) for ids in PROMPTS]
            conductor.run()
        for sequence, want in zip(running, alone, strict=True):
            assert sequence.error is None
            assert torch.equal(sequence.result, want)
        assert "get_interface" not in vars(_interfaces())


def _interfaces() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


FAMILIES = [
    ("llama", torch.bfloat16),
    ("gemma3_text", torch.float32),  # two kinds of attention, norms of its own
    ("gpt_oss", torch.bfloat16),  # sinks; experts that are matrices times rows
    ("gpt2", torch.float32),  # Conv1D, LayerNorm
    ("qwen2_moe", torch.bfloat16),  # a shared expert behind a gate
    ("olmo2", torch.bfloat16),
    ("phi3", torch.bfloat16),
    ("cohere", torch.float32),
    ("afmoe", torch.bfloat16),  # gives attention its mask by name
]


@pytest.mark.parametrize(("family", "dtype"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_every_sequence_has_its_own_bits(
    family: str, dtype: torch.dtype, tmp_path: Path, joined: list[int], kinds: list[Kind]
) -> None:
    check(write(family, tmp_path, dtype))
    assert [kind.refused for kind in kinds if kind.refused] == []
    assert max(joined) == len(PROMPTS)


CACHES = [
    ("2MiB", {}),
    ("2700KiB", {"kv_ram": "300KiB", "kv_block_tokens": 16}),
    ("6MiB", {"attention": "offload"}),
    ("7MiB", {"kv": "q8"}),
]


@pytest.mark.parametrize(("ram", "options"), CACHES)
def test_caches_of_every_sort(
    checkpoint: Callable[[str], Path], ram: str, options: dict[str, Any], joined: list[int]
) -> None:
    """Keys and values in blocks pass through one buffer for all, or are attended to in place."""
    check(checkpoint("qwen3"), ram, **options)
    assert max(joined) == len(PROMPTS)


def test_experts_that_stream_are_read_once_for_all(
    checkpoint: Callable[[str], Path], joined: list[int]
) -> None:
    check(checkpoint("qwen3_moe"), "2MiB")
    assert max(joined) == len(PROMPTS)


MIXED = [
    ("jamba", "no attention over a cache", True),  # every other layer has a state
    ("deepseek_v2", "shape", False),  # latents are expanded behind the cache
    ("llama4_text", "bmm", False),
]


@pytest.mark.parametrize(("family", "why", "some"), MIXED, ids=[f for f, *_ in MIXED])
def test_what_is_not_known_to_be_safe_stays_alone(
    family: str, why: str, some: bool, tmp_path: Path, joined: list[int], kinds: list[Kind]
) -> None:
    check(write(family, tmp_path))
    assert any(why in (kind.refused or "") for kind in kinds)
    assert bool(joined) == some


def test_a_layer_that_mixes_rows_is_found_out(
    checkpoint: Callable[[str], Path], joined: list[int], kinds: list[Kind],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All that it calls is safe by name."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x)) + x[:1] * 2**-6

    monkeypatch.setattr(Qwen3MLP, "forward", forward)
    check(checkpoint("qwen3"))
    assert [kind.refused for kind in kinds] == ["another result than alone"]
    assert joined == []


ODD: list[Callable[..., Any]] = [
    lambda ask, module, q, k, v, mask, **more: ask(
        module, query=q, key=k, value=v, attention_mask=mask, **more
    ),
    lambda ask, module, q, k, v, mask, **more: ask(module, q, k, v, **more, attention_mask=mask),
    lambda ask, module, q, k, v, mask, **more: ask(module, q, k, v, mask, 0.0, **more),
    lambda ask, module, q, k, v, mask, **more: ask(module, q, k, v, **more),
]


@pytest.mark.parametrize(
    ("way", "some"), list(zip(ODD, [True, True, False, False], strict=True)),
    ids=["names", "the mask's name", "one more by place", "no mask"],
)  # fmt: skip
def test_attention_is_asked_for_in_many_ways(
    checkpoint: Callable[[str], Path], joined: list[int], monkeypatch: pytest.MonkeyPatch,
    way: Callable[..., Any], some: bool,
) -> None:  # fmt: skip
    """Each layer runs alone first, and whoever listens to that leaves it as it is."""
    from transformers.models.qwen3 import modeling_qwen3

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None,
        dropout: float = 0.0, scaling: float | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        return own(module, query, key, value, attention_mask, scaling=scaling)

    found = _interfaces()
    own = found["sdpa"]

    def get_interface(self: Any, *_: Any) -> Any:
        return attend

    def asked(*args: Any) -> Any:
        inner = vars(found).get("get_interface")
        function = inner(*args) if inner else attend
        return lambda *a, **k: way(function, *a[:5], **{n: k[n] for n in ("scaling",)})

    monkeypatch.setattr(type(found), "get_interface", get_interface)
    monkeypatch.setattr(
        modeling_qwen3, "ALL_ATTENTION_FUNCTIONS", type("Table", (), {"get_interface": asked})
    )
    check(checkpoint("qwen3"))
    assert bool(joined) == some


@pytest.mark.parametrize("refused", [True, False])
def test_an_error_in_a_trial_is_the_layers_unless_it_is_the_disks(
    checkpoint: Callable[[str], Path], joined: list[int], kinds: list[Kind],
    monkeypatch: pytest.MonkeyPatch, refused: bool,
) -> None:  # fmt: skip
    """What the layer does in vain is not tried again with every token."""
    error = UnsupportedModelError("not so") if refused else StoreError("a bad sector")
    left = [error]
    end = Replay.end

    def failing(self: Replay) -> None:
        if left:
            raise left.pop()
        end(self)

    monkeypatch.setattr(Replay, "end", failing)
    check(checkpoint("qwen3"))
    assert [kind.refused for kind in kinds] == (["not so"] if refused else [None])
    assert bool(joined) is not refused


def test_hooks_inside_see_one_sequence_at_a_time(
    checkpoint: Callable[[str], Path], joined: list[int]
) -> None:
    with opened(checkpoint("qwen3"), "40MiB") as model:
        seen: list[tuple[int, ...]] = []
        inside = model.model.layers[1].mlp

        def listen(module: Any, args: Any, output: torch.Tensor) -> None:
            seen.append(tuple(output.shape))

        with Conductor(model) as conductor:
            for ids in PROMPTS:
                conductor.start(lambda ids=ids: logits(model, ids, NEW))
            while conductor.step():
                if conductor.counters.passes == 4 and not inside._forward_hooks:
                    before, hook = len(joined), inside.register_forward_hook(listen)
        hook.remove()
        assert before > 0
        assert {shape[:2] for shape in seen} == {(1, 1)}
        assert len(joined) > before, "the other layers still are"


def test_whoever_wants_attention_gets_its_own(tmp_path: Path, joined: list[int]) -> None:
    """transformers collects it with hooks that are there for all."""
    directory = write("llama", tmp_path)
    with opened(directory, "200MiB") as model:
        model.set_attn_implementation("eager")

        def attentions(ids: tuple[int, ...]) -> list[torch.Tensor]:
            found = model.generate(
                torch.tensor([ids]), max_new_tokens=4, do_sample=False, eos_token_id=[],
                pad_token_id=0, output_attentions=True, return_dict_in_generate=True,
            )  # fmt: skip
            return [layer for step in found.attentions for layer in step]

        alone = [attentions(ids) for ids in PROMPTS[:2]]
        with Conductor(model) as conductor:
            seeing = [conductor.start(lambda ids=ids: attentions(ids)) for ids in PROMPTS[:2]]
            for ids in PROMPTS[2:]:
                conductor.start(lambda ids=ids: logits(model, ids, NEW))
            conductor.run()
        for sequence, want in zip(seeing, alone, strict=True):
            assert sequence.error is None
            assert len(sequence.result) == len(want)
            assert all(map(torch.equal, sequence.result, want))


def test_a_disk_that_fails_in_a_layer_fails_those_who_wait(
    checkpoint: Callable[[str], Path], joined: list[int]
) -> None:
    with opened(checkpoint("qwen3_moe"), "2MiB") as model:
        alone = [logits(model, ids, NEW) for ids in PROMPTS]
        executor, broken = model.offload.executor, False
        one, some = executor.acquire, executor.acquire_run

        def acquire(expert: str) -> Any:
            if broken:
                raise StoreError(f"{expert} cannot be read")
            return one(expert)

        def acquire_run(experts: Any, most: int) -> Any:
            if broken:
                raise StoreError(f"{experts[0]} cannot be read")
            return some(experts, most)

        executor.acquire, executor.acquire_run = acquire, acquire_run
        with Conductor(model) as conductor:
            running = [conductor.start(lambda ids=ids: logits(model, ids, NEW)) for ids in PROMPTS]
            while conductor.step():
                broken = conductor.counters.passes == 5
            broken = False
            assert joined
            assert all(isinstance(s.error, StoreError) for s in running)
            again = [conductor.start(lambda ids=ids: logits(model, ids, NEW)) for ids in PROMPTS]
            conductor.run()
        for sequence, want in zip(again, alone, strict=True):
            assert torch.equal(sequence.result, want)


def test_what_changes_its_ways_after_the_trial_is_an_error_and_no_other_answer(
    checkpoint: Callable[[str], Path], joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values are in the caches by then."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    forward = Qwen3MLP.forward

    def changed(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        return torch.fft.fft(out).real if joined else out

    monkeypatch.setattr(Qwen3MLP, "forward", changed)
    with opened(checkpoint("qwen3"), "40MiB") as model, Conductor(model) as conductor:
        running = [conductor.start(lambda ids=ids: logits(model, ids, NEW)) for ids in PROMPTS]
        conductor.run()
    assert all("had not done when it was tried" in str(s.error) for s in running)


# -- what layers may call ---------------------------------------------------------------------


@pytest.fixture
def rows() -> Iterator[torch.Tensor]:
    with torch.no_grad():
        yield torch.randn(5, 1, 40, generator=torch.Generator().manual_seed(0))


def each(mode: RowFunctions, function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    """``function`` of all rows is that of each row alone."""
    with mode:
        found = function(x)
    alone = torch.cat([function(x[i : i + 1].clone()) for i in range(len(x))])
    assert torch.equal(found, alone)


def pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.reshape(-1, 1, 20, 2))


MATRIX = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
SAFE: dict[str, Callable[[torch.Tensor], Any]] = {
    "sums": lambda x: x.pow(2).mean(-1, keepdim=True).rsqrt() * x + x.sum(dim=-1, keepdim=True),
    "curves": lambda x: F.silu(x) * torch.sigmoid(x) + F.gelu(x, approximate="tanh").exp(),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32).topk(3).values,
    "powers": lambda x: x.abs().pow(0.3) + x**3,
    "linear": lambda x: F.linear(x, MATRIX, MATRIX[:, 0]),
    "matrix": lambda x: (x.view(-1, 40) @ MATRIX.T).view(-1, 1, 24),
    "biased": lambda x: torch.addmm(MATRIX[:, 0], x.view(-1, 40), MATRIX.T),
    "complex": lambda x: torch.view_as_real(pairs(x) * pairs(MATRIX[:1])),
    "in place": lambda x: F.silu(x.clone(), inplace=True).mul_(2).sigmoid_(),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFE)
def test_functions_leave_rows_apart(name: str, rows: torch.Tensor) -> None:
    each(RowFunctions(lambda *_: None), SAFE[name], rows)


UNSAFE: dict[str, Callable[[torch.Tensor], Any]] = {
    "another kernel": lambda x: torch.fft.fft(x),
    "over rows": lambda x: x.mean(0),
    "all": lambda x: x.sum(),
    "norm of all": lambda x: F.softmax(x, dim=0),
    "batches": lambda x: torch.bmm(x, MATRIX.T.expand(5, -1, -1)),
    "scaled": lambda x: torch.add(x, x, alpha=0.3),
    "two": lambda x: torch.nn.functional.cosine_similarity(x, x),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_functions_that_are_not_known(name: str, rows: torch.Tensor) -> None:
    with pytest.raises(NotJoined), RowFunctions(lambda *_: None):
        UNSAFE[name](rows)


def test_choices_are_free(rows: torch.Tensor) -> None:
    with RowFunctions(lambda *_: None):
        places = rows.argmax(-1)
        assert torch.equal(torch.bincount(places.flatten(), minlength=40).cumsum(0)[-1:],
                           torch.tensor([5]))  # fmt: skip


def test_products_go_where_they_are_joined(rows: torch.Tensor) -> None:
    asked: list[Any] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        asked.append((tuple(x.shape), bias))
        return torch.zeros(len(x), len(weight))

    with RowFunctions(multiply):
        found = F.linear(rows, MATRIX)
        F.linear(rows[:1], MATRIX)
    assert found.shape == (5, 1, 24)
    assert asked == [((5, 40), None)]


# -- which layers -----------------------------------------------------------------------------


def test_layers_of_one_kind_run_the_same_code() -> None:
    from families import tiny_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("gemma3_text")).eval()
    layers = [layer for _, layer in layers_of(model)]
    assert len(layers) == len(model.model.layers)
    of_each = {(layer.self_attn.is_sliding, kind_of(layer)) for layer in layers}
    assert len(of_each) == len({sliding for sliding, _ in of_each}) == 2
    layers[0].mlp.register_forward_hook(lambda *_: None)
    assert len(layers_of(model)) == len(layers) - 1
    assert layers_of(nn.Linear(1, 1)) == []


def test_a_module_in_anothers_place_is_seen() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch = LayerWatch(layer, [])
    assert watch.untouched()
    layer[1] = nn.Linear(2, 2)
    assert not watch.untouched()


def test_keys_that_are_not_there_yet_are_good_for_attention_alone() -> None:
    with pytest.raises(AttributeError):
        Pending.__new__(Pending).shape  # type: ignore[attr-defined]  # noqa: B018


def test_interfaces_are_shared_by_conductors() -> None:
    one, two = install(), install()
    one()
    assert "get_interface" in vars(_interfaces())
    two()
    assert "get_interface" not in vars(_interfaces())
