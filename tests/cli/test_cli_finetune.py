"""``offload finetune`` without its engine: flags, the plan, figures, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_support import Cli, Result, refused
from finetune_support import FakeRun, fake_engine

from offload.cli import finetune_text as say
from offload.cli.finetune_flags import targets
from offload.cli.finetune_stop import stop_after_step
from offload.cli.finetune_view import View
from offload.errors import OffloadError
from offload.train.metrics import read_lines
from offload.train.options import TrainOptions
from offload.train.reports import EndReport, StepReport

Tune = Callable[..., Result]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs that were prepared; the engine that prepares them is a fake."""
    found: list[FakeRun] = []
    monkeypatch.setitem(sys.modules, "offload.train.preparing", fake_engine(found))
    return found


@pytest.fixture
def tune(cli: Cli, tmp_path: Path) -> Tune:
    """``offload finetune`` with what it cannot do without."""
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')

    def call(*words: object) -> Result:
        data = () if "--data" in words else ("--data", tmp_path / "train.jsonl")
        return cli(
            "finetune",
            "-m",
            tmp_path / "model",
            *data,
            "--output",
            tmp_path / "out",
            "--no-tensorboard",
            *words,
        )

    return call


FLAGS = """
--model --data --eval-data --method --output --ram --gpu --disk --states --max-steps --epochs
--batch-size --grad-accum --seq-len --lr --schedule --warmup --weight-decay --max-grad-norm --seed
--save-every --save-total-limit --resume --lora-r --lora-alpha --lora-targets --json --eval-every
--eval-share --skip-bad-rows --grad-dtype --dtype --order --packing --no-packing --router-aux-loss
--lora-dropout --merge --betas --eps --threads --tensorboard --plot --verbose -m -t -v --keep
--skip-untouched-experts --device
""".split()


def test_help_has_the_flags_and_needs_nothing_heavy() -> None:
    code = (
        "import sys\nfrom offload.cli.main import main\nassert main(['finetune', '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'numba', 'rich', 'asyncio'} & set(sys.modules)"
        "\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    words = set(done.stdout.replace(",", " ").split())
    assert not set(FLAGS) - words


def test_a_run_from_the_plan_to_the_result(tune: Tune, runs: list[FakeRun], tmp_path: Path) -> None:
    done = tune("--max-steps", 3, "--eval-every", 2, "--eval-share", 0.1)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        f"{tmp_path}/out: the model after step 3",
        f"offload generate --model {tmp_path}/out",
    ]
    assert done.err.splitlines() == [
        "plan [of 2 tiers]",
        "  a step takes 1.0 s",
        "note: 2 rows were skipped",
        "step 1/3 · loss 3.0000 · lr 1e-05 · grad norm 1.25 · 500 tok/s · compute 90%, ssd 50% · "
        "1.0 GiB/s · 4.00 s left",
        "eval: step 2 · loss 1.2500 · perplexity 3.49 · 77 tokens · 0.50 s · the best so far",
        "step 3/3 · loss 1.0000 · lr 3.33e-06 · grad norm 1.25 · 500 tok/s · "
        "compute 90%, ssd 50% · 1.0 GiB/s",
        "commit: step 3 is safe, 0.25 s",
        "writing the model: 1.0 GiB",
        "writing the model: 1.0 GiB, done",
        "stats: 3 steps in 6.00 s · smoothed loss 1.7638 · 500 tok/s · peak RSS 3.0 GiB above "
        "the process, 75.0% of the budget 4.0 GiB · SSD 5.0 GiB read, 2.0 GiB written",
    ]
    assert [run.closed for run in runs] == [1]


def test_what_is_said_of_the_best_and_of_skipped_experts() -> None:
    options = TrainOptions(model="m", data=Path("d"), output=Path("o"), eval_every=1)
    end = EndReport(
        steps=9, last_step=9, stopped="done", seconds=9.0, tokens=900, budget_bytes=100,
        peak_rss_bytes=50, read_bytes=0, written_bytes=0, output="o", output_step=6, best_loss=2.5,
        last_output="o.last", skipped_updates=3000, expert_updates=1000,
    )  # fmt: skip
    assert say.use_lines(end, options)[:2] == [
        "o: the model after step 6 of 9, where the evaluation was best (loss 2.5000)",
        "o.last: the model after step 9, the last",
    ]
    assert "3,000 of 4,000 updates of experts skipped (75%)" in say.stats_line(end)
    last = replace(end, output_step=9, last_output=None, skipped_updates=0)
    assert say.use_lines(last, options)[0] == (
        "o: the model after step 9, where the evaluation was best (loss 2.5000)"
    )
    assert "skipped" not in say.stats_line(last)
    step = StepReport(
        step=1, of=9, epoch=0.1, loss=1.0, grad_norm=1.0, lr=1e-5, tokens=9, label_tokens=9,
        seconds=1.0, skipped_updates=12,
    )  # fmt: skip
    assert say.step_parts(step, 1.0, None)["skipped"] == "12 experts skipped"


