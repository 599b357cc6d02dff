"""Ways to gradients that a streamed model cannot go as a resident one does: each an error, and no
other gradient; and weights that train for some steps only."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dropin_support import EPS, PLACES, batches, close, loop, maker, resident, streamed
from families import tiny_config, write

from offload.errors import OffloadError
from offload.train.lazy_grad import GradientError
from offload.train.optimizer import AdamW
from offload.train.streamed import StreamedAccessError


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return maker(tmp_path_factory)


def test_gradients_of_some_inputs_alone_are_refused(tiny: Any) -> None:
    """Those of the weights were added to ``p.grad``, too: the next step had them twice."""
    with streamed(tiny()) as model:
        ids = next(batches(1))
        hidden = model.get_input_embeddings()(ids).detach().requires_grad_()

        def loss() -> torch.Tensor:
            found: torch.Tensor = model(inputs_embeds=hidden, labels=ids).loss
            return found

        with pytest.raises(OffloadError, match="cannot go through"):
            torch.autograd.grad(loss(), hidden)
        with pytest.raises(OffloadError, match="cannot go through"):
            loss().backward(inputs=[hidden])
        with pytest.raises(OffloadError, match="create_graph"):
            torch.autograd.grad(loss(), hidden, create_graph=True)
        with pytest.raises(StreamedAccessError, match="lm_head"):
            torch.autograd.grad(loss(), [model.lm_head.weight], allow_unused=True)
        with pytest.raises(StreamedAccessError, match=r"lm_head.*p\.grad"):
            loss().backward(inputs=[model.lm_head.weight])  # nothing came, and nobody was told
        assert all(p.grad is None for p in model.parameters())


class _Beside(torch.nn.Module):
    """An adapter: what is added to a layer's product."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, torch.nn.Linear(base.in_features, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.added(x)  # type: ignore[no-any-return]


def test_gradients_of_adapters_alone_are_refused(tiny: Any) -> None:
    """None came, without a word: they leave a layer's own backward, which was not gone through."""
    with streamed(tiny(), train="adapters") as model:
        mlp, ids = model.model.layers[1].mlp, next(batches(1))
        mlp.up_proj = _Beside(mlp.up_proj)
        weight, bias = mlp.up_proj.added.weight, mlp.up_proj.added.bias

        def loss() -> torch.Tensor:
            found: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return found

        with pytest.raises(OffloadError, match="cannot go through"):
            loss().backward(inputs=[weight])
        with pytest.raises(OffloadError, match="cannot go through"):
            torch.autograd.grad(loss(), [weight], allow_unused=True)
        seen: list[float] = []
        bias.register_hook(lambda g: seen.append(float(g.sum())))
        loss().backward()
        assert weight.grad is not None
        assert seen == [float(bias.grad.sum())]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_torch_func(tiny: Any) -> None:
    """``jvp`` came down in torch; others said that a Function must be written in another way."""
    directory, ids = tiny(), next(batches(1))
    with streamed(directory) as model:

        def loss(embeds: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = model(inputs_embeds=embeds, labels=ids).loss
            return found

        embeds = model.get_input_embeddings()(ids).detach()
        for transform in (torch.func.grad, torch.func.jacrev, torch.func.vmap):
            with pytest.raises(OffloadError, match=r"torch\.func.*backward\(\)"):
                transform(loss)(embeds[None] if transform is torch.func.vmap else embeds)
        with torch.no_grad(), pytest.raises(OffloadError, match=r"torch\.func.*forward_ad"):
            torch.func.jvp(loss, (embeds,), (embeds,))
        with torch.no_grad():
            each = [m(input_ids=ids).logits for m in (model, resident(directory))]
            assert torch.equal(torch.func.vmap(lambda x: model(x[None]).logits[0])(ids), each[0])
            assert torch.equal(*each)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "lm_head.weight"])
