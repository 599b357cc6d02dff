"""Plain torch loops over a streamed model, against the same loop over the resident one."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from dropin_support import EPS, PLACES, batches, close, groups_of, loop, maker, resident, streamed
from engine_support import every_pair

from offload.errors import ClosedError, OffloadError
from offload.train.engine import NotFinite
from offload.train.lazy_grad import GradientError, LazyGrad
from offload.train.optimizer import AdamW
from offload.train.streamed import StreamedAccessError, StreamedParameter

F32 = torch.float32


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return maker(tmp_path_factory)


def compare(directory: Path, place: str, **how: Any) -> None:
    wanted = resident(directory)
    expected = loop(wanted, torch.optim.AdamW(groups_of(wanted), lr=1e-3, eps=EPS), **how)
    with streamed(directory, place) as model:
        found = loop(model, AdamW(groups_of(model), lr=1e-3, eps=EPS), **how)
        assert found == pytest.approx(expected, rel=2e-5)
        assert close(model, wanted)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_is_torchs_own(tiny: Any, place: str, foreach: bool | None) -> None:
    compare(tiny(), place, foreach=foreach)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "clip", "accumulate", "place"),
    every_pair(["qwen3_moe", "gpt2"], [0.0, 0.5], [1, 3], PLACES),
)
def test_accumulation_and_schedules(
    tiny: Any, family: str, place: str, accumulate: int, clip: float
) -> None:
    compare(tiny(family), place, accumulate=accumulate, clip=clip)


@pytest.mark.parametrize("place", PLACES)
def test_tied_embeddings(tiny: Any, place: str) -> None:
    compare(tiny("gemma2", tie_word_embeddings=True), place, accumulate=2)


@pytest.mark.parametrize("place", PLACES)
def test_updates_inside_backward(tiny: Any, place: str) -> None:
    directory = tiny("qwen3_moe")
    wanted = resident(directory)
    expected = loop(wanted, torch.optim.AdamW(groups_of(wanted), lr=1e-3), clip=0)
    with streamed(directory, place) as model:
        optimizer = AdamW(groups_of(model), lr=1e-3, in_backward=True)
        assert loop(model, optimizer, clip=0) == pytest.approx(expected, rel=1e-5)
        assert close(model, wanted)
        ids = next(batches(1))
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(GradientError, match="in_backward=True has used them"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)


def test_accumulation_with_updates_inside_backward_is_declared(tiny: Any) -> None:
    directory = tiny()
    wanted, data = resident(directory), list(batches(2))
    optimizer = torch.optim.AdamW(wanted.parameters(), lr=1e-3)
    for ids in data:
        wanted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with streamed(directory) as model:
        ours = AdamW(model.parameters(), lr=1e-3, in_backward=True)
        with ours.accumulating():
            model(input_ids=data[0], labels=data[0]).loss.backward()
        model(input_ids=data[1], labels=data[1]).loss.backward()
        ours.step()
        assert close(model, wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_gradient_that_comes_after_its_update_is_no_second_update(tiny: Any, family: str) -> None:
    ids = next(batches(1))
    with streamed(tiny(family)) as model:
        ours = AdamW(model.parameters(), lr=1e-3, in_backward=True)
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(GradientError, match=r"accumulating\(\)"):
            model(input_ids=ids, labels=ids).loss.backward()
    with streamed(tiny(family)) as model:
        ours = AdamW(model.parameters(), lr=1e-3, in_backward=True)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            ours.step()
        penalty = sum(p.pow(2).sum() for p in model.parameters())  # behind the layers, in backward
        with pytest.raises(GradientError, match="weights themselves"):
            (model(input_ids=ids, labels=ids).loss + penalty).backward()


@pytest.mark.parametrize(
    "what", [{"maximize": True}, {"amsgrad": True}, {"decoupled_weight_decay": False}]
)
def test_what_a_group_asks_for_is_done_or_refused(tiny: Any, what: dict[str, Any]) -> None:
    with streamed(tiny()) as model:
        with pytest.raises(OffloadError, match=next(iter(what))):
            AdamW([{"params": list(model.parameters()), **what}])
        AdamW([{"params": list(model.parameters()), "amsgrad": False, "foreach": True}])


# -- reading weights --------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_weights_are_read_by_whoever_reads_them(tiny: Any, place: str) -> None:
    directory = tiny("qwen3_moe")
    wanted = resident(directory)
    with streamed(directory, place) as model:
        assert all(isinstance(p, StreamedParameter) for p in model.parameters())
        for (name, ours), (_, theirs) in zip(
            model.named_parameters(), wanted.named_parameters(), strict=True
        ):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), name
            assert torch.equal(ours.data, theirs.data)
            assert torch.equal(ours.norm(), theirs.norm())
            assert torch.equal(ours[:1], theirs[:1])
        saved = model.state_dict()
        assert all(torch.equal(v, saved[k]) for k, v in wanted.state_dict().items())
        assert torch.equal(copy.deepcopy(model.lm_head.weight), wanted.lm_head.weight)


@pytest.mark.parametrize("place", PLACES)
def test_a_head_that_is_read_directly_is_trained(tiny: Any, place: str) -> None:
    directory = tiny()

    def run(model: Any, optimizer: Any) -> list[float]:
        out = []
        for ids in batches(3):
            hidden = model.model(input_ids=ids).last_hidden_state
            logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1),
                                                     ids[:, 1:].flatten())  # fmt: skip
            loss = loss + 1e-3 * model.model.layers[0].mlp.up_proj.weight.square().sum()
            loss.backward()
            out += [float(loss.detach()),
                    float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()
        return out

    wanted = resident(directory)
    expected = run(wanted, torch.optim.AdamW(wanted.parameters(), lr=1e-3))
    with streamed(directory, place) as model:
        found = run(model, AdamW(model.parameters(), lr=1e-3))
        assert found == pytest.approx(expected, rel=1e-5)
        assert close(model, wanted)


def test_generation_waits_for_updates(tiny: Any) -> None:
    directory = tiny("llama")
    wanted = resident(directory)
    loop(wanted, torch.optim.AdamW(groups_of(wanted), lr=1e-2))
    with streamed(directory) as model:
        loop(model, AdamW(groups_of(model), lr=1e-2))
        ids = next(batches(1))
        said = [
            m.eval().generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
            for m in (model, wanted)
        ]
        assert torch.equal(*said)


# -- reading gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_gradients_can_be_read_and_replaced(tiny: Any, place: str) -> None:
    directory = tiny("qwen3_moe")
    wanted = resident(directory)
    ids = next(batches(1))
    wanted(input_ids=ids, labels=ids).loss.backward()
    with streamed(directory, place) as model:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        model(input_ids=ids, labels=ids).loss.backward()
        for (name, ours), (_, theirs) in zip(
            model.named_parameters(), wanted.named_parameters(), strict=True
        ):
            assert isinstance(ours.grad, LazyGrad)
            assert torch.allclose(ours.grad.clone(), theirs.grad, atol=1e-7), name
            assert float(ours.grad.norm()) == pytest.approx(float(theirs.grad.norm()), rel=1e-5)
            assert float(ours.grad.data.abs().max()) == float(theirs.grad.abs().max()), name
        for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            ours.grad.div_(4)
            ours.grad *= 2
            assert torch.allclose(ours.grad.clone(), theirs.grad / 2, atol=1e-7)
            theirs.grad.mul_(0.5)
        head = model.lm_head.weight
        head.grad = head.grad.clamp(-1e-4, 1e-4)
        wanted.lm_head.weight.grad.clamp_(-1e-4, 1e-4)
        optimizer.step()
        torch.optim.AdamW(wanted.parameters(), lr=1e-3).step()
        assert close(model, wanted)


def test_experts_outside_of_their_layer(tiny: Any) -> None:
    """With gradients an error; without, their result. And the model trains on."""
    directory = tiny("qwen3_moe")
    wanted = resident(directory)
    with streamed(directory, "disk") as model:
        hidden = torch.randn(1, 4, model.config.hidden_size)
        with pytest.raises(OffloadError, match="outside of it"):
            model.model.layers[0].mlp(hidden)
        with torch.no_grad():
            found, expected = (m.model.layers[0].mlp(hidden) for m in (model, wanted))
        assert torch.equal(found, expected)
        loop(model, AdamW(model.parameters(), lr=1e-3, eps=EPS), steps=1)
        loop(wanted, torch.optim.AdamW(wanted.parameters(), lr=1e-3, eps=EPS), steps=1)
        assert close(model, wanted)


@pytest.mark.parametrize("place", PLACES)
def test_steps_of_gradients_that_no_backward_made(tiny: Any, place: str) -> None:
    """Nothing uses the weights between two steps (evolution strategies, gradients from elsewhere):
    each update has the gradients of its own step."""
    directory = tiny("qwen3_moe")
    wanted = resident(directory)
    theirs = torch.optim.AdamW(wanted.parameters(), lr=1e-3)
    with streamed(directory, place) as model:
        ours = AdamW(model.parameters(), lr=1e-3)
        for step in range(1, 5):
            for optimizer, params in (ours, model.parameters()), (theirs, wanted.parameters()):
                for p in params:
                    p.grad = torch.full(tuple(p.shape), 0.01 * step)
                optimizer.step()
        assert close(model, wanted)


@pytest.mark.parametrize("kept", [False, True], ids=["run again", "graph kept"])
@pytest.mark.parametrize("what", ["router_logits", "attentions", "hidden_states"])
def test_losses_of_what_is_captured_inside_of_layers(tiny: Any, what: str, kept: bool) -> None:
    """transformers' loss that balances experts comes of router logits, which hooks put beside the
    layers' results: its value came without its gradient."""
    directory = tiny("qwen3_moe")

    def run(model: Any) -> torch.Tensor:
        model.router_aux_loss_coef = 0.5
        model.set_attn_implementation("eager")
        out: Any = model(input_ids=ids, labels=ids, **{f"output_{what}": True})
        loss = out.loss
        if what != "router_logits":  # of these it is there already
            loss = loss + sum((t.float() ** 2).mean() for t in getattr(out, what))
        loss.backward()
        return loss.detach()

    wanted = resident(directory)
    ids = next(batches(1))
    expected = run(wanted)
    with streamed(directory, "ram" if kept else "disk") as model:
        if kept:
            model.offload.engine.kept_units = frozenset(
                range(len(model.offload.engine.layout.units))
            )
        assert torch.allclose(run(model), expected)
        named = dict(wanted.named_parameters())
        for name, ours in model.named_parameters():
            assert torch.allclose(ours.grad.clone(), named[name].grad, rtol=1e-4, atol=1e-6), name
        # What is asked for without training is captured as ever.
        with torch.no_grad():
            found = getattr(model(input_ids=ids, **{f"output_{what}": True}), what)
            again = getattr(wanted(input_ids=ids, **{f"output_{what}": True}), what)
        assert len(found) == len(again)
        assert all(map(torch.equal, found, again))


