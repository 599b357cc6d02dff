"""A token's products by our kernel: torch's bits, and torch itself wherever that is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import budgets, greedy, opened, options, prompt, reference
from families import tiny_config, write
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from wrap_support import streamed

import offload
from offload.cpu_ops import row_products
from offload.models import single_rows, teams
from offload.models.load import prepare
from offload.models.single_rows import SingleRows, probed, worth
from offload.runtime.memory import HostMemory


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models count; nothing is known of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(single_rows, "LEAST_BYTES", 1)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of matrices that the kernel has multiplied single rows with since."""
    if not worth(2**40, torch.bfloat16, "cpu"):
        pytest.skip("this processor has no kernel for single bfloat16 rows")
    if row_products.find_block(torch.randn(64, 128).bfloat16()) is None:
        pytest.skip("torch adds single rows' products here in an order that is not known")
    found: list[tuple[int, ...]] = []
    inner = single_rows.multiplied

    def multiplied(x: Any, weight: Any, bias: Any, block: int) -> torch.Tensor:
        found.append(tuple(weight.shape))
        return inner(x, weight, bias, block)

    groups = row_products.multiply_groups

    def multiply_groups(x: Any, weights: Any, counts: Any, rows: int, block: int) -> torch.Tensor:
        found.extend([(rows, x.shape[1])] * len(counts))
        return groups(x, weights, counts, rows, block)

    monkeypatch.setattr(single_rows, "multiplied", multiplied)
    monkeypatch.setattr(row_products, "multiply_groups", multiply_groups)
    return found


def half(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


# -- which products -------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
def test_single_rows_have_torchs_bits(shapes: list[tuple[int, ...]], biased: bool) -> None:
    rows, sizes = SingleRows(), [(64, 96), (2560, 64), (96, 2560), (33, 64), (64, 33)]
    for n, k in sizes:
        weight, bias = half(n, k), half(n, seed=1) if biased else None
        for shape in ((1, k), (1, 1, k)):
            x = half(*shape, seed=2)
            with torch.no_grad():
                found, want = rows.linear(x, weight, bias), F.linear(x, weight, bias)
            assert found.shape == want.shape
            assert torch.equal(found, want)
    assert set(shapes) == set(sizes[:3]), "what is no whole panel is torch's"


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "within",
    [
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        _Functions,
        _Operators,
        forward_ad.dual_level,
        lambda: torch.device("cpu"),
    ],
)
def test_what_is_looked_at_or_differentiated_is_torchs(
    shapes: list[tuple[int, ...]], within: Callable[[], AbstractContextManager[Any]]
) -> None:
    x, weight, rows = half(1, 128), half(64, 128), SingleRows()
    with torch.no_grad(), within():
        assert torch.equal(rows.linear(x, weight), F.linear(x, weight))
    assert not shapes
    with torch.no_grad():
        rows.linear(x, weight)
    assert shapes == [(64, 128)]


def test_what_is_no_row_as_it_lies_is_torchs(shapes: list[tuple[int, ...]]) -> None:
    rows, weight, many = SingleRows(), half(64, 128), half(1, 5, 128)
    every_second = half(1, 256)[:, ::2]
    with torch.no_grad():
        for x in (half(2, 128), many, many[:, -1:], half(128), every_second, half(0, 128)):
            assert torch.equal(rows.linear(x, weight), F.linear(x, weight))
        turned, row = half(128, 64).T, half(1, 128)
        assert torch.equal(rows.linear(row, turned), F.linear(row, turned))
        wide = row.float()
        assert torch.equal(rows.linear(wide, weight.float()), F.linear(wide, weight.float()))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            rows.linear(half(1, 64), weight)
        mapped = torch.vmap(lambda x: rows.linear(x[None], weight))(half(3, 128))
        torch.testing.assert_close(mapped[:, 0], F.linear(half(3, 128), weight))
        assert not shapes
        rows.linear(row, weight)
    assert shapes == [(64, 128)]


def test_layers_that_make_their_weights_keep_doing_so(shapes: list[tuple[int, ...]]) -> None:
    """Pruning computes them anew in each forward, from parameters of other names."""
    layer, other = nn.Linear(128, 64).bfloat16(), nn.Linear(128, 64).bfloat16()
    x, rows = half(1, 128), SingleRows()
    undo = rows.install(nn.ModuleList([layer, other]))
    with torch.no_grad():
        assert torch.equal(other(input=x), F.linear(x, other.weight, other.bias))
        assert shapes == [(64, 128)]
        prune.l1_unstructured(layer, "weight", 0.5)
        prune.l1_unstructured(other, "bias", 0.5)
        for one in (layer, other):
            assert torch.equal(one(x), F.linear(x, one.weight, one.bias))
    assert shapes == [(64, 128)]
    for back in undo:
        back()
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize(
    ("nbytes", "dtype", "device"),
    [(0, torch.bfloat16, "cpu"), (1, torch.float32, "cpu"), (1, torch.bfloat16, "cuda")],
)
def test_it_is_not_worth_it(nbytes: int, dtype: torch.dtype, device: str) -> None:
    assert not worth(nbytes, dtype, device)


# -- what is known of the machine -----------------------------------------------------------