@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_other_weights_for_one_call(tiny: Any, name: str, kind: str) -> None:
    """Backward runs a layer again with its own weights: as long as these are the same the gradient
    went to them. Fused experts were never the other ones."""
    directory, ids = tiny("qwen3_moe"), next(batches(1))
    with streamed(directory) as model:
        value = dict(model.named_parameters())[name].detach().clone().requires_grad_()
        other = {name: value if kind == "tensor" else torch.nn.Parameter(value.detach())}
        given: Any = (), {"input_ids": ids, "labels": ids, "use_cache": False}
        with pytest.raises(OffloadError, match=r"other weights|replaced"):
            torch.func.functional_call(model, other, *given).loss.backward()
        model.zero_grad()
        with torch.no_grad():
            if "experts" in name:
                with pytest.raises(OffloadError, match=f"{name} .* replaced"):
                    torch.func.functional_call(model, other, *given)
            else:
                other = {name: 2 * value}
                found = torch.func.functional_call(model, other, *given).loss
                wanted = torch.func.functional_call(resident(directory), other, *given).loss
                assert torch.equal(found, wanted)


def test_gradients_of_inputs_of_a_frozen_model(tiny: Any) -> None:
    """Prompts that are sought, say: no weight is in the way."""
    directory, ids, found = tiny("qwen3_moe"), next(batches(1)), []
    wanted = resident(directory).requires_grad_(False)
    with streamed(directory, train="adapters") as model:
        for m in (model, wanted):
            hidden = m.get_input_embeddings()(ids).detach().requires_grad_()
            found += torch.autograd.grad(m(inputs_embeds=hidden, labels=ids).loss, hidden)
        assert torch.allclose(*found, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["mlp", "gate_up_proj", "layers.1"])
def test_weights_that_are_frozen_for_a_while(tiny: Any, what: str, place: str) -> None:
    """Fused experts went on training."""
    directory = tiny("qwen3_moe")

    def run(model: Any, optimizer: Any) -> list[float]:
        out = []
        for step, ids in enumerate(batches(5)):
            for name, param in model.named_parameters():
                param.requires_grad_(what not in name or step not in (1, 2))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            out.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        return out

    wanted = resident(directory)
    expected = run(wanted, torch.optim.AdamW(wanted.parameters(), lr=1e-3, eps=EPS))
    with streamed(directory, place) as model:
        found = run(model, AdamW(model.parameters(), lr=1e-3, eps=EPS))
        assert found == pytest.approx(expected, rel=2e-5)
        assert close(model, wanted)


@pytest.mark.parametrize("what", ["down_proj", "gate_up_proj"])
def test_a_part_of_fused_experts(tiny: Any, what: str) -> None:
    """Whether all of it trained was decided by the first."""
    directory = tiny("qwen3_moe")
    wanted = resident(directory)
    for name, param in wanted.named_parameters():
        param.requires_grad_(what in name)
    expected = loop(wanted, torch.optim.AdamW([p for p in wanted.parameters() if p.requires_grad]))
    with streamed(directory, train=lambda name: what in name) as model:
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
        assert loop(model, optimizer) == pytest.approx(expected, rel=1e-5)
        assert close(model, wanted)


@pytest.mark.parametrize("place", PLACES)
def test_a_penalty_on_fused_experts(tiny: Any, place: str) -> None:
    """Of a weight that units use expert by expert, read as a whole beside them: its gradient was
    nobody's."""
    directory, ids = tiny("qwen3_moe"), next(batches(1))

    def gradients(model: Any, weight: float) -> dict[str, torch.Tensor]:
        loss = weight * model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss + sum(p.pow(2).sum() for p in model.parameters())).backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found

    with streamed(directory, place) as model:
        for weight in (0.0, 1.0):
            found, wanted = gradients(model, weight), gradients(resident(directory), weight)
            assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


