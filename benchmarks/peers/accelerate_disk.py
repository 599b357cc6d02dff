"""The peer: accelerate's disk offload, in its two forms.

``prepare`` makes the folder (needs memory for the whole model, so it runs unlimited);
``run`` generates from it and writes JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["prepare", "run"])
    parser.add_argument("form", choices=["disk_offload", "device_map"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--ram-bytes", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    model = disk_offload(args) if args.form == "disk_offload" else device_map(args)
    if args.step == "run":
        Path(args.json).write_text(json.dumps(generate(model, args.tokens)))


def disk_offload(args: argparse.Namespace) -> Any:
    """``accelerate.disk_offload``: every weight in one file each, read in forward hooks."""
    from accelerate import disk_offload, init_empty_weights
    from accelerate.utils import offload_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    if args.step == "prepare":
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
        offload_state_dict(args.folder, model.state_dict())
        return model
    config = AutoConfig.from_pretrained(args.model)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.eval()
    return disk_offload(model, args.folder, execution_device=torch.device("cpu"))


def device_map(args: argparse.Namespace) -> Any:
    """``from_pretrained(device_map="auto", offload_folder=…)`` with the same RAM budget."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype="auto",
        device_map="auto",
        max_memory={"cpu": args.ram_bytes},
        offload_folder=args.folder,
    )


def generate(model: Any, tokens: int) -> dict[str, Any]:
    """Greedy decoding; the rate counts from the second token on."""
    times: list[float] = []

    class Clock:
        def put(self, _: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    ids = torch.arange(5, 21)[None]
    model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=Clock(),
        pad_token_id=0,
    )
    steps = [b - a for a, b in itertools.pairwise(times[1:])]
    return {"decode_tok_s": len(steps) / sum(steps) if steps else None, "steps_s": steps}


if __name__ == "__main__":
    main()
