"""The form of a model's loss: proved family by family, and refused where it is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import CORE, randomise, tail, tiny_config
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from offload.train import head_twin
from offload.train.head_find import HeadForm, find_head, run_body
from offload.train.head_loss import ResidentHead, Transform, head_loss, shift_labels
from offload.train.head_twin import no_cache

REFUSED = {
    **dict.fromkeys(
        "bart bigbird_pegasus blenderbot blenderbot-small cpmant marian mbart mvp pegasus plbart"
        " trocr whisper xlm xlnet".split(),
        "shifted by one",
    ),
    "dory": "not a plain nn.Linear",
    "git": "its twin does not run",  # its logits have rows for the image, too
    "prophetnet": "its head is given",
    "reformer": "without its head",  # its hashes are drawn anew at each call
}
"""Families whose loss has another form, and what they are told."""


def meta(family: str, **numbers: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **numbers))


def real(family: str, **numbers: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **numbers)).float()
    randomise(model)
    model.set_experts_implementation("eager")
    return model.train()


def form_of(model: Any) -> HeadForm:
    form, reason = find_head(model)
    assert form is not None, reason
    assert reason == ""
    return form


def check_gradients(model: Any, form: HeadForm) -> None:
    """Every gradient of the model's own loss is that of body and ``head_loss``."""
    ids = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :4] = -100
    torch.manual_seed(3)
    # Without a cache: xLSTM writes into its own, and cannot go back then.
    loss = model(input_ids=ids, labels=labels, **no_cache(model)).loss
    loss.backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    torch.manual_seed(3)
    hidden = run_body(model, form, input_ids=ids)
    linear = model.get_submodule(form.head)
    assert (linear.out_features, linear.in_features) == (form.vocabulary, form.width)
    assert (linear.bias is not None) == form.bias
    head = ResidentHead(linear.weight, linear.bias, rows=100)
    flat = shift_labels(labels)
    tokens = int((flat != -100).sum())
    rows = hidden.detach().flatten(0, 1)
    total, grad = head_loss(rows, flat, head, scale=1 / tokens, transform=form.transform)
    hidden.backward(grad.view_as(hidden))
    for p, more in ((linear.weight, head.weight_grad), (linear.bias, head.bias_grad)):
        if p is not None:
            p.grad = more if p.grad is None else p.grad + more
    torch.testing.assert_close(total / tokens, loss.detach(), rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        if want[name] is None:
            assert p.grad is None, name
        else:
            scale = float(want[name].abs().max())
            torch.testing.assert_close(
                p.grad, want[name], rtol=1e-4, atol=1e-4 * scale + 1e-8, msg=name
            )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", CORE)
def test_core_families(family: str) -> None:
    model = real(family)
    check_gradients(model, form_of(model))


@pytest.mark.sweep
@pytest.mark.parametrize("family", tail())
def test_other_families(family: str) -> None:
    form, reason = find_head(meta(family))
    if family in REFUSED:
        assert form is None
        assert REFUSED[family] in reason
    else:
        assert form is not None, reason


@pytest.mark.parametrize(
    ("family", "numbers", "factor", "softcap"),
    [
        ("granite", {"logits_scaling": 8}, 1 / 8, None),
        ("granitemoe", {"logits_scaling": 6.0}, 1 / 6, None),
        # Three numbers would explain the logits; only one of them is followed.
        (
            "granite",
            {"logits_scaling": 0.25, "residual_multiplier": 0.25, "embedding_multiplier": 4.0},
            4.0,
            None,
        ),
        ("hyperclovax", {"logits_scaling": 0.5}, 0.5, None),
        ("cohere", {"logit_scale": 0.3}, 0.3, None),
        ("falcon_h1", {"lm_head_multiplier": 0.4}, 0.4, None),
        ("gemma2", {"final_logit_softcapping": None}, 1.0, None),
        (
            "gemma2",
            {"final_logit_softcapping": 50.0, "attn_logit_softcapping": 50.0},
            1.0,
            50.0,
        ),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, 1.0, 30.0),
        ("xlstm", {"output_logit_soft_cap": 7.0}, 1.0, 7.0),
        ("llama", {}, 1.0, None),
    ],
)
def test_numbers_of_the_config(
    family: str, numbers: dict[str, Any], factor: float, softcap: float | None
) -> None:
    model = real(family, **numbers)
    form = form_of(model)
    assert form.transform == Transform(factor=factor, softcap=softcap)
    check_gradients(model, form)


