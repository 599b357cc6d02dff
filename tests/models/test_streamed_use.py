"""A streamed model in a program that does more than to call it: threads, autocast, hooks, weights
that are reparametrised, replaced or handed out. Right as the resident model is, or one clear error.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import Golden, budgets, greedy, opened, options, prompt, reference
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from wrap_support import seeded_alone, streamed, tiny

import offload
from offload.errors import ClosedError, OffloadError, UnsupportedModelError
from offload.models.load import prepare

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with seeded_alone():
        yield


def chain(change: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> nn.Sequential:
    return nn.Sequential(*[change(nn.Linear(64, 64)) for _ in range(10)]).eval()


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(x)
    return out


# -- autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_autocast(family: str, tmp_path: Path) -> None:
    """torch keeps casts by weight, and a slot's tensor is one layer's weight after the other's."""
    model, ids_BL = tiny(family), prompt(rows=2)

    def logits() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out: torch.Tensor = model(ids_BL).logits
        return out

    want_BLV = logits()
    streamed(model, tmp_path)
    for _ in range(2):
        got_BLV = logits()
        assert got_BLV.dtype == want_BLV.dtype
        assert torch.equal(got_BLV, want_BLV)
    assert torch.is_autocast_cache_enabled()
    offload.unwrap(model)
    assert torch.equal(logits(), want_BLV)


