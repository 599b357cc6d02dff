"""Never silently wrong: what a streamed model cannot do is an error that says so.

And checkpoints that are not what they claim: an error before or while they are read, never a
model with other weights than the file's.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import (
    Golden,
    budgets,
    check_logits,
    find_budgets,
    greedy,
    opened,
    options,
    prompt,
    reference,
)
from families import write

from offload.errors import (
    CheckpointError,
    ClosedError,
    OffloadError,
    StoreError,
    UnsupportedModelError,
)
from offload.io.faults import Fault, FaultyStore
from offload.models.absent import AbsentTensor
from offload.models.load import Prepared, prepare

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def smallest(directory: Path, device: str = "cpu") -> Prepared:
    return prepare(directory, options(device, **budgets(directory, device)["minimum"]))


def everything(directory: Path) -> Prepared:
    return prepare(directory, options("cpu"))


# -- training a model whose weights come and go ---------------------------------------------------


@pytest.mark.parametrize("budget", [smallest, everything])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_backward_is_refused(checkpoint: Checkpoint, family: str, budget: Any) -> None:
    with opened(budget(checkpoint(family).directory)) as model:
        out = model(prompt(), labels=prompt())
        for value in (out.loss, out.logits.sum()):
            with pytest.raises(OffloadError, match="backward through a streamed model"):
                value.backward()
        assert all(p.grad is None for p in model.parameters())
        assert torch.is_grad_enabled()


def test_backward_through_a_part_is_refused(checkpoint: Checkpoint, device: str) -> None:
    """A unit called by itself: a graph would keep views of slots that are refilled."""
    with opened(smallest(checkpoint("qwen3").directory, device)) as model:
        hidden = model.model(prompt()).last_hidden_state
        with pytest.raises(OffloadError, match="backward through a streamed model"):
            hidden.sum().backward()
        embeds = torch.zeros((1, 4, 64), dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(OffloadError, match="backward through a streamed model"):
            model(inputs_embeds=embeds).logits.sum().backward()
        assert embeds.grad is None
        for transform in (torch.func.grad, torch.func.jacrev):  # all of them were 0
            with pytest.raises(OffloadError, match="backward through a streamed model"):
                transform(lambda x: model(inputs_embeds=x).logits.sum())(embeds.detach())


def test_forward_leaves_grad_mode_as_it_was(checkpoint: Checkpoint) -> None:
    with opened(smallest(checkpoint("qwen3").directory)) as model:
        model(prompt())
        assert torch.is_grad_enabled()
        with pytest.raises(IndexError):
            model(torch.tensor([[3, 10**6]]))
        assert torch.is_grad_enabled()
        with torch.inference_mode():
            assert model(prompt()).logits.is_inference()


def test_grad_mode_does_not_change_the_bits(checkpoint: Checkpoint) -> None:
    want = checkpoint("qwen3_moe")
    with opened(smallest(want.directory)) as model:
        assert torch.equal(model(want.ids_BL).logits, want.logits_BLV)
        with torch.inference_mode():
            assert torch.equal(model(want.ids_BL).logits, want.logits_BLV)


# -- reading what is not there ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_streamed_weight_cannot_be_read_from_outside(checkpoint: Checkpoint, family: str) -> None:
    with opened(smallest(checkpoint(family).directory)) as model:
        absent = [p for _, p in model.named_parameters() if type(p.data) is not torch.Tensor]
        assert len(absent) > 4
        x = torch.ones((), dtype=torch.bfloat16)
        for parameter in absent:
            assert parameter.shape == parameter.detach().shape
            for read in (
                lambda p: p + x,
                lambda p: p.sum(),
                lambda p: p.clone(),
                lambda p: p.float(),
                lambda p: p[..., 0],
                lambda p: p.tolist(),
                lambda p: p.numpy(),
                lambda p: p.zero_(),
                lambda p: torch.equal(p, p),
                lambda p: torch.stack([p, p]),
                copy.deepcopy,
            ):
                with torch.no_grad(), pytest.raises((OffloadError, RuntimeError)):
                    read(parameter)
        with pytest.raises(OffloadError, match="streamed"):
            copy.deepcopy(model)
        for held in (model.state_dict(), list(model.parameters()), model):
            with pytest.raises(OffloadError, match="streamed"):
                torch.save(held, io.BytesIO())


def test_saving_and_moving_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    want = checkpoint("qwen3_moe")
    with opened(smallest(want.directory)) as model:
        for spoil in (
            lambda: model.save_pretrained(tmp_path),
            lambda: model.push_to_hub("someone/model"),
            lambda: model.float(),
            lambda: model.to(torch.float16),
            lambda: model.half(),
        ):
            with pytest.raises(OffloadError, match=r"offload\.unwrap"):
                spoil()
        assert list(tmp_path.iterdir()) == []
        assert model.to("cpu").to(torch.bfloat16).eval() is model  # as pipelines do
        check_logits(model, want)  # and nothing was half done


@pytest.mark.parametrize("part", ["model", "model.layers.1", "model.embed_tokens", "lm_head"])
def test_moving_a_part_is_refused(checkpoint: Checkpoint, part: str) -> None:
    want = checkpoint("qwen3_moe")
    for prepared in (smallest(want.directory), everything(want.directory)):
        with opened(prepared) as model:
            module = model.get_submodule(part)
            for spoil in (
                lambda m: m.half(),
                lambda m: m.to(torch.float64),
                lambda m: m.to("meta"),
            ):
                with pytest.raises(OffloadError, match=r"stays on cpu and in torch\.bfloat16"):
                    spoil(module)
            assert module.to("cpu").to(torch.bfloat16) is module
            check_logits(model, want)
            # Of a part without weights that come and go a copy is an ordinary module.
            if not any(isinstance(p, AbsentTensor) for p in module.parameters()):
                twin = copy.deepcopy(module)
                assert twin.half() is twin
                assert {p.dtype for p in twin.parameters()} == {torch.float16}
                check_logits(model, want)
        assert "_apply" not in vars(module)


def test_what_is_trainable_does_not_depend_on_the_budget(checkpoint: Checkpoint) -> None:
    directory = checkpoint("qwen3_moe").directory
    own = reference(directory, torch.bfloat16)
    for prepared in (smallest(directory), everything(directory)):
        with opened(prepared) as model:
            assert model.num_parameters(only_trainable=True) == own.num_parameters()
            with torch.no_grad():
                model(prompt())
            assert all(p.requires_grad for p in model.parameters())
            model.requires_grad_(False)
            assert model.num_parameters(only_trainable=True) == 0


@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a layer"])
def test_compiled_it_runs_as_it_is(checkpoint: Checkpoint, how: str) -> None:
    """Nothing of it is traced: not waits, not views of slots that are others' soon."""
    from torch._dynamo.testing import CompileCounter

    want = checkpoint("qwen3_moe")
    for prepared in (smallest(want.directory), everything(want.directory)):
        with opened(prepared) as model:
            torch._dynamo.reset()
            counter = CompileCounter()
            called = model
            if how == "torch.compile":
                called = torch.compile(model, backend=counter)
            else:
                (model if how == "model.compile" else model.model).compile(backend=counter)
            with torch.no_grad():
                for _ in range(2):
                    assert torch.equal(called(want.ids_BL).logits, want.logits_BLV)
            assert counter.frame_count == 0
            check_logits(model, want)