def test_an_order_is_found_once_and_looked_at_again(
    shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    inner = row_products.find_block

    def find_block(weight: Any, bias: Any = None, expected: int | None = None) -> int | None:
        asked.append(expected)
        return inner(weight, bias, expected)

    monkeypatch.setattr(row_products, "find_block", find_block)
    weight, x = half(64, 2560), half(1, 2560)
    with torch.no_grad():
        for _ in range(2):
            rows = SingleRows()  # as in another process
            for _ in range(2):
                assert torch.equal(rows.linear(x, weight), F.linear(x, weight))
    (block,) = rows.blocks.values()
    assert asked == [None, block]
    # A file that says something else is not believed.
    monkeypatch.setattr(single_rows.Known, "get", lambda *_: 64 if block != 64 else 128)
    rows = SingleRows()
    with torch.no_grad():
        assert torch.equal(rows.linear(x, weight), F.linear(x, weight))
    assert list(rows.blocks.values()) == [block]
    monkeypatch.setattr(single_rows.Known, "get", lambda *_: "nonsense")
    assert SingleRows().product(x, weight) is None  # with gradients
    with torch.no_grad():
        assert SingleRows().product(x, weight) is not None


def test_where_the_order_is_not_known_torch_multiplies(
    shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_products, "BLOCKS", (64,))
    weight, x = half(64, 2560), half(1, 2560)
    with torch.no_grad():
        if row_products.find_block(weight) == 64:
            pytest.skip("this machine adds in blocks of 64")
        assert torch.equal(SingleRows().linear(x, weight), F.linear(x, weight))
    assert not shapes


def check(model: Any, want: Any) -> None:
    """Tokens and their logits, bit by bit."""
    found = greedy(model, prompt())
    assert torch.equal(found.sequences, want.sequences)
    assert all(map(torch.equal, found.logits, want.logits))


# -- models ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        more = {"moe_intermediate_size": 96} if family == "qwen3_moe" else {}
        write(family, tmp_path / family, config=tiny_config(family, **more))
        return tmp_path / family

    return make


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [(96, 64), (64, 96), (256, 64)]),
        ("qwen3_moe", [(192, 64), (64, 96), (256, 64)]),
        ("gpt_oss", [(256, 64)]),  # its experts lie the other way
    ],
)
@pytest.mark.parametrize("budget", ["all", "minimum"])
def test_tokens_are_the_resident_models(
    family: str,
    expected: list[tuple[int, ...]],
    budget: str,
    checkpoint: Callable[[str], Path],
    shapes: list[tuple[int, ...]],
) -> None:
    directory = checkpoint(family)
    want = greedy(reference(directory, torch.bfloat16), prompt())
    found = budgets(directory, "cpu")
    prepared = prepare(directory, options("cpu", **found[budget]))
    assert prepared.single_rows is not None
    with opened(prepared) as model:
        check(model, want)
        layer = model.model.layers[0]
    assert set(expected) <= set(shapes)
    assert not [m for m in layer.modules() if "forward" in m.__dict__], "closed, it is as it was"


def test_smaller_models_are_torchs(
    checkpoint: Callable[[str], Path],
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(single_rows, "LEAST_BYTES", 2**30)
    directory = checkpoint("llama")
    prepared = prepare(directory, options("cpu", ram=2**30))
    assert prepared.single_rows is None
    with opened(prepared) as model:
        greedy(model, prompt())
    assert not shapes


def test_with_one_thread_fewer_the_kernel_has_one_fewer(
    checkpoint: Callable[[str], Path],
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libgomp ends and restarts threads when regions differ in their number."""
    monkeypatch.setattr(teams, "LEAST_BYTES", 1)
    monkeypatch.setattr(teams, "LEAST_BUDGET", 1)
    counts: list[tuple[int, int]] = []
    inner = row_products.threads.run

    def run(body: Any, address: int, arguments: Any, workers: int | None = None) -> None:
        counts.append((workers or 0, torch.get_num_threads()))
        inner(body, address, arguments, workers)

    monkeypatch.setattr(row_products.threads, "run", run)
    directory = checkpoint("llama")
    want = greedy(reference(directory, torch.bfloat16), prompt())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepared = prepare(directory, options("cpu", **budgets(directory, "cpu")["minimum"]))
        if prepared.team is None:
            pytest.skip("one thread fewer has other bits here")
        prepared.team = teams.TeamPlan(fewer=True, planned=True)
        with opened(prepared) as model:
            check(model, want)
    finally:
        torch.set_num_threads(before)
    assert (1, 1) in counts
    assert all(ours == theirs for ours, theirs in counts)


def test_a_wrapped_model_multiplies_so_until_it_is_unwrapped(
    tmp_path: Path, shapes: list[tuple[int, ...]]
) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    want = greedy(model, prompt())
    assert not shapes
    streamed(model, tmp_path)
    check(model, want)
    assert shapes
    offload.unwrap(model)
    shapes.clear()
    check(model, want)
    assert not shapes
    assert not [m for m in model.modules() if "forward" in m.__dict__]


# -- predictions ----------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    found = HostMemory(48 << 20, "weights")
    yield found
    found.close()


def test_rates_are_of_the_same_kernel(memory: HostMemory, shapes: list[tuple[int, ...]]) -> None:
    products = probed(memory)
    shapes.clear()
    with torch.inference_mode():
        products.one(0)
        products.one(1)
        products.tiny_s()
    assert shapes[:2] == list(single_rows.SIZES)
    assert set(shapes[2:]) == {(32, 32)}, "what a toy's products cost"