def test_autocast_of_a_loaded_model(checkpoint: Checkpoint) -> None:
    want = checkpoint("llama", torch.float32)
    least = budgets(want.directory, "cpu")["minimum"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want_BLV = reference(want.directory, torch.float32)(want.ids_BL).logits
        with opened(prepare(want.directory, options("cpu", **least))) as model:
            assert torch.equal(model(want.ids_BL).logits, want_BLV)


# -- threads ------------------------------------------------------------------------------------


def _together(work: Callable[[int], None], n: int) -> None:
    """``work(0..n-1)`` in threads that are switched as often as the interpreter can."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # noqa: BLE001  told below
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("whole", [True, False], ids=["generate", "base-model"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_threads_take_turns(family: str, whole: bool, tmp_path: Path) -> None:
    model = tiny(family)
    prompts = [prompt(seed=i, length=5 + i) for i in range(4)]

    def answer(ids_BL: torch.Tensor) -> torch.Tensor:
        if whole:
            sequences: torch.Tensor = greedy(model, ids_BL).sequences
            return sequences
        with torch.no_grad():
            hidden: torch.Tensor = model.model(ids_BL).last_hidden_state
        return hidden

    want = [answer(ids_BL) for ids_BL in prompts]
    streamed(model, tmp_path)

    def work(i: int) -> None:
        for _ in range(3):
            assert torch.equal(answer(prompts[i]), want[i])

    _together(work, len(prompts))
    executor = model.offload.executor
    executor.settle()
    assert executor.held() == []
    executor.validate()
    model.offload.close()


@pytest.mark.parametrize("kind", ["kv_ram", "prompt_cache"])
def test_generations_that_share_a_cache_take_turns(
    checkpoint: Checkpoint, kind: str, tmp_path: Path
) -> None:
    directory = checkpoint("qwen3").directory
    settings: dict[str, Any] = {"kv_ram": 2**16, "kv_block_tokens": 16}
    if kind == "prompt_cache":
        settings = {"prompt_cache": tmp_path, "prompt_cache_chunk": 4}
    prompts = [prompt(seed=i, length=9 + i) for i in range(3)]
    with opened(prepare(directory, options("cpu", disk=tmp_path, **settings))) as model:
        want = [greedy(model, ids_BL).sequences for ids_BL in prompts]

        def work(i: int) -> None:
            for _ in range(3):
                assert torch.equal(greedy(model, prompts[i]).sequences, want[i])

        _together(work, len(prompts))


def test_a_layer_by_itself_in_two_threads(tmp_path: Path) -> None:
    """Past the model there is nobody to take turns: an error, and no block is held for good."""
    model, x = chain(), torch.randn(3, 64)
    want = run(model, x)
    streamed(model, tmp_path)
    inside, go_on = threading.Event(), threading.Event()

    def stop_here(*_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    hook = model[4].register_forward_pre_hook(stop_here)
    thread = threading.Thread(target=run, args=(model[4], x))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(UnsupportedModelError, match="4 runs in two threads at once"):
        run(model[4], x)
    go_on.set()
    thread.join()
    hook.remove()
    assert torch.equal(run(model, x), want)
    assert model.offload.executor.held() == []
    model.offload.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("elsewhere", [True, False], ids=["in a thread", "here"])
def test_what_a_run_holds_when_it_ends_in_the_middle(
    error: type[BaseException], elsewhere: bool, tmp_path: Path
) -> None:
    """torch runs no hooks after a Ctrl-C; the first layer needs the room of the one that ran."""
    model, ids_BL = tiny("qwen3_moe"), prompt()
    want_BLV = model(ids_BL).logits
    streamed(model, tmp_path)
    layer = model.model.layers[2]

    def leave(*_: Any) -> None:
        raise error

    def work() -> None:
        with pytest.raises(error):
            model(ids_BL)

    for module in (layer, layer.self_attn, layer.mlp.experts, model.model.norm, model.lm_head):
        for place in (module.register_forward_pre_hook, module.register_forward_hook):
            hook = place(leave)
            if elsewhere:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            else:
                work()
            hook.remove()
            assert model.offload.executor.held() == []
            assert torch.equal(model(ids_BL).logits, want_BLV)
    model.offload.close()


@pytest.mark.parametrize("how", ["close", "unwrap"])
def test_the_end_of_a_model_that_runs_in_another_thread(how: str, tmp_path: Path) -> None:
    """It waits until the pass is over, or at its next layer: no garbage, no hang."""
    model, x = chain(), torch.randn(3, 64)
    want = run(model, x)
    streamed(model, tmp_path)
    inside, go_on = threading.Event(), threading.Event()
    said: list[Any] = []

    def stop_here(*_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    def work() -> None:
        try:
            said.append(run(model, x))
        except ClosedError as error:
            said.append(error)

    model[4].register_forward_pre_hook(stop_here)
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    handle = model.offload

    def end() -> None:
        handle.close() if how == "close" else offload.unwrap(model)

    ending = threading.Thread(target=end)
    ending.start()
    go_on.set()
    thread.join()
    ending.join()
    (answer,) = said
    if how == "unwrap" or isinstance(answer, torch.Tensor):
        assert torch.equal(answer, want)
    else:
        assert "closed" in str(answer)
    assert handle.closed
    assert handle.executor.live_leases() == 0


# -- weights that are computed, handed out, replaced ----------------------------------------------


def _pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.3)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change", [weight_norm, spectral_norm, _pruned, parametrizations.weight_norm]
)
def test_weights_that_a_hook_computes(change: Any, tmp_path: Path) -> None:
    """torch's own reparametrisations are forward pre-hooks, which need the parameters."""
    model, x = chain(change), torch.randn(3, 64)
    want = run(model, x)
    streamed(model, tmp_path)
    for _ in range(2):
        assert torch.equal(run(model, x), want)
    offload.unwrap(model)
    assert torch.equal(run(model, x), want)


class Learned(nn.Module):
    """A learned prompt: returns a part of its own weight, in whatever structure."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))
        self._form = form

    def forward(self) -> Any:
        return self._form(self.weight)


class Prompted(nn.Module):
    def __init__(self, form: Callable[[torch.Tensor], Any], back: Callable[[Any], Any]) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Learned(form) for _ in range(8)])
        self._back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self._back(learned()) for learned in self.prompts]
        return x + torch.stack(rows).sum(0)


@pytest.mark.parametrize(
    ("form", "back"),
    [
        (lambda w: w, lambda out: out[:3]),
        (lambda w: w[2:5], lambda out: out),
        (lambda w: {"rows": (w[2:5], None)}, lambda out: out["rows"][0]),
        (lambda w: [1, torch.return_types.max((w[:3], w[:3]))], lambda out: out[1][0]),
    ],
    ids=["whole", "rows", "in a dict", "in a named tuple"],
)
def test_a_layer_that_returns_a_part_of_its_weight(form: Any, back: Any, tmp_path: Path) -> None:
    """Its slot has other bytes when the result is read."""
    model, x = Prompted(form, back).eval(), torch.randn(3, 64)
    want = run(model, x)
    streamed(model, tmp_path)
    for _ in range(2):
        assert torch.equal(run(model, x), want)
    offload.unwrap(model)


def _replace(layer: Any, value: torch.Tensor) -> None:
    layer.weight = nn.Parameter(value)


def _set_data(layer: Any, value: torch.Tensor) -> None:
    layer.weight.data = value


def _assign(layer: Any, value: torch.Tensor) -> None:
    layer.load_state_dict({"weight": value, "bias": value[0]}, assign=True)


@pytest.mark.parametrize("change", [_replace, _set_data, _assign])
def test_a_weight_that_is_replaced_while_it_streams(change: Any, tmp_path: Path) -> None:
    """The layer would go on with the old one, and nobody would know."""
    model, x = streamed(chain(), tmp_path), torch.randn(3, 64)

    def change_and_run() -> None:
        change(model[5], torch.zeros(64, 64))
        run(model, x)

    with pytest.raises(OffloadError, match=r"5\.weight is streamed and .*offload\.unwrap"):
        change_and_run()
    model.offload.close()


def test_weights_of_a_functional_call(tmp_path: Path) -> None:
    model, x = streamed(chain(), tmp_path), torch.randn(3, 64)
    others = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(OffloadError, match=r"0\.weight is streamed and has been replaced"):
        torch.func.functional_call(model, others, x)
    model.offload.close()


def test_fused_experts_of_a_functional_call(tmp_path: Path) -> None:
    """Their loop found those of the model, whatever was given."""
    model, ids_BL = streamed(tiny("qwen3_moe"), tmp_path), prompt()
    name = "model.layers.1.mlp.experts.down_proj"
    experts = model.model.layers[1].mlp.experts
    value = torch.zeros(experts.down_proj.shape)
    with torch.no_grad(), pytest.raises(OffloadError, match=f"{name} .*replaced"):
        torch.func.functional_call(model, {name: value}, (ids_BL,))
    want = tiny("qwen3_moe")
    for each in (model, want):  # an assignment is seen
        each.model.layers[1].mlp.experts.down_proj = nn.Parameter(value)
    with torch.no_grad():
        assert torch.equal(model(ids_BL).logits, want(ids_BL).logits)
    model.offload.close()


def test_fused_experts_that_are_exported(tmp_path: Path) -> None:
    """torch.export puts tensors without values in their place, which is nobody's assignment."""
    model, ids_BL = tiny("qwen3_moe", use_cache=False), prompt()
    offload.wrap(model, ram="64MiB", disk=tmp_path)  # all but the experts stays in its place
    with torch.no_grad():
        want = model(ids_BL).logits
        with pytest.raises(OffloadError, match="cannot be traced or exported"):
            torch.export.export(model, (ids_BL,))
        assert torch.equal(model(ids_BL).logits, want)
    model.offload.close()


def test_a_module_in_place_of_another(tmp_path: Path) -> None:
    """A layer that is not ours is the program's, and streams no more than it ever did."""
    model, x = chain(), torch.randn(3, 64)
    want = copy.deepcopy(model)
    streamed(model, tmp_path)
    new = nn.Linear(64, 64)
    for each in (model, want):
        each[5] = new
        del each[0]
    assert torch.equal(run(model, x), run(want, x))
    model.offload.close()


def test_heads_that_are_not_torchs_own(tmp_path: Path) -> None:
    """A forward in front of the class's is no plain product, which could be taken in slices."""
    wide = {"vocab_size": 1500, "tie_word_embeddings": False}
    model, ids_BL = tiny("qwen3", **wide), prompt()
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: 2 * inner(x)
    with torch.no_grad():
        want_BLV = model(ids_BL).logits
        streamed(model, tmp_path)
        assert torch.equal(model(ids_BL).logits, want_BLV)
    offload.unwrap(model)

    model = streamed(tiny("qwen3", **wide), tmp_path)
    assert model.offload.attachment.cut.head is not None
    model.lm_head.weight = nn.Parameter(torch.zeros(1500, 64))
    with pytest.raises(OffloadError, match=r"lm_head\.weight is streamed and has been replaced"):
        model(ids_BL)
    model.offload.close()


def test_an_expert_is_read_by_its_layer_only(tmp_path: Path) -> None:
    """Between two runs it would be a view of a slot that the next run fills anew."""
    model = streamed(tiny("qwen3_moe"), tmp_path)
    experts = model.model.layers[0].mlp.experts
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"gate_up_proj is streamed expert by expert"):
            experts.gate_up_proj[1]
        model(prompt())
    model.offload.close()


