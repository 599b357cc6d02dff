"""Attention of several sequences whose layer is computed in one go: each over its own cache.

The layer's code gets a ``RowsCache`` in place of a cache. What it stores there are all rows' new
keys and values; they reach each sequence's own cache when the layer asks transformers' interface
for attention, one sequence after the other, by the very function that each would have called, with
the tensors that it would have given. So a cache may hand out a buffer that the next one uses again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import greenlet
import torch
from torch.overrides import _pop_mode_temporarily

from offload.batch.row_functions import NotJoined, row_of
from offload.models.shadow import shadow

Attend = Callable[..., Any]


class Listener(Protocol):
    """Who wants to know of the calls of attention in a greenlet."""

    def attend(self, inner: Attend, *args: Any, **kwargs: Any) -> Any:
        """In place of ``inner``, an attention function of transformers."""
        ...


_listeners: dict[Any, Listener] = {}
_lock = threading.Lock()
_installed: list[Any] = [0, None]
"""How many want it, and what takes it away."""


def install() -> Callable[[], None]:
    """Have attention functions that models ask transformers for pass by the listeners. Returns what
    ends that; whoever is in no ``listening`` notices nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _lock:
        if not _installed[0]:
            ask = ALL_ATTENTION_FUNCTIONS.get_interface

            def get_interface(*args: Any, **kwargs: Any) -> Any:
                inner = ask(*args, **kwargs)
                listener = _listeners.get(greenlet.getcurrent())
                return inner if listener is None else partial(listener.attend, inner)

            _installed[1] = shadow(ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface)
        _installed[0] += 1
    return _uninstall


def _uninstall() -> None:
    with _lock:
        _installed[0] -= 1
        if not _installed[0]:
            _installed[1]()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """In this greenlet."""
    current = greenlet.getcurrent()
    _listeners[current] = listener
    try:
        yield
    finally:
        del _listeners[current]


class Stored(NamedTuple):
    """What a layer has put into a cache."""

    keys: torch.Tensor
    values: torch.Tensor
    layer: int


class Ask:
    """A call of an attention function, whose first arguments families give by place or by name."""

    NAMES = ("module", "query", "key", "value", "attention_mask")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ``NotJoined``: one that is not known."""
        placed = dict(zip(self.NAMES, args, strict=False))
        named = {name: kwargs[name] for name in self.NAMES if name in kwargs}
        self.first = placed | named
        if len(args) > len(self.NAMES) or self.first.keys() < set(self.NAMES):
            raise NotJoined("attention with other arguments than transformers' own")
        self.more = {name: value for name, value in kwargs.items() if name not in named}
        self._placed = len(args)

    def of(
        self, inner: Attend, query: Any, key: Any, value: Any, mask: Any, more: dict[str, Any]
    ) -> Any:
        """``inner`` with these, in the way that was called."""
        values = (self.first["module"], query, key, value, mask)
        named = dict(zip(self.NAMES[self._placed :], values[self._placed :], strict=True))
        return inner(*values[: self._placed], **named, **more)


class Asked(NamedTuple):
    """A call of attention: what it was asked, and its answer."""

    query: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]
    answer: torch.Tensor


class Alone:
    """Listens to a layer that one sequence runs by itself."""

    def __init__(self, cache: Any) -> None:
        self.stored: list[Stored] = []
        self.asked: list[Asked] = []
        self.odd: str | None = None
        """What cannot be done for several at once."""
        self._cache, self._update = cache, cache.update

    @contextmanager
    def listening(self) -> Iterator[None]:
        undo = shadow(self._cache, "update", self._note)
        try:
            with listening(self):
                yield
        finally:
            undo()

    def attend(self, inner: Attend, *args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        try:
            ask = Ask(args, kwargs)
        except NotJoined as error:
            self.odd = str(error)
            return found
        if len(self.asked) == len(self.stored) or not isinstance(found, tuple):
            self.odd = "attention over what is not in its cache"
        else:
            first = ask.first
            self.asked.append(Asked(first["query"], first["attention_mask"], ask.more, found[0]))
        return found

    def _note(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != len(Stored._fields) or _is_told_more(kwargs):
            self.odd = "a cache that is told other than keys, values and a layer"
        else:
            self.stored.append(Stored(*args))
        return self._update(*args, **kwargs)


class Rows:
    """What each sequence has, where alone there would be a tensor; good for attention alone."""

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = each


class Pending:
    """All rows' new keys or values, before they are in their caches."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored


class RowsCache:
    """In the place of a cache of transformers, for a layer that several sequences run at once."""

    def __init__(self, store: Callable[[Stored], None]) -> None:
        self._store = store

    def update(self, keys: Any, values: Any, layer: int, *more: Any, **kwargs: Any) -> Any:
        if more or _is_told_more(kwargs):
            raise NotJoined("a cache that is told more than keys and values")
        stored = Stored(keys, values, layer)
        self._store(stored)
        return Pending(stored), Pending(stored)

    def __getattr__(self, name: str) -> Any:
        raise NotJoined(f"{name} of a cache")


