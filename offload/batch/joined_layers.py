"""One call of a decoder layer for all sequences that wait at it, with each one's own bits.

The code of transformers' layers takes 0.6 ms a token in Python and small operations, whoever
multiplies: with many sequences that is more than all products. So those who decode wait for each
other before a layer, and its own ``forward`` runs once with their rows: [n, 1, H] in place of
n times [1, 1, H], attention for each over its own cache (``row_attention``).

That no bit changes has two reasons. What the code may call meanwhile leaves rows apart by what it
is (``row_functions``). And every kind of layer is tried first: sequences run one by themselves, it
runs once more with all their rows, and has to ask the same of attention, store the same keys and
values and come to the same result, for ``ROWS_TRIED`` rows. One that does not, or that does what is
not known to be safe, stays with each one alone, as do hooks inside, training, autocast, prompts and
whoever wants to see attention.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.batch.row_attention import Alone, Parts, Replay, Rows, Together, listening, same_bits
from offload.batch.row_functions import Multiply, NotJoined, RowFunctions, row_of
from offload.errors import ClosedError, OffloadError, StoreError, WatchdogError
from offload.kv.named import CACHE
from offload.models.lean_watch import LayerWatch
from offload.models.shadow import CAPTURES

logger = logging.getLogger(__name__)

ROWS_TRIED = 128
"""Rows through layers of one kind that must have come out right before any is joined: as many as
take two tokens of 64 sequences, or a few of two through all layers."""

JOINED_BYTES = 64 * 2**10
"""For each sequence, of the rows that go in and come out of a product: what the plan sets aside. Of
wider rows fewer are computed at once, and the weights are read again for the others; but the plan
has a place of its own for logits."""

HIDDEN, MASK = "hidden_states", "attention_mask"
"""What transformers calls a layer's arguments."""

Join = Callable[[Any, Any], Any]


class Call(NamedTuple):
    """One sequence's call of a layer, every argument by its name; and what it has come to, if it
    has run alone."""

    kwargs: dict[str, Any]
    alone: Alone | None = None
    output: Any = None


class Found(NamedTuple):
    """A sequence's result."""

    output: Any


class Kind:
    """Layers that run the same code, on weights of the same shapes."""

    def __init__(self) -> None:
        self.tried = 0
        """Rows that came out right."""
        self.refused: str | None = None


