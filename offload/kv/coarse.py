"""Blocks in 8 or 4 bits: quantised when they are full, so that the newest tokens are never lossy.

    H heads, n tokens of a block, D head size

How, and why keys otherwise than values: ``offload.cpu_ops.block_elements``. Only attention that
reads blocks where they are takes them. A block that loses tokens again (a draft that was refused)
is read back into full precision; what it lost by rounding is not.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from offload.cpu_ops.block_layout import BlockKind
from offload.cpu_ops.block_layout import BlockLayout as KernelLayout
from offload.errors import OffloadError
from offload.kv.homes import KvHomes
from offload.kv.kernel_layout import is_latent, kernel_layout
from offload.kv.pool import Pool, Views
from offload.kv.shape import BlockLayout, KvShape
from offload.kv.store import BlockStore

QUANTISED = {"q8": BlockKind.Q8, "q4": BlockKind.Q4}
"""By what ``--kv`` calls them."""

WRITTEN = 2
"""Slots for full blocks on their way to their homes."""


def coarse_layout(shape: KvShape, tokens: int, kind: str) -> KernelLayout:
    """A block of full precision's counterpart.

    Raises:
        OffloadError: its head sizes are not what the kernels take in that kind.
        UnsupportedModelError: as ``kernel_layout``.
    """
    plain = kernel_layout(BlockLayout(shape, tokens))
    return KernelLayout(QUANTISED[kind], plain.key_heads, plain.key_dim, plain.dim, tokens)


def rounded_bytes(layout: KernelLayout) -> int:
    """Of a block's keys and values, without what lies between and behind them in a slot."""
    return layout.key_heads * (layout.stride(keys=True) + layout.stride(keys=False))


def slot_bytes_of(shape: KvShape, tokens: int, kind: str | None) -> int:
    """Of a block that is full; a latent cache, which the model expands, is not quantised."""
    if kind not in QUANTISED or is_latent(shape):
        return BlockLayout(shape, tokens).nbytes
    return coarse_layout(shape, tokens, kind).nbytes


def stored_shape(shape: KvShape, kind: str | None) -> KvShape:
    """A layer's keys and values as blocks hold the newest tokens of them."""
    if kind == "bf16" and not is_latent(shape):
        return dataclasses.replace(shape, dtype="bfloat16")
    return shape


def is_lossy(shapes: Sequence[KvShape], kind: str | None) -> bool:
    """Whether blocks in that kind round what a model caches."""
    return kind in QUANTISED or any(stored_shape(s, kind) != s for s in shapes)


def tails_homes(slots: int, slot_bytes: int, layers: int, sequences: int) -> KvHomes:
    """Of a pool for newest blocks alone, from which nothing is spilled."""
    return KvHomes(
        slots=slots,
        slot_bytes=slot_bytes,
        layers=layers,
        sequences=sequences,
        window=0,
        resident=(0,) * layers,
    )


class Coarse:
    """What one layer needs to quantise: where its newest blocks are, and how the others look."""

    def __init__(self, tails: BlockStore, layout: KernelLayout) -> None:
        """``tails``: blocks in full precision, of a pool of their own; their slots are larger."""
        self.tails = tails
        self.layout = layout

    def quantise(self, plain: Views, pool: Pool, slot: int) -> None:
        """Write a full block [H, n, D] of keys and values into a slot."""
        block = _bytes_of(pool, slot, self.layout.nbytes)
        keys, values = (
            x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in plain
        )
        # Only here: a run in full precision does without Numba.
        from offload.cpu_ops.block_quantise import quantise_block

        quantise_block(self.layout, keys, values, block)

    def parts(self, pool: Pool, slot: int) -> Views:
        """Of a slot the bytes of keys and of values [H, parts, record], uint8, in place."""
        block, layout = _bytes_of(pool, slot, self.layout.nbytes), self.layout
        found = []
        for keys in (True, False):
            start = 0 if keys else layout.values_at
            some = block[start : start + layout.key_heads * layout.stride(keys=keys)]
            found.append(torch.from_numpy(some.reshape(layout.key_heads, layout.parts, -1)))
        return found[0], found[1]

    def restore(self, pool: Pool, slot: int, into: Views) -> None:
        """Read a block back, as far as it is still known."""
        block = _bytes_of(pool, slot, self.layout.nbytes)
        for x, keys in zip(into, (True, False), strict=True):
            x.copy_(torch.from_numpy(self.layout.read(block, keys=keys)))


def _bytes_of(pool: Pool, slot: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if nbytes > pool.slot_bytes:
        raise OffloadError(f"a block of {nbytes} bytes is too large for {pool.slot_bytes}")
    raw = (ctypes.c_uint8 * nbytes).from_address(pool.address(slot))
    return np.frombuffer(memoryview(raw), np.uint8)