class Parts:
    """The sequences' own tensors behind those that were put together for a layer."""

    def __init__(self) -> None:
        self._parts: dict[int, Sequence[Any]] = {}
        self._kept: list[Any] = []

    def join(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, ...] of tensors [1, ...] that are alike."""
        joined = torch.cat(list(rows))
        self._parts[id(joined)] = rows
        self._kept.append(joined)
        return joined

    def of(self, kwargs: dict[str, Any], i: int) -> dict[str, Any]:
        """Sequence ``i``'s own, where a layer has passed on what it was given."""
        return {name: self._own(value, i) for name, value in kwargs.items()}

    def _own(self, value: Any, i: int) -> Any:
        if isinstance(value, Rows):
            return value.each[i]
        parts = self._parts.get(id(value))
        return value if parts is None else parts[i]


class Replay:
    """Listens to a layer that is tried with the rows of several who ran it alone: they must have
    stored and asked the same. Raises ``NotJoined``."""

    def __init__(self, alone: Sequence[Alone], parts: Parts) -> None:
        self._alone, self._parts = alone, parts
        self._stored = self._asked = 0
        self.cache = RowsCache(self._store)

    def attend(self, inner: Attend, *args: Any, **kwargs: Any) -> Any:
        ask = Ask(args, kwargs)
        _pending(ask)
        query, masks = ask.first["query"], _masks(ask, len(self._alone))
        at, self._asked = self._asked, self._asked + 1
        answers = []
        for i, alone in enumerate(self._alone):
            if at >= len(alone.asked):
                raise NotJoined("attention that was not asked for alone")
            asked = alone.asked[at]
            if masks[i] is not asked.mask or not _alike(query, i, asked.query):
                raise NotJoined("another query or mask than alone")
            if not _same_kwargs(self._parts.of(ask.more, i), asked.kwargs):
                raise NotJoined("attention with other arguments than alone")
            answers.append(asked.answer)
        return torch.cat(answers), None

    def end(self) -> None:
        """All that was done alone has been done."""
        for alone in self._alone:
            if (self._stored, self._asked) != (len(alone.stored), len(alone.asked)):
                raise NotJoined("less attention than alone")

    def _store(self, stored: Stored) -> None:
        at, self._stored = self._stored, self._stored + 1
        for i, alone in enumerate(self._alone):
            if at >= len(alone.stored):
                raise NotJoined("keys that were not stored alone")
            own = alone.stored[at]
            same = _alike(stored.keys, i, own.keys) and _alike(stored.values, i, own.values)
            if own.layer != stored.layer or not same:
                raise NotJoined("other keys and values than alone")


class Together:
    """Listens to a layer that is run for several: attention over each one's own cache."""

    def __init__(self, caches: Sequence[Any], parts: Parts) -> None:
        self._caches, self._parts = caches, parts
        self.touched = False
        """Whether any cache has been changed."""
        self.cache = RowsCache(lambda _: None)

    def attend(self, inner: Attend, *args: Any, **kwargs: Any) -> Any:
        ask = Ask(args, kwargs)
        stored, masks = _pending(ask), _masks(ask, len(self._caches))
        answers = []
        with _pop_mode_temporarily():
            for i, cache in enumerate(self._caches):
                self.touched = True
                keys, values = cache.update(
                    row_of(stored.keys, i), row_of(stored.values, i), stored.layer
                )
                query, own = row_of(ask.first["query"], i), self._parts.of(ask.more, i)
                answer, _ = ask.of(inner, query, keys, values, masks[i], own)
                answers.append(answer)
            return torch.cat(answers), None


def _pending(ask: Ask) -> Stored:
    key, value = ask.first["key"], ask.first["value"]
    if not isinstance(key, Pending) or not isinstance(value, Pending):
        raise NotJoined("attention over what is not in its cache")
    if key.stored is not value.stored:
        raise NotJoined("keys of one layer and values of another")
    return key.stored


def _masks(ask: Ask, count: int) -> Sequence[Any]:
    mask = ask.first["attention_mask"]
    if mask is None:
        return [None] * count
    if not isinstance(mask, Rows):
        raise NotJoined("a mask of the layer's own")
    return mask.each


def _is_told_more(kwargs: Mapping[str, Any]) -> bool:
    """Whether a cache may do otherwise for what it is given besides keys and values. What attention
    is told (``kwargs``, since transformers 5.24) is for caches of pages, which look their table up
    in there."""
    return any(value is not None for name, value in kwargs.items() if name != "kwargs")


def _alike(joined: torch.Tensor, i: int, own: torch.Tensor) -> bool:
    """Whether row ``i`` is what one alone had, and lies as that did."""
    with _pop_mode_temporarily():
        row = row_of(joined, i)
        wide = [at for at, size in enumerate(own.shape) if size > 1]
        return (
            row.shape == own.shape
            and row.dtype == own.dtype
            and all(row.stride(at) == own.stride(at) for at in wide)
            and same_bits(row, own)
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where values are no numbers."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _same_kwargs(now: dict[str, Any], alone: dict[str, Any]) -> bool:
    if now.keys() != alone.keys():
        return False
    return all(_same(value, alone[name]) for name, value in now.items())


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b)


__all__ = ["Alone", "Parts", "Replay", "Rows", "RowsCache", "Together", "install", "same_bits"]
