"""Which weights are chosen: as peft chooses modules, and experts beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_support import HOW, Made
from run_support import options_for, planned_once, train, write_data, write_model

from offload.errors import OffloadError
from offload.models.meta import build
from offload.train.lora import inject
from offload.train.lora_targets import find_targets

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"  # peft's
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory)


def names(model: Any, wanted: Any) -> set[str]:
    return {t.name for t in find_targets(model, wanted)}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe"])
@pytest.mark.parametrize(
    "wanted",
    [
        ["q_proj", "c_attn"],
        ["mlp.down_proj", "shared_expert.down_proj", "c_fc"],
        r".*\.[12]\..*(c_attn|_proj)",
        "all-linear",
    ],
)
def test_modules_are_those_of_peft(tiny: Made, family: str, wanted: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = build(tiny(family)).model
    if isinstance(wanted, list):
        paths = [f".{n}" for n, _ in model.named_modules()]
        wanted = [w for w in wanted if any(p.endswith(f".{w}") for p in paths)]
    ours = {t.name for t in find_targets(model, wanted) if t.experts is None}
    config = LoraConfig(r=2, target_modules=wanted, fan_in_fan_out=family == "gpt2")
    theirs = get_peft_model(build(tiny(family)).model, config).base_model.targeted_module_names
    assert ours == set(theirs)


def test_by_default_every_linear_layer_of_the_decoder(tiny: Made) -> None:
    model = build(tiny("llama", tie_word_embeddings=False)).model
    found = find_targets(model, None)
    assert len(found) == 4 * 7
    assert names(model, "all-linear") == {t.name for t in found}
    assert names(model, ["lm_head"]) == {"lm_head"}
    assert [t.name for t in found[:2]] == [f"model.layers.0.self_attn.{x}_proj" for x in "qk"]
    gpt2 = find_targets(build(tiny("gpt2")).model, None)
    assert {t.name.rpartition(".")[2] for t in gpt2} == {"c_attn", "c_proj", "c_fc"}
    assert all(t.transposed for t in gpt2)
    assert (gpt2[0].n_in, gpt2[0].n_out) == gpt2[0].module.weight.shape


def test_experts_are_named_like_layers(tiny: Made) -> None:
    model = build(tiny("qwen2_moe")).model
    assert not any("experts" in n and "shared" not in n for n in names(model, None))
    down = find_targets(model, ["down_proj"])
    fused = [t for t in down if t.experts]
    shared = [t for t in down if not t.experts]
    assert [t.name for t in fused] == [f"model.layers.{i}.mlp.experts.down_proj" for i in range(4)]
    assert all(t.weight == t.name for t in fused)
    assert [t.weight for t in shared] == [
        f"model.layers.{i}.mlp.shared_expert.down_proj.weight" for i in range(4)
    ]
    assert names(model, ["experts.down_proj"]) == {t.name for t in fused}
    assert names(model, ["1.mlp.experts.gate_up_proj", "q_proj"]) == {
        "model.layers.1.mlp.experts.gate_up_proj",
        *(f"model.layers.{i}.self_attn.q_proj" for i in range(4)),
    }
    mixed = find_targets(model, [r".*layers\.0\..*experts\..*", "3.self_attn.o_proj"])
    assert [t.name.rpartition(".")[2] for t in mixed] == ["gate_up_proj", "down_proj", "o_proj"]
    gate_up = mixed[0]
    weight = model.get_parameter(gate_up.weight)
    assert (gate_up.experts, gate_up.n_out, gate_up.n_in) == weight.shape
    oss = find_targets(build(tiny("gpt_oss")).model, ["gate_up_proj"])[0]
    assert oss.transposed
    assert (oss.experts, oss.n_in, oss.n_out) == oss.module.gate_up_proj.shape


def test_what_finds_nothing_is_an_error_that_lists_what_there_is(tiny: Made) -> None:
    model = build(tiny("mixtral")).model
    with pytest.raises(
        OffloadError,
        match=r"'w1' is no weight .* there are down_proj, gate_up_proj, k_proj, lm_head, o_proj",
    ):
        inject(model, **HOW, targets=["q_proj", "w1"])
    with pytest.raises(OffloadError, match="'roj' is no weight"):  # whole parts only
        find_targets(model, ["roj"])
    with pytest.raises(OffloadError, match="no LoRA targets"):
        find_targets(model, [])
    with pytest.raises(OffloadError, match="neither a name nor a regular expression"):
        find_targets(model, ["(q_proj"])
    with pytest.raises(OffloadError, match="embed_tokens"):
        find_targets(model, ["embed_tokens"])
    # Nothing was changed by any of these.
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_of_nothing_but_a_head() -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 2)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    with pytest.raises(OffloadError, match="no linear layer outside of its head"):
        find_targets(Bare(), None)


@pytest.mark.parametrize("wanted", [None, "all-linear"])
@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("llama4_text", "router"),
        ("phimoe", "router"),
        ("deepseek_v4", "o_a_proj"),  # groups are multiplied apart
        ("mamba2", "out_proj"),
        ("falcon_h1", "mamba.out_proj"),
    ],
)
def test_what_is_no_plain_linear_layer_has_no_adapter(
    tiny: Made, family: str, left_out: str, wanted: Any
) -> None:
    model = build(tiny(family)).model
    there = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert any(name.endswith(left_out) for name in there)
    found = names(model, wanted)
    assert found
    assert not any(name.endswith(left_out) for name in found)
    with pytest.raises(OffloadError, match=left_out):
        find_targets(model, [left_out])


def test_a_decoder_that_is_the_head(tiny: Made) -> None:
    found = names(build(tiny("modernbert-decoder")).model, None)
    assert any("attn" in name for name in found)
    assert "decoder" not in found


def test_a_linear_layer_of_a_familys_own_has_one(tiny: Made) -> None:
    assert any("dense_h_to_4h" in name for name in names(build(tiny("falcon")).model, None))


def test_layers_whose_weights_are_used_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone where nobody named them; who does is told."""
    planned_once(monkeypatch)
    model, data = write_model(tmp_path / "m", "gemma3n_text"), write_data(tmp_path / "d.jsonl")
    how: dict[str, Any] = {"method": "lora", "lora_r": 4, "max_steps": 2}
    log = train(options_for(model, data, tmp_path / "a", **how))
    assert len(log.losses) == 2
    assert [n for n in log.notes if "altup.correction_coefs" in n and "change nothing" in n]
    named = ("q_proj", "correction_coefs")
    with pytest.raises(OffloadError, match="would never be trained"):
        train(options_for(model, data, tmp_path / "b", **how, lora_targets=named))
