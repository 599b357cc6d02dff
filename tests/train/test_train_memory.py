"""A budget is a bound: peak resident memory of training in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_support import write_data, write_tokenizer

BUDGET = 288 << 20
LIMIT = 1.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 60 million parameters: with its states 16 bytes each, 3.3 budgets."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=16,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("model") / "m"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    assert 16 * sum(p.numel() for p in made.parameters()) > 3 * BUDGET
    made.save_pretrained(directory)
    write_tokenizer(directory, eos_token="<end>", pad_token="<pad>")
    return directory


def run(*words: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_command(model: Path, tmp_path: Path) -> None:
    """The baseline is that of a warm process; plan, steps, a commit and the output are counted."""
    data = write_data(tmp_path / "train.jsonl", 40)
    run(
        "-m", "offload", "finetune", "--model", model, "--data", data,
        "--output", tmp_path / "out", "--disk", tmp_path / "disk", "--ram", BUDGET,
        "--max-steps", 2, "--seq-len", 64, "--threads", 1, "--no-tensorboard",
        "--save-every", 1, "--json", tmp_path / "figures.jsonl",
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    end = lines[-1]
    assert end["event"] == "end"
    assert end["budget_bytes"] == BUDGET
    assert 0.3 * BUDGET < end["peak_rss_bytes"] <= LIMIT * BUDGET


LOOP = """
import sys, torch, offload
from offload.runtime.rss import peak_rss
from offload.train import dropin_load
warm, seen = dropin_load.warm_training, []
dropin_load.warm_training = lambda *a: seen.append(warm(*a)) or seen[0]
torch.set_num_threads(1)
model = offload.load(sys.argv[1], train=True, ram=int(sys.argv[2]), disk=sys.argv[3], context=64)
optimizer = offload.AdamW(model.parameters(), lr=1e-4)
for step in range(2):
    ids = torch.randint(0, 8192, (1, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(sys.argv[4])
model.offload.close()
print(peak_rss() - seen[0])
"""


@pytest.mark.sweep
def test_a_loop_of_the_users(model: Path, tmp_path: Path) -> None:
    done = run("-c", LOOP, model, BUDGET, tmp_path / "disk", tmp_path / "out")
    grown = int(done.stdout.splitlines()[-1])
    assert 0.3 * BUDGET < grown <= LIMIT * BUDGET