def test_every_flag_reaches_the_engine(
    tune: Tune, runs: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str | None] = []
    monkeypatch.setattr(
        "offload.cli.finetune_run.find_model", lambda _model, quant: packed.append(quant)
    )
    threads = torch.get_num_threads()
    assert tune().code == 0
    plain = runs.pop().options
    assert (plain.method, plain.lr, plain.packing, plain.resume) == ("full", 1e-5, True, False)
    (tmp_path / "eval.jsonl").write_text("{}\n")
    (tmp_path / "disk").mkdir()
    done = tune(
        "--eval-data", tmp_path / "eval.jsonl", "--method", "lora", "--ram", "4GiB",
        "--disk", tmp_path / "disk", "--states", "8bit", "--grad-dtype", "fp32", "--dtype", "bf16",
        "--max-steps", 9, "--batch-size", 2, "--grad-accum", 3, "--order", "usual",
        "--seq-len", 64, "--no-packing", "--skip-bad-rows", "--lr", "2e-4", "--schedule", "cosine",
        "--warmup", 2, "--weight-decay", 0.1, "--betas", "0.8, 0.95", "--eps", "1e-6",
        "--max-grad-norm", 0, "--seed", 7, "--eval-every", 4, "--keep", "both", "--save-every", 5,
        "--save-total-limit", 2, "--resume", "--router-aux-loss", 0.01, "--lora-r", 8,
        "--lora-alpha", 8, "--lora-dropout", 0.1, "--lora-targets", "q_proj, v_proj", "--merge",
        "--quant", "q4", "-t", 1,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    asked = runs.pop().options
    unchanged = {
        name
        for name in type(asked).__dataclass_fields__
        if getattr(asked, name) == getattr(plain, name)
    }
    assert unchanged == {
        "model", "data", "output", "epochs", "eval_share", "skip_untouched_experts", "gpu",
        "device", "head", "gpu_updates",
    }  # fmt: skip
    assert asked.keep == "both"
    assert tune("--skip-untouched-experts").code == 0
    assert runs.pop().options.skip_untouched_experts is True
    assert packed == ["q4"]
    assert asked.ram == 4 * 2**30
    assert asked.betas == (0.8, 0.95)
    assert asked.lora_targets == ("q_proj", "v_proj")
    assert asked.dtype == "bfloat16"
    assert tune("--epochs", 2.5, "--eval-share", 0.5).code == 0
    assert (runs[-1].options.epochs, runs[-1].options.eval_share) == (2.5, 0.5)
    assert tune("--gpu", "1GiB", "--device", "sim", "--head", "gpu", "--gpu-updates", 3).code == 0
    assert (runs[-1].options.head, runs[-1].options.gpu_updates) == ("gpu", "3")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("q_proj,v_proj", ("q_proj", "v_proj")),
        (r".*\.[0-9]{1,2}\.q_proj, v_proj", (r".*\.[0-9]{1,2}\.q_proj", "v_proj")),
        ("x,(q|v)_proj,y{2}", ("x", "(q|v)_proj", "y{2}")),
        ("", ("",)),
    ],
)
def test_commas_of_a_regular_expression(text: str, named: tuple[str, ...]) -> None:
    assert targets(text) == named


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "8GiB"], ["--gpu 8.0 GiB", "drop --gpu"]),
        (["--gpu", "much"], ["not a size"]),
        (["--gpu-updates", "2"], ["--gpu-updates 2 cannot take effect", "--device sim"]),
        (["--gpu-updates", "0"], ["none of auto, off"]),
        (["--head", "gpu"], ["--head gpu cannot take effect", "--device sim"]),
        (["--head", "ram"], ["--head", "auto", "gpu", "cpu"]),
        (["--lr", "-1"], ["--lr -1"]),
        (["--lr", "nan"], ["--lr nan"]),
        (["--lr", "fast"], ["--lr"]),
        (["--method", "lore"], ["--method", "full", "lora"]),
        (["--states", "fp8"], ["--states", "8bit"]),
        (["--dtype", "float16"], ["--dtype float16", "underflow"]),
        (["--betas", "0.9"], ["--betas '0.9'", "0.9,0.999"]),
        (["--betas", "0.9,x"], ["--betas"]),
        # Its value is the default: it was given all the same, and cannot take effect.
        (["--lora-r", "16"], ["--lora-r cannot take effect", "--method lora"]),
        (["--merge"], ["--merge cannot take effect"]),
        (["--lora-targets", "", "--method", "lora"], ["--lora-targets names no module"]),
        (["--epochs", "1", "--max-steps", "5"], ["contradict"]),
        (["--save-total-limit", "1"], ["--save-every"]),
        (["--eval-every", "5"], ["--eval-data"]),
        (["--data", "/nowhere.jsonl"], ["/nowhere.jsonl", "no such file"]),
        (["--resume"], ["--resume", "out.offload"]),
        (["--json", "/nowhere/at/all"], ["--json", "no directory"]),
        (["--plot", "/nowhere/at/all"], ["--plot", "no directory"]),
    ],
)
def test_a_wrong_flag_is_one_line(
    tune: Tune, runs: list[FakeRun], words: list[str], said: list[str]
) -> None:
    refused(tune(*words), *said)
    assert not runs


