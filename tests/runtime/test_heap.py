"""Large blocks that are freed are the system's again; the end of a small budget's heap stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offload.runtime.heap import LARGE_BYTES, LEAST_LARGE_BYTES, SMALL_BUDGET, large_bytes

LIBC = """
import ctypes, sys

class MallInfo(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    print("skip")
    sys.exit()
libc.mallinfo2.restype = MallInfo
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
"""

RETURN = """
from offload.runtime.heap import LARGE_BYTES, return_large_blocks

if sys.argv[1] == "yes":
    assert return_large_blocks() and return_large_blocks()
size = 3 * LARGE_BYTES
libc.free(libc.malloc(size))  # from now on glibc would put blocks of this size on its heap
blocks = []
for _ in range(8):
    blocks.append(libc.malloc(size))
    libc.malloc(100_000)  # stays, so that the heap cannot shrink
for block in blocks:
    libc.free(block)
print(libc.mallinfo2().fordblks // size)
"""


def left_behind(how: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", LIBC + RETURN, how], capture_output=True, text=True, check=True
    )
    if run.stdout.strip() == "skip":
        pytest.skip("this C library does not say what its heap holds")
    return int(run.stdout)


def test_large_blocks_are_returned() -> None:
    assert left_behind("yes") == 0


def test_the_default_keeps_them() -> None:
    """Else there would be nothing to mend."""
    assert left_behind("no") >= 6


SMALL = """
from offload.runtime import heap

budget = 2**25
libc.free(libc.malloc(3 * heap.LARGE_BYTES))  # what is large to glibc grows
assert getattr(heap, sys.argv[1])(budget)
size = 2**20
blocks = []
for _ in range(40):
    blocks.append(libc.malloc(size))
    libc.malloc(100_000)
for block in blocks:
    libc.free(block)
print(libc.mallinfo2().fordblks // size)
"""


@pytest.mark.parametrize("how", ["return_large_blocks", "keep_small_heap"])
def test_a_block_is_large_beside_its_budget(how: str) -> None:
    """A prompt's activations in blocks of 1 MiB leave nothing behind of a budget of 32 MiB."""
    run = subprocess.run(
        [sys.executable, "-c", LIBC + SMALL, how], capture_output=True, text=True, check=True
    )
    if run.stdout.strip() == "skip":
        pytest.skip("this C library does not say what its heap holds")
    assert int(run.stdout) <= 2


def test_what_is_large_is_a_share_of_small_budgets() -> None:
    sizes = [large_bytes(n) for n in (2**20, 2**25, SMALL_BUDGET, 2**40, None)]
    assert sizes == [LEAST_LARGE_BYTES, 2**19, LARGE_BYTES, LARGE_BYTES, LARGE_BYTES]


KEEP = """
from offload.runtime import heap
from offload.runtime.rss import current_rss

def used(blocks=8, size=3 * heap.LARGE_BYTES):
    \"\"\"Resident bytes more, in blocks, when blocks have been used and freed.\"\"\"
    before = current_rss()
    held = []
    for _ in range(blocks):
        held.append(libc.malloc(size))
        ctypes.memset(held[-1], 1, size)
        pins.append(libc.malloc(100_000))
    for block in held:
        libc.free(block)
    return round((current_rss() - before) / size)

libc.free.restype = None
pins = []
heap.return_large_blocks()
said = [used()]
with heap.keeping_freed():
    with heap.keeping_freed():
        said.append(used())
    said.append(used())  # the inner one's end changes nothing: these are found again
    inside = current_rss()
said.append(round((current_rss() - inside) / (3 * heap.LARGE_BYTES)))
rss = current_rss()
calm, full = heap.GiveBack(rss + 2**30, 2**29), heap.GiveBack(rss + 2**30, 2**30 + 2**20)
with heap.keeping_freed():
    used()
    calm()
    kept = current_rss()
    full()
    said += [calm.times, full.times, round((current_rss() - kept) / (3 * heap.LARGE_BYTES))]
print(*said)
"""


def test_freed_blocks_can_be_kept_for_a_while() -> None:
    """And are given back behind it, or where a limit comes near, and only there."""
    run = subprocess.run(
        [sys.executable, "-c", LIBC + KEEP], capture_output=True, text=True, check=True
    )
    if run.stdout.strip() == "skip":
        pytest.skip("this C library does not say what its heap holds")
    before, inside, again, behind, calm, full, given = map(int, run.stdout.split())
    assert before == 0
    assert inside >= 7
    assert again <= 2
    assert behind <= -7
    assert (calm, full) == (0, 1)
    assert given <= -7


END = """
from offload.runtime.heap import keep_small_heap

print(keep_small_heap(int(sys.argv[1])), end=" ")
for block in [libc.malloc(100_000) for _ in range(60)]:
    libc.free(block)
print(libc.mallinfo2().keepcost)
"""


@pytest.mark.parametrize(("budget", "kept"), [(SMALL_BUDGET - 1, True), (SMALL_BUDGET, False)])
def test_a_small_budget_keeps_the_end_of_its_heap(budget: int, kept: bool) -> None:
    """What was free when the process was weighed is not the system's a moment later."""
    run = subprocess.run(
        [sys.executable, "-c", LIBC + END, str(budget)], capture_output=True, text=True, check=True
    )
    if run.stdout.strip() == "skip":
        pytest.skip("this C library does not say what its heap holds")
    done, free = run.stdout.split()
    assert done == str(kept)
    assert (int(free) > 5_000_000) == kept
