"""How fast this machine multiplies with a pack's weights, alone and beside reading its files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from offload.cpu_ops.formats import Format, get_format
from offload.cpu_ops.kernels import gemm, gemv
from offload.cpu_ops.packing import packed_bytes
from offload.cpu_ops.threads import setup
from offload.io.pack_manifest import Kind, Layout
from offload.models.pack_reader import PackedModel
from offload.runtime.memory import HostMemory
from offload.runtime.probe_together import SIZES, Together, measure, measure_fewer
from offload.scheduler.costs import PACKED
from offload.scheduler.hardware import FLOP_PER_S, Hardware, Rate

TOGETHER = 32
"""Tokens of the products that tell what each token more costs: the same from the second to the
32nd within a tenth (q4, 2560 x 8704, two Zen 4 cores: 0.53 ms for one, 0.08 for each more), and a
quarter less in a long prompt."""

_SAMPLES, _SETTLE_S = 6, 0.02

_BYTE = 0x20
"""What weights are made of: no denormal and no NaN in any format's scale."""


class PackedProducts:
    """Products of our kernels; see ``probe_together.Products``."""

    def __init__(self, memory: HostMemory, fmt: Format) -> None:
        memory.fill(_BYTE)
        self._format, start = fmt, memory.tensor().data_ptr()
        self.nbytes: Sequence[int] = [packed_bytes(fmt, rows, columns) for rows, columns in SIZES]
        self._places = [range(start, start + memory.nbytes - n + 1, n) for n in self.nbytes]
        self._next = [0 for _ in SIZES]
        self._x = [np.ones(columns, np.float32) for _, columns in SIZES]
        self._out = [np.empty(rows, np.float32) for rows, _ in SIZES]

    def one(self, size: int) -> None:
        rows, columns = SIZES[size]
        places, at = self._places[size], self._next[size]
        self._next[size] = (at + 1) % len(places)
        gemv(self._format, places[at], rows, columns, self._x[size], self._out[size])

    def seconds(self, size: int, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self.one(size)
        return (time.perf_counter() - began) / count

    def tiny_s(self) -> float:
        return self.seconds(1, 20)


def main_format(pack: PackedModel) -> Format | None:
    """That of most packed bytes that a token uses: of experts, if there are any; None if nothing
    is packed."""
    counts: Counter[str] = Counter()
    experts = bool(pack.experts)
    for block in pack.manifest.blocks:
        if experts == (block.kind is Kind.EXPERT):
            for part in block.parts:
                if part.layout is Layout.PACKED:
                    counts[part.format] += part.nbytes
    return get_format(counts.most_common(1)[0][0]) if counts else None


def on_this_pack(
    hardware: Hardware, pack: PackedModel, *, fewer: bool = True
) -> tuple[Hardware, Hardware | None]:
    """The same machine as it is now, and (``fewer``) with one thread fewer: the read rate of the
    pack's own files, the rate of products with its weights, and what is left of either beside the
    other. The kernel is there.

    Raises:
        StoreError: a file cannot be read.
    """
    fmt = main_format(pack)
    files = sorted(pack.path.glob("bundle-*.bin"))
    if fmt is None:
        return hardware, None
    products = partial(PackedProducts, fmt=fmt)
    found = measure(files, PACKED, products)
    if found is None:
        return hardware, None
    less = measure_fewer(files, PACKED, products, setup) if fewer else None
    many = {**hardware.matmul, PACKED: many_tokens(fmt)}

    def on(found: Together) -> Hardware:
        # A product that begins where the last one ends, in the same region, costs its bytes.
        return replace(replace(found, product_s=0.0).on(hardware, PACKED), matmul=many)

    return on(found), None if less is None else on(less)


def many_tokens(fmt: Format) -> Rate:
    """Operations per second, two for each weight and token, of every token but the first, whose
    time is that of reading the weights."""
    rows, columns = SIZES[0]
    with closing(HostMemory(packed_bytes(fmt, rows, columns), "weights of the probe")) as memory:
        memory.fill(_BYTE)
        weights = memory.tensor().data_ptr()
        x_TK = np.ones((TOGETHER, columns), np.float32)
        out_TN = np.empty((TOGETHER, rows), np.float32)

        def seconds(tokens: int) -> float:
            began = time.perf_counter()
            gemm(fmt, weights, rows, columns, x_TK[:tokens], out_TN[:tokens])
            return time.perf_counter() - began

        until = time.perf_counter() + _SETTLE_S
        while time.perf_counter() < until:
            seconds(TOGETHER)
        one_s = min(seconds(1) for _ in range(_SAMPLES))
        operations = 2 * rows * columns * (TOGETHER - 1)
        more_s = [seconds(TOGETHER) - one_s for _ in range(_SAMPLES)]
        return Rate.of([operations / max(s, 1e-9) for s in more_s], FLOP_PER_S)
