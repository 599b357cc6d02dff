"""What is asked of a run: every contradiction is one error with its flag and a way out."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from offload.errors import OffloadError
from offload.train.checks import changed, check_dtypes, check_options, state_directory
from offload.train.options import TrainOptions

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def good(tmp_path: Path) -> TrainOptions:
    (tmp_path / "model").mkdir()
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    return TrainOptions(
        model=str(tmp_path / "model"), data=tmp_path / "train.jsonl", output=tmp_path / "out"
    )


def said(options: TrainOptions, given: set[str] | None = None) -> str:
    with pytest.raises(OffloadError) as raised:
        check_options(options, given)
    return str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"method": "lora", "lora_r": 4, "merge": True, "lora_targets": ("q_proj",)},
        {"max_steps": 10, "warmup": 9.0, "save_every": 10, "save_total_limit": 2},
        {"grad_accum": 8, "grad_dtype": "fp32", "order": "usual"},
        {"max_grad_norm": 0.0, "weight_decay": 0.1, "betas": (0.0, 0.0), "warmup": 0.0},
        {"eval_share": 0.05, "eval_every": 3, "router_aux_loss": 0.0},
        {"eval_share": 0.05, "eval_every": 3, "keep": "both"},
        {"keep": "last", "skip_untouched_experts": True},
        {"states": "bf16", "dtype": "bfloat16", "grad_dtype": "bf16"},
        {"states": "8bit", "dtype": "float32"},
    ],
)
def test_what_can_be_done_is_not_refused(good: TrainOptions, fields: dict[str, Any]) -> None:
    check_options(dataclasses.replace(good, **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr": -1e-5}, ["--lr -1e-05", "above 0"]),
        ({"lr": 0.0}, ["--lr 0", "above 0"]),
        ({"lr": NAN}, ["--lr nan"]),
        ({"lr": INF}, ["--lr inf"]),
        ({"eps": 0.0}, ["--eps 0"]),
        ({"betas": (0.9, 1.0)}, ["--betas 0.9,1", "below 1"]),
        ({"betas": (-0.1, 0.9)}, ["--betas -0.1"]),
        ({"betas": (0.9, NAN)}, ["--betas"]),
        ({"betas": (0.9,)}, ["--betas 0.9"]),
        ({"weight_decay": -0.1}, ["--weight-decay -0.1"]),
        ({"lr": 0.5, "weight_decay": 2.0}, ["--lr 0.5", "--weight-decay 2", "is 1"]),
        ({"max_grad_norm": NAN}, ["--max-grad-norm nan"]),
        ({"warmup": -1.0}, ["--warmup -1"]),
        ({"warmup": 2.5}, ["--warmup 2.5", "whole"]),
        ({"warmup": 10.0, "max_steps": 10}, ["--warmup 10", "--max-steps 10"]),
        ({"epochs": 0.0}, ["--epochs 0"]),
        ({"epochs": 2.0, "max_steps": 5}, ["--max-steps 5", "--epochs 2", "contradict"]),
        ({"max_steps": 0}, ["--max-steps 0"]),
        ({"batch_size": 0}, ["--batch-size 0", "at least 1"]),
        ({"grad_accum": 0}, ["--grad-accum 0"]),
        ({"seq_len": 1}, ["--seq-len 1", "at least 2"]),
        ({"threads": 0}, ["--threads 0"]),
        ({"seed": -1}, ["--seed -1"]),
        ({"seed": 2**63}, ["--seed 9223372036854775808"]),
        ({"ram": 0}, ["--ram 0"]),
        ({"method": "lore"}, ["--method lore", "full, lora"]),
        ({"states": "fp8"}, ["--states fp8", "8bit"]),
        ({"schedule": "wavy"}, ["--schedule wavy"]),
        ({"order": "random"}, ["--order random"]),
        ({"grad_dtype": "fp16"}, ["--grad-dtype fp16", "bf16, fp32"]),
        ({"dtype": "float16"}, ["--dtype float16", "underflow", "--dtype bfloat16"]),
        ({"dtype": "float64"}, ["--dtype float64"]),
        ({"states": "bf16", "dtype": "float32"}, ["--states bf16", "--states fp32"]),
        (
            {"grad_dtype": "bf16", "grad_accum": 4, "batch_size": 2},
            ["--grad-dtype bf16", "--grad-accum 4", "--batch-size 8"],
        ),
        ({"lora_r": 8}, ["--lora-r cannot take effect", "--method lora"]),
        ({"merge": True, "lora_alpha": 1.0}, ["--lora-alpha, --merge cannot", "drop them"]),
        ({"method": "lora", "lora_r": 0}, ["--lora-r 0"]),
        ({"method": "lora", "lora_alpha": NAN}, ["--lora-alpha nan"]),
        ({"method": "lora", "lora_dropout": 1.0}, ["--lora-dropout 1"]),
        ({"method": "lora", "lora_targets": ()}, ["--lora-targets is empty"]),
        ({"method": "lora", "lora_targets": ("q_proj", " ")}, ["--lora-targets names no"]),
        ({"eval_every": 5}, ["--eval-every 5", "--eval-data", "--eval-share"]),
        ({"eval_share": 1.0}, ["--eval-share 1"]),
        ({"eval_every": 0, "eval_share": 0.1}, ["--eval-every 0"]),
        ({"eval_every": 9, "eval_share": 0.1, "max_steps": 8}, ["--eval-every 9", "step 8"]),
        ({"keep": "best"}, ["--keep best", "--eval-every"]),
        ({"keep": "both", "eval_share": 0.1}, ["--keep both", "--eval-every"]),
        ({"keep": "worst"}, ["--keep worst", "best, last, both"]),
        ({"method": "lora", "skip_untouched_experts": True}, ["--skip-untouched-experts", "drop"]),
        ({"save_every": 0}, ["--save-every 0"]),
        ({"save_every": 9, "max_steps": 8}, ["--save-every 9", "step 8"]),
        ({"save_total_limit": 2}, ["--save-total-limit 2", "--save-every"]),
        ({"router_aux_loss": -0.1}, ["--router-aux-loss -0.1"]),
    ],
)
def test_one_error_with_numbers(
    good: TrainOptions, fields: dict[str, Any], words: list[str]
) -> None:
    message = said(dataclasses.replace(good, **fields))
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_flag_that_was_given_its_default_is_given_too(good: TrainOptions) -> None:
    assert good.lora_r == 16
    check_options(good, set())
    assert "--lora-r cannot take effect" in said(good, {"lora_r"})
    assert "contradict" in said(dataclasses.replace(good, max_steps=3), {"epochs", "max_steps"})
    assert changed(dataclasses.replace(good, seed=1)) == {"model", "data", "output", "seed"}


def test_whose_weights_are_kept(good: TrainOptions) -> None:
    """Whoever evaluates on the way gets the best, unless they say otherwise."""
    evaluated = dataclasses.replace(good, eval_every=2, eval_share=0.1)
    assert (good.kept, good.retained) == ("last", 1)
    assert (evaluated.kept, evaluated.retained) == ("best", 2)
    assert dataclasses.replace(evaluated, keep="last").retained == 1


def test_files_that_are_not_there_or_empty(good: TrainOptions, tmp_path: Path) -> None:
    gone, empty = tmp_path / "gone.jsonl", tmp_path / "empty.jsonl"
    empty.touch()
    message = said(dataclasses.replace(good, data=gone))
    assert message == f"--data {gone}: there is no such file or directory"
    assert "--eval-data" in said(dataclasses.replace(good, eval_data=gone))
    assert "is empty" in said(dataclasses.replace(good, data=empty))


def test_data_that_is_no_file(good: TrainOptions, tmp_path: Path) -> None:
    """A shell's ``<(command)`` is a name that leads to none; a FIFO without a writer is not waited
    for."""
    os.mkfifo(tmp_path / "rows.jsonl")
    reading, writing = os.pipe()
    try:
        for path in (tmp_path / "rows.jsonl", Path(f"/dev/fd/{reading}"), Path("/dev/null")):
            for name in ("data", "eval_data"):
                message = said(dataclasses.replace(good, **{name: path}))
                assert message.startswith(
                    f"--{name.replace('_', '-')} {path} is a pipe or a device"
                )
                assert "write it to a file first" in message
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("name", ["model", "data", "eval_data", "output", "disk"])
def test_names_that_no_file_can_have(good: TrainOptions, tmp_path: Path, name: str) -> None:
    """``pathlib`` raises errors of its own when it is asked about them."""
    (tmp_path / "circle").symlink_to("circle")
    for given, why in (
        (tmp_path / ("x" * 300), "name too long; give another path"),
        (tmp_path / "circle" / "x", "levels of symbolic links; give another path"),
        (Path("~no-such-user/x"), "no home directory ~no-such-user; give the whole path"),
    ):
        value = str(given) if name == "model" else given
        message = said(dataclasses.replace(good, **{name: value}))
        assert message.startswith(f"--{name.replace('_', '-')} {given}: ")
        assert why in message


def test_states_beside_an_output_whose_name_has_no_room_for_more(
    good: TrainOptions, tmp_path: Path
) -> None:
    message = said(dataclasses.replace(good, output=tmp_path / ("x" * 250)))
    assert message.startswith("--disk ")
    assert "too long" in message


def test_eval_data_and_a_share_contradict(good: TrainOptions, tmp_path: Path) -> None:
    both = dataclasses.replace(good, eval_data=tmp_path / "eval.jsonl", eval_share=0.1)
    assert "contradict" in said(both)


def test_where_results_go(good: TrainOptions, tmp_path: Path) -> None:
    assert state_directory(good) == tmp_path / "out.offload"
    check_options(dataclasses.replace(good, output=tmp_path / "deep" / "er" / "out"))
    # A scratch disk with everything on it.
    check_options(dataclasses.replace(good, disk=tmp_path, output=tmp_path / "out"))
    for fields, words in (
        ({"output": tmp_path / "train.jsonl"}, ["is a file"]),
        ({"output": tmp_path / "train.jsonl" / "out"}, ["is a file"]),
        ({"disk": tmp_path / "train.jsonl"}, ["--disk", "is a file"]),
        ({"output": tmp_path / "model" / "tuned"}, ["--output", "--model", "lies in it"]),
        ({"output": tmp_path / "model"}, ["--output", "--model"]),
        ({"output": tmp_path}, ["--data", "lies in --output"]),
        ({"disk": tmp_path / "out"}, ["--disk", "--output"]),
        ({"disk": tmp_path / "out" / "states"}, ["--disk", "--output"]),
        ({"disk": tmp_path / "model" / "states"}, ["--disk", "--model"]),
    ):
        message = said(dataclasses.replace(good, **fields))  # type: ignore[arg-type]
        assert all(word in message for word in words), message


def test_a_model_may_be_a_hub_id(good: TrainOptions, tmp_path: Path) -> None:
    check_options(dataclasses.replace(good, model="some-org/some-model"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable(good: TrainOptions, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "not writable" in said(dataclasses.replace(good, output=closed / "out"))


def test_relative_outputs(
    good: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", "./"):
        assert state_directory(dataclasses.replace(good, output=Path(path))) == (
            tmp_path / "here.offload"
        )


def test_nothing_to_resume(good: TrainOptions, tmp_path: Path) -> None:
    wanted = dataclasses.replace(good, resume=True)
    assert "out.offload to resume from" in said(wanted)
    (tmp_path / "out.offload").mkdir()
    check_options(wanted)


def test_the_checkpoints_dtype(good: TrainOptions) -> None:
    check_dtypes(good, "bfloat16")
    check_dtypes(good, "float32")
    with pytest.raises(OffloadError, match="the model is float16"):
        check_dtypes(good, "float16")
    with pytest.raises(OffloadError, match="--states bf16"):
        check_dtypes(dataclasses.replace(good, states="bf16"), "float32")
