"""Small checkpoints with a tokenizer, and one way to run prompts alone and together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families import randomise

import offload
from offload.batch.generation import Generation, Sampling, generate

CONTEXT = 256
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 256, "num_hidden_layers": 5},
    "qwen3_moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
    },
    # Latents are expanded by a projection that streams by itself.
    "deepseek_v3": {
        "intermediate_size": 256,
        "first_k_dense_replace": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
}
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def write_model(family: str, target: Path) -> None:
    """About 2 MiB in bfloat16, with a tokenizer that has a token for each letter."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = ["<|end|>", *LETTERS]
    raw = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>"
    )
    config = CONFIG_MAPPING[family](
        **{
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            **SHAPES[family],
        },
        vocab_size=len(words),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        randomise(model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@dataclass(frozen=True)
class Case:
    """One prompt and how it is answered."""

    ids: tuple[int, ...]
    new: int
    temperature: float = 0.0
    seed: int | None = None
    stop_after: int | None = None

    def run(self, model: Any) -> Generation:
        """In the way that a user's single run goes, but for the seed."""
        seen: list[int] = []

        def on_token(token: int) -> bool:
            seen.append(token)
            return len(seen) == self.stop_after

        return generate(
            model,
            self.ids,
            max_new_tokens=self.new,
            sampling=Sampling(temperature=self.temperature),
            ignore_eos=True,
            on_token=on_token,
        )

    def alone(self, model: Any) -> Generation:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return self.run(model)


CASES = (
    Case((5, 6, 7), 9),
    Case(tuple(range(3, 30)), 4, temperature=0.9, seed=3),
    Case((9,), 14),
    Case((8, 7, 6, 5), 12, temperature=1.3, seed=4),
    Case((8, 7, 6, 5), 12, stop_after=5),
    Case((8, 7, 6, 5), 12, temperature=1.3, seed=5),
)
"""Greedy and sampled, of several lengths, one stopped."""


@contextmanager
def opened(path: Path, ram: str, **options: Any) -> Iterator[Any]:
    """A model opened for six sequences."""
    settings = {"prompt_tokens": 30, "context": 48, "sequences": len(CASES)} | options
    model = offload.load(path, ram=ram, overhead_bytes=0, **settings)
    try:
        yield model
        model.offload.executor.validate()
        assert model.offload.executor.held() == []
    finally:
        model.offload.close()


def all_alone(model: Any, cases: Sequence[Case] = CASES) -> list[Generation]:
    with torch.random.fork_rng(devices=[]):
        return [case.alone(model) for case in cases]


def logits(model: Any, ids: Sequence[int], new: int) -> torch.Tensor:
    """Of ``new`` tokens behind a prompt, greedily: [new, V]."""
    how: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": []}
    how |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    return torch.cat(model.generate(torch.tensor([list(ids)]), **how).logits)
