"""That examples in one row do not see each other, in the models themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from data_support import opened, write_lines
from families import all_families, randomise, tiny_config

from offload.errors import DataError
from offload.train.data import IGNORED, open_data, packing_obstacle

PACKED = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "mixtral", "gpt2",
          "olmo3", "phi3", "llama4_text", "deepseek_v3"]  # fmt: skip
REFUSED = {
    "mamba": "keeps a state",
    "mamba2": "keeps a state",
    "qwen3_next": "keeps a state",
    "jamba": "keeps a state",
    "rwkv": "keeps a state",
    "lfm2_moe": "layers of type conv",
    "minimax": "layers of type linear_attention",
    "bloom": "takes no position_ids",
    "mpt": "takes no position_ids",
    "gpt_oss": "examples in one row see each other",
    "opt": "examples in one row see each other",
}


def build(family: str, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    # Windows and chunks of 8 positions: shorter than the examples.
    config = tiny_config(family, vocab_size=2048, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.set_experts_implementation("eager")
    randomise(model)
    return model.eval()


def rows(count: int) -> list[dict[str, str]]:
    return [
        {
            "prompt": f"number {i} " + "the king " * (i % 4),
            "completion": "and the queen " * (i % 3 + 1),
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", PACKED)
def test_packed_examples_are_as_alone(family: str, attention: str, tmp_path: Any) -> None:
    model = build(family, attention)
    assert packing_obstacle(type(model), model.config) is None
    data, _ = opened(
        write_lines(tmp_path / "a.jsonl", rows(17)), tmp_path, seq_len=96, batch_size=3
    )
    with data, torch.no_grad():
        batch = data.train.micro_batch(0, 0)
        assert len(batch.rows) > len(batch.lengths) == 3
        packed = model(
            batch.input_ids, position_ids=batch.position_ids, attention_mask=None, use_cache=False
        ).logits
        compared, errors = 0, []
        for b, length in enumerate(batch.lengths):
            starts = [*(batch.position_ids[b, :length] == 0).nonzero().flatten().tolist(), length]
            for begin, end in itertools.pairwise(starts):
                alone = model(batch.input_ids[b : b + 1, begin:end], use_cache=False).logits[0]
                scale = float(alone.abs().max())
                errors.append(float((packed[b, begin:end] - alone).abs().max()) / scale)
                compared += 1
        assert compared == len(batch.rows)
        assert max(errors) < 2e-6
        # A test that cannot tell: without positions the second example sees the first.
        mixed = model(batch.input_ids, use_cache=False).logits
        begin = starts[1]
        assert float((mixed[-1, begin:length] - packed[-1, begin:length]).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_padded_examples_are_as_alone(family: str, tmp_path: Any) -> None:
    model = build(family, "sdpa")
    file = write_lines(tmp_path / "a.jsonl", rows(5))
    data, _ = opened(file, tmp_path, seq_len=96, batch_size=5, packing=False)
    with data, torch.no_grad():
        batch = data.train.micro_batch(0, 0)
        padded = model(
            batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
        ).logits
        for b, length in enumerate(batch.lengths):
            alone = model(batch.input_ids[b : b + 1, :length], use_cache=False).logits[0]
            torch.testing.assert_close(padded[b, :length], alone, rtol=1e-5, atol=1e-5)


def test_the_loss_of_a_packed_batch_is_that_of_its_examples(tmp_path: Any) -> None:
    """transformers' own shift and mean, over packed labels as they are."""
    model = build("llama", "sdpa")
    file = write_lines(tmp_path / "a.jsonl", rows(9))
    packed, _ = opened(file, tmp_path, seq_len=128, batch_size=9)
    apart, _ = opened(file, tmp_path, seq_len=128, packing=False)
    with packed, apart, torch.no_grad():
        assert packed.steps_per_epoch == 1
        batch = packed.train.micro_batch(0, 0)
        loss = model(
            batch.input_ids, position_ids=batch.position_ids, labels=batch.labels, use_cache=False
        ).loss
        total, labels = 0.0, 0
        for step in range(apart.steps_per_epoch):
            one = apart.train.micro_batch(step, 0)
            found = model(
                one.input_ids, attention_mask=one.attention_mask, labels=one.labels, use_cache=False
            ).loss
            total += float(found) * one.label_tokens
            labels += one.label_tokens
        assert labels == batch.label_tokens == int((batch.labels != IGNORED).sum())
        assert float(loss) == pytest.approx(total / labels, rel=1e-5)


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_packed_are_refused(family: str, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    obstacle = packing_obstacle(model_class, config)
    assert obstacle is not None
    assert REFUSED[family] in obstacle
    file = write_lines(tmp_path / "a.jsonl", rows(2))
    with pytest.raises(DataError, match=r"packed rows: .*; use --no-packing"):
        opened_with(file, tmp_path, obstacle)


def opened_with(file: Any, tmp_path: Any, obstacle: str) -> None:
    from data_support import options, tokenizer

    open_data(options(file), tokenizer(), max_positions=None, obstacle=obstacle, cache=tmp_path)


def test_attention_without_masks_is_refused() -> None:
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2, whose packing works for one row" in str(
        packing_obstacle(LlamaForCausalLM, config)
    )


def test_the_question_leaves_the_random_state_alone() -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    assert packing_obstacle(LlamaForCausalLM, tiny_config("llama")) is None
    assert torch.equal(torch.rand(4), want)


@pytest.mark.sweep
@pytest.mark.parametrize("family", all_families())
def test_no_family_is_packed_that_mixes_examples(family: str) -> None:
    """Each family that the question lets pass, on a deeper model than the toy it was asked on."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"no tiny {family}: {error}")
    if packing_obstacle(type(model), model.config) is not None:
        return
    model.set_experts_implementation("eager")
    randomise(model)
    model.eval()
    ids = torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in (21, 19)]).expand(2, -1)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat(
            [model(part, use_cache=False).logits for part in ids.split([21, 19], dim=1)], dim=1
        )
    assert float((packed - alone).abs().max() / alone.abs().max()) < 1e-5