def test_hooks_on_a_gradient_that_never_is_whole(tiny: Any) -> None:
    with streamed(tiny("qwen3_moe")) as model:
        named = dict(model.named_parameters())
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            with pytest.raises(StreamedAccessError, match="expert by expert"):
                getattr(named["model.layers.0.mlp.experts.down_proj"], register)(lambda g: None)
        seen: list[float] = []
        model.lm_head.weight.register_hook(lambda g: seen.append(float(g.norm())))
        ids = next(batches(1))
        model(input_ids=ids, labels=ids).loss.backward()
        assert seen == pytest.approx([float(model.lm_head.weight.grad.norm())])


def test_data_of_a_gradient(tiny: Any) -> None:
    with streamed(tiny()) as model:
        ids = next(batches(1))
        model(input_ids=ids, labels=ids).loss.backward()
        grad = model.lm_head.weight.grad
        before = grad.clone()
        with pytest.raises(GradientError, match=r"p\.grad = "):
            grad.data = torch.zeros(1)
        grad.data.mul_(0.5)
        assert torch.equal(model.lm_head.weight.grad.clone(), before / 2)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_evaluation_in_inference_mode(tiny: Any, family: str) -> None:
    directory, ids = tiny(family), next(batches(1))
    with torch.no_grad():
        expected = float(resident(directory)(input_ids=ids, labels=ids).loss)
    with streamed(directory) as model:
        with torch.inference_mode():
            assert float(model(input_ids=ids, labels=ids).loss) == pytest.approx(expected)
        model(input_ids=ids, labels=ids).loss.backward()
        AdamW(model.parameters()).step()


