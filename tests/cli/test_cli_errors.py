"""Damaged checkpoints and impossible wishes: one line, exit code 2, and no model left open."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused

from offload.cli import output, session
from offload.errors import StoreError
from offload.models import options
from offload.units import parse_bytes

IDS = ("--prompt-ids", "5,6,7", "-n", 4, "--no-predict")


def weights(directory: Path) -> Path:
    return directory / "model.safetensors"


def rewrite_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header; the data stays where it is."""
    data = weights(directory).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    weights(directory).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def tensors(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for name, entry in header.items() if name != "__metadata__"]


def missing_shard(directory: Path) -> None:
    data = weights(directory).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    names = [name for name in json.loads(data[8 : 8 + length]) if name != "__metadata__"]
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weights(directory).rename(directory / first)
    where = {name: second if "layers.7." in name else first for name in names}
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def truncated(directory: Path) -> None:
    size = weights(directory).stat().st_size
    with weights(directory).open("r+b") as file:
        file.truncate(size - 1000)


def header_too_long(directory: Path) -> None:
    with weights(directory).open("r+b") as file:
        file.write(struct.pack("<Q", 80_000_000))


def overlapping(directory: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        first, second = sorted(tensors(header), key=lambda t: t["data_offsets"])[:2]
        size = second["data_offsets"][1] - second["data_offsets"][0]
        start = first["data_offsets"][1] - 2
        second["data_offsets"] = [start, start + size]

    rewrite_header(directory, change)


def unknown_dtype(directory: Path) -> None:
    rewrite_header(directory, lambda header: tensors(header)[0].update(dtype="BF17"))


def wrong_dtype(directory: Path) -> None:
    rewrite_header(directory, lambda header: tensors(header)[0].update(dtype="F32"))


def edit_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def other_width(directory: Path) -> None:
    edit_config(directory, intermediate_size=512)


def more_layers(directory: Path) -> None:
    edit_config(directory, num_hidden_layers=9, layer_types=["full_attention"] * 9)


def quantised(directory: Path) -> None:
    edit_config(directory, quantization_config={"quant_method": "gptq", "bits": 4})


def pickles_only(directory: Path) -> None:
    weights(directory).rename(directory / "pytorch_model.bin")


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def config_no_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def unknown_family(directory: Path) -> None:
    edit_config(directory, model_type="no_such_family")


def no_layers(directory: Path) -> None:
    edit_config(directory, num_hidden_layers=0, layer_types=[])


def not_fetched(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 11362480\n"
    weights(directory).write_text(pointer)


def link_to_nothing(directory: Path) -> None:
    weights(directory).unlink()
    weights(directory).symlink_to("../../blobs/ab12")


def small_floats(directory: Path) -> None:
    edit_config(directory, dtype="float8_e4m3fn")


def end_as_text(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, "</s>"]}')


def padding_beyond(directory: Path) -> None:
    edit_config(directory, pad_token_id=10**6)


def a_million_layers(directory: Path) -> None:
    edit_config(directory, num_hidden_layers=10**6, layer_types=None)


def layers_as_text(directory: Path) -> None:
    edit_config(directory, num_hidden_layers="8")


def killed_pack(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "pack.journal").write_text("{}")


def sees_no_token(directory: Path) -> None:
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    kinds = ["sliding_attention"] * layers
    edit_config(directory, sliding_window=0, use_sliding_window=True, layer_types=kinds)


def no_encoder(directory: Path) -> None:
    edit_config(directory, is_encoder_decoder=True)


def encoder(directory: Path) -> None:
    edit_config(directory, architectures=["Qwen3Model"])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (missing_shard, ["model-00002-of-00002.safetensors"]),
        (truncated, ["truncated", "1000"]),
        (header_too_long, ["80000000"]),
        (overlapping, ["inside"]),
        (unknown_dtype, ["'BF17'"]),
        (wrong_dtype, ["F32", "bytes"]),
        (other_width, ["config"]),
        (more_layers, ["layers.8."]),
        (quantised, ["'gptq'"]),
        (pickles_only, ["pickle"]),
        (no_config, ["config.json"]),
        (config_no_json, ["config.json"]),
        (unknown_family, ["no_such_family"]),
        (encoder, ["Qwen3Model", "cannot generate"]),
        (no_layers, ["num_hidden_layers 0: a model has 1 or more"]),
        (padding_beyond, ["cannot build", "Padding_idx must be within num_embeddings"]),
        (not_fetched, ["pointer of git-lfs", "git lfs pull"]),
        (link_to_nothing, ["is a link to ../../blobs/ab12, which is not there"]),
        (small_floats, ["float8_e4m3fn of config.json", "--dtype"]),
        (end_as_text, ["eos_token_id [2, '</s>']", "no token's id"]),
        pytest.param(
            a_million_layers,
            ["num_hidden_layers 1000000, the checkpoint has"],
            marks=pytest.mark.sweep,
        ),
        (layers_as_text, ["num_hidden_layers", "expected int, got str"]),
        (sees_no_token, ["sliding_window 0: a token sees 1 or more"]),
        (no_encoder, ["is_encoder_decoder true", "has no encoder"]),
        (killed_pack, ["is not finished: give 'offload pack' the same source and directory again"]),
    ],
)
def test_a_checkpoint_that_is_not_right(
    cli: Cli, bare: Path, damage: Callable[[Path], None], said: list[str]
) -> None:
    damage(bare)
    refused(cli("generate", "-m", bare, *IDS), *said)


