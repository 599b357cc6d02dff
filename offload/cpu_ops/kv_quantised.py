"""Keys and values of past tokens in 8 or 4 bits, the newest ones in float32.

    G key heads, D head size, T tokens, P parts of PART tokens

Tokens are stored in a *tail* of PART rows. When it is full it becomes a part of the layer's record
(``block_elements`` says what is in one), quantised as ``block_layout`` says, and the tail starts
anew. A token attends to full parts as they were rounded and to its own part as it is: so a prompt's
tokens get what they get one by one, however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.block_layout import PART, BlockKind, BlockLayout
from offload.cpu_ops.block_quantise import quantise_block
from offload.cpu_ops.kv_cache import Array, KvCache, KvType, aligned
from offload.errors import OffloadError


def quantised_layout(heads: int, dim: int, parts: int, kind: KvType) -> BlockLayout:
    """A layer's record. Raises OffloadError: ``dim`` is not what kernels take in that kind."""
    return BlockLayout(BlockKind(kind.value), heads, dim, dim, PART * parts)


Heard = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], None]
"""``heard(keys, values)``: bytes [G, P, record] of parts as they are stored."""


def tail_layout(heads: int, dim: int) -> BlockLayout:
    """A layer's tail, keys and values each where they are."""
    return BlockLayout(BlockKind.F32, heads, dim, dim, PART)


