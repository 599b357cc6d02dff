"""Where keys and values of a block of tokens lie, and writing quantised ones.

    G key heads, T tokens of a block, P its parts of at most BLOCK tokens, Dk, Dv head sizes

A block is the keys, then the values, both at a multiple of 4096 bytes: plain kinds [G, T, D] as
they are, quantised ones [G, P] records (``block_elements`` says what is in one, and why).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.kv_cache import from_bf16, to_bf16
from offload.errors import OffloadError

Array = npt.NDArray[Any]

PART = 256
"""Tokens of a partial result at most: ``block_kernels.BLOCK``."""
PAGE = 4096
WIDEST = 512


class BlockKind(enum.Enum):
    """How elements of keys and values are stored."""

    F32 = "f32"
    BF16 = "bf16"
    Q8 = "q8"
    """8 bits, lossy."""
    Q4 = "q4"
    """4 bits, lossy."""

    @property
    def bits(self) -> int:
        return {"f32": 32, "bf16": 16, "q8": 8, "q4": 4}[self.value]

    @property
    def quantised(self) -> bool:
        return self.bits < 16


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The bytes of a block.

    ``tokens`` is a multiple of 16, beyond PART a multiple of PART; head sizes are multiples of 16
    (of 32 with q4), WIDEST at most.

    Raises:
        OffloadError: they are not.
    """

    kind: BlockKind
    key_heads: int
    key_dim: int
    dim: int
    """Of values."""
    tokens: int

    def __post_init__(self) -> None:
        grain = 32 if self.kind is BlockKind.Q4 else 16
        for dim in (self.key_dim, self.dim):
            if dim < 1 or dim % grain or dim > WIDEST:
                other = "take --kv q8, or " if self.kind is BlockKind.Q4 and dim % 16 == 0 else ""
                raise OffloadError(
                    f"our attention over blocks in {self.kind.value} takes head sizes in multiples "
                    f"of {grain} up to {WIDEST}, not {dim}; {other}run the model's own attention: "
                    f"without --kv, --kv-keep and --attention offload"
                )
        if self.key_heads < 1:
            raise OffloadError(f"a block needs a key head, not {self.key_heads}")
        if self.tokens < 1 or self.tokens % (PART if self.tokens > PART else 16):
            raise OffloadError(
                f"blocks have a multiple of 16 tokens, of {PART} beyond {PART}; not {self.tokens}"
            )

    @property
    def span(self) -> int:
        """Tokens of a part."""
        return min(self.tokens, PART)

    @property
    def parts(self) -> int:
        return self.tokens // self.span

    def record(self, *, keys: bool) -> int:
        """Bytes of one head's keys or values in one part."""
        dim = self.key_dim if keys else self.dim
        scales = 4 * (dim if keys else self.span) if self.kind.quantised else 0
        return scales + self.span * dim * self.kind.bits // 8

    def stride(self, *, keys: bool) -> int:
        """Bytes from one head to the next."""
        return self.parts * self.record(keys=keys)

    @property
    def values_at(self) -> int:
        """Offset of the values in the block."""
        return -(-self.key_heads * self.stride(keys=True) // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """Of a block, a multiple of PAGE."""
        return self.values_at + -(-self.key_heads * self.stride(keys=False) // PAGE) * PAGE

    def plain(self, block: npt.NDArray[np.uint8], *, keys: bool) -> Array:
        """A view [G, T, D] of a block in f32, or in bf16 as uint16 bits.

        Raises:
            OffloadError: the kind is quantised.
        """
        if self.kind.quantised:
            raise OffloadError(f"blocks in {self.kind.value} have no rows to view; dequantise them")
        dtype = np.float32 if self.kind is BlockKind.F32 else np.uint16
        shape = (self.key_heads, self.tokens, self.key_dim if keys else self.dim)
        return self._part(block, keys=keys).view(dtype).reshape(shape)

    def _part(self, block: npt.NDArray[np.uint8], *, keys: bool) -> npt.NDArray[np.uint8]:
        start = 0 if keys else self.values_at
        return block[start : start + self.key_heads * self.stride(keys=keys)]

    def write(
        self, block: npt.NDArray[np.uint8], x_GTD: npt.NDArray[np.float32], *, keys: bool
    ) -> None:
        """Round or quantise all T tokens of float32 keys or values into a block."""
        if not self.kind.quantised:
            plain = self.plain(block, keys=keys)
            plain[...] = x_GTD if self.kind is BlockKind.F32 else to_bf16(x_GTD)
            return
        x = x_GTD.reshape(self.key_heads, self.parts, self.span, -1)
        steps, lows, codes = quantise(x, self.kind.bits, axis=2 if keys else 3)
        heads = (self.key_heads, self.parts, -1)
        packed = (pack_keys if keys else pack_values)(codes, self.kind.bits)
        pieces = (steps, lows, packed)
        record = np.concatenate(
            [np.ascontiguousarray(p).view(np.uint8).reshape(heads) for p in pieces], axis=2
        )
        self._part(block, keys=keys)[...] = record.reshape(-1)

    def read(self, block: npt.NDArray[np.uint8], *, keys: bool) -> npt.NDArray[np.float32]:
        """All T tokens [G, T, D] as the kernels see them."""
        if not self.kind.quantised:
            plain = self.plain(block, keys=keys)
            return plain.copy() if self.kind is BlockKind.F32 else from_bf16(plain)
        dim = self.key_dim if keys else self.dim
        count = dim if keys else self.span
        record = self._part(block, keys=keys).reshape(self.key_heads, self.parts, -1)
        scales = from_bf16(np.ascontiguousarray(record[..., : 4 * count]).view(np.uint16))
        shape = self.key_heads, self.parts, self.span, dim
        unpack = unpack_keys if keys else unpack_values
        u = unpack(record[..., 4 * count :], self.kind.bits, dim).reshape(shape).astype(np.float32)
        axis = 2 if keys else 3
        steps, lows = (np.expand_dims(s, axis) for s in (scales[..., :count], scales[..., count:]))
        return np.asarray(lows + steps * u, np.float32).reshape(self.key_heads, self.tokens, dim)


def quantise(
    x: npt.NDArray[np.float32], bits: int, axis: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """Steps and lows (bits of bfloat16, without ``axis``) and integers: x ~ low + step * u.

    Lows and steps are rounded outwards first, so that the integers reach from end to end and no
    value lies beyond half a step of one.
    """
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    lows = from_bf16(_towards(low, up=False))
    steps = from_bf16(_towards((high - lows) / np.float32(2**bits - 1), up=True))
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps > 0)
    codes = np.clip(np.rint((x - lows) * inverse), 0, 2**bits - 1).astype(np.uint8)
    return to_bf16(steps.squeeze(axis)), to_bf16(lows.squeeze(axis)), codes


def _towards(x: npt.NDArray[np.float32], *, up: bool) -> npt.NDArray[np.uint16]:
    """The next bfloat16 that is no smaller (``up``) or no larger."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    grow = (x > 0) == up
    bits = np.where(grow, bits + np.uint32(0xFFFF), bits)
    return (bits >> np.uint32(16)).astype(np.uint16)


def pack_values(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """[..., T, D] integers to bytes [..., T / 2, D, 2]: the channels of two tokens. Of 4 bits
    [..., T / 2, D / 32, 16, 2]: of 32 channels the first 16 are low nibbles."""
    *more, tokens, dim = codes.shape
    pairs: Array = codes.reshape(*more, tokens // 2, 2, dim).swapaxes(-2, -1)
    if bits == 4:
        halves = pairs.reshape(*more, tokens // 2, dim // 32, 2, 16, 2)
        pairs = halves[..., 0, :, :] | halves[..., 1, :, :] << 4
    return np.ascontiguousarray(pairs, np.uint8).reshape(*more, -1)


def unpack_values(packed: npt.NDArray[np.uint8], bits: int, dim: int) -> npt.NDArray[np.uint8]:
    """What ``pack_values`` packed, [..., T, D]."""
    *more, _ = packed.shape
    if bits == 4:
        pairs = packed.reshape(*more, -1, dim // 32, 16, 2)
        packed = np.stack([pairs & 15, pairs >> 4], axis=-3)
    pairs = packed.reshape(*more, -1, dim, 2).swapaxes(-2, -1)
    return np.ascontiguousarray(pairs).reshape(*more, -1, dim)


LANES = 16
"""Tokens whose keys lie side by side."""

_ORDER = np.arange(LANES).reshape(4, 4).T.reshape(-1)
"""Which of them are where: four transposed, so that a few shuffles of sums give four in a row."""


def pack_keys(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """[..., T, D] integers to bytes [..., T / 16, D / 2, 16, 2]: pairs of channels of 16 tokens. Of
    4 bits the low nibbles are a pair, the high ones the next."""
    *more, tokens, dim = codes.shape
    groups = codes.reshape(*more, tokens // LANES, LANES, dim // 2, 2)[..., _ORDER, :, :]
    pairs: Array = groups.swapaxes(-3, -2)
    if bits == 4:
        pairs = pairs[..., 0::2, :, :] | pairs[..., 1::2, :, :] << 4
    return np.ascontiguousarray(pairs, np.uint8).reshape(*more, -1)


def unpack_keys(packed: npt.NDArray[np.uint8], bits: int, dim: int) -> npt.NDArray[np.uint8]:
    """What ``pack_keys`` packed, [..., T, D]."""
    *more, _ = packed.shape
    pairs = packed.reshape(*more, -1, dim // (2 if bits == 8 else 4), LANES, 2)
    if bits == 4:
        both = np.stack([pairs & 15, pairs >> 4], axis=-3)
        pairs = both.reshape(*more, -1, dim // 2, LANES, 2)
    groups = pairs.swapaxes(-3, -2)[..., _ORDER, :, :]  # a transposition is its own inverse
    return np.ascontiguousarray(groups).reshape(*more, -1, dim)