@pytest.mark.parametrize("config", [True, False])
def test_a_directory_of_gguf_files(cli: Cli, bare: Path, config: bool) -> None:
    weights(bare).unlink()
    (bare / "tokenizer.json").unlink(missing_ok=True)
    if not config:
        (bare / "config.json").unlink()
    for name in ("b-00002-of-00002.gguf", "b-00001-of-00002.gguf"):
        (bare / name).touch()
    said = f"it has GGUF files, which are named themselves: {bare / 'b-00001-of-00002.gguf'}"
    refused(cli("generate", "-m", bare, "-p", "x"), said)
    refused(cli("pack", bare, bare / "p"), said)
    (bare / "c.gguf").touch()
    refused(cli("generate", "-m", bare, "-p", "x"), f"{said} (or another of its 2)")


@pytest.mark.parametrize("packed", [False, True])
def test_weights_that_the_config_has_no_place_for_are_said(
    cli: Cli, bare: Path, tmp_path: Path, packed: bool
) -> None:
    where = tmp_path / "p" if packed else bare
    if packed:
        assert cli("pack", bare, where).code == 0
    edit_config(where, num_hidden_layers=2, layer_types=None)
    result = cli("generate", "-m", where, *IDS)
    assert result.code == 0, result.err
    assert "tensors have no place in the" in result.err
    assert "the first is model.layers.2." in result.err


def test_a_broken_tokenizer(cli: Cli, bare: Path) -> None:
    (bare / "tokenizer.json").write_text("{}")
    refused(cli("generate", "-m", bare, "-p", "x"), "tokenizer")


