"""``offload generate``: the text is transformers' own, at any budget, and the report adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import Cli, refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.cli import planning
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate

MIB = 2**20
PROMPT = "the disk feeds the Käfer 数据"
NEW = 24
KEYS = {
    "load_s", "ttft_s", "prompt_tokens", "prefill_tok_s", "new_tokens", "decode_tok_s", "hit_rate",
    "disk_read_bytes", "stall_s", "baseline_rss_bytes", "peak_rss_bytes", "ram_budget_bytes",
    "predicted_decode_tok_s", "bound_decode_tok_s", "token_ids",
}  # fmt: skip


def reference(path: Path, ids: list[int], **settings: Any) -> list[int]:
    """New tokens of the resident model."""
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
    prompt = torch.tensor([ids])
    settings = {"do_sample": False, "max_new_tokens": NEW} | settings
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    return out[0, len(ids) :].tolist()


def tight(cli: Cli, path: Path, target: Path, *words: object) -> int:
    """A budget a little above the least: most of the weights have to stream."""
    report = target / "plan.json"
    done = cli(
        "plan", "-m", path, "--no-predict", "-c", 64, "--prompt-tokens", 16, "--json", report,
        *words,
    )  # fmt: skip
    assert done.code == 0, done.err
    # Room for what the least differs by from one moment to the next: it counts the process's heap.
    return json.loads(report.read_text())["minimum_bytes"]["ram"] + 6 * MIB


def generate(cli: Cli, path: Path, target: Path, *words: object, **more: Any) -> dict[str, Any]:
    """Run it; returns the JSON with stdout and stderr added."""
    report = target / "run.json"
    done = cli("generate", "-m", path, "--no-predict", "--json", report, *words, **more)
    assert done.code == 0, done.err
    return json.loads(report.read_text()) | {"stdout": done.out, "stderr": done.err}


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_text_is_transformers_own_while_weights_stream(
    cli: Cli, family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(family)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(PROMPT)["input_ids"]
    want = reference(path, ids)
    ram = tight(cli, path, tmp_path)
    run = generate(cli, path, tmp_path, "-p", PROMPT, "--raw", "-n", NEW, "--ram", ram)
    assert run["token_ids"] == want
    assert run["stdout"] == tokenizer.decode(want, skip_special_tokens=True) == run["text"]
    assert set(run) >= KEYS
    assert run["streamed"]
    assert run["prompt_tokens"] == len(ids)
    assert run["new_tokens"] == len(want)
    assert run["finished"] == ("eos" if want[-1] == 0 else "length")
    assert 0 < run["decode_disk_read_bytes"] < run["disk_read_bytes"]
    assert run["ram_budget_bytes"] == ram
    # In a process that has run other tests its heap moves by some MiB; processes of their own are
    # held to theirs in test_cli_chat and test_kv_beside.
    assert run["peak_rss_bytes"] - run["baseline_rss_bytes"] <= ram + 8 * MIB
    assert run["ttft_s"] > 0
    assert run["decode_tok_s"] == pytest.approx((len(want) - 1) / run["decode_s"])
    if family == "moe":
        routed = run["decode_hits"] + run["decode_misses"]
        assert routed == (len(want) - 1) * 4 * 2  # layers, experts for each token
        assert run["decode_hit_rate"] == run["decode_hits"] / routed
    else:
        assert run["hit_rate"] is None
    assert run["predicted_decode_tok_s"] is None
    [stats] = [line for line in run["stderr"].splitlines() if line.startswith("stats:")]
    for word in ("load", "TTFT", "decode", "MiB/token from disk", "stall", "peak RSS", "budget"):
        assert word in stats
    assert "everything was resident" not in run["stderr"]


def test_a_resident_run_says_that_it_did_not_stream(cli: Cli, dense: Path, tmp_path: Path) -> None:
    run = generate(cli, dense, tmp_path, "-p", "x", "-n", 3, "--ram", "400MiB")
    assert not run["streamed"]
    assert run["decode_disk_read_bytes"] == 0
    assert run["load_read_bytes"] > 0
    assert "everything was resident" in run["stderr"]


def test_the_chat_template_and_its_absence(cli: Cli, dense: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(dense)
    message = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    run = generate(cli, dense, tmp_path, "-n", 4, stdin="hi\n")
    assert run["prompt_tokens"] == len(ids)
    assert run["token_ids"] == reference(dense, ids, max_new_tokens=4)
    file = tmp_path / "prompt.txt"
    file.write_text("hi\n")
    run = generate(cli, dense, tmp_path, "-n", 4, "--raw", "--prompt-file", file)
    assert run["token_ids"] == reference(dense, tokenizer("hi")["input_ids"], max_new_tokens=4)


def test_ids_in_ids_out_without_a_tokenizer(cli: Cli, bare: Path, tmp_path: Path) -> None:
    run = generate(cli, bare, tmp_path, "--prompt-ids", "5,6,7", "-n", 4, "--ignore-eos")
    assert run["stdout"] == ",".join(map(str, run["token_ids"]))
    assert run["token_ids"] == reference(bare, [5, 6, 7], max_new_tokens=4, eos_token_id=None)
    refused(cli("generate", "-m", bare, "-p", "x"), "no tokenizer", "--prompt-ids")
    refused(cli("generate", "-m", bare, "--prompt-ids", "1", "--stop", "x"), "--stop")
    refused(cli("generate", "-m", bare, "--prompt-ids", "99999"), "99999", "vocabulary")


def test_a_stop_string_is_not_shown_and_ends_the_run(cli: Cli, dense: Path, tmp_path: Path) -> None:
    words = ("-p", PROMPT, "--ignore-eos", "-n", NEW)
    whole = generate(cli, dense, tmp_path, *words)
    text = whole["text"]
    stop = text[len(text) // 2 :][:3]
    run = generate(cli, dense, tmp_path, *words, "--stop", stop, "--stop", "never there")
    assert run["finished"] == "stop"
    assert run["stdout"] == text[: text.index(stop)]
    assert run["new_tokens"] < whole["new_tokens"] == NEW
    assert run["token_ids"] == whole["token_ids"][: run["new_tokens"]]


def test_a_seed_repeats_and_matches_transformers(cli: Cli, dense: Path, tmp_path: Path) -> None:
    words = ("--prompt-ids", "9,8", "-n", 8, "--temp", 0.9, "--top-k", 40, "--seed", 3)
    first, again = (generate(cli, dense, tmp_path, *words) for _ in range(2))
    assert first["token_ids"] == again["token_ids"]
    assert first["sampling"]["seed"] == 3
    torch.manual_seed(3)
    sampled = dict(do_sample=True, temperature=0.9, top_k=40, top_p=1.0, max_new_tokens=8)
    assert first["token_ids"] == reference(dense, [9, 8], **sampled)


def test_the_simulated_accelerator_gives_the_same(cli: Cli, moe: Path, tmp_path: Path) -> None:
    words = ("--prompt-ids", "9,8,7", "-n", 6, "--ignore-eos", "--device", "sim")
    report = tmp_path / "least.json"
    cli("plan", "-m", moe, "--no-predict", "-c", 16, "--device", "sim", "--json", report)
    least = json.loads(report.read_text())["minimum_bytes"]
    budgets = ("--ram", least["ram"] + 6 * MIB, "--gpu", least["device"] + MIB)
    run = generate(cli, moe, tmp_path, *words, *budgets)
    assert run["token_ids"] == reference(moe, [9, 8, 7], max_new_tokens=6, eos_token_id=None)
    assert run["plan"]["compute"] == "device"
    assert run["decode_h2d_bytes"] > 0


def test_what_goes_up_from_ram_is_said(cli: Cli, dense: Path, tmp_path: Path) -> None:
    """It is no resident run, and none that says anything of a disk."""
    words = ("--prompt-ids", "9,8,7", "-n", 6, "--ignore-eos", "--device", "sim")
    report = tmp_path / "least.json"
    cli("plan", "-m", dense, "--no-predict", "-c", 16, "--device", "sim", "--json", report)
    least = json.loads(report.read_text())["minimum_bytes"]
    run = generate(cli, dense, tmp_path, *words, "--ram", "1GiB", "--gpu", least["device"])
    assert run["token_ids"] == reference(dense, [9, 8, 7], max_new_tokens=6, eos_token_id=None)
    assert not run["streamed"]
    [stats] = [line for line in run["stderr"].splitlines() if line.startswith("stats:")]
    assert "MiB/token up to the device" in stats
    assert "streamed from there to the device" in run["stderr"]
    assert "everything was resident" not in run["stderr"]
    every = generate(cli, dense, tmp_path, *words, "--ram", "1GiB", "--gpu", "1GiB")
    assert every["token_ids"] == run["token_ids"]
    assert "up to the device" not in every["stderr"]
    assert "everything was resident" in every["stderr"]


def hardware() -> Hardware:
    rate = Rate(median=2e9, low=1e9, high=4e9, n=3, unit=BYTES_PER_S)
    flops = Rate(median=2e11, low=1e11, high=4e11, n=3, unit=FLOP_PER_S)
    return Hardware(
        ssd_read=rate, ssd_write=rate, ssd_mixed=rate, ram_read=rate, memcpy=rate,
        matmul={"bfloat16": flops}, gemv={"bfloat16": rate}, cores=1, ram_bytes=2**34, name="test",
    )  # fmt: skip


def test_a_prediction_from_a_quick_probe_is_kept(
    cli: Cli, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def probe(directory: Path, **options: Any) -> Hardware:
        calls.append((directory, options["quick"]))
        return hardware()

    monkeypatch.setattr(planning, "probe", probe)
    words = ("generate", "-m", dense, "--prompt-ids", "1", "-n", 3, "--ram", "400MiB")
    first = cli(*words, "--json", tmp_path / "run.json")
    assert "a quick probe" in first.err
    again = cli(*words)
    assert "a quick probe" not in again.err
    assert calls == [(dense, True)]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["predicted_decode_tok_s"] == run["plan"]["predicted_decode_tok_s"]["mid"] > 0
    assert run["bound_decode_tok_s"] * 1.000001 >= run["predicted_decode_tok_s"]
    assert "predicted" in first.err
    assert "measured" in first.err


def test_a_disk_that_cannot_be_probed_costs_the_prediction_only(
    cli: Cli, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*_: Any, **__: Any) -> Hardware:
        raise planning.OffloadError("read-only")

    monkeypatch.setattr(planning, "probe", probe)
    done = cli("generate", "-m", dense, "--prompt-ids", "1", "-n", 2, "--ram", "400MiB")
    assert done.code == 0
    assert "no prediction: read-only" in done.err


def test_converted_weights_leave_nothing_on_the_disk(cli: Cli, dense: Path, tmp_path: Path) -> None:
    disk = tmp_path / "spill"
    words = ("--prompt-ids", "5,6", "-n", 4, "--dtype", "fp32", "--disk", disk)
    run = generate(cli, dense, tmp_path, *words)
    assert run["plan"]["converted_bytes"] > 0
    assert list(disk.iterdir()) == []


def test_quiet_unless_verbose(cli: Cli, dense: Path) -> None:
    words = ("generate", "-m", dense, "--no-predict", "--prompt-ids", "1", "-n", 2)
    quiet = cli(*words).err.splitlines()
    starts = ("dense: ", "  ", "load: ", "stats: ", "note: ")
    assert all(line.startswith(starts) for line in quiet), quiet
