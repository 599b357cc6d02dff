"""Training steps beside a card: cases of ``case.py``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def resident(job: dict[str, Any]) -> dict[str, Any]:
    """Everything on the device: bfloat16 autocast over float32 weights, gradient checkpointing,
    ``AdamW(fused=True)``; with ``offload_states`` torchao's ``CPUOffloadOptimizer``."""
    from transformers import AutoModelForCausalLM

    place = "cuda" if job["device"] == "cuda" else "cpu"
    kwargs: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.0, "fused": True}
    if job.get("offload_states"):
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            return {"skipped": f"torchao: {error}"}
        if place != "cuda":
            return {"skipped": "torchao's optimizer is one of a card"}
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).train()
    model.to(place)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    if job.get("offload_states"):
        optimizer: Any = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **kwargs)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, job["seq_len"]), generator=generator)
    ids = ids.to(place)
    seconds, losses = [], []
    for _ in range(job["steps"]):
        began = time.perf_counter()
        with torch.autocast(place, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for the card
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if place == "cuda" else None
    return figures(job, seconds, losses) | {"device_peak_bytes": peak}


def offload(job: dict[str, Any]) -> dict[str, Any]:
    """``offload finetune`` with the states on the disk. Without ``gpu`` the CPU computes; with it
    layers do on the device, and so does the head where that is predicted to be faster. ``clip``: 0
    for none, whose updates run inside backward. ``updates``: ``--gpu-updates``."""
    from finetune_inputs import text, tokenizer, vocabulary

    model = Path(job["model"])
    if not (model / "tokenizer.json").exists():
        tokenizer(vocabulary(model)).save_pretrained(model)
    with tempfile.TemporaryDirectory(dir=job["work"]) as folder:
        work = Path(folder)
        data = text(work / "train.txt", vocabulary(model), job["seq_len"], job["steps"])
        events_file = work / "events.jsonl"
        command = [
            sys.executable, "-m", "offload", "finetune", "--model", str(model), "--data", str(data),
            "--output", str(work / "out"), "--disk", str(work / "states"), "--ram", str(job["ram"]),
            "--max-steps", str(job["steps"]), "--seq-len", str(job["seq_len"]), "--schedule",
            "constant", "--warmup", "0", "--json", str(events_file), "--no-tensorboard",
        ]  # fmt: skip
        if job.get("gpu"):
            command += ["--gpu", str(job["gpu"])]
            command += ["--device", "sim"] * (job["device"] != "cuda")
            command += ["--gpu-updates", job.get("updates", "auto")]
        if "clip" in job:
            command += ["--max-grad-norm", str(job["clip"])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:])
        events = [json.loads(line) for line in events_file.read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    start, end = events[0], events[-1]
    peak, gpu = end["device_peak_bytes"], job.get("gpu")
    return figures(job, [e["seconds"] for e in steps], [e["loss"] for e in steps]) | {
        "computes_on": "device" if job.get("gpu") else "cpu",
        "peak_rss_bytes": end["peak_rss_bytes"],
        "within_budget": end["peak_rss_bytes"] <= end["budget_bytes"],
        "device_peak_bytes": peak,
        "device_within_budget": None if peak is None or not gpu else peak <= gpu,
        "predicted_step_s": start.get("predicted_step_s"),
        "lanes": [e.get("lanes") for e in steps[1:]],
        "plan": start.get("plan"),
    }


def figures(job: dict[str, Any], seconds: list[float], losses: list[float]) -> dict[str, Any]:
    """The first step warms up."""
    steady = sorted(seconds[1:])
    median = steady[len(steady) // 2]
    return {
        "steps_s": seconds, "step_s": median, "tok_s": job["seq_len"] / median, "losses": losses,
    }  # fmt: skip


__all__ = ["offload", "resident"]
