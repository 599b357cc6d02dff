"""Memory of a long prompt: as much as the kernel that runs takes, and no more than is planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offload.models.footprint import LiveBytes, measure
from offload.models.meta_attention import CardAttention, CpuAttention

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).to(torch.bfloat16).eval()


def test_a_prompt_grows_with_its_tokens_and_not_with_their_square() -> None:
    model = llama()
    short, long = (measure(model, n).activation_bytes for n in (1024, 4096))
    assert long < 4.5 * short
    # The scores of one layer alone, as torch computes on meta.
    assert long < 16 * 4096**2 * 4 / 8


def test_what_the_kernel_does_not_take_is_counted_as_it_is_computed() -> None:
    """Heads of values that differ from those of keys (MLA): torch multiplies step by step."""
    query, key = (torch.empty(1, 4, 512, 32, device="meta") for _ in range(2))
    peaks = {}
    for dim in (32, 16):
        value = torch.empty(1, 4, 512, dim, device="meta")
        watch = LiveBytes(set())
        with torch.no_grad(), CpuAttention(), watch:
            F.scaled_dot_product_attention(query, key, value)
        peaks[dim] = watch.peak
        choice = torch._fused_sdp_choice(*(torch.empty(x.shape) for x in (query, key, value)))
        assert (choice != 0) == (dim == 32)
    assert peaks[16] >= 4 * 512 * 512 * 4 > peaks[32]


@pytest.mark.parametrize(
    ("dtype", "groups", "masked", "scores"),
    [
        (torch.bfloat16, 4, False, False),  # flash
        (torch.bfloat16, 16, True, False),  # the other one
        (torch.bfloat16, 4, True, True),
        (torch.float32, 16, False, False),
        (torch.float32, 4, False, True),  # what transformers asks for where heads are grouped
        (torch.float64, 16, False, True),
    ],
)
def test_a_card_holds_scores_where_none_of_its_kernels_takes_the_operands(
    dtype: torch.dtype, groups: int, masked: bool, scores: bool
) -> None:
    tokens, heads = 512, 16
    query = torch.empty(1, heads, tokens, 32, dtype=dtype, device="meta")
    key, value = (torch.empty(1, groups, tokens, 32, dtype=dtype, device="meta") for _ in range(2))
    mask = torch.empty(1, 1, tokens, tokens, dtype=torch.bool, device="meta") if masked else None
    watch = LiveBytes(set())
    with torch.no_grad(), CardAttention(), watch:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=groups != heads
        )
    assert out.shape == query.shape
    assert (watch.peak >= heads * tokens**2 * dtype.itemsize) == scores


def test_a_plan_for_a_card_counts_them() -> None:
    scores = 16 * 2048**2 * 4
    whole = llama().float()
    assert measure(whole, 2048).activation_bytes < scores
    assert measure(whole, 2048, card=True).activation_bytes > scores
    assert measure(llama(), 2048, card=True).activation_bytes < scores
    assert measure(llama(), 2048, card=True, flash=False).activation_bytes > scores / 2
    alike = llama(num_key_value_heads=16).float()
    assert measure(alike, 2048, card=True).activation_bytes < scores


def test_padding_costs_a_mask_of_every_row() -> None:
    model = llama()
    one, two = (measure(model, 2048, batch).activation_bytes for batch in (1, 2))
    assert two >= 2 * one + 2 * 2048**2 * 2


FORWARD = """
import gc, json, sys
import torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

sizes, tokens, batch = json.loads(sys.argv[1])
torch.set_num_threads(2)
model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).eval()


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forward(length):
    ids = torch.zeros((batch, length), dtype=torch.int64)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :7] = 0
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)


forward(64)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
forward(tokens)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's clear_refs")
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_a_forward_takes_no_more_than_was_measured(batch: int) -> None:
    tokens = 2048
    planned = measure(llama(), tokens, batch)
    job = json.dumps([SIZES, tokens, batch])
    run = subprocess.run(
        [sys.executable, "-c", FORWARD, job], capture_output=True, text=True, cwd=ROOT, check=True
    )
    # What products of this size need has a reserve of its own; scores would take 128 MiB of each
    # sequence.
    workspace = 24 * MIB
    assert int(run.stdout) <= planned.activation_bytes + planned.cache_bytes + workspace