def test_a_hook_inside_of_a_layer_is_warned_of(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    with streamed(tiny()) as model:
        ids = next(batches(1))
        layer = model.model.layers[1]
        layer.register_forward_hook(lambda *_: None)
        model(input_ids=ids, labels=ids, output_hidden_states=True).loss.backward()
        assert not caplog.records
        layer.mlp.register_forward_hook(lambda *_: None)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        (said,) = caplog.records
        assert "trains nothing in a loss" in said.getMessage()


def _eval(model: Any, optimizer: Any) -> None:
    model.eval()


def _hook(model: Any, optimizer: Any) -> None:
    for layer in model.transformer.h:
        layer.mlp.register_forward_hook(lambda module, args, out: out * 2)


def _step(model: Any, optimizer: Any) -> None:
    ids = next(batches(1))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("change", [_eval, _hook, _step])
def test_what_is_changed_between_forward_and_backward(tiny: Any, change: Any) -> None:
    """Layers ran again as they were by then: dropout was gone from gradients, say."""
    with streamed(tiny("gpt2")) as model:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        ids = next(batches(1))
        loss = model(input_ids=ids, labels=ids).loss
        change(model, optimizer)
        with pytest.raises(OffloadError, match="came to another result"):
            loss.backward()
        optimizer.zero_grad()
        if change is not _hook:
            model.train()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_are_changed_between_forward_and_backward(tiny: Any) -> None:
    peft = pytest.importorskip("peft")
    with streamed(tiny(), train="adapters") as base:
        settings = peft.LoraConfig(
            target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        model = peft.get_peft_model(base, settings, "one")
        model.add_adapter("two", settings)
        ids = next(batches(1))
        loss = model(input_ids=ids, labels=ids).loss
        model.set_adapter("two")
        with pytest.raises(OffloadError, match="which adapters are on"):
            loss.backward()


def test_kernels_that_are_others_with_autograd(tmp_path: Path) -> None:
    """Doge's mask wants a gradient, for which torch has one way of attention only: forward takes
    it, too, with the resident model's loss."""
    config = tiny_config("doge", hidden_dropout=0.2)
    directory = write("doge", tmp_path / "doge", torch.float32, config=config)
    wanted = resident(directory)
    with streamed(directory) as model:
        optimizer = AdamW(model.parameters(), lr=0.0)
        for ids in batches(2, rows=3, length=37):
            losses = []
            for each in (wanted, model):
                torch.manual_seed(3)
                losses.append(each(input_ids=ids, labels=ids).loss)
            assert torch.equal(*losses)
            losses[1].backward()
            optimizer.step()


def test_buffers_that_forward_changes(tiny: Any) -> None:
    """Spectral norm goes on with each run: gradients were those of another weight."""
    directory, ids, found = tiny(), next(batches(1)), []
    with streamed(directory) as model:
        for m in (resident(directory), model):
            torch.manual_seed(0)
            layer = m.model.layers[1].self_attn
            torch.nn.utils.parametrizations.spectral_norm(layer.q_proj)
            m(input_ids=ids, labels=ids).loss.backward()
            embeddings = m.get_input_embeddings().weight.grad.clone()
            found.append((embeddings, layer.q_proj.parametrizations.weight[0]._u))
    for wanted, ours in zip(*found, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-6)


def test_statistics_of_batch_norm(tmp_path: Path) -> None:
    """A batch counted twice; what was saved, and what a resumed run began with, were the
    checkpoint's."""
    from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerForCTC

    config = Wav2Vec2ConformerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37,
        conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 8), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, vocab_size=40, layerdrop=0.0, mask_time_prob=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        conformer_conv_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    wanted = Wav2Vec2ConformerForCTC(config)
    wanted.save_pretrained(tmp_path / "model")
    sound, labels = torch.randn(2, 2000), torch.randint(1, 40, (2, 5))
    with streamed(tmp_path / "model", disk=tmp_path / "states") as model:
        for m in (wanted, model):
            m.train()(input_values=sound, labels=labels).loss.backward()
        model.offload.commit()
    with streamed(tmp_path / "model", disk=tmp_path / "states", resume=True) as model:
        assert model.load_state_dict(model.state_dict()) == ([], [])
        for m in (wanted, model):
            m(input_values=sound, labels=labels).loss.backward()
        model.offload.stepped()  # without one a commit has nothing to add
        model.offload.commit()
    with streamed(tmp_path / "model", disk=tmp_path / "states", resume=True) as model:
        model.save_pretrained(tmp_path / "out")
    saved = dict(Wav2Vec2ConformerForCTC.from_pretrained(tmp_path / "out").named_buffers())
    for name, buffer in wanted.named_buffers():
        assert torch.allclose(saved[name], buffer, atol=1e-5), name


def test_a_result_that_is_written_to(tmp_path: Path) -> None:
    """SpecAugment: times are masked in what a projection gives, which torch refused as a view."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37,
        conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 8), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, vocab_size=40, layerdrop=0.0, mask_time_prob=0.3,
        mask_time_length=2, feat_proj_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    Wav2Vec2ForCTC(config).save_pretrained(tmp_path / "m")
    wanted = resident(tmp_path / "m")
    sound, labels = torch.randn(2, 2000), torch.randint(1, 40, (2, 5))
    with streamed(tmp_path / "m") as model:
        for m in (wanted, model):
            torch.manual_seed(1)
            np.random.seed(1)  # which times are masked
            m(input_values=sound, labels=labels).loss.backward()
        named = dict(wanted.named_parameters())
        assert named["wav2vec2.masked_spec_embed"].grad.abs().max() > 0
        for name, p in model.named_parameters():
            other = named[name].grad
            assert (p.grad is None) == (other is None), name
            assert other is None or torch.allclose(p.grad.clone(), other, atol=1e-5), name


def test_a_layer_that_is_not_repeatable(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Sums that come together in another order each time are nobody's change."""
    with streamed(tiny("gpt2")) as model:
        runs = itertools.count()
        for layer in model.transformer.h:
            layer.mlp.register_forward_hook(lambda module, args, out: out * (1 + 1e-6 * next(runs)))
        with caplog.at_level(logging.WARNING, "offload.train.same_again"):
            for ids in batches(2):
                model(input_ids=ids, labels=ids).loss.backward()
        said = [r.getMessage() for r in caplog.records if "each time" in r.getMessage()]
        assert len(said) == len(model.transformer.h)