def test_a_broken_chat_template(cli: Cli, dense: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in dense.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    refused(cli("generate", "-m", broken, "-p", "x"), "no such role", "--raw")


@pytest.mark.parametrize("used", [17, -1])
def test_more_experts_for_a_token_than_there_are(
    cli: Cli, moe: Path, bare: Path, used: int
) -> None:
    (bare / "config.json").write_bytes((moe / "config.json").read_bytes())
    edit_config(bare, num_experts_per_tok=used)
    refused(cli("generate", "-m", bare, *IDS), f"num_experts_per_tok {used} of num_experts 16")


@pytest.mark.parametrize("odd", [{"return_dict": False}, {"architectures": [3]}])
def test_a_config_that_says_nothing_of_the_model(cli: Cli, bare: Path, odd: dict[str, Any]) -> None:
    plain = cli("generate", "-m", bare, *IDS)
    edit_config(bare, **odd)
    result = cli("generate", "-m", bare, *IDS)
    assert (result.code, result.out) == (0, plain.out)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("flags", [(), ("--temp", 1)])
def test_logits_that_are_no_numbers(
    cli: Cli, bare: Path, value: float, flags: tuple[Any, ...]
) -> None:
    data = bytearray(weights(bare).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    norm = json.loads(data[8 : 8 + length])["model.norm.weight"]
    assert norm["dtype"] == "BF16"
    begin, end = (8 + length + at for at in norm["data_offsets"])
    data[begin:end] = struct.pack("<f", value)[2:] * ((end - begin) // 2)
    weights(bare).write_bytes(data)
    refused(cli("generate", "-m", bare, *IDS, *flags), "the logits of the token after 3 are")


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_budget_too_small_says_the_least_and_that_works(
    cli: Cli, bare: Path, command: str
) -> None:
    words = IDS if command == "generate" else ("-c", 8, "--no-predict")
    line = refused(cli(command, "-m", bare, "--ram", "1MiB", *words), "--ram")
    found = re.search(r"at least (\d+) bytes", line)
    assert found, line
    # The least counts this process's heap, which differs a little from one moment to the next.
    enough = int(found.group(1)) + parse_bytes("8MiB")
    assert cli(command, "-m", bare, "--ram", enough, *words).code == 0


def test_a_budget_beyond_what_is_free_is_said(
    cli: Cli, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's limit, say: the system would end the process without a word."""
    words = ("plan", "-m", bare, "--ram", "1GiB", "--no-predict")
    assert "may end this process" not in cli(*words).out
    monkeypatch.setattr(options, "available_ram", lambda: 1 << 20)
    result = cli(*words)
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    assert "1.0 MiB are free: the system may end this process" in said
    assert "give --ram 819.2 KiB" in said


def test_a_prompt_that_cannot_fit(cli: Cli, bare: Path) -> None:
    many = ",".join(["1"] * 2049)
    refused(cli("generate", "-m", bare, "--prompt-ids", many), "2049", "2048", "by 2")
    refused(cli("generate", "-m", bare, "--prompt-ids", "1,2,3", "-c", 3), "3", "by 1")
    refused(cli("generate", "-m", bare, "--prompt-ids", "1,2", "-c", 4096), "4096", "2048")
    refused(cli("plan", "-m", bare, "-c", 4096), "4096", "2048")
    refused(cli("plan", "-m", bare, "-c", 8, "--prompt-tokens", 9), "9", "8")


def test_a_disk_directory_that_is_a_file(cli: Cli, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for disk in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(cli("generate", "-m", bare, "--disk", disk, *IDS), str(disk))


def test_a_file_that_shrinks_while_it_is_read(
    cli: Cli, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the text: the text so far stays, then one line, and all is closed."""
    show = session._show

    def cut_the_file(text: str, first_text: Any) -> None:
        show(text, first_text)
        with weights(bare).open("r+b") as file:
            file.truncate(100_000)

    monkeypatch.setattr(session, "_show", cut_the_file)
    plan = tmp_path / "plan.json"
    cli("plan", "-m", bare, "-c", 64, "--prompt-tokens", 3, "--no-predict", "--json", plan)
    least = json.loads(plan.read_text())["minimum_bytes"]["ram"] + parse_bytes("6MiB")
    words = ("--prompt-ids", "5,6,7", "-n", 32, "--ignore-eos", "--no-predict", "--ram", least)
    done = cli("generate", "-m", bare, *words, "--json", tmp_path / "run.json")
    assert done.code == 2
    assert len(done.errors) == 1
    assert "Traceback" not in done.err
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["finished"] == "failed"
    assert done.out == ",".join(map(str, run["token_ids"]))
    assert 1 <= run["new_tokens"] < 32


def test_a_bug_keeps_its_traceback(cli: Cli, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(session, "make_plan", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli("generate", "-m", bare, *IDS)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), ["no thread can be started", "ulimit -u"]),
        (MemoryError(), ["no more memory for this process: ", "ulimit -v"]),
        (
            RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: 7 bytes"),
            ["no more memory for this process (can't allocate memory: 7 bytes)", "--ram"],
        ),
        (OSError(24, "Too many open files", "/dev/x"), ["too many open files", "ulimit -n"]),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
            ["no place for temporary files", "['/tmp']", "set TMPDIR"],
        ),
    ],
)
def test_limits_of_the_system_are_no_bugs(
    cli: Cli, bare: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: list[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(session, "make_plan", fail)
    refused(cli("generate", "-m", bare, *IDS), *words)


def test_too_many_open_files_behind_an_error_of_ours(
    cli: Cli, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words send elsewhere, which does not help."""

    def fail(*_: Any, **__: Any) -> None:
        try:
            raise OSError(24, "Too many open files")
        except OSError as e:
            raise StoreError(f"cannot open x: {e.strerror}; choose another directory") from e

    monkeypatch.setattr(session, "make_plan", fail)
    refused(cli("generate", "-m", bare, *IDS), "cannot open x", "ulimit -n")


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "-m", "~no-such-user/m"),
        ("generate", "-m", "~no-such-user/m", "-p", "~"),
        ("generate", "--model=~no-such-user/m", "-p", "x"),
        ("pack", "MODEL", "~no-such-user/m"),
        ("synth", "MODEL", "~no-such-user/m"),
    ],
)
def test_the_home_of_nobody(
    cli: Cli, bare: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shell leaves the word as it is, and pathlib's error does not say which one it was."""
    monkeypatch.chdir(bare)
    given = (bare if word == "MODEL" else word for word in words)
    refused(cli(*given), "~no-such-user/m: there is no home directory ~no-such-user; give")
    assert not any(name.startswith("~") for name in os.listdir(bare))


@pytest.mark.parametrize("command", ["pack", "synth"])
def test_a_home_that_no_shell_has_put_in(
    cli: Cli, bare: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = bare / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(bare)
    run = cli(command, bare, "~/made")
    assert run.code == 0, run.err
    assert os.listdir(home) == ["made"]
    assert not (bare / "~").exists()


@pytest.mark.parametrize("flag", ["--json", "--prompt-file", "--disk", "--prompt-cache", "--plan"])
def test_paths_that_are_not_even_looked_at(cli: Cli, bare: Path, flag: str) -> None:
    words = ("generate", "-m", bare, *(IDS if flag != "--prompt-file" else ()))
    refused(cli(*words, flag, "~nobody-of-this-name/x"), "no home directory ~nobody-of-this-name")
    refused(cli(*words, flag, "x" * 300), "File name too long")


def test_a_file_in_a_folder_that_is_closed(
    cli: Cli, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: str, *_: Any, **__: Any) -> None:  # root may look into any
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(output, "takes_bytes", closed)
    refused(cli("generate", "-m", bare, *IDS, "--json", "shut/x"), "cannot use shut/x: Permission")


def test_a_message_is_of_a_few_lines_whatever_it_repeats(cli: Cli, bare: Path) -> None:
    said = refused(cli("generate", "-m", bare, "--prompt-ids", "5," * 20_000 + "x"), "not a list")
    assert len(said) < 5000
    assert said.endswith("such as 1,2,3: 'x'")
    config = {"model_type": "llama", "dtype": "z" * 10**5}
    (bare / "config.json").write_text(json.dumps(config))
    assert len(refused(cli("generate", "-m", bare, *IDS))) < 5000


def test_a_message_never_writes_to_the_terminal_what_a_file_says(cli: Cli, tmp_path: Path) -> None:
    """Names in a GGUF header may hold escape sequences; they are shown, not obeyed."""
    key = b"\x1b[2J\x07key"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    file = tmp_path / "m.gguf"
    file.write_bytes(header + struct.pack("<I", 77) + bytes(8))
    run = cli("pack", file, tmp_path / "out")
    refused(run, r"the value of \x1b[2J\x07key has the unknown type 77")
    assert "\x1b" not in run.err


def test_a_pipe_in_the_place_of_the_config(cli: Cli, bare: Path) -> None:
    (bare / "config.json").unlink()
    os.mkfifo(bare / "config.json")  # opened, it would wait for a writer for ever
    refused(cli("generate", "-m", bare, *IDS), "config.json is no file")


def test_a_config_that_names_no_class(cli: Cli, bare: Path) -> None:
    config = json.loads((bare / "config.json").read_text())
    del config["architectures"]
    (bare / "config.json").write_text(json.dumps(config))
    assert cli("generate", "-m", bare, *IDS).code == 0, "the causal model is the guess"

    def another_head(header: dict[str, Any]) -> None:
        header["score.weight"] = header.pop("lm_head.weight")

    rewrite_header(bare, another_head)
    refused(cli("generate", "-m", bare, *IDS), "config.json names no class", '"architectures"')


def test_a_path_that_is_not_utf8(cli: Cli, bare: Path) -> None:
    odd = bare.rename(bare.with_name(os.fsdecode(b"bare\xff")))
    assert cli("generate", "-m", odd, *IDS).code == 0
    (odd / "tokenizer.json").write_text("{}")
    refused(cli("generate", "-m", odd, "-p", "a"), "path is not UTF-8; rename it")
