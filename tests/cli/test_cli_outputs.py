"""Files that commands write: none takes the place of a model's own, or of what is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_support import Cli, refused

from offload.cli.chat_history import Conversation
from offload.cli.output import check_target, check_targets
from offload.errors import OffloadError

SAID = "is a file of a model, and would be replaced; give another name"


@pytest.mark.parametrize("flag", ["--json", "--record-routing", "--trace"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_models_own_files_stay(
    cli: Cli, dense: Path, tmp_path: Path, flag: str, name: str
) -> None:
    target = tmp_path / name
    shutil.copy(dense / name, target)
    before = target.read_bytes()
    refused(cli("generate", "-m", dense, "-p", "x", flag, target), flag, SAID)
    assert target.read_bytes() == before


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    """Nor is the root, which has no name of its own."""
    for directory in (tmp_path, Path("/")):
        with pytest.raises(OffloadError, match="is a directory; give a file"):
            check_target(directory, "--json")


def test_weights_by_any_name_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "download").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "bundle-00001.bin").write_bytes(b"x")
    (tmp_path / "link").symlink_to("bundle-00001.bin")
    for name in ("download", "bundle-00001.bin", "link"):
        with pytest.raises(OffloadError, match=SAID):
            check_target(tmp_path / name, "--json")
        with pytest.raises(OffloadError, match="is a file of a model; nothing is saved"):
            Conversation(None).save(tmp_path / name, "m")
    check_target(tmp_path / "config.json", "--json")  # nothing is there
    (tmp_path / "run.json").write_text("{}")
    check_target(tmp_path / "run.json", "--json")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for given, why in (
        (tmp_path / ("x" * 300), "name too long"),
        (tmp_path / ("x" * 242), "242 bytes long, and while it is written another 14"),
        (tmp_path / "circle", "levels of symbolic links"),
        (Path("~no-such-user/x"), "no home directory ~no-such-user"),
    ):
        with pytest.raises(OffloadError, match=f"^--trace {given}: .*{why}.*; give "):
            check_targets({"--json": None, "--trace": given})


def test_what_is_read_is_not_replaced(cli: Cli, dense: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once")
    done = cli("generate", "-m", dense, "--prompt-file", prompt, "--json", prompt)
    refused(done, "--json", "is read by this command")
    assert prompt.read_text() == "Once"


def test_what_the_picture_of_a_run_and_a_replay_read(cli: Cli, dense: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once")
    done = cli("generate", "-m", dense, "--prompt-file", prompt, "--trace", prompt)
    refused(done, "--trace", "is read by this command")
    refused(cli("bench", "cache", prompt, "--json", prompt), "--json", "is read by this command")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    out = ("--output", tmp_path / "out")
    done = cli("finetune", "-m", dense, "--data", data, *out, "--json", data)
    refused(done, "--json", "is read by this command")
    assert prompt.read_text() == "Once"
    assert data.read_text() == '{"text": "a"}\n'


def test_two_reports_in_one_file(cli: Cli, dense: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    (tmp_path / "link").symlink_to(one)
    words = ("generate", "-m", dense, "-p", "x", "--json", one)
    refused(cli(*words, "--trace", one), "--json and --trace are the same file", "name two")
    refused(cli(*words, "--record-routing", tmp_path / "link"), "the same file")
    assert not one.exists()
    check_targets({"--json": one, "--trace": tmp_path / "two.json", "--plot": None})
    check_targets(dict.fromkeys(("--json", "--trace"), Path("/dev/null")))  # replaces nothing


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "-p", "a", "--prompt", "b"), "--prompt is given 2 times"),
        (("generate", "--batch", "a", "--batch=b", "--batch", "c"), "--batch is given 3 times"),
        (("finetune", "--data", "a", "--output", "o", "--data", "b"), "--data is given 2 times"),
        (("finetune", "--eval-data", "a", "--eval-data", "b"), "--eval-data is given 2 times"),
    ],
)
def test_inputs_that_would_be_left_out(
    cli: Cli, dense: Path, words: tuple[str, ...], said: str
) -> None:
    refused(cli(*words, "-m", dense), said)


@pytest.mark.usefixtures("tiny_probe")
def test_a_setting_may_be_overruled(cli: Cli, dense: Path) -> None:
    """As by whoever adds it to an alias."""
    done = cli("generate", "-m", dense, "-p", "Once", "-n", "2", "-n", "3", "--ram", "1MiB",
               "--ram", "2GiB", "--ignore-eos")  # fmt: skip
    assert done.code == 0
    assert "3 tokens" in done.err
