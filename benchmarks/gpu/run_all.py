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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from case import GIB, make_model, pack_model  # noqa: E402
from common import ROOT, facts  # noqa: E402

DONE, FAILED, UNFINISHED = 0, 2, 3
MIB = 1 << 20

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
        self.data["facts"] = facts() | card_facts(self.device)
        self.failed: list[str] = []
        self.stopped = False

    def case(self, name: str, run: Callable[[float], dict[str, Any]]) -> dict[str, Any] | None:
        """The result of a case: from before, or run now with the seconds there are. None: it
        failed, or there is no time."""
        found = self.data["cases"].get(name)
        if found is not None and "error" not in found:
            return dict(found)
        left = self.deadline - time.monotonic()
        if self.stopped or left < max(20.0, 1.3 * self.longest_s):
            self.stopped = True
            return None
        began = time.monotonic()
        try:
            result = run(left)
        except subprocess.TimeoutExpired:
            self.stopped = True  # it gets all of the next call's time
            return None
        except RuntimeError as error:
            result = {"error": str(error)}
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
    done = subprocess.run(
        [sys.executable, str(HERE / "case.py"), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


# -- sections ---------------------------------------------------------------------------------


FAMILIES = ("llama", "gemma2", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Of ``tests/gpu/test_gpu_equivalence.py``: a case each, so that a lease that ends loses one."""


def equivalence(section: Section, args: argparse.Namespace) -> None:
    """The tests that compare streamed with resident models on the device, and of its kernels."""
    on_device = "sim" if args.device == "sim" else "cuda"
    rest = " or ".join(FAMILIES)
    cases = [
        (f"equivalence {f}", "test_gpu_equivalence.py", f"{on_device} and {f}") for f in FAMILIES
    ]
    cases.append(("equivalence rest", "test_gpu_equivalence.py", f"{on_device} and not ({rest})"))
    cases += [("card", "test_gpu_card.py", ""), ("packed", "test_gpu_packed.py", "")]
    for name, file, words in cases:

        def run(left: float, file: str = file, words: str = words) -> dict[str, Any]:
            marked = [] if args.device == "sim" else ["-m", "gpu"]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", f"tests/gpu/{file}", "-q", "-p",
                 "no:cacheprovider", "-o", "timeout=120", *marked, "-k", words],
                cwd=ROOT, capture_output=True, text=True, timeout=left, check=False,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            said = done.stdout.strip().splitlines()
            if done.returncode:
                raise RuntimeError("\n".join(said[-40:]))
            return {"said": said[-1] if said else ""}

        section.case(name, run)


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
        capped = {**ours, "gpu": gib * GIB}
        section.case(f"offload {gib} GiB", lambda left, j=capped: run_case(j, left))


SECTIONS = {
    "equivalence": equivalence, "link": link, "kernels": kernels, "dense": dense, "moe": moe,
    "training": training,
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
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("torch sees no card here; --device sim tries the program out", file=sys.stderr)
            return FAILED
    deadline = time.monotonic() + args.deadline
    codes = []
    for name in SECTIONS if args.section == "all" else [args.section]:
        section = Section(name, args, deadline)
        SECTIONS[name](section, args)
        codes.append(section.end())
    return FAILED if FAILED in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
