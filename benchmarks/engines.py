"""Which engine, queue depth and request size this disk likes.

    python benchmarks/engines.py --file /scratch/model-00001-of-00002.safetensors

aiofiles is the default unless it is more than 5 % slower than plain threads on the same disk.
Candidates take turns, so that a drifting disk treats them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from common import facts, record, settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", required=True, help="a large file on the disk to measure; read")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests-mib", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib-per-round", type=int, default=256)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from offload.io.tune import compare_engines, tune

    sizes = [m << 20 for m in args.requests_mib]
    per_round = args.mib_per_round << 20
    both = compare_engines(args.file, rounds=args.rounds, bytes_per_round=per_round)
    print(
        f"depth 4, 4 MiB: {both.default.engine} {both.default.bytes_per_s / 1e9:.2f} GB/s, "
        f"{both.other.engine} {both.other.bytes_per_s / 1e9:.2f} GB/s, ratio {both.ratio:.3f} "
        f"({both.mode}): use {both.choice}"
    )
    tuned = tune(
        args.file,
        queue_depths=args.depths,
        request_sizes=sizes,
        rounds=args.rounds,
        bytes_per_round=per_round,
    )
    for rate in sorted(tuned.rates, key=lambda r: -r.bytes_per_s):
        print(
            f"{rate.engine:>9} depth {rate.queue_depth} x {rate.request_bytes >> 20} MiB: "
            f"{rate.bytes_per_s / 1e9:.2f} GB/s (spread {rate.spread:.0%})"
        )
    print(f"cheapest good one: {tuned.best.engine} {tuned.best.queue_depth} x "
          f"{tuned.best.request_bytes >> 20} MiB")  # fmt: skip
    result = {
        "benchmark": "engines",
        "facts": facts(),
        "settings": settings(args),
        "comparison": {
            "default": dataclasses.asdict(both.default),
            "other": dataclasses.asdict(both.other),
            "ratio": both.ratio,
            "choice": both.choice,
            "mode": both.mode,
        },
        "rates": [dataclasses.asdict(r) for r in tuned.rates],
        "best": dataclasses.asdict(tuned.best),
    }
    print(f"written to {record('engines', result, args.output)}")


if __name__ == "__main__":
    main()