def test_a_closed_model_says_so(checkpoint: Checkpoint, device: str) -> None:
    with opened(smallest(checkpoint("qwen3_moe").directory, device)) as model:
        pass
    with pytest.raises(ClosedError, match="belongs to a model that has been closed; load it again"):
        model(prompt())
    model.offload.close()


# -- checkpoints that are not what they claim -----------------------------------------------------


@pytest.fixture
def spoilt(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint whose tensors and config the test may change."""

    def make(
        family: str,
        tensors: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
        **config: Any,
    ) -> Path:
        from safetensors.torch import load_file, save_file

        directory = tmp_path / family
        shutil.copytree(checkpoint(family).directory, directory)
        file = directory / "model.safetensors"
        held = load_file(file)
        tensors(held)
        save_file(held, file, metadata={"format": "pt"})
        text = directory / "config.json"
        text.write_text(json.dumps({**json.loads(text.read_text()), **config}))
        return directory

    return make


ONE = "model.layers.1.self_attn.q_proj.weight"


def test_a_missing_tensor(spoilt: Callable[..., Path]) -> None:
    directory = spoilt("qwen3", lambda t: t.pop(ONE))
    with pytest.raises(CheckpointError, match=rf"1 of the model's \d+ tensors.*{ONE}"):
        prepare(directory, options("cpu"))


def test_a_missing_expert(spoilt: Callable[..., Path]) -> None:
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    directory = spoilt("qwen3_moe", lambda t: t.pop(gone))
    with pytest.raises(OffloadError):
        prepare(directory, options("cpu")).open().offload.close()


def test_an_unexpected_tensor_is_ignored_as_by_transformers(
    spoilt: Callable[..., Path], checkpoint: Checkpoint
) -> None:
    directory = spoilt("qwen3", lambda t: t.update(extra=torch.ones(3)))
    with opened(everything(directory)) as model:
        check_logits(model, checkpoint("qwen3"))


def test_a_tensor_of_another_shape(spoilt: Callable[..., Path]) -> None:
    directory = spoilt("qwen3", lambda t: t.update({ONE: t[ONE][:-1].contiguous()}))
    with pytest.raises(CheckpointError, match=rf"{ONE}: \(63, 64\).*\(64, 64\)"):
        prepare(directory, options("cpu"))


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5},
        {"hidden_size": 32},
        {"intermediate_size": 80},
        {"vocab_size": 300},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_config_of_another_size(spoilt: Callable[..., Path], config: dict[str, Any]) -> None:
    directory = spoilt("qwen3", **config)
    with pytest.raises(CheckpointError, match="of different models"):
        prepare(directory, options("cpu"))


def test_fewer_layers_than_the_file_has(spoilt: Callable[..., Path]) -> None:
    """transformers ignores the rest (that is how heads are cut off), and so do we."""
    import transformers

    directory = spoilt("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    want = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with opened(smallest(directory)) as model, torch.no_grad():
        assert torch.equal(model(prompt()).logits, want.eval()(prompt()).logits)


def test_another_number_of_experts(spoilt: Callable[..., Path]) -> None:
    for n in (3, 5):
        directory = spoilt("qwen3_moe", num_local_experts=n)
        with pytest.raises(OffloadError):
            prepare(directory, options("cpu")).open().offload.close()
        shutil.rmtree(directory)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_file_that_is_too_short(spoilt: Callable[..., Path], keep: int) -> None:
    directory = spoilt("qwen3")
    file = directory / "model.safetensors"
    os.truncate(file, keep if keep >= 0 else file.stat().st_size - 1)
    with pytest.raises(CheckpointError):
        prepare(directory, options("cpu"))


def test_a_file_that_shrinks_while_the_model_runs(spoilt: Callable[..., Path], device: str) -> None:
    directory = spoilt("qwen3")
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    with opened(smallest(directory, device)) as model:
        want = greedy(model, prompt()).sequences
        model.offload.executor.settle()
        os.truncate(file, 3000)
        with pytest.raises(StoreError, match=r"model\.safetensors"):
            greedy(model, prompt())
        with file.open("r+b") as back:  # the same inode
            back.write(whole)
        assert torch.equal(greedy(model, prompt()).sequences, want)


def test_a_read_error_in_the_middle_of_generation(checkpoint: Checkpoint, device: str) -> None:
    """The thread that generates gets it; the model works again afterwards."""
    want = checkpoint("qwen3_moe")
    stores: list[FaultyStore] = []

    def faulty(inner: Any) -> FaultyStore:
        stores.append(FaultyStore(inner))
        return stores[-1]

    with opened(smallest(want.directory, device), wrap_store=faulty) as model:
        check_logits(model, want)
        for _ in range(3):
            model.offload.executor.settle()
            stores[0].inject(Fault.EIO, times=30)
            with pytest.raises(StoreError, match="injected"):
                greedy(model, want.ids_BL)
            stores[0].inject(Fault.EIO, "none", times=0)
            drain(stores[0])
            model.offload.executor.settle()
            assert model.offload.executor.held() == []
            check_logits(model, want)


def drain(store: FaultyStore) -> None:
    """Forget what has been injected and has not hit."""
    store._script.clear()


def test_a_flipped_bit_is_not_our_secret(checkpoint: Checkpoint) -> None:
    """Published files carry no checksums: this shows that the comparison would see a flip."""
    want = checkpoint("qwen3")
    stores: list[FaultyStore] = []

    def faulty(inner: Any) -> FaultyStore:
        stores.append(FaultyStore(inner))
        stores[-1].inject(Fault.BIT_FLIP, times=10**4)
        return stores[-1]

    with opened(smallest(want.directory), wrap_store=faulty) as model, torch.no_grad():
        assert not torch.equal(model(want.ids_BL).logits, want.logits_BLV)


# -- models that cannot be streamed ---------------------------------------------------------------


def test_quantised_and_remote_code_are_named(spoilt: Callable[..., Path]) -> None:
    directory = spoilt("qwen3", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="'fp8'"):
        prepare(directory, options("cpu"))
    shutil.rmtree(directory)
    remote = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    with pytest.raises(UnsupportedModelError, match="never run"):
        prepare(spoilt("qwen3", **remote), options("cpu"))


def test_a_weight_read_outside_of_its_layer_is_an_error_not_garbage(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose head looks into the first layer: streaming that layer cannot work."""
    from transformers.models.qwen3 import modeling_qwen3

    plain = modeling_qwen3.Qwen3ForCausalLM.forward

    def peeking(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, *args, **kwargs)
        out.logits = out.logits + self.model.layers[0].mlp.up_proj.weight.mean()
        return out

    prepared = smallest(checkpoint("qwen3").directory)
    with opened(prepared) as model:
        model.__class__ = type("Peeking", (type(model),), {"forward": peeking})
        model.__dict__.pop("forward", None)
        with pytest.raises(OffloadError, match=r"layers\.0\.mlp\.up_proj\.weight is streamed"):
            model(prompt())


def test_experts_whose_loop_needs_all_at_once_are_streamed_by_layer(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Tried on one token before anything is planned; the answer is the same, only coarser."""
    import equivalence

    from offload.models import load

    want = checkpoint("qwen3_moe")
    monkeypatch.setattr(equivalence, "_budgets", {})  # those of the finer cut are smaller
    monkeypatch.setattr(load, "check_expert_loop", lambda group: "its loop looks at all experts")
    least = find_budgets(want.directory, device)["minimum"]
    prepared = prepare(want.directory, options(device, **least))
    assert prepared.cut.groups == []
    assert any("looks at all experts" in note for note in prepared.notes)
    with opened(prepared) as model:
        check_logits(model, want)


def test_families_are_written_and_read_from_a_path_with_odd_names(tmp_path: Path) -> None:
    directory = write("llama", tmp_path / "Zwölf Bären #1?")
    with opened(smallest(directory)) as model:
        model(prompt())