def test_a_scaled_gradient_goes_on_being_summed(tiny: Any) -> None:
    directory = tiny()
    wanted, data = resident(directory), list(batches(2))
    with streamed(directory) as model:
        for m, optimizer in ((wanted, torch.optim.AdamW(wanted.parameters(), lr=1e-3)),
                             (model, AdamW(model.parameters(), lr=1e-3))):  # fmt: skip
            m(input_ids=data[0], labels=data[0]).loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            m(input_ids=data[1], labels=data[1]).loss.backward()
            optimizer.step()
        assert close(model, wanted)


def test_infinity_norms_and_errors_are_torchs(tiny: Any) -> None:
    directory = tiny()
    wanted, ids = resident(directory), next(batches(1))
    wanted(input_ids=ids, labels=ids).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(wanted.parameters(), 1.0, norm_type=float("inf"))
    with streamed(directory) as model:
        model(input_ids=ids, labels=ids).loss.backward()
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        assert float(found) == float(expected)
        with pytest.raises(GradientError, match="in place"):
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        model.zero_grad()
        optimizer = AdamW(model.parameters())
        (model(input_ids=ids, labels=ids).loss * float("nan")).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        with pytest.raises(NotFinite):
            optimizer.step()
        optimizer.zero_grad()
        assert close(model, resident(directory), 0.0)