def test_others_hooks(tmp_path: Path) -> None:
    """Inputs and outputs that hooks replace, results that they keep."""
    model, x = chain(), torch.randn(3, 64)
    want = copy.deepcopy(model)
    streamed(model, tmp_path)
    answers = []
    for each in (model, want):
        kept: list[torch.Tensor] = []
        each[3].register_forward_pre_hook(lambda _, a, k: ((2 * a[0],), k), with_kwargs=True)
        each[4].register_forward_hook(lambda _, a, out: out + 1)
        each[6].register_forward_hook(lambda _, a, out, kept=kept: kept.append(out))
        answers.append([run(each, x), run(each, x), *kept])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    model.offload.close()


def test_a_model_that_is_collected_in_one_of_its_own_threads(tmp_path: Path) -> None:
    """The collector runs wherever objects are made; the thread cannot wait for its own end."""
    model = streamed(chain(), tmp_path)
    run(model, torch.randn(3, 64))
    engine = model.offload.executor.store._engine
    collected = threading.Event()
    gc.disable()
    try:
        del model
        engine.submit(lambda: (gc.collect(), collected.set()))
        assert collected.wait(30)
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "offload-close":
            thread.join(30)


def test_a_default_device_is_not_where_models_are_loaded() -> None:
    directory = Path(__file__).parents[2] / "examples" / "tiny_moe"
    ids = torch.tensor([[5, 9, 17, 3]])
    logits = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = offload.load(directory, ram="60MiB", context=64, overhead_bytes=8 << 20)
            with torch.no_grad():
                logits.append(model(ids).logits)
            model.offload.close()
    assert torch.equal(*logits)
