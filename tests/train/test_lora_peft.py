"""Against peft: the same losses from the same adapters, and files it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import batch, group_at
from equivalence import reference
from lora_support import EXPERTS, HOW, Made, adapted_engine, pinned

from offload.errors import OffloadError
from offload.models.meta import build
from offload.train.lora import Adapters, inject
from offload.train.lora_output import write_adapter
from offload.train.output import write_model
from offload.train.output_tensors import OutputTensors

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory)


def with_peft(directory: Path, dtype: torch.dtype, adapters: Adapters, dropout: float) -> Any:
    """A resident peft model with the engine's first values."""
    base = reference(directory, dtype)
    config = peft.LoraConfig(
        r=adapters.r, lora_alpha=adapters.alpha, lora_dropout=dropout,
        target_modules=[t.name for t in adapters.targets],
        fan_in_fan_out=adapters.targets[0].transposed,
    )  # fmt: skip
    model = peft.get_peft_model(base, config).train()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, make in adapters.initial.items():
            theirs = named[f"base_model.model.{name}.default.weight"]
            assert theirs.dtype == torch.float32
            theirs.copy_(make())
    assert {n for n, p in named.items() if p.requires_grad} == {
        f"base_model.model.{n}.default.weight" for n in adapters.initial
    }
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe"])
def test_losses_are_those_of_peft_with_torch_adamw(
    tiny: Made, family: str, dtype: torch.dtype, dropout: float
) -> None:
    directory = tiny(family, dtype)
    with adapted_engine(directory, pinned("disk"), dropout=dropout) as (engine, adapters, _):
        model = with_peft(directory, dtype, adapters, dropout)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1.0, weight_decay=0.1)
        losses = []
        for step in range(6):
            ids = batch(step, 0)
            engine.begin_forward()
            torch.manual_seed(step)
            ours = engine.model(input_ids=ids, labels=ids).loss
            torch.manual_seed(step)
            theirs = model(input_ids=ids, labels=ids).loss
            if step == 0:
                assert torch.equal(ours, theirs)
            losses.append((ours.item(), theirs.item()))
            ours.backward()
            theirs.backward()
            engine.end_backward()
            result = engine.step(group_at(step), 0.05)
            norm = torch.nn.utils.clip_grad_norm_(trained, 0.05)
            assert result.norm == pytest.approx(norm.item(), rel=2e-3 if step else 1e-5)
            for group in optimizer.param_groups:
                group["lr"] = group_at(step)(engine.layout.trained[0].pieces[0]).lr
            optimizer.step()
            optimizer.zero_grad()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        for ours_loss, theirs_loss in losses:
            assert ours_loss == pytest.approx(theirs_loss, rel=tolerance), losses
        named = dict(model.named_parameters())
        for name, value in adapters.values(engine).items():
            want = named[f"base_model.model.{name}.default.weight"].detach()
            atol = 2e-5 if dtype == torch.float32 else 2e-3
            torch.testing.assert_close(value, want, atol=atol, rtol=1e-3)


def step_once(engine: Any) -> None:
    for step in range(2):
        ids = batch(step, 0)
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids).loss.backward()
        engine.end_backward()
        engine.step(group_at(5), 0.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", None), ("gpt2", None), ("mixtral", EXPERTS), ("qwen3_moe", EXPERTS),
     ("gpt_oss", EXPERTS), ("qwen2_moe", None)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peft_loads_what_was_trained(
    tiny: Made, tmp_path: Path, family: str, targets: Any, dtype: torch.dtype
) -> None:
    directory = tiny(family, dtype)
    ids = batch(7, 0)
    with adapted_engine(directory, pinned("half"), targets=targets) as (engine, adapters, _):
        step_once(engine)
        pairs = adapters.pairs(adapters.values(engine))
        write_adapter(
            tmp_path / "adapter", engine.model, pairs, adapters.options(directory), run_id="r",
            source=directory,
        )  # fmt: skip
        engine.model.eval()
        engine.begin_forward()
        with torch.no_grad():
            ours = engine.model(input_ids=ids).logits
    base = reference(directory, dtype)
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        want = theirs(input_ids=ids).logits
    assert not torch.equal(want, plain)
    if targets is None and family != "qwen2_moe":
        assert torch.equal(ours, want)
    elif dtype == torch.float32:  # peft adds experts' B A to W
        torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)
    else:
        moved = (want - plain).float().abs().mean()
        assert (ours - want).float().abs().mean() < 0.5 * moved


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", None), ("gpt2", None), ("mixtral", EXPERTS), ("gpt_oss", EXPERTS)],
)
def test_the_merged_model_computes_the_same(
    tiny: Made, tmp_path: Path, family: str, targets: Any
) -> None:
    directory = tiny(family, torch.float32)
    ids = batch(7, 0)
    with adapted_engine(directory, pinned("disk"), targets=targets) as (engine, adapters, _):
        step_once(engine)
        values = adapters.merged_values(engine.read_elements, adapters.values(engine))
        with OutputTensors(build(directory).mapping, values) as tensors:
            write_model(tmp_path / "out", directory, tensors.tensors, tensors.read, run_id="r")
        engine.model.eval()
        engine.begin_forward()
        with torch.no_grad():
            ours = engine.model(input_ids=ids).logits
    with torch.no_grad():
        merged = reference(tmp_path / "out", torch.float32)(input_ids=ids).logits
        plain = reference(directory, torch.float32)(input_ids=ids).logits
    torch.testing.assert_close(merged, ours, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(merged, plain, atol=1e-3)


def test_a_tied_weight_cannot_be_merged_alone(tiny: Made) -> None:
    model = build(tiny("llama", tie_word_embeddings=True)).model
    adapters = inject(model, **HOW, targets=["lm_head", "q_proj"])
    with pytest.raises(OffloadError, match=r"lm_head.weight is tied to model.embed_tokens.weight"):
        adapters.merged_values(lambda *_: torch.zeros(0), {})
    inject(build(tiny("llama", tie_word_embeddings=True)).model, **HOW).check_mergeable()