# -- misuse -----------------------------------------------------------------------------------


def test_a_foreign_optimizer_is_refused_before_it_makes_states(tiny: Any) -> None:
    with streamed(tiny()) as model:
        optimizer = torch.optim.AdamW(model.parameters())
        ids = next(batches(1))
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(OffloadError, match=r"use offload\.AdamW"):
            optimizer.step()
        assert not optimizer.state


def test_no_step_without_gradients_nor_with_old_ones(tiny: Any) -> None:
    with streamed(tiny()) as model:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        ids = next(batches(1))
        with pytest.raises(GradientError, match="no gradients"):
            optimizer.step()
        model(input_ids=ids, labels=ids).loss.backward()
        kept = model.lm_head.weight.grad
        optimizer.step()
        assert model.lm_head.weight.grad is None
        with pytest.raises(GradientError, match="is gone"):
            kept.norm()
        with pytest.raises(GradientError, match="no gradients"):
            optimizer.step()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=False)
        with pytest.raises(GradientError, match="no gradients"):
            optimizer.step()


def test_gradients_that_nobody_owns_are_said(tiny: Any) -> None:
    with streamed(tiny()) as model:
        optimizer = AdamW(model.model.parameters())
        ids = next(batches(1))
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(GradientError, match="lm_head"):
            optimizer.step()
        optimizer.add_param_group({"params": [model.lm_head.weight], "lr": 1e-3})
        optimizer.step()


def test_weights_cannot_be_changed_or_moved(tiny: Any) -> None:
    with streamed(tiny()) as model:
        head = model.lm_head.weight
        for change in (
            lambda: head.zero_(), lambda: torch.nn.init.normal_(head), lambda: head.data.add_(1),
            lambda: setattr(head, "data", torch.zeros(1)), head.data_ptr, model.half,
        ):  # fmt: skip
            with torch.no_grad(), pytest.raises(StreamedAccessError):
                change()
        with pytest.raises(StreamedAccessError, match="save them as a checkpoint first"):
            model.resize_token_embeddings(300)
        assert model.to("cpu") is model