class JoinedLayer:
    """One layer: tried at first, then computed for all who wait. Both are a ``Product``."""

    def __init__(
        self, name: str, layer: nn.Module, kind: Kind, join: Join, multiply: Multiply,
        unrecorded: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """``unrecorded``: a context in which what runs is no use of the model."""
        self._layer, self._kind, self._join, self._multiply = layer, kind, join, multiply
        self._unrecorded = unrecorded
        self._inner: Callable[..., Any] = layer.forward
        self._names = _names(layer)
        self._watch = LayerWatch(layer, [])
        self._bytes = _bytes_of(layer)
        self._trial = Trial(f"{name} (tried)", self)
        self._together = AllRows(f"{name} (rows)", self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's, for one of several sequences."""
        call = self._call(args, kwargs)
        if call is None:
            return self._inner(*args, **kwargs)
        if self.proven:
            found: Found | None = self._join(self._together, call)
            return self._inner(*args, **kwargs) if found is None else found.output
        alone = Alone(call.kwargs[CACHE])
        with alone.listening():
            output = self._inner(*args, **kwargs)
        self._join(self._trial, call._replace(alone=alone, output=output))
        return output

    @property
    def proven(self) -> bool:
        return self._kind.tried >= ROWS_TRIED and self._kind.refused is None

    def at_once(self, sequences: int) -> int:
        """Rows that go through together."""
        return max(1, sequences * JOINED_BYTES // self._bytes)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """A call with one token's row, if it is one that may be joined."""
        if self._kind.refused is not None or self._layer.training:
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        if len(args) > len(self._names):
            return None
        if args:
            kwargs = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, cache = kwargs.get(HIDDEN), kwargs.get(CACHE)
        if type(hidden) is not torch.Tensor or hidden.shape[:-1] != (1, 1):
            return None
        if hidden.device.type != "cpu" or not _is_cache(cache) or not self._watch.untouched():
            return None
        return Call(kwargs)

    # -- by the conductor -----------------------------------------------------------------

    def run(self, calls: Listing[Call]) -> list[Found]:
        """The layer once, for all."""
        if len(calls) == 1:
            return [Found(self._inner(**calls[0].kwargs))]
        parts = Parts()
        caches = [call.kwargs[CACHE] for call in calls]
        together = Together(caches, parts)
        try:
            kwargs = _joined(calls, parts, together.cache)
            with listening(together), RowFunctions(self._multiply):
                output = self._inner(**kwargs)
            return [Found(_part(output, i, len(calls))) for i in range(len(calls))]
        except NotJoined as error:
            self._refuse(error)
            if together.touched:
                raise OffloadError(
                    f"a {type(self._layer).__name__} did what it had not done when it was tried "
                    f"({error}), and its sequences cannot go on; run this model with --batch-size 1"
                ) from error
            return [Found(self._inner(**call.kwargs)) for call in calls]

    def compare(self, calls: Listing[Call]) -> None:
        """Whether the layer does for all at once what each has come to alone."""
        if len(calls) < 2 or self._kind.refused is not None:
            return
        try:
            for call in calls:
                if call.alone is None or call.alone.odd:
                    raise NotJoined(call.alone.odd if call.alone else "nothing is known of it")
                if not call.alone.asked:
                    raise NotJoined("no attention over a cache")
            parts = Parts()
            replay = Replay([call.alone for call in calls if call.alone], parts)
            kwargs = _joined(calls, parts, replay.cache)
            with self._unrecorded(), listening(replay), RowFunctions(self._multiply):
                output = self._inner(**kwargs)
            replay.end()
            for i, call in enumerate(calls):
                if not _equal(_part(output, i, len(calls)), call.output):
                    raise NotJoined("another result than alone")
        except (StoreError, WatchdogError, ClosedError) as error:  # say nothing of the layer
            logger.debug("%s could not be tried: %s", self._trial.name, error)
        except Exception as error:  # noqa: BLE001  whatever it is: not this way
            self._refuse(error)
        else:
            self._kind.tried += len(calls)

    def _refuse(self, error: Exception) -> None:
        self._kind.refused = str(error) or type(error).__name__
        logger.info(
            "layers of class %s are computed for each sequence alone: %s",
            type(self._layer).__name__, self._kind.refused,
        )  # fmt: skip


class AllRows:
    """A ``Product``: a layer that has been tried."""

    def __init__(self, name: str, layer: JoinedLayer) -> None:
        self.name, self._layer = name, layer

    def takes(self, row: Call) -> bool:
        return True

    def at_once(self, sequences: int) -> int:
        return self._layer.at_once(sequences)

    def multiply(self, rows: Listing[Call]) -> list[Any]:
        return list(self._layer.run(rows))


class Trial(AllRows):
    """A ``Product``, of no consequence for those who have come to it."""

    def multiply(self, rows: Listing[Call]) -> list[Any]:
        self._layer.compare(rows)
        return [True] * len(rows)


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder layers whose own code could run once for several: transformers', unpacked, with
    nobody's hooks inside."""
    base: Any = getattr(sys.modules.get("transformers.modeling_layers"), _LAYER, None)
    if base is None:
        return []
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, base) and not m.training]
    inner = {id(part) for _, m in found for part in m.modules() if part is not m}
    return [(n, m) for n, m in found if id(m) not in inner and _names(m) and _is_own(m)]


_LAYER = "GradientCheckpointingLayer"


def kind_of(layer: nn.Module) -> Hashable:
    """Equal for layers that do the same: of the same classes, settings and shapes. Which number a
    layer has tells only which keys and values are its own."""
    found: list[Hashable] = []
    for part, module in layer.named_modules():
        own = module.__dict__.items()
        settings = [(k, v) for k, v in own if type(v) in _SETTINGS and k not in _NUMBERS]
        tensors = (*module._parameters.items(), *module._buffers.items())
        shapes = [(k, tuple(v.shape), v.dtype) for k, v in tensors if v is not None]
        found.append((part, type(module), tuple(settings), tuple(shapes)))
    return tuple(found)


_SETTINGS = (bool, int, float, str)
_NUMBERS = ("layer_idx", "layer_id", "layer_number")


def _is_own(layer: nn.Module) -> bool:
    for module in layer.modules():
        if type(module).__module__.startswith("offload."):
            return False  # packed
        if module is layer:
            continue
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for hook in table.values():
                owner = getattr(hook, "__module__", None) or ""
                if owner != CAPTURES and not owner.startswith("offload."):
                    return False
    return True


def _names(layer: nn.Module) -> tuple[str, ...]:
    """Of a layer's arguments; none if it takes any number, or lacks those that are needed."""
    kind: Any = type(layer)
    return _names_of(kind)


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    forward: Any = getattr(kind, "forward", None)
    parameters = list(inspect.signature(inspect.unwrap(forward)).parameters.values())[1:]
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
        return ()
    return names if HIDDEN in names and CACHE in names else ()


def _is_cache(cache: Any) -> bool:
    """Whether a layer's tokens go to a cache as all its others do; not those of an encoder, too."""
    return hasattr(cache, "update") and hasattr(cache, "layers")


def _bytes_of(layer: nn.Module) -> int:
    """For each row, at the widest place: what goes into a product and what comes out, and what lies
    between, in float32."""
    widths = [sum(p.shape[-2:]) for p in layer.parameters() if p.dim() >= 2]
    return 4 * max(widths, default=1)


def _joined(calls: Listing[Call], parts: Parts, cache: Any) -> dict[str, Any]:
    """All calls' arguments in one. Raises ``NotJoined``."""
    first = calls[0].kwargs
    for call in calls:
        if call.kwargs.keys() != first.keys():
            raise NotJoined("calls with other arguments")
    return {
        name: cache if name == CACHE
        else _join_masks([call.kwargs[name] for call in calls]) if name == MASK
        else _join_values(name, [call.kwargs[name] for call in calls], parts)
        for name in first
    }  # fmt: skip


def _join_masks(masks: list[Any]) -> Any:
    return None if all(mask is None for mask in masks) else Rows(masks)


def _join_values(name: str, values: list[Any], parts: Parts) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise NotJoined(f"{name} of several kinds")
    if type(first) is torch.Tensor:
        alike = all(v.shape == first.shape and v.dtype == first.dtype for v in values)
        if not alike or first.dim() < 2 or first.shape[0] != 1:
            raise NotJoined(f"{name} of shape {tuple(first.shape)}")
        return parts.join(values)
    if type(first) in (tuple, list):
        if any(len(value) != len(first) for value in values):
            raise NotJoined(f"{name} of several lengths")
        return type(first)(
            _join_values(name, list(some), parts) for some in zip(*values, strict=True)
        )
    if first is None or isinstance(first, (bool, int, float, str, torch.dtype)):
        if any(value != first for value in values):
            raise NotJoined(f"{name} that differs")
        return first
    raise NotJoined(f"{name}, a {type(first).__name__}")


def _part(output: Any, i: int, count: int) -> Any:
    """Of a layer's result, what is sequence ``i``'s."""
    if type(output) is torch.Tensor:
        if output.shape[:1] != (count,):
            raise NotJoined(f"a result of shape {tuple(output.shape)}")
        return row_of(output, i)
    if type(output) in (tuple, list):
        return type(output)(_part(part, i, count) for part in output)
    if output is None:
        return None
    raise NotJoined(f"a result that is a {type(output).__name__}")


def _equal(a: Any, b: Any) -> bool:
    if type(a) is torch.Tensor and type(b) is torch.Tensor:
        return same_bits(a, b)
    if type(a) in (tuple, list) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a is None and b is None


__all__ = ["JOINED_BYTES", "ROWS_TRIED", "JoinedLayer", "Kind", "kind_of", "layers_of"]
