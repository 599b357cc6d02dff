"""Tiny checkpoints with a trained tokenizer, and the command line in this very process."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_support import TINY_EFFORT, Cli, Result
from left_threads import threads_left
from measured_once import measured_once
from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from offload.cli.main import main
from offload.runtime import probe as probe_module

# Its thread would start with the first progress bar of a reference model, in whatever test that is.
tqdm.monitor_interval = 0

CORPUS = [
    "the disk feeds the ring and the ring feeds the layers, one after the other",
    "ein Käfer läuft über die Straße; größere Blöcke, kürzere Wege",
    "数据从磁盘流向内存，再流向计算。専門家は必要なときだけ読まれる。",
    "emoji take four bytes: 🦀🚀🧵 and so do 𝔸𝔹ℂ",
] * 20
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 2048


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measurements and private files of a test stay its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    with measured_once():
        yield


@pytest.fixture
def tiny_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are measured in a moment; nothing is measured yet of a test's own cache."""
    monkeypatch.setattr(probe_module, "FULL", TINY_EFFORT)
    monkeypatch.setattr(probe_module, "QUICK", TINY_EFFORT)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Run a command in this process; it must leave no thread behind."""

    def run(*words: object, stdin: str | bytes = b"") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        return Result(code, shown.out, shown.err)

    before = set(threading.enumerate())
    yield run
    left = threads_left(before)
    logging.getLogger("offload").handlers.clear()
    assert not left, f"threads left: {left}"


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")


def _write(
    directory: Path, family: str, tokenizer: PreTrainedTokenizerFast, **more: object
) -> Path:
    config = CONFIG_MAPPING[family](
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3, 16 MiB in bfloat16, tokenizer with a chat template."""
    tokenizer = _tokenizer()
    tokenizer.chat_template = TEMPLATE
    return _write(
        tmp_path_factory.mktemp("models") / "dense",
        "qwen3",
        tokenizer,
        intermediate_size=1024,
        num_hidden_layers=8,
    )


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, 16 experts in each of 4 layers, 14 MiB in bfloat16, no chat template."""
    return _write(
        tmp_path_factory.mktemp("models") / "moe",
        "qwen3_moe",
        _tokenizer(),
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=4,
    )


@pytest.fixture
def bare(dense: Path, tmp_path: Path) -> Path:
    """The dense checkpoint without its tokenizer; a copy to damage."""
    target = tmp_path / "bare"
    target.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (target / name).write_bytes((dense / name).read_bytes())
    return target