@pytest.mark.parametrize(
    ("family", "body"),
    [
        ("llama", "model"),
        ("gpt2", "transformer"),
        ("llama4_text", "model"),  # transformers' accessor gives the whole model here
        ("minicpm3", None),  # scales what enters the head
        ("bert", None),  # another layer before the head
    ],
)
def test_bodies(family: str, body: str | None) -> None:
    model = real(family)
    form = form_of(model)
    assert form.body == body
    check_gradients(model, form)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "llama"])
def test_a_body_that_is_wider_than_its_head(family: str) -> None:
    """State spaces sum their layers in float32, whatever the weights are."""
    model = real(family).to(torch.bfloat16)
    form = form_of(model)
    ids = torch.randint(3, 250, (2, 16), generator=torch.Generator().manual_seed(2))
    own = model(input_ids=ids, labels=ids, use_cache=False).loss
    with torch.no_grad():
        hidden = run_body(model, form, input_ids=ids, **no_cache(model))
        head = model.get_submodule(form.head)
        loss, _ = head_loss(
            hidden.flatten(0, 1), shift_labels(ids), ResidentHead(head.weight, head.bias, rows=100),
            scale=1.0, transform=form.transform,
        )  # fmt: skip
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(loss / 30, own, rtol=1e-3, atol=0)


def test_router_losses_are_not_the_heads() -> None:
    assert form_of(meta("mixtral", output_router_logits=True)).transform == Transform()


def test_padded_vocabulary_is_refused() -> None:
    model = meta("inkling2_text", unpadded_vocab_size=200)
    if model.lm_head.out_features == 200:
        pytest.skip("since transformers 5.24 its head has no padding")
    form, reason = find_head(model)
    assert form is None
    assert "its logits are [2, 16, 250]" in reason


class Quiet(LlamaForCausalLM):
    """Its logits are made smaller by a number that no config tells."""

    by = 0.37

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.pop("labels", None)
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.by
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
        return output


class Chance(Quiet):
    """The number happens to be one of the config's."""

    by = 0.02


class Smooth(LlamaForCausalLM):
    """Its logits are plain, its loss is not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.01 * output.logits.square().mean()
        return output


class Often(LlamaForCausalLM):
    """Its head is called twice."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.lm_head(torch.zeros(1, self.config.hidden_size))
        return output


class Masked(LlamaForCausalLM):
    """Some words can never be said."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clone()
        output.logits[..., 7] = torch.finfo(torch.float32).min
        return output


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Quiet, "no factor or softcap of its config"),
        (Chance, "do not follow the numbers of its config"),
        (Smooth, "its loss is not that of the cross-entropy"),
        (Often, "its head is called 2 times"),
        (Masked, "no factor or softcap of its config"),
    ],
)
def test_what_is_not_proved_is_refused(kind: Any, reason: str) -> None:
    config = tiny_config("llama")
    assert isinstance(config, LlamaConfig)
    assert config.initializer_range == Chance.by
    with torch.device("meta"):
        model = kind(config)
    form, why = find_head(model)
    assert form is None
    assert reason in why


def test_a_head_that_is_no_linear_is_refused() -> None:
    model = meta("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    form, why = find_head(model)
    assert form is None
    assert "of class Sequential, not a plain nn.Linear" in why
    assert "missing" in find_head(torch.nn.Linear(2, 2))[1]


def test_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    form_of(meta("gemma2"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_body_without_a_module_leaves_the_head_alone() -> None:
    model = real("minicpm3")
    form = form_of(model)
    called: list[str] = []
    model.lm_head.register_forward_pre_hook(lambda *_: called.append("before"))
    model.lm_head.register_forward_hook(lambda *_: called.append("after"))
    ids = torch.ones((1, 4), dtype=torch.int64)
    hidden = run_body(model, form, input_ids=ids)
    assert hidden.requires_grad
    assert called == []
    model(ids)  # and is itself again
    assert called == ["before", "after"]


def test_a_twin_that_is_too_large_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_twin, "TWIN_BYTES", 1000)
    form, reason = find_head(meta("llama"))
    assert form is None
    assert "its smallest twin takes" in reason
