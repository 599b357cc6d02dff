"""Fine-tuning runs that are killed (kill -9) again and again, and their results.

    python tests/campaigns/finetune_crash.py --points 200 --seed 1 --json finetune-crash.json

Each *point* is a run of a tiny model that is killed once or more, is continued with ``--resume``
under another budget, another order of micro-batches and another distance of commits, and must end
with the weights of the run that nobody disturbed, byte for byte (see ``kills``).

Exit code 0: every point ended with the right weights. 1: some did not; their directories are kept.
"""

from __future__ import annotations

import random
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from kills import Killer, Trial, Work, main, prepare_process

prepare_process()

CASES: dict[str, dict[str, Any]] = {
    "llama fp32": {"family": "llama"},
    "llama bf16 unclipped": {"family": "llama", "states": "bf16", "max_grad_norm": 0.0},
    "llama masters 8bit": {"family": "llama-float32", "states": "8bit", "dtype": "bfloat16"},
    "moe fp32 accumulated": {"family": "qwen3_moe", "grad_accum": 2},
    "moe bf16": {"family": "qwen3_moe", "states": "bf16"},
    "llama best": {
        "family": "llama",
        "eval_share": 0.3,
        "eval_every": 1,
        "lr": 0.1,
        "schedule": "constant",
    },
    "moe untouched": {
        "family": "qwen3_moe",
        "seq_len": 3,
        "batch_size": 1,
        "skip_untouched_experts": True,
    },
    "llama lora merged": {"family": "llama", "method": "lora", "merge": True, "lora_r": 4},
    "moe lora balanced": {
        "family": "qwen3_moe",
        "method": "lora",
        "lora_r": 4,
        "lora_dropout": 0.1,
        "router_aux_loss": 0.1,
    },
    "llama both retained": {
        "family": "llama",
        "states": "bf16",
        "eval_share": 0.3,
        "eval_every": 1,
        "lr": 0.1,
        "schedule": "constant",
        "keep": "both",
        "save_total_limit": 2,
    },
}


class Finetune(Trial):
    name = "finetune_crash"
    cases = tuple(CASES)
    most_kills = 3
    again = 0.3
    patience_s = 120.0
    pattern = "*.safetensors"

    def warm(self, place: Path) -> None:
        import torch
        from run_support import train, write_data, write_model

        self.load(place)
        models = self._models
        write_model(models["llama"], "llama")
        write_model(models["llama-float32"], "llama", torch.float32)
        write_model(models["qwen3_moe"], "qwen3_moe")
        write_data(self._data)
        for case in CASES:
            train(self._options(case, place / "warm"))
            shutil.rmtree(place / "warm")

    def load(self, place: Path) -> None:
        import run_support
        from tqdm import tqdm
        from transformers.models.llama import modeling_llama
        from transformers.models.qwen3_moe import modeling_qwen3_moe

        from offload.cpu_ops.optimizer_entries import squares_entry
        from offload.train import preparing

        del modeling_llama, modeling_qwen3_moe
        squares_entry("bf16")  # the first kernel of a process takes Numba 0.4 s
        preparing.step_rates = lambda *_: None  # type: ignore[assignment]  # would measure for seconds
        preparing.warm_training = run_support.not_warmed  # type: ignore[assignment]
        tqdm.monitor_interval = 0  # its thread would not survive the fork
        families = ("llama", "llama-float32", "qwen3_moe")
        self._models = {family: place / f"model-{family}" for family in families}
        self._data = place / "data.jsonl"

    def _options(self, case: str, place: Path, **more: Any) -> Any:
        from run_support import options_for

        given = dict(CASES[case])
        model = self._models[given.pop("family")]
        return options_for(model, self._data, place, **{**given, **more})

    def attempt(self, case: str, place: Path, rng: random.Random | None) -> tuple[str, Work]:
        if rng is None:
            return "", partial(_run, self._options(case, place), False)
        resume = (place / "disk" / "tiles.bin").exists()
        options = self._options(
            case, place, resume=resume,
            ram=rng.choice((112 << 20, 160 << 20, 1 << 30)),
            order=rng.choice(("vertical", "usual")),
            save_every=rng.choice((1, 1, 2, 2 if "save_total_limit" in CASES[case] else None)),
        )  # fmt: skip
        on_disk = rng.random() < 0.5
        text = (
            f"resume={resume} ram={options.ram >> 20} order={options.order} "
            f"save_every={options.save_every} on_disk={on_disk}"
        )
        return text, partial(_run, options, on_disk)

    def result(self, place: Path) -> Path:
        return place

    def digests(self, place: Path) -> dict[str, str]:
        """Of the output, and of the adapter or the last weights beside it. What is hidden beside
        them counts, too: a run that has ended leaves nothing half written."""
        found = super().digests(place)
        hidden = {p.name: "left behind" for p in place.glob(".out*")}
        return {k: v for k, v in found.items() if k.startswith("out")} | hidden

    def reached(self, place: Path) -> str:
        if (place / "out").exists():
            return "behind the output"
        if list(place.glob(".out*")):
            return "in the output"
        disk = place / "disk"
        commits = sorted(int(p.stem.split("-")[1]) for p in disk.glob("commit-*.json"))
        if (disk / "commit.tmp").exists():
            return "in a commit"
        if commits:
            return f"behind commit {commits[-1]}"
        return "before the first commit" if disk.exists() else "before the store"


def _run(options: Any, on_disk: bool, killer: Killer) -> None:
    """In a child: one run, from its options to its output."""
    from run_support import everything_on_disk, train

    stand_around(killer)
    train(options, change=everything_on_disk if on_disk else lambda _: None)


def stand_around(killer: Killer) -> None:
    """The calls of the tile store, and of the output, which are the module's own."""
    from offload.io.tile_directory import TileSyscalls
    from offload.io.tile_store import TileStore
    from offload.train import commits

    real = TileSyscalls()
    calls = TileSyscalls(
        pwritev=killer.around(real.pwritev, killer.half_of_pages(real.pwritev)),
        write=killer.around(real.write, killer.half_of_bytes(real.write)),
        fsync=killer.around(real.fsync),
        rename=killer.around(real.rename),
        unlink=killer.around(real.unlink),
    )

    class Store:
        create = staticmethod(partial(TileStore.create, syscalls=calls))
        open = staticmethod(partial(TileStore.open, syscalls=calls))

    commits.TileStore = Store  # type: ignore[assignment, misc]
    killer.around_os(("fsync", "rename", "mkdir", "unlink"))


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", Finetune(), points=200))