def test_what_is_missing_is_one_line(cli: Cli) -> None:
    refused(cli("finetune"), "--model", "offload finetune --help")
    refused(cli("finetune", "-m", "x"), "--data")


def test_a_card(tune: Tune, runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_card import FakeCard

    from offload.runtime import cuda_api

    card = FakeCard()
    monkeypatch.setattr(cuda_api, "card_count", lambda: 1)
    monkeypatch.setattr(cuda_api, "current_card", lambda: 0)
    monkeypatch.setattr(cuda_api, "open_card", lambda _: card)
    assert tune("--gpu", "1GiB").code == 0
    assert (runs[-1].options.gpu, runs[-1].options.device) == (1 << 30, "auto")
    assert tune("--device", "cuda:0").code == 0
    assert runs[-1].options.device == "cuda:0"
    card.end()


def test_a_simulated_accelerator(tune: Tune, runs: list[FakeRun]) -> None:
    assert tune("--gpu", "8GiB", "--device", "sim").code == 0
    assert (runs[-1].options.gpu, runs[-1].options.device) == (8 << 30, "sim")


def test_figures_and_a_plot(tune: Tune, runs: list[FakeRun], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, plot = tmp_path / "m.jsonl", tmp_path / "loss.png"
    done = tune("--max-steps", 4, "--json", figures, "--plot", plot)
    assert done.code == 0, done.err
    assert f"metrics: figures are in {figures}\n" in done.err
    assert f"plot: the losses are drawn in {plot}\n" in done.err
    found = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [e["event"] for e in found] == [
        "start", "note", "step", "step", "step", "step", "commit", "phase", "end",
    ]  # fmt: skip
    assert found[0]["plan"] == ["plan [of 2 tiers]", "  a step takes 1.0 s"]
    assert found[-1]["output"] == str(tmp_path / "out")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_appends_its_figures(
    tune: Tune, runs: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "m.jsonl"
    assert tune("--max-steps", 4, "--json", figures).code == 0
    (tmp_path / "out.offload").mkdir()
    monkeypatch.setitem(sys.modules, "offload.train.preparing", fake_engine(runs, first=3))
    assert tune("--max-steps", 6, "--json", figures, "--resume").code == 0
    events = read_lines(figures)
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [e["of"] for e in events if e["event"] == "step"] == [4, 4, 6, 6, 6, 6]
    assert events[-1]["event"] == "end"


def test_figures_never_go_over_another_file(
    tune: Tune, runs: list[FakeRun], tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    before = data.read_bytes()
    refused(tune("--json", data), "--json", "is read by this command")
    notes = tmp_path / "notes.jsonl"
    notes.write_bytes(before)
    refused(tune("--json", notes), "line 1 is not a line of metrics")
    assert notes.read_bytes() == before
    out = tmp_path / "out"
    out.mkdir()
    refused(tune("--json", out / "m.jsonl"), "--json", "lies in --output")
    assert data.read_bytes() == before
    assert not runs


def test_a_plot_never_goes_over_another_file(
    tune: Tune, runs: list[FakeRun], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    data, same = tmp_path / "train.jsonl", tmp_path / "x"
    before = data.read_bytes()
    refused(tune("--plot", data), "--plot", "is read by this command")
    notes = tmp_path / "notes.txt"
    notes.write_bytes(before)
    refused(tune("--plot", notes), "no PNG")
    refused(tune("--json", same, "--plot", same), "--json and --plot are the same file")
    assert notes.read_bytes() == before
    assert data.read_bytes() == before
    assert not runs


def test_an_adapter_is_used_otherwise(tune: Tune, runs: list[FakeRun], tmp_path: Path) -> None:
    out = f"{tmp_path}/out"
    assert tune("--method", "lora").out.splitlines() == [
        f"{out}: the adapter after step 3",
        f"PeftModel.from_pretrained(model, '{out}')",
    ]
    assert tune("--method", "lora", "--merge").out.splitlines() == [
        f"{out}: the merged model after step 3",
        f"offload generate --model {out}",
    ]


def test_a_run_that_fails_is_closed_and_its_figures_stay(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(n: int) -> None:
        if n == 3:
            raise OffloadError("the loss of step 3 is nan: row 17 of the data")

    runs: list[FakeRun] = []
    monkeypatch.setitem(sys.modules, "offload.train.preparing", fake_engine(runs, before_step=fail))
    figures = tmp_path / "m.jsonl"
    done = tune("--max-steps", 5, "--json", figures)
    assert refused(done) == "error: the loss of step 3 is nan: row 17 of the data"
    assert [e["step"] for e in read_lines(figures) if e["event"] == "step"] == [1, 2]
    assert runs[0].closed == 1


def test_the_plot_of_a_failed_run_never_hides_why_it_failed(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "plots").mkdir()

    def fail(n: int) -> None:
        if n == 3:
            (tmp_path / "plots").rmdir()
            raise OffloadError("the disk is full")

    monkeypatch.setitem(sys.modules, "offload.train.preparing", fake_engine([], before_step=fail))
    done = tune("--max-steps", 5, "--plot", tmp_path / "plots" / "p.png")
    assert refused(done) == "error: the disk is full"
    assert "warning: --plot" in done.err


def test_tensorboard_if_it_is_installed(
    cli: Cli, tune: Tune, runs: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(tune("--tensorboard"), "--tensorboard", "pip install tensorboard")
    assert not runs
    made: list[Path] = []

    class Writer:
        def __init__(self, *, log_dir: str, purge_step: int) -> None:
            made.append(Path(log_dir))

        def __getattr__(self, _: str) -> Callable[..., None]:
            return lambda *_: None

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert tune().code == 0
    assert made == []  # --no-tensorboard, from the fixture
    assert tune("--tensorboard").code == 0
    assert made == [tmp_path / "out.tensorboard"]
    needed = ("-m", tmp_path / "model", "--data", tmp_path / "train.jsonl")
    assert cli("finetune", *needed, "--output", tmp_path / "out").code == 0
    assert made == [tmp_path / "out.tensorboard"] * 2


@pytest.mark.parametrize(
    ("signum", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_finishes_the_step_and_commits(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, signum: int, code: int, word: str
) -> None:
    """The announcement comes while the step still runs: the fake waits for it."""
    said = threading.Event()
    stopping = View.stopping

    def heard(view: View, what: str) -> None:
        stopping(view, what)
        said.set()

    def kill(n: int) -> None:
        if n == 2:
            os.kill(os.getpid(), signum)
            assert said.wait(30)

    before = signal.getsignal(signum)
    monkeypatch.setattr(View, "stopping", heard)
    runs: list[FakeRun] = []
    monkeypatch.setitem(sys.modules, "offload.train.preparing", fake_engine(runs, before_step=kill))
    done = tune("--max-steps", 9)
    assert done.code == code
    lines = done.err.splitlines()
    assert "stop: after this step, which is committed; once more" in done.err
    assert "commit: step 2 is safe, 0.25 s" in lines
    assert lines[-2:] == [
        "note: stopped after step 2; the same command with --resume continues there",
        word,
    ]
    assert "stats: 2 steps" in done.err
    assert done.out == ""
    assert runs[0].taken == [1, 2]
    assert runs[0].closed == 1
    assert signal.getsignal(signum) is before


def test_a_signal_in_the_last_step_changes_nothing(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(n: int) -> None:
        if n == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setitem(sys.modules, "offload.train.preparing", fake_engine([], before_step=kill))
    done = tune("--max-steps", 3)
    assert done.code == 0
    assert "the model after step 3" in done.out


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    words = ["finetune", "-m", tmp_path / "model", "--data", tmp_path / "train.jsonl"]
    words += ["--output", tmp_path / "out", "--no-tensorboard", "--max-steps", "2"]
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("finetune_support.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SECONDS_A_STEP": "300", "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("note:"):
                break
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("stop: after this step")
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 130
        assert process.stderr.read() == "interrupted\n"
    finally:
        process.kill()
        process.communicate()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_after_step(pytest.fail) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found: list[Any] = []

    def run() -> None:
        with stop_after_step(pytest.fail) as stop:
            found.append((stop(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]
