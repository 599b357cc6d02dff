"""What every benchmark records and how it limits memory."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def facts() -> dict[str, Any]:
    """Hardware, versions and commit, so that a result can be judged later."""
    import psutil
    import torch
    import transformers

    cpu = platform.processor() or platform.machine()
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
            if line.startswith("flags"):
                flags = line
    except OSError:
        pass  # not Linux: the processor's name has to do
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "isa": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in flags],
        "ram_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }


def settings(args: argparse.Namespace) -> dict[str, str]:
    """The flags of a run, without those that only say where files are on this machine."""
    return {
        k: str(v)
        for k, v in vars(args).items()
        if not isinstance(v, Path) and not str(v).startswith("/")
    }


def record(name: str, result: dict[str, Any], output: Path | None) -> Path:
    """Write a result as JSON; returns where."""
    target = output or RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    return target


@contextmanager
def memory_group(limit_bytes: int | None) -> Any:
    """A cgroup that bounds memory *and* page cache; yields a command prefix.

    Yields None if the system does not let us make one (then nothing is limited, and the result
    says so).
    """
    if limit_bytes is None:
        yield []
        return
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"offload-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        try:
            enter = f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"'
            yield ["sh", "-c", enter]
        finally:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)
        return
    yield None


def drop_page_cache() -> bool:
    """Empty the page cache, so that buffered peers read the disk; False if not allowed."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def offload_command(*args: str) -> list[str]:
    """The command line of this checkout."""
    code = "import sys; from offload.__main__ import run; sys.exit(run())"
    return [sys.executable, "-c", code, *args]


def run_limited(
    command: Sequence[str], limit_bytes: int | None, timeout_s: float
) -> tuple[int, str, bool]:
    """Run in a memory group; returns (exit code, last of stderr, whether it was limited)."""
    with memory_group(limit_bytes) as prefix, tempfile.TemporaryFile("w+") as err:
        limited = prefix is not None and limit_bytes is not None
        try:
            done = subprocess.run(
                [*(prefix or []), *command],
                stdout=subprocess.DEVNULL,
                stderr=err,
                timeout=timeout_s,
                check=False,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
        err.seek(0)
        return code, err.read()[-2000:], limited


def ssd_rate(directory: Path, limit_bytes: int = 4 << 30) -> float:
    """Bytes per second of O_DIRECT reads of a checkpoint's files, in order, once.

    The whole files, not a part over and over: what a virtual disk's host has cached would be
    measured instead of the disk. 4 requests of 4 MiB in flight, as offload reads by default.
    """
    from contextlib import ExitStack
    from functools import partial

    from offload.io.engines import make_engine
    from offload.io.files import DirectFile
    from offload.io.memory import Staging

    depth, request = 4, 4 << 20
    engine, staging = make_engine(queue_depth=depth), Staging(depth, request)

    def fetch(file: Any, offset: int) -> int:
        with staging.chunk() as chunk:
            return int(file.read(offset, chunk.view))

    with ExitStack() as stack:
        files = [
            stack.enter_context(DirectFile.open(p))
            for p in sorted([*directory.glob("*.safetensors"), *directory.glob("bundle-*.bin")])
        ]
        places = [
            (file, offset)
            for file in files
            for offset in range(0, file.size // 4096 * 4096 - request, request)
        ][: limit_bytes // request]
        began = time.perf_counter()
        jobs = [engine.submit(partial(fetch, file, offset)) for file, offset in places]
        total = sum(job.result() for job in jobs)
        seconds = time.perf_counter() - began
        engine.close()
        staging.close()
    return total / seconds
