"""Is an LM head in slices bit-equal to the whole on this machine?

``F.linear(x, W)[a:b] == F.linear(x, W[a:b])`` holds bit for bit if the kernel sums every output
in the same order whatever the number of rows of ``W``. BLAS libraries promise nothing of the
kind, so it is tried: in a process of its own (the whole ``W`` may not fit this one's budget), on a
``W`` of the real shape whose memory is a few megabytes mapped again and again.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import torch

from offload.runtime.known import Known

logger = logging.getLogger(__name__)

ROWS_TRIED = (1, 2, 3, 4, 5, 8, 16)
"""Numbers of rows of ``x`` that are tried: one sequence, beams, small batches."""

OUTPUTS_TRIED = 2**18
"""Outputs compared for each number of rows, at least: two kernels that sum in another order agree
on all but one in thousands after rounding to bfloat16, so a small head needs many draws."""

_PROBE = """
import ctypes, json, math, mmap, os, sys
import torch
import torch.nn.functional as F
job = json.loads(sys.argv[1])
torch.set_num_threads(job["threads"])
device = torch.device(job.get("device", "cpu"))
dtype = getattr(torch, job["dtype"])
V, H, step = job["vocabulary"], job["width"], job["slice"]
generator = torch.Generator().manual_seed(0)
def random(rows):
    return torch.randn(rows, H, generator=generator, dtype=torch.float32)
def in_ram():
    size = torch.empty(0, dtype=dtype).element_size()
    page = mmap.ALLOCATIONGRANULARITY
    row = H * size
    # Period: whole rows and whole pages, so that the pattern repeats without a seam.
    unit = math.lcm(page, row)
    period = unit * max(1, (4 << 20) // unit)
    start = job["phase"]
    total = -(-(V * row + start) // period) * period
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    i32 = ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, i32, i32, i32, ctypes.c_long]
    fd = os.memfd_create("head")
    os.ftruncate(fd, period)
    base = libc.mmap(None, total, 0, 0x22, -1, 0)
    for at in range(0, total, period):
        got = libc.mmap(base + at, period, 3, 0x11, fd, 0)
        if got != base + at:
            raise OSError("mmap failed")
    whole = (ctypes.c_char * (V * row)).from_address(base + start)
    W = torch.frombuffer(whole, dtype=dtype).view(V, H)
    rows = (period - start) // row
    W[:rows] = (random(min(rows, V)) * 0.05).to(dtype)
    return W
def on_card():
    W = torch.empty(V, H, dtype=dtype, device=device)
    some = (random(min(V, 4096)) * 0.05).to(dtype).to(device)
    for at in range(0, V, len(some)):
        W[at:at + len(some)] = some[:V - at]
    return W
W = in_ram() if device.type == "cpu" else on_card()
good = []
for m in job["rows"]:
    equal = True
    for _ in range(max(2, job["outputs"] // (m * V))):
        x = random(m).to(dtype).to(device)
        want = F.linear(x, W)
        for a in range(0, V, step):
            if not torch.equal(F.linear(x, W[a:a + step]), want[:, a:a + step]):
                equal = False
                break
        if not equal:
            break
    if equal:
        good.append(m)
print(json.dumps(good))
"""


def verified_rows(
    vocabulary: int,
    width: int,
    dtype: torch.dtype,
    slice_rows: int,
    threads: int,
    rows: tuple[int, ...] = ROWS_TRIED,
    phase: int = 0,
    device: str = "cpu",
) -> frozenset[int]:
    """Which of these numbers of input rows give bit-equal slices here; cached per machine.

    ``phase``: where the weight starts within 64 bytes. ``device``: what multiplies, by torch's
    name; a card needs room for the whole weight for a moment, outside of any budget.

    Empty if it cannot be tried (then the head must stay whole).
    """
    from offload.runtime.cuda_api import card_name
    from offload.runtime.hardware_cache import cpu_name

    job = {
        "vocabulary": vocabulary,
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "slice": slice_rows,
        "threads": threads,
        "rows": list(rows),
        "outputs": OUTPUTS_TRIED,
        "phase": phase,
    }
    where = cpu_name()
    if device != "cpu":
        job["device"] = device
        where = card_name(device)
    key = json.dumps({**job, "torch": torch.__version__, "cpu": where}, sort_keys=True)
    known = Known("head_slices.json")
    found = known.get(key)
    if isinstance(found, list):
        return frozenset(found)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(job)],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        good = [int(m) for m in json.loads(done.stdout.strip().splitlines()[-1])]
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        stderr = (getattr(error, "stderr", None) or "").strip().splitlines()[-1:]
        logger.warning(
            "whether LM head slices are bit-equal could not be tried (%s %s): the head stays whole",
            error,
            *stderr,
        )
        return frozenset()
    known.put(key, good)
    return frozenset(good)
