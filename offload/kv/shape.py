"""What a block of keys and values looks like in memory and on disk. Pure.

    H heads, n tokens of a block, D head size

A block holds ``n`` tokens of one layer of one sequence: keys ``[H, n, D]``, then values. Each part
starts at a page, so a block is one read, one write, and a kernel gets two addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from offload.blocks import ALIGN, DTYPE_BYTES, align_up

BLOCK_TOKENS = 256
"""Tokens of a block: what one partial of the attention kernels covers. Of a long context more, see
``block_tokens_for``. Attention over 8k tokens in bfloat16, 32 heads that share 4 of 128, read 22.8
GB/s from blocks of 256, 22.4 of 512, 19.5 of 1024, 18.2 of 128 and 19.2 of 64
(``benchmarks/attention.py``, two Zen 4 cores)."""

TRANSFER_BYTES = 4 * 2**20
"""What a block of a long context may grow to: a disk gives three quarters of its rate for requests
of 512 KiB, nine tenths for 1 MiB."""

LONG_SHARE = 32
"""A block has at most one token in so many of the context: each layer's newest block is in RAM."""


def block_tokens_for(context: int, nbytes: Callable[[int], int]) -> int:
    """Tokens of a block for a context of so many, where a block of n tokens has ``nbytes(n)``.

    Blocks in full precision hold the same numbers whatever their size: attention is cut into parts
    of ``BLOCK_TOKENS`` anyway.
    """
    tokens = BLOCK_TOKENS
    while 2 * tokens * LONG_SHARE <= context and nbytes(2 * tokens) <= TRANSFER_BYTES:
        tokens *= 2
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """One layer's keys and values of one token. ``dtype`` by torch's name.

    Values may differ from keys: a latent cache keeps the compressed vector as one and the rotated
    key as the other.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Of a token, keys and values."""
        elements = self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return elements * DTYPE_BYTES[self.dtype]

    def gathered_bytes(self, tokens: int, sequences: int) -> int:
        """Of a layer's keys and values in one piece each, as the model's own attention takes
        them."""
        width = DTYPE_BYTES[self.dtype] * tokens * sequences
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return align_up(keys * width) + align_up(values * width)


@dataclass(frozen=True)
class BlockLayout:
    """Where things lie in a block of ``tokens`` tokens; offsets and sizes in bytes."""

    shape: KvShape
    tokens: int

    @cached_property
    def key_bytes(self) -> int:
        s = self.shape
        return s.key_heads * self.tokens * s.key_dim * DTYPE_BYTES[s.dtype]

    @cached_property
    def value_at(self) -> int:
        """Where values start."""
        return align_up(self.key_bytes)

    @cached_property
    def value_bytes(self) -> int:
        s = self.shape
        return s.value_heads * self.tokens * s.value_dim * DTYPE_BYTES[s.dtype]

    @cached_property
    def nbytes(self) -> int:
        """Of a slot, a multiple of 4096."""
        return max(ALIGN, self.value_at + align_up(self.value_bytes))


def layout_within(shape: KvShape, tokens: int, slot_bytes: int) -> BlockLayout | None:
    """Blocks of at most ``tokens`` tokens that fit into slots made for another layer: halved until
    they do. None if not even one token fits."""
    while tokens:
        found = BlockLayout(shape, tokens)
        if found.nbytes <= slot_bytes:
            return found
        tokens //= 2
    return None
