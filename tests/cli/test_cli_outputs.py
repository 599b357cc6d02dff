"""Files that commands write: none takes the place of a model's own, or of what is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_support import Cli, refused

from offload.cli.chat_history import Conversation
from offload.cli.output import check_target
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


def test_what_is_read_is_not_replaced(cli: Cli, dense: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once")
    done = cli("generate", "-m", dense, "--prompt-file", prompt, "--json", prompt)
    refused(done, "--json", "is read by this command")
    assert prompt.read_text() == "Once"