@pytest.mark.parametrize("place", PLACES)
def test_what_others_ask_of_a_weight(tiny: Any, place: str) -> None:
    """A dtype, a shape: the tensor that asks is answered, not the weight given in its place."""
    with streamed(tiny(), place) as model:
        weight = model.lm_head.weight
        half = torch.ones(weight.numel(), dtype=torch.bfloat16)
        assert torch.equal(half.to(weight), torch.ones(weight.numel()))
        assert torch.equal(half.type_as(weight), torch.ones(weight.numel()))
        assert torch.equal(half.view_as(weight), torch.ones(weight.shape, dtype=torch.bfloat16))
        assert torch.equal(half.float().view_as(weight) * weight, weight.detach().clone())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_parameter_without_elements(tmp_path: Path) -> None:
    """As MobileBERT's, whose hidden state is as wide as its embeddings: it was called no part of
    the model."""
    from transformers import MobileBertConfig, MobileBertForMaskedLM

    config = MobileBertConfig(
        vocab_size=128, hidden_size=32, embedding_size=32, intra_bottleneck_size=16,
        intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    MobileBertForMaskedLM(config).save_pretrained(tmp_path / "m")
    wanted = resident(tmp_path / "m")
    expected = loop(wanted, torch.optim.AdamW(groups_of(wanted), lr=1e-3, eps=EPS))
    with streamed(tmp_path / "m") as model:
        assert any(not p.numel() for p in model.parameters())
        found = loop(model, AdamW(groups_of(model), lr=1e-3, eps=EPS))
        assert found == pytest.approx(expected, rel=1e-5)
        assert close(model, wanted)


def test_what_is_no_part_of_the_model_is_refused(tiny: Any) -> None:
    with streamed(tiny()) as model, streamed(tiny()) as other:
        with pytest.raises(OffloadError, match="in memory"):
            AdamW([torch.nn.Parameter(torch.zeros(3))])
        with pytest.raises(OffloadError, match="several"):
            AdamW([model.lm_head.weight, other.lm_head.weight])
        with pytest.raises(OffloadError, match="beta"):
            AdamW(model.parameters(), betas=(1.5, 0.9))


def test_compiled_it_trains_as_it_is(tiny: Any) -> None:
    """Trainer(torch_compile=True), say: nothing of it is traced, its gradients are the same."""
    from torch._dynamo.testing import CompileCounter

    directory = tiny()
    found = []
    for compiled in (False, True):
        counter = CompileCounter()
        torch._dynamo.reset()
        with streamed(directory) as model:
            called = torch.compile(model, backend=counter) if compiled else model
            ids = next(batches(1))
            loss = called(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        assert counter.frame_count == 0
    assert all(map(torch.equal, *found))


def test_what_was_frozen_stays_so(tiny: Any) -> None:
    directory = tiny()

    def chosen(name: str) -> bool:
        return "mlp" in name

    wanted = resident(directory)
    for name, param in wanted.named_parameters():
        param.requires_grad_(chosen(name))
    expected = loop(wanted, torch.optim.AdamW([p for p in wanted.parameters() if p.requires_grad]))
    with streamed(directory, train=chosen) as model:
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
        assert loop(model, optimizer) == pytest.approx(expected, rel=1e-5)
        assert close(model, wanted)
        with pytest.raises(StreamedAccessError, match="frozen when the model was loaded"):
            model.lm_head.weight.requires_grad_()
    with (
        pytest.raises(OffloadError, match="nothing to train"),
        streamed(directory, train=lambda _: False),
    ):
        pass


@pytest.mark.parametrize("place", PLACES)
def test_threads_end_with_the_program(tiny: Any, place: str, caplog: Any) -> None:
    """One that was in torch's code when the interpreter went ended a third of the programs that
    close nothing with an abort."""
    before = set(threading.enumerate())
    with streamed(tiny("llama"), place) as model:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        loop(model, optimizer, clip=0)
        model.offload._at_exit()
        left = [t.name for t in set(threading.enumerate()) - before]
        assert [name for name in left if "update" in name or "spill" in name] == []
        assert "not all of them saved" in caplog.text
        with pytest.raises(ClosedError):
            model.offload.commit()


def test_a_forks_child_leaves_the_parents_files(tiny: Any, monkeypatch: Any) -> None:
    with streamed(tiny("llama")) as model:
        training = model.offload
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            training._at_exit()
        assert training.directory.is_dir()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        loop(model, optimizer, clip=0)
    assert not training.directory.exists()
