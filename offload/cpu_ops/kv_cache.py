"""Keys and values of past tokens, in memory that is allocated once.

    L layers, G key heads, C capacity in tokens, D head size, T tokens

Rows lie as [G, C, D], so what is cached is also a view [G, T, D] without a copy for code that
attends in another way (prompts). Memory is touched, and so counts as resident, only where tokens
were stored.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt

from offload.errors import OffloadError

Array = npt.NDArray[Any]
LINE = 64
"""Bytes of a cache line, and of a vector."""


class KvType(enum.Enum):
    """How elements are stored."""

    F32 = "f32"
    BF16 = "bf16"
    """Rounded to nearest, ties to even; numpy holds the bits as uint16."""
    Q8 = "q8"
    """Full blocks in 8 bits, the newest tokens in float32 (``kv_quantised``)."""
    Q4 = "q4"

    @property
    def quantised(self) -> bool:
        return self in (KvType.Q8, KvType.Q4)

    @property
    def words(self) -> str:
        """For people."""
        names = {"f32": "float32", "bf16": "bfloat16", "q8": "8 bits", "q4": "4 bits"}
        return names[self.value]

    @property
    def dtype(self) -> Any:
        """Of rows as tokens are stored."""
        return np.uint16 if self is KvType.BF16 else np.float32

    @property
    def nbytes(self) -> int:
        """Of an element of those."""
        return int(np.dtype(self.dtype).itemsize)


PLAIN = (KvType.F32, KvType.BF16)
"""Kinds that keep rows as they are stored."""


def refuse_stale() -> NoReturn:
    """Raises OffloadError: a cache whose memory another generation has taken is used."""
    raise OffloadError(
        "this cache's memory belongs to a later generation, or its model is closed: a model keeps "
        "one conversation. Continue from the latest cache; drop assistant_early_exit, with which a "
        "model drafts for itself; what generates in the middle of a generation (assistant_model, a "
        "stopping criterion) needs a model of its own: load it twice"
    )


def refuse_copy() -> NoReturn:
    """Raises OffloadError, for what ``copy.deepcopy`` and ``pickle`` ask of memory for keys and
    values: a plan has counted it once, and kernels know it by its address."""
    raise OffloadError(
        "keys and values of a streamed model lie in memory that was planned for, and cannot be "
        "copied or pickled; for texts that begin alike, load the model with prompt_cache=DIR, or "
        "pass a transformers DynamicCache as past_key_values, which can be copied (not beside kv, "
        "kv_ram or kv_keep)"
    )


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16's bits, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.where(np.isnan(x), bits | np.uint32(0x400000), rounded)
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def kv_cache_bytes(layers: int, heads: int, dim: int, capacity: int, kind: KvType) -> int:
    """What a cache of a plain kind takes when it is full."""
    return 2 * layers * heads * capacity * dim * kind.nbytes


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros, untouched, at the start of a cache line: numpy's begin 16 bytes after one, and then
    every vector that a kernel loads lies in two lines."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    # zeros, not empty: numpy then asks the system for fresh pages, of which only used ones count.
    memory = np.zeros(nbytes + LINE, np.uint8)
    skip = -int(memory.__array_interface__["data"][0]) % LINE
    rows: Array = memory[skip : skip + nbytes].view(dtype).reshape(shape)
    return rows


class KvCache:
    """Keys and values of every layer; each layer has its own length.

    Not for several threads at a time. Layers' lengths differ only within a token's step.
    """

    def __init__(
        self, layers: int, heads: int, dim: int, capacity: int, kind: KvType = KvType.F32
    ) -> None:
        """
        Raises:
            OffloadError: a count is not positive, or ``dim`` not a multiple of 16.
        """
        if min(layers, heads, capacity) < 1 or dim < 1 or dim % 16:
            raise OffloadError(
                f"a cache needs layers, heads and tokens, and heads of a multiple of 16; got "
                f"{layers} layers, {heads} heads of {dim}, {capacity} tokens"
            )
        self.layers, self.heads, self.dim = layers, heads, dim
        self.capacity, self.kind = capacity, kind
        shape = (heads, self.rows, dim)
        self._keys = [aligned(shape, kind.dtype) for _ in range(layers)]
        self._values = [aligned(shape, kind.dtype) for _ in range(layers)]
        self._lengths = [0] * layers
        self._places = [
            (k.__array_interface__["data"][0], v.__array_interface__["data"][0])
            for k, v in zip(self._keys, self._values, strict=True)
        ]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """See ``refuse_copy``: kernels would go on in this one's memory."""
        refuse_copy()

    @property
    def rows(self) -> int:
        """Of each head that are at ``places``: C."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        """When full."""
        return kv_cache_bytes(self.layers, self.heads, self.dim, self.capacity, self.kind)

    def length(self, layer: int) -> int:
        return self._lengths[layer]

    def places(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's keys and values [G, C, D] as tokens are stored."""
        return self._places[layer]

    def keys(self, layer: int) -> Array:
        """A view [G, T, D] of what is stored, float32 or the bits of bfloat16 as uint16."""
        return self._keys[layer][:, : self._lengths[layer]]

    def values(self, layer: int) -> Array:
        """As ``keys``."""
        return self._values[layer][:, : self._lengths[layer]]

    def make_room(self, layer: int, tokens: int = 1) -> int:
        """The length so far, if ``tokens`` more fit.

        Raises:
            OffloadError: they do not.
        """
        length = self._lengths[layer]
        if length + tokens > self.capacity:
            raise OffloadError(
                f"the cache holds {length} of {self.capacity} tokens, {tokens} more do not fit; "
                f"allow a longer context or end the conversation"
            )
        return length

    def advance(self, layer: int, tokens: int = 1) -> None:
        """Count tokens that a kernel has stored at the end."""
        self._lengths[layer] = self.make_room(layer, tokens) + tokens

    def at_once(self, layer: int) -> int:
        """Tokens that ``room`` takes in one go."""
        return self.capacity - self._lengths[layer]

    def row(self, layer: int) -> int:
        """Of ``rows``: where the next token is stored."""
        return self._lengths[layer]

    def room(self, layer: int, tokens: int) -> tuple[Array, Array]:
        """Where the next ``tokens`` keys and values belong, views [G, T, D] as they are stored; who
        has written there says ``advance``. Raises as ``make_room``."""
        start = self.make_room(layer, tokens)
        rows = slice(start, start + tokens)
        return self._keys[layer][:, rows], self._values[layer][:, rows]

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Store T tokens after those that are there: float32 [G, T, D], any strides.

        Raises:
            OffloadError: a shape or dtype does not fit, or there is no room.
        """
        want = (self.heads, keys.shape[1] if keys.ndim == 3 else -1, self.dim)
        for name, array in (("keys", keys), ("values", values)):
            if array.shape != want or array.dtype != np.float32:
                raise OffloadError(
                    f"{name} must be float32 [{self.heads}, tokens, {self.dim}] (as many keys as "
                    f"values), got {array.dtype} {list(array.shape)}"
                )
        self.make_room(layer, want[1])

        def store(to: Array, new: Array) -> None:
            to[...] = to_bf16(new) if self.kind is KvType.BF16 else new

        self.append_by(layer, keys, values, store)

    def append_by(
        self, layer: int, keys: Any, values: Any, store: Callable[[Array, Any], None]
    ) -> None:
        """``append`` of what ``store`` copies to rows as they are stored, [G, n, D] each; there is
        room for all."""
        done, tokens = 0, keys.shape[1]
        while done < tokens:
            n = min(tokens - done, self.at_once(layer))
            for to, new in zip(self.room(layer, n), (keys, values), strict=True):
                store(to, new[:, done : done + n])
            self.advance(layer, n)
            done += n

    def fill(self, layer: int, keys: Array, values: Array) -> None:
        """Store T tokens from the start, in place of what was there. Raises as ``append``."""
        self.truncate(layer, 0)
        self.append(layer, keys, values)

    def truncate(self, layer: int, length: int) -> None:
        """Forget a layer's tokens from ``length`` on. Raises OffloadError: there are fewer."""
        if not 0 <= length <= self._lengths[layer]:
            raise OffloadError(f"cannot cut {self._lengths[layer]} cached tokens to {length}")
        self._lengths[layer] = length

    def crop(self, length: int) -> None:
        """Forget all tokens from ``length`` on; a negative one forgets as many at the end, as
        transformers' ``Cache.crop`` does.

        Raises:
            OffloadError: there are not as many tokens.
        """
        shortest = min(self._lengths)
        keep = shortest + length if length < 0 else length
        if not 0 <= keep <= shortest:
            raise OffloadError(f"cannot crop {shortest} cached tokens to {length}")
        for layer in range(self.layers):
            self.truncate(layer, keep)
