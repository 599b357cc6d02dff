"""``offload pack FILE.gguf OUT``: a model directory of its own, or one clear line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import Cli, refused
from gguf import GGMLQuantizationType as Type
from gguf_fixtures import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from offload.cli import prompt
from offload.io.gguf import read_gguf
from offload.io.pack_manifest import is_pack
from offload.models.gguf_config import config_from_gguf
from offload.models.gguf_tokenizer import load_tokenizer
from offload.models.pack_reader import PackedModel

Write = Callable[..., Path]
TEXT = "größere Blöcke, 数据 and 🦀 feed the ring 1234"


@pytest.fixture(scope="session")
def models(dense: Path, moe: Path) -> dict[str, Any]:
    return {
        "dense": (dense, AutoModelForCausalLM.from_pretrained(dense).float()),
        "moe": (moe, AutoModelForCausalLM.from_pretrained(moe).float()),
    }


@pytest.fixture
def write(models: dict[str, Any], tmp_path: Path) -> Write:
    """``write("moe", Type.Q8_0)``: that checkpoint as a GGUF file."""

    def one(which: str = "moe", kind: Type = Type.Q8_0, **how: Any) -> Path:
        directory, model = models[which]
        path = tmp_path / f"{which}-{kind.name}.gguf"
        return write_gguf(path, model, kind, tokenizer=(directory, "qwen2"), **how)

    return one


@pytest.mark.parametrize("which", ["dense", "moe"])
def test_a_model_directory_of_its_own(cli: Cli, write: Write, tmp_path: Path, which: str) -> None:
    path, out = write(which), tmp_path / "p"
    result = cli("pack", path, out)
    assert result.code == 0, result.err
    plan = result.err.splitlines()[0]
    assert plan.startswith(f"plan: {path} (gguf ")
    assert "-> none:" in plan
    assert "quantisation error" not in result.out
    path.unlink()  # nothing of the directory needs it
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    loaded = prompt.load_tokenizer(out)
    asked = prompt.Asked(text=TEXT)
    assert prompt.encode(asked, loaded, raw=True, directory=out) == ids
    chat = prompt.encode(asked, loaded, raw=False, directory=out)
    assert (tokenizer.decode(chat) == f"<|user|>{TEXT}\n<|assistant|>") is (which == "dense")
    assert GenerationConfig.from_pretrained(out).eos_token_id == 0
    assert PackedModel.open(out).manifest.quant == "none"


def test_config_and_tokenizer_are_the_files(cli: Cli, write: Write, tmp_path: Path) -> None:
    path = write("dense")
    assert cli("pack", path, tmp_path / "p").code == 0
    file = read_gguf(path)
    config, tokenizer = config_from_gguf(file), load_tokenizer(file)
    got = AutoConfig.from_pretrained(tmp_path / "p").to_dict()
    idle = {"_name_or_path", "transformers_version"}
    assert {k: v for k, v in got.items() if k not in idle} == {
        k: v for k, v in config.to_dict().items() if k not in idle
    }
    read = AutoTokenizer.from_pretrained(tmp_path / "p")
    assert read.get_vocab() == tokenizer.get_vocab()
    assert read(TEXT) == tokenizer(TEXT)
    assert read.chat_template == tokenizer.chat_template
    assert read.special_tokens_map == tokenizer.special_tokens_map


def test_a_file_with_several_chat_templates(cli: Cli, write: Write, tmp_path: Path) -> None:
    named = {"default": "<{{ messages[0].content }}>", "tool_use": "tools", "rag": "found"}
    templates = [{"name": name, "template": text} for name, text in named.items()]
    out = tmp_path / "p"
    result = cli("pack", write("dense", templates=templates), out)
    assert result.code == 0, result.err
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == named
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<hi>"


def test_a_file_without_a_vocabulary(cli: Cli, models: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", models["moe"][1], Type.F16)
    assert cli("pack", path, tmp_path / "p", "--quant", "q4").code == 0
    assert prompt.load_tokenizer(tmp_path / "p") is None
    assert (tmp_path / "p" / "config.json").is_file()


def test_quant(cli: Cli, write: Write, tmp_path: Path) -> None:
    path = write("moe", Type.F16)
    result = cli("pack", path, tmp_path / "p", "--quant", "q4")
    assert result.code == 0, result.err
    assert "expert 8." in result.out
    again = cli("pack", path, tmp_path / "p", "--quant", "q4")
    assert again.out.startswith(f"{tmp_path / 'p'}: complete already")
    refused(cli("pack", path, tmp_path / "p"), "as q4, wanted is", "as none")
    path = write("moe", Type.Q8_0)
    refused(
        cli("pack", path, tmp_path / "q", "--quant", "q4"),
        "is quantised already", "q8_0", "--quant none keeps its bits",
    )  # fmt: skip
    assert not (tmp_path / "q").exists()


def test_types_without_kernels(cli: Cli, write: Write, tmp_path: Path) -> None:
    path = write("moe", Type.Q8_0, kinds={"attn_q.weight": Type.Q2_K})
    refused(
        cli("pack", path, tmp_path / "p"),
        "4 tensors are of types without kernels (4 in Q2_K)", "--allow-requant",
    )  # fmt: skip
    report = tmp_path / "r.json"
    result = cli("pack", path, tmp_path / "p", "--allow-requant", "--json", report)
    assert result.code == 0, result.err
    first = "model.layers.0.self_attn.q_proj.weight"
    assert f"{first} and 3 more: q2_k, which has no kernels, became q4_0" in result.err
    assert "quantisation error, relative RMS over" in result.out
    found = json.loads(report.read_text())
    assert len(found["converted"]) == 4
    assert found["errors"].keys() == {"matrix"}
    assert 0.01 < found["errors"]["matrix"]["relative_rms"] < 0.15


def test_requant_is_for_gguf(cli: Cli, moe: Path, tmp_path: Path) -> None:
    refused(cli("pack", moe, tmp_path / "p", "--allow-requant"), "--allow-requant is for GGUF")


def test_bad_files_are_one_line(cli: Cli, write: Write, tmp_path: Path) -> None:
    path = write("moe", Type.Q4_0)
    whole = path.read_bytes()
    header = read_gguf(path)
    out = tmp_path / "p"

    def broken(data: bytes, *words: str) -> None:
        path.write_bytes(data)
        refused(cli("pack", path, out), *words)
        assert not is_pack(out)

    refused(cli("pack", tmp_path / "none.gguf", out), "none.gguf", "No such file")
    broken(whole[:-5000], str(path))
    broken(whole[:200], str(path))
    broken(b"", str(path))
    assert whole.count(b"qwen3moe") > 5
    broken(whole.replace(b"qwen3moe", b"qwen9moe"), "'qwen9moe' is not supported; supported are")
    name = b"blk.2.attn_v.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # behind the dimensions: the type's code
    assert whole[at : at + 4] == (2).to_bytes(4, "little")
    broken(whole[:at] + (99).to_bytes(4, "little") + whole[at + 4 :], "blk.2.attn_v.weight", "99")
    assert not out.exists()
    at = header.tensors["blk.2.ffn_up_exps.weight"].offset + 18 * 77
    nan = np.array([np.nan], np.float16).tobytes()
    broken(whole[:at] + nan + whole[at + 2 :], "tensor blk.2.ffn_up_exps.weight", "NaN or infinite")
    foreign = tmp_path / "d"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years")
    path.write_bytes(whole)
    refused(cli("pack", path, foreign), "is not a packed model", "thesis.txt")
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"]
    # The file is another one now (it was written again), and the directory was begun for the old.
    refused(cli("pack", path, out), "is an unfinished pack of", "wanted is")


def test_a_full_disk(
    cli: Cli, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = write(), os.fstatvfs

    class Full:
        f_bavail, f_frsize, f_blocks = 3, 4096, 1000

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Full if real(fd) else None)
    result = cli("pack", path, tmp_path / "p")
    refused(result, "too little space: the pack needs", "12.0 KiB (12288 bytes) are free")
    assert not (tmp_path / "p").exists()


KILLED = """
import os, signal, sys
from offload.models.pack_open import open_source
from offload.models.pack_run import pack
def progress(state):
    if state.bytes_done > state.bytes_total * float(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
pack(open_source(sys.argv[1]), sys.argv[2], progress=progress, sync_bytes=1 << 14)
"""


@pytest.mark.sweep  # packs of checkpoints are killed in every run
def test_kill_9_and_again(cli: Cli, write: Write, tmp_path: Path) -> None:
    path, out = write(), tmp_path / "p"
    for share in ("0.2", "0.7"):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), str(out), share],
            capture_output=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not is_pack(out)
    report = tmp_path / "r.json"
    assert cli("pack", path, out, "--json", report).code == 0
    found = json.loads(report.read_text())
    assert 0 < found["bytes_written"] < 0.5 * found["bytes_out"]
    assert cli("pack", path, tmp_path / "w").code == 0
    names = sorted(p.name for p in (tmp_path / "w").iterdir())
    assert names == sorted(p.name for p in out.iterdir())
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "w" / name).read_bytes(), name