def quantised_bytes(layers: int, heads: int, dim: int, capacity: int, kind: KvType) -> int:
    """What a ``QuantisedKv`` takes when it is full."""
    tail = 2 * heads * min(capacity, PART) * dim * 4
    record = quantised_layout(heads, dim, max(1, capacity // PART), kind).nbytes
    return layers * (tail + (record if capacity >= PART else 0))


class QuantisedKv(KvCache):
    """``keys`` and ``values`` are copies, as kernels see them."""

    def __init__(self, layers: int, heads: int, dim: int, capacity: int, kind: KvType) -> None:
        """
        Raises:
            OffloadError: as ``KvCache``, or ``kind`` is none with fewer bits, or has no kernels for
                such heads.
        """
        if not kind.quantised:
            raise OffloadError(f"keys and values in {kind.value} are kept in a plain cache")
        super().__init__(layers, heads, dim, capacity, kind)
        self.layout = quantised_layout(heads, dim, max(1, capacity // PART), kind)
        self._part = quantised_layout(heads, dim, 1, kind)
        nbytes = self.layout.nbytes if capacity >= PART else 0
        self._records = [aligned((nbytes,), np.uint8) for _ in range(layers)]
        self._made = aligned((self._part.nbytes,), np.uint8)
        self._done = [0] * layers
        self._raw: list[int | None] = [None] * layers
        """The part of which the tail still has all tokens as they were before rounding."""
        self._heard: list[Heard | None] = [None] * layers
        self._errors: list[float | None] = [None] * layers
        self.error: float | None = None
        """See ``note_error``; the largest so far, None: it was not measured."""

    @property
    def rows(self) -> int:
        return PART

    @property
    def nbytes(self) -> int:
        return quantised_bytes(self.layers, self.heads, self.dim, self.capacity, self.kind)

    def record(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's keys and values in ``layout``."""
        at = int(self._records[layer].__array_interface__["data"][0])
        return at, at + self.layout.values_at

    def done(self, layer: int) -> int:
        """Tokens in full parts; the others are in the tail."""
        return self._done[layer]

    def row(self, layer: int) -> int:
        return self._lengths[layer] - self._done[layer]

    def at_once(self, layer: int) -> int:
        """To the end of the part."""
        return min(PART - self.row(layer), self.capacity - self._lengths[layer])

    def make_room(self, layer: int, tokens: int = 1) -> int:
        """As ``KvCache.make_room``. Whoever asks may write to the tail before the length says so,
        and be interrupted."""
        length = super().make_room(layer, tokens)
        self._raw[layer] = None
        return length

    def room(self, layer: int, tokens: int) -> tuple[Array, Array]:
        """As ``KvCache.room``, for ``at_once`` tokens at most."""
        self.make_room(layer, tokens)
        start = self.row(layer)
        if start + tokens > PART:
            raise OffloadError(f"{tokens} tokens reach beyond a part that holds {start} of {PART}")
        rows = slice(start, start + tokens)
        return self._keys[layer][:, rows], self._values[layer][:, rows]

    def advance(self, layer: int, tokens: int = 1) -> None:
        """As ``KvCache.advance``; a part that is full is quantised."""
        self.room(layer, tokens)
        self._lengths[layer] += tokens
        if self.row(layer) == PART:
            self._quantise(layer)

    def _quantise(self, layer: int) -> None:
        part = self._done[layer] // PART
        quantise_block(self._part, self._keys[layer], self._values[layer], self._made)
        made = [self._parts(self._part, self._made, keys=keys) for keys in (True, False)]
        for keys, new in zip((True, False), made, strict=True):
            self._parts(self.layout, self._records[layer], keys=keys)[:, part] = new[:, 0]
        self._done[layer] += PART
        self._raw[layer] = part
        if (heard := self._heard[layer]) is not None:
            heard(made[0], made[1])

    def listen(self, layer: int, heard: Heard | None) -> None:
        """Tell of every part of a layer as it becomes full, in memory that the next one takes;
        None: nobody any more."""
        self._heard[layer] = heard

    def check_parts(
        self, layer: int, keys: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8]
    ) -> None:
        """Raises OffloadError: those are no parts of such a cache."""
        for name, found, is_keys in (("keys", keys, True), ("values", values, False)):
            want = (self.heads, keys.shape[1], self._part.record(keys=is_keys))
            if found.dtype != np.uint8 or found.shape != want:
                raise OffloadError(
                    f"parts of {name} must be uint8 {list(want)}, got {found.dtype} "
                    f"{list(found.shape)}"
                )

    def append_parts(
        self, layer: int, keys: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8]
    ) -> None:
        """Store P full parts as ``listen`` told of them, bytes [G, P, record] each, behind tokens
        that fill parts: what follows sees them as if their tokens had come one by one.

        Raises:
            OffloadError: as ``check_parts``; there is no room, or a part that is not full.
        """
        self.check_parts(layer, keys, values)
        self.make_room(layer, PART * keys.shape[1])
        if self.row(layer):
            raise OffloadError(f"full parts cannot follow one that holds {self.row(layer)} tokens")
        first = self._done[layer] // PART
        for new, is_keys in ((keys, True), (values, False)):
            to = self._parts(self.layout, self._records[layer], keys=is_keys)
            to[:, first : first + new.shape[1]] = new
        self._lengths[layer] += PART * keys.shape[1]
        self._done[layer] = self._lengths[layer]

    def _parts(
        self, layout: BlockLayout, block: npt.NDArray[np.uint8], *, keys: bool
    ) -> npt.NDArray[np.uint8]:
        """[G, P, bytes] of keys or of values."""
        start, nbytes = 0 if keys else layout.values_at, self.heads * layout.stride(keys=keys)
        return block[start : start + nbytes].reshape(self.heads, layout.parts, -1)

    def part(self, layer: int, index: int) -> tuple[Array, Array]:
        """Keys and values [G, PART, D] of a full part as kernels see them, float32."""
        made = np.zeros(self._part.nbytes, np.uint8)
        for keys in (True, False):
            self._parts(self._part, made, keys=keys)[:, 0] = self._parts(
                self.layout, self._records[layer], keys=keys
            )[:, index]
        return self._part.read(made, keys=True), self._part.read(made, keys=False)

    def keys(self, layer: int) -> Array:
        return self._whole(layer)[0]

    def values(self, layer: int) -> Array:
        return self._whole(layer)[1]

    def _whole(self, layer: int) -> tuple[Array, Array]:
        rows = self.row(layer)
        tail = self._keys[layer][:, :rows], self._values[layer][:, :rows]
        parts = [self.part(layer, i) for i in range(self._done[layer] // PART)]
        keys, values = zip(*parts, tail, strict=True)
        return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)

    def truncate(self, layer: int, length: int) -> None:
        """As ``KvCache.truncate``. Of a part that is cut what is known comes back to the tail: all
        of it if nothing has been stored since it was full, else what rounding left."""
        done = self._done[layer]
        super().truncate(layer, length)
        if not length:
            self._errors[layer] = None
        part, rows = divmod(length, PART)
        if part * PART >= done:
            return
        self._done[layer] = part * PART
        if rows and self._raw[layer] != part:
            for to, new in zip(
                (self._keys[layer], self._values[layer]), self.part(layer, part), strict=True
            ):
                to[:, :rows] = new[:, :rows]

    def note_error(self, layer: int, error: float) -> None:
        """A layer's attention is off by that part of its largest number, from quantising."""
        self._errors[layer] = max(self._errors[layer] or 0.0, error)
        self.error = max(self.error or 0.0, error)

    def error_of(self, layer: int) -> float | None:
        """What was noted of the tokens that a layer holds; None: nothing."""
        return self._errors[layer]


def make_kv(layers: int, heads: int, dim: int, capacity: int, kind: KvType = KvType.F32) -> KvCache:
    """A cache of that kind."""
    return (QuantisedKv if kind.quantised else KvCache)(layers, heads, dim, capacity, kind)


__all__ = [
    "QuantisedKv", "make_kv", "quantised_bytes", "quantised_layout", "tail_layout",
]  # fmt: skip
