"""The streaming peer: DeepSpeed's ZeRO-Infinity on its CPU accelerator, one process.

ZeRO stage 3 in bfloat16; optimizer states and parameters in files (``--where nvme``) or in RAM
(``cpu``), its own CPU Adam, its own asynchronous I/O (16 requests of 1 MiB at a time), activations
checkpointed. A buffer for parameters takes the largest one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

ALONE = {
    "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517",
}  # fmt: skip
"""What a launcher would tell the only process of a run; read while deepspeed is imported."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="only its config is read")
    parser.add_argument("--where", choices=["nvme", "cpu"], default="nvme")
    parser.add_argument("--swap", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--max-grad-norm", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    os.environ.update(ALONE)
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    args.swap.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(args.model)
    settings = zero(args, largest=config.hidden_size * config.vocab_size)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    engine, *_ = deepspeed.initialize(
        model=model, config=settings, model_parameters=model.parameters()
    )
    ids = torch.randint(3, config.vocab_size, (1, args.tokens))
    steps, phases, losses = [], [], []
    for _ in range(args.steps):
        times = [time.perf_counter()]
        loss = engine(input_ids=ids, labels=ids).loss
        times.append(time.perf_counter())
        engine.backward(loss)
        times.append(time.perf_counter())
        engine.step()
        times.append(time.perf_counter())
        steps.append(times[-1] - times[0])
        phases.append([b - a for a, b in itertools.pairwise(times)])
        losses.append(float(loss.detach()))
    result = {
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "parameters": sum(p.ds_numel for p in model.parameters()),
        "steps_s": steps,
        "phases_s": phases,
        "losses": losses,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    args.json.write_text(json.dumps(result))


def zero(args: argparse.Namespace, largest: int) -> dict[str, Any]:
    """DeepSpeed's settings; ``largest``: elements of the largest parameter."""
    place = {"device": args.where, "pin_memory": False}
    if args.where == "nvme":
        place["nvme_path"] = str(args.swap)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": args.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**place, "buffer_count": 5},
            "offload_param": {
                **place, "buffer_count": 6, "buffer_size": max(largest, 30_000_000),
            },
        },
        "aio": {
            "block_size": 1 << 20, "queue_depth": 16, "thread_count": 1,
            "single_submit": False, "overlap_events": True,
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
