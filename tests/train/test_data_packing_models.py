"""That examples in one row do not see each other, in the models themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_support import opened, write_lines
from families import all_families, randomise, tiny_config

from offload.errors import DataError
from offload.train.data import IGNORED, open_data, packing_obstacle

PACKED = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "mixtral", "gpt2", "gpt_oss",
          "olmo3", "phi3", "llama4_text", "deepseek_v3"]  # fmt: skip
REFUSED = {
    "mamba": "keeps a state",
    "mamba2": "keeps a state",
    "qwen3_next": "keeps a state",
    "jamba": "keeps a state",
    "rwkv": "keeps a state",
    "lfm2": "layers of type conv",
    "minimax": "layers of type linear_attention",
    "bloom": "takes no position_ids",
    "mpt": "takes no position_ids",
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
            for begin, end in zip(starts, starts[1:], strict=False):
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
    with pytest.raises(DataError, match=f"packed rows: {family}.*; use --no-packing"):
        opened_with(file, tmp_path, obstacle)


def opened_with(file: Any, tmp_path: Any, obstacle: str) -> None:
    from data_support import options, tokenizer

    open_data(options(file), tokenizer(), max_positions=None, obstacle=obstacle, cache=tmp_path)


def test_attention_without_masks_is_refused() -> None:
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2, not eager or sdpa" in str(packing_obstacle(LlamaForCausalLM, config))


def test_every_family_is_decided() -> None:
    """No family's config or class makes the question itself fail."""
    from transformers import AutoModelForCausalLM

    decided = {}
    for family in all_families():
        config = tiny_config(family)
        decided[family] = packing_obstacle(
            AutoModelForCausalLM._model_mapping[type(config)], config
        )
    assert sum(reason is None for reason in decided.values()) > 40
    assert sum(reason is not None for reason in decided.values()) > 10
