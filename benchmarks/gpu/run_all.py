"""All that is to be measured on a card, section by section; see README.md beside this file.

    python benchmarks/gpu/run_all.py --section dense --deadline 540 --out results

Each case runs in a process of its own and is written down when it ends. Called again with the same
``--out``, a section goes on where it stopped. Exit codes: 0, all of it is there; 3, the deadline
came first, call again; 2, it cannot be measured here, or a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from case import GIB, make_model, pack_model  # noqa: E402
from common import ROOT, facts  # noqa: E402

DONE, FAILED, UNFINISHED = 0, 2, 3
NO_TESTS = 5
"""pytest's exit code where none was selected."""
MIB = 1 << 20
SAID = 8000
"""Of what a process that failed has said, the end that is kept, in characters."""

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
TINY_MOE = {
    **TINY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64,
    "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 2,
    "num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


class Section:
    """A section's results in ``out/NAME.json``, case by case.

    Args:
        deadline: the moment (of ``time.monotonic``) after which no case may run.
    """

    def __init__(self, name: str, args: argparse.Namespace, deadline: float) -> None:
        self.name = name
        self.device = args.device
        self.deadline = deadline
        self.file = Path(args.out) / f"{name}.json"
        self.longest_s = 0.0
        self.data: dict[str, Any] = {"section": name, "device": self.device, "cases": {}}
        if self.file.is_file():
            self.data = json.loads(self.file.read_text())
            if self.data["device"] != self.device:
                raise SystemExit(
                    f"{self.file} is of device {self.data['device']}; give another --out"
                )
        try:
            self.data["facts"] = facts() | card_facts(self.device)
        except Exception:  # noqa: BLE001  a card that does not answer is what cases will tell of
            self.data["facts"] = {"error": traceback.format_exc()[-SAID:]}
        self.failed: list[str] = []
        self.stopped = False

    def case(
        self, name: str, run: Callable[[float], dict[str, Any]], limit_s: float | None = None
    ) -> dict[str, Any] | None:
        """The result of a case: from before, or run now with the seconds there are. None: it
        failed, or there is no time. What it raises is written down, and the next one runs.

        Args:
            limit_s: the most that it may take. With a limit there has to be half of it; a case that
                is too long for what is left is passed over, and shorter ones behind it are not.
        """
        found = self.data["cases"].get(name)
        if found is not None and "error" not in found:
            return dict(found)
        left = self.deadline - time.monotonic()
        needed = max(20.0, 1.3 * self.longest_s) if limit_s is None else limit_s / 2
        if (self.stopped and limit_s is None) or left < needed:
            self.stopped = True
            return None
        began = time.monotonic()
        allowed = left if limit_s is None else min(left, limit_s)
        try:
            result = run(allowed)
        except subprocess.TimeoutExpired as error:
            if allowed == left:
                self.stopped = True  # it gets all of the next call's time
                return None
            said = f"it took more than {allowed:.0f} s"
            result = {"error": f"{said}; its last words: {last_words(error.stdout, error.stderr)}"}
        except Exception as error:  # noqa: BLE001  a case's failure is a result
            plain = isinstance(error, RuntimeError)  # of another process: its own words
            result = {"error": str(error) if plain else traceback.format_exc()[-SAID:]}
        if "error" in result:
            self.failed.append(name)
        seconds = time.monotonic() - began
        self.longest_s = max(self.longest_s, seconds)
        self.data["cases"][name] = {**result, "took_s": round(seconds, 1)}
        self.write()
        print(f"{self.name}: {name}: {json.dumps(result)[:300]}", flush=True)
        return None if "error" in result else result

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n")
        fresh.replace(self.file)

    def end(self) -> int:
        self.write()
        if self.failed:
            print(f"{self.name}: failed: {', '.join(self.failed)}", flush=True)
            return FAILED
        return UNFINISHED if self.stopped else DONE


def card_facts(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"card": "simulated"}
    import torch

    found = torch.cuda.get_device_properties(0)
    return {"card": found.name, "card_bytes": found.total_memory, "cuda": torch.version.cuda}


def run_case(job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """``case.py`` on a job. Raises RuntimeError with the end of what it said."""
    tests = str(ROOT / "tests" / "cpu_ops")  # the formats' bounds
    path = os.pathsep.join([str(ROOT), str(HERE), str(HERE.parent), tests])
    command = [sys.executable, str(HERE / "case.py"), json.dumps(job)]
    more = {
        "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    code, out, said = finish(command, timeout_s, more)
    if code:
        raise RuntimeError(said.strip()[-SAID:] or f"exit code {code}")
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result


def finish(command: list[str], timeout_s: float, env: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a program. At its time limit it is ended with all that it has
    started: what still runs on the card would be in the figures of the next.

    Raises:
        subprocess.TimeoutExpired: with what it has said.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        start_new_session=True, env={**os.environ, **env},
    )  # fmt: skip
    try:
        out, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        error.stdout, error.stderr = process.communicate()
        gone(process.pid)
        raise
    return process.returncode, out, said


def gone(group: int) -> None:
    """Return when no program of a killed process group runs any more: the signal is sent at once,
    the last of them ends when the kernel next runs it, and gives its memory on a card back then.

    Raises:
        RuntimeError: one still runs after a minute (in a driver's call that nothing interrupts).
    """
    end = time.monotonic() + 60
    while any(process_group(pid) == group for pid in psutil.pids()):
        if time.monotonic() > end:
            raise RuntimeError(f"processes of the group {group} still run 60 s after SIGKILL")
        time.sleep(0.01)


def process_group(pid: int) -> int | None:
    """The process group of a process that runs; ``None`` of one that has ended, reaped or not."""
    try:
        if psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return os.getpgid(pid)
    except (psutil.Error, ProcessLookupError):
        return None


def last_words(*said: Any) -> str:
    """The end of what a program has said, errors last."""
    text = [s.decode(errors="replace") if isinstance(s, bytes) else s or "" for s in said]
    return "\n".join(t.strip()[-SAID // len(said) :] for t in text if t.strip())


# -- sections ---------------------------------------------------------------------------------


FAMILIES = ("llama", "gemma2", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Of ``tests/gpu/test_gpu_equivalence.py``: a case each, so that a lease that ends loses one."""


def equivalence(section: Section, args: argparse.Namespace) -> None:
    """The tests that compare streamed with resident models on the device, and of its kernels."""
    cases = [(f"equivalence {f}", "test_gpu_equivalence.py", f) for f in FAMILIES]
    cases.append(("equivalence rest", "test_gpu_equivalence.py", f"not ({' or '.join(FAMILIES)})"))
    cases += [("card", "test_gpu_card.py", ""), ("packed", "test_gpu_packed.py", "")]
    cases.append(("training", "test_gpu_training.py", ""))
    for name, file, words in cases:
        section.case(name, pytest_case(args, file, words))


def pytest_case(
    args: argparse.Namespace, file: str, words: str, each_s: int = 120
) -> Callable[[float], dict[str, Any]]:
    """A case: the tests of a file in ``tests/gpu`` that have ``words``, on the device, of at most
    ``each_s`` seconds each."""
    if file == "test_gpu_equivalence.py":
        on = "sim" if args.device == "sim" else "cuda"
        words = f"{on} and {words}" if words else on
    marked = [] if args.device == "sim" else ["-m", "gpu"]
    command = [
        sys.executable, "-m", "pytest", f"tests/gpu/{file}", "-q", "-p", "no:cacheprovider",
        # Where it is installed it warns of xdist, and warnings are errors here.
        "-p", "no:benchmark",
        "-o", f"timeout={each_s}", "--tb=short", *marked, "-k", words,
    ]  # fmt: skip

    def run(left: float) -> dict[str, Any]:
        code, out, errors = finish(command, left, {})
        said = out.strip().splitlines()
        if code == NO_TESTS and args.device == "sim":
            return {"skipped": "these need a card"}
        if code:
            raise RuntimeError(last_words(out, errors))
        return {"said": said[-1] if said else ""}

    return run


def link(section: Section, args: argparse.Namespace) -> None:
    """Rates of copies of our arenas against torch's."""
    nbytes = 64 * MIB if args.tiny else 4 * GIB
    job = {"kind": "link", "device": args.device, "nbytes": nbytes}
    section.case("rates", lambda left: run_case(job, left))


def link_rate(args: argparse.Namespace) -> float | None:
    """What the section ``link`` has measured: the bound of all that is streamed."""
    file = Path(args.out) / "link.json"
    if not file.is_file():
        return None
    rates = json.loads(file.read_text())["cases"].get("rates", {})
    best = rates.get("torch_pinned") or rates.get("arena") or {}
    found = best.get("h2d_bytes_per_s")
    return float(found) if found else None


def model_for(args: argparse.Namespace, name: str, config: dict[str, Any]) -> Path:
    """A random checkpoint: tiny, or of ``benchmarks/configs/NAME.json``."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    file = HERE.parent / "configs" / f"{name}.json"
    if args.tiny:
        file = work / f"tiny-{name}.json"
        file.write_text(json.dumps(config))
    out = work / file.stem
    make_model(file, out)
    return out


def dense(section: Section, args: argparse.Namespace) -> None:
    """Decode and prefill with the model 2, 4 and 8 times larger than the device's memory."""
    job = model_job(args, model_for(args, args.dense, TINY))
    section.case("resident", lambda left: run_case({**job, "kind": "resident"}, left))
    for ratio in (2, 4, 8):
        streamed = {**job, "kind": "stream", "ratio": ratio}
        found = section.case(f"offload 1/{ratio}", lambda left, j=streamed: run_case(j, left))
        if found is not None:
            peer = {**job, "kind": "accelerate", "gpu": found["gpu_budget_bytes"]}
            section.case(f"accelerate 1/{ratio}", lambda left, j=peer: run_case(j, left))


def kernels(section: Section, args: argparse.Namespace) -> None:
    """The kernels for packed weights: right on this card, and how fast against its memory."""
    device = {"device": args.device}
    section.case("agree", lambda left: run_case({**device, "kind": "kernels agree"}, left))
    size = {"rows": 4096, "columns": 4096, "nbytes": 1 * GIB}
    section.case("rates", lambda left: run_case({**device, **size, "kind": "kernels"}, left))


def moe(section: Section, args: argparse.Namespace) -> None:
    """Decode with slots on the device for a tenth, a quarter and half of the experts, packed in
    4.5 bits and as they are."""
    model = model_for(args, args.moe, TINY_MOE)
    job = {**model_job(args, model), "moe": True}

    def packed(left: float, share: float) -> dict[str, Any]:
        pack = model.with_name(f"{model.name}-q4")
        pack_model(model, pack, "q4")
        return run_case({**job, "kind": "stream", "model": str(pack), "share": share}, left)

    for share in (0.1, 0.25, 0.5):
        section.case(f"packed q4 {share:.0%}", lambda left, s=share: packed(left, s))
    section.case("resident", lambda left: run_case({**job, "kind": "resident"}, left))
    for share in (0.1, 0.25, 0.5):
        streamed = {**job, "kind": "stream", "share": share}
        found = section.case(f"offload {share:.0%}", lambda left, j=streamed: run_case(j, left))
        if found is not None:
            peer = {**job, "kind": "accelerate", "gpu": found["gpu_budget_bytes"]}
            section.case(f"accelerate {share:.0%}", lambda left, j=peer: run_case(j, left))


def model_job(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    return {
        "device": args.device,
        "model": str(model),
        "ram": weights + weights // 4 + (GIB if args.tiny else 6 * GIB),
        "prompts": [16, 64] if args.tiny else [16, 512, 2048],
        "tokens": 6 if args.tiny else 33,
        "link_bytes_per_s": link_rate(args),
    }


def training(section: Section, args: argparse.Namespace) -> None:
    """Steps with everything on the device, with torchao's optimizer, and ours."""
    model = model_for(args, args.train, TINY)
    job = {
        **model_job(args, model), "work": args.work, "seq_len": 64 if args.tiny else 1024,
        "steps": 3 if args.tiny else 6,
    }  # fmt: skip
    section.case("resident", lambda left: run_case({**job, "kind": "train resident"}, left))
    peer = {**job, "kind": "train resident", "offload_states": True}
    section.case("torchao offload", lambda left: run_case(peer, left))
    ours = {**job, "kind": "train offload"}
    section.case("offload on the CPU", lambda left: run_case(ours, left))
    for gib in (8, 16, 24):
        gpu = 256 * MIB if args.tiny else gib * GIB
        for clip, name in ((1.0, ""), (0.0, ", no clipping")):
            capped = {**ours, "gpu": gpu, "clip": clip}
            section.case(f"offload {gib} GiB{name}", lambda left, j=capped: run_case(j, left))
    # What the plan's choice of who updates is worth, and whether it is the right one.
    for updates in ("off", "1") if args.tiny else ("off", "4", "2", "1"):
        asked = {**ours, "gpu": gpu, "updates": updates}
        section.case(f"--gpu-updates {updates}", lambda left, j=asked: run_case(j, left))


def first(section: Section, args: argparse.Namespace) -> None:
    """What the first nine minutes on a new card can tell: a little of each thing, what others
    depend on before them, each with a limit of its own."""
    device = {"device": args.device}

    def of(limit_s: float, name: str, job: dict[str, Any]) -> dict[str, Any] | None:
        return section.case(name, lambda left: run_case({**device, **job}, left), limit_s)

    def tests(limit_s: float, name: str, file: str, words: str = "", each_s: int = 45) -> None:
        section.case(name, pytest_case(args, file, words, each_s), limit_s)

    of(90, "machine", {"kind": "machine"})
    of(60, "link", {"kind": "link", "nbytes": 64 * MIB if args.tiny else GIB})
    tests(90, "card", "test_gpu_card.py")
    of(60, "kernels agree", {"kind": "kernels agree"})
    tests(90, "equivalence llama", "test_gpu_equivalence.py", "llama")
    # Numba compiles the CPU's kernels, too, where it has not done so before.
    tests(120, "packed products", "test_gpu_packed.py", "products or experts", 90)
    tests(90, "equivalence qwen3_moe", "test_gpu_equivalence.py", "qwen3_moe")
    tests(90, "training", "test_gpu_training.py", "tile or llama and least or qwen3_moe and all")
    of(40, "kernels", {"kind": "kernels", "rows": 4096, "columns": 4096, "nbytes": GIB // 2})

    def streamed(left: float) -> dict[str, Any]:
        model = model_for(args, args.train, TINY)
        job = {**model_job(args, model), "prompts": [16, 256], "kind": "stream", "ratio": 2}
        return run_case(job, left)

    section.case("dense 1/2", streamed, 90)

    def trained(left: float) -> dict[str, Any]:
        model = model_for(args, args.train, TINY)
        job = {
            **model_job(args, model), "kind": "train offload", "work": args.work, "steps": 4,
            "seq_len": 64 if args.tiny else 512, "gpu": 256 * MIB if args.tiny else 2 * GIB,
        }  # fmt: skip
        return run_case(job, left)

    section.case("a step", trained, 90)

    def write(_: float) -> dict[str, Any]:
        model = model_for(args, "moe-tiny", TINY_MOE) if args.tiny else small_moe(args)
        pack_model(model, model.with_name(f"{model.name}-q4"), "q4")
        return {"model": str(model)}

    written = section.case("pack", write, 120)
    if written is not None:
        model = Path(written["model"])
        job = {**model_job(args, model), "prompts": [16, 256], "moe": True, "share": 0.25}
        pack = str(model.with_name(f"{model.name}-q4"))
        of(80, "packed experts 25%", {**job, "kind": "stream", "model": pack})
    tests(200, "packed models", "test_gpu_packed.py", "three_lines", 150)
    for family in ("gpt_oss", "deepseek_v3", "gemma2", "gpt2"):
        tests(90, f"equivalence {family}", "test_gpu_equivalence.py", family)


def small_moe(args: argparse.Namespace) -> Path:
    """A random checkpoint with experts that is written in seconds."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    file = work / "moe-small.json"
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
             "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4,
             "num_hidden_layers": 8, "vocab_size": 8192}  # fmt: skip
    file.write_text(json.dumps({**TINY_MOE, **sizes}))
    out = work / file.stem
    make_model(file, out)
    return out


SECTIONS = {
    "first": first, "equivalence": equivalence, "link": link, "kernels": kernels, "dense": dense,
    "moe": moe, "training": training,
}  # fmt: skip
"""By what is worth most if the time runs out: whether it is right, what bounds it, how near it
comes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--section", required=True, choices=[*SECTIONS, "all"])
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds for this call")
    parser.add_argument("--device", choices=["cuda", "sim", "simulated"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models; implied by sim")
    parser.add_argument("--dense", default="dense-4g", help="of benchmarks/configs")
    parser.add_argument("--moe", default="moe-4g", help="of benchmarks/configs")
    parser.add_argument("--train", default="dense-174m", help="of benchmarks/configs")
    parser.add_argument("--out", default=os.environ.get("OUT") or "gpu-results")
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "offload-gpu-bench"))
    args = parser.parse_args()
    args.device = "sim" if args.device == "simulated" else args.device
    args.tiny = args.tiny or args.device == "sim"
    args.out, args.work = (str(Path(d).absolute()) for d in (args.out, args.work))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("torch sees no card here; --device sim tries the program out", file=sys.stderr)
            return FAILED
    deadline = time.monotonic() + args.deadline
    codes = []
    whole = [name for name in SECTIONS if name != "first"]
    for name in whole if args.section == "all" else [args.section]:
        section = Section(name, args, deadline)
        SECTIONS[name](section, args)
        codes.append(section.end())
    return FAILED if FAILED in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
