"""``offload pack`` and ``offload synth --quant``: what they print, and what they refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import Cli, refused

from offload.io.pack_manifest import JOURNAL, is_pack
from offload.models.pack_reader import PackedModel


def test_pack_says_what_it_will_do_and_did(cli: Cli, moe: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "p", tmp_path / "r.json"
    result = cli("pack", moe, out, "--quant", "q4", "--json", report)
    assert result.code == 0, result.err
    plan = result.err.splitlines()[0]
    assert plan.startswith(f"plan: {moe} (safetensors ")
    for word in ("-> q4:", "MiB in", "MiB out", "64 experts", "GiB free"):
        assert word in plan
    first, second = result.out.splitlines()
    assert first.startswith(f"{out}: ")
    assert " GB/s)" in first
    assert second.startswith("quantisation error, relative RMS over ")
    assert "expert 8." in second
    found = json.loads(report.read_text())
    assert found["quant"] == "q4"
    assert found["bytes_written"] <= found["bytes_out"] < 0.5 * found["bytes_in"]
    assert 0.05 < found["errors"]["expert"]["relative_rms"] < 0.12
    assert (out / "tokenizer.json").read_bytes() == (moe / "tokenizer.json").read_bytes()
    again = cli("pack", moe, out, "--quant", "q4")
    assert again.code == 0
    assert again.out.startswith(f"{out}: complete already")


def test_pack_keeps_bits_by_default(cli: Cli, dense: Path, tmp_path: Path) -> None:
    result = cli("pack", dense, tmp_path / "p", "--bundle-size", "4MiB")
    assert result.code == 0, result.err
    assert "error" not in result.out
    assert len(list((tmp_path / "p").glob("bundle-*.bin"))) > 3


def test_what_cannot_be_packed_is_one_line(cli: Cli, moe: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("years")
    refused(cli("pack", tmp_path / "none", tmp_path / "p"), "there is no directory")
    refused(cli("pack", tmp_path / "d", tmp_path / "p"), "has no config.json")
    refused(cli("pack", moe, tmp_path / "p", "--quant", "q5"), "q5")
    refused(cli("pack", moe, tmp_path / "p", "--json", tmp_path / "no" / "r"), "--json")
    refused(cli("pack", moe, tmp_path / "d"), "is not a packed model", "thesis.txt")
    file = tmp_path / "d" / "thesis.txt"
    for out in (file, file / "p"):
        refused(cli("pack", moe, out), f"{file} exists and is no directory")
    assert not (tmp_path / "p").exists()
    assert cli("pack", moe, tmp_path / "p", "--quant", "q8").code == 0
    refused(cli("pack", moe, tmp_path / "p", "--quant", "q4"), "as q8, wanted is", "as q4")


def test_pack_to_a_full_disk(
    cli: Cli, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real = os.fstatvfs

    class Full:
        f_bavail, f_frsize, f_blocks = 3, 4096, 1000

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Full if real(fd) else None)
    result = cli("pack", moe, tmp_path / "p", "--quant", "q4")
    refused(result, "too little space", "12.0 KiB (12288 bytes) are free")
    assert not (tmp_path / "p").exists()


def test_synth_writes_a_pack(cli: Cli, moe: Path, tmp_path: Path) -> None:
    result = cli("synth", moe, tmp_path / "p", "--quant", "q4", "--layers", "2", "--seed", "3")
    assert result.code == 0, result.err
    assert "seed 3 (random " in result.err
    model = PackedModel.open(tmp_path / "p")
    assert len(model.experts) == 2
    assert model.manifest.quant == "q4"
    assert (tmp_path / "p" / "tokenizer.json").is_file()
    for flag in (["--dtype", "float32"], ["--overwrite"]):
        refused(cli("synth", moe, tmp_path / "q", "--quant", "q8", *flag), flag[0], "--quant")


INTERRUPTED = """
import sys
from offload.cli.main import main
from offload.models import pack_run
def slow(*args, **kwargs):
    result = make(*args, **kwargs)
    time.sleep(0.05)  # so that a signal comes while there is something left to do
    return result
import time
make, pack_run.make = pack_run.make, slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_leaves_what_can_be_continued(cli: Cli, moe: Path, tmp_path: Path) -> None:
    """SIGTERM: that SIGINT takes the same way is in ``test_cli_signals``."""
    out = tmp_path / "p"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "pack", str(moe), str(out), "--quant", "q4"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    bundle = out / "bundle-00001.bin"
    # Blocks are written in order from the front, and no block of the first is so long.
    while not (bundle.exists() and any(bundle.read_bytes()[200_000:400_000])):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "are packed; the same command continues there" in err
    assert "Traceback" not in err
    assert not is_pack(out)
    assert (out / JOURNAL).read_text().count("\n") > 1
    result = cli("pack", moe, out, "--quant", "q4")
    assert result.code == 0, result.err
    assert is_pack(out)


def test_a_name_that_is_too_long_is_an_error(cli: Cli, moe: Path, tmp_path: Path) -> None:
    refused(cli("pack", moe, tmp_path / ("a" * 300)), "cannot make", "File name too long")
