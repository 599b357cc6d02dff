"""A single token through a whole model without the model's own code around its layers.

Masks, rotary tables and outputs that nobody reads cost a small model a millisecond per token. What
is left of a forward is: a row of the embedding, the layers (``lean_run``), the last norm, the head,
each still its own module with its own hooks.

That this is all that happens between the layers is not taken from the class's name: when the model
opens, both ways run once with layers that only scale and shift, and the logits have to be the same
bits. A model that does more (scaled embeddings outside of their module, capped logits) keeps its
forward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.errors import OffloadError
from offload.kv.named import CACHE, NAMES, given_cache
from offload.models.attach import Attachment
from offload.models.lean_cache import LeanCache
from offload.models.lean_watch import DecoderWatch
from offload.models.shadow import shadow
from offload.models.streamed_forward import not_compiled

logger = logging.getLogger(__name__)

Token = Callable[[torch.Tensor, int | None, LeanCache], torch.Tensor | None]
"""See ``LeanRun.token``."""

_READ = {"input_ids", "attention_mask", "position_ids", *NAMES}
_WITHOUT_EFFECT = {"use_cache", "logits_to_keep", "return_dict"}
"""For one token, as long as a cache is given and a dictionary is wanted."""
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


class LeanForward:
    """``model.forward`` for one token on a ``LeanCache``; everything else goes to the model."""

    def __init__(
        self, model: Any, paths: Sequence[str], token: Token, untouched: Callable[[], bool]
    ) -> None:
        """``paths``: of the decoder layers, in order; ``token``: all of them at once, or None;
        ``untouched``: whether they are as they were opened.

        Raises:
            OffloadError: the model has no list of layers, embedding, norm or head where every
                model of transformers has them.
        """
        parents = {path.rpartition(".")[0] for path in paths}
        base = getattr(model, "base_model", None)
        norm = getattr(base, "norm", None)
        if len(parents) != 1 or not isinstance(base, nn.Module) or not isinstance(norm, nn.Module):
            raise OffloadError("its layers are in several lists, or it has no last norm")
        (self._parent,) = parents
        self._model, self._base, self._norm = model, base, norm
        self._layers: list[nn.Module] = [model.get_submodule(path) for path in paths]
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        if self._embedding is None or self._head is None:
            raise OffloadError("it has no embedding or no head")
        self._token, self._untouched = token, untouched
        self._watch = DecoderWatch(model, base, model.get_submodule(*parents))
        self._inner: Callable[..., Any] = model.forward
        self._output: Any = None

    def attach(self, cache: LeanCache, attachment: Attachment) -> None:
        """Take over, if both ways give the same bits. ``cache``: an empty one."""
        model = self._model
        stand_ins = [_ScaleAndShift(layer, i) for i, layer in enumerate(self._layers)]
        ids = torch.ones((1, 1), dtype=torch.int64)
        with torch.no_grad(), _layers_replaced(model, self._parent, stand_ins):
            stock = self._inner(input_ids=ids, use_cache=True, **{CACHE: cache})
            logits = self._logits(self._embedding(ids), cache, None, stand_ins)
        if not torch.equal(stock.logits, logits):
            raise OffloadError(
                f"it does more around its layers than embedding, norm and head: logits differ by "
                f"{float((stock.logits - logits).abs().max()):.1e}"
            )
        self._output = type(stock)

        @functools.wraps(self._inner)  # generate() reads the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            with attachment.turn:
                return self(*args, **kwargs)

        attachment.on_detach(shadow(model, "forward", not_compiled(forward)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = given_cache(kwargs)
        ids: Any = kwargs.get("input_ids")
        if args or not isinstance(cache, LeanCache):
            return self._inner(*args, **kwargs)
        if not self._is_plain(ids, kwargs, seen=cache.is_as_seen()):
            return self._inner(*args, **kwargs)
        cache.check_live()
        if not _sees_all(kwargs.get("attention_mask"), cache.get_seq_length() + 1):
            return self._inner(*args, **kwargs)
        positions = kwargs.get("position_ids")
        if positions is not None and int(positions) == cache.get_seq_length():
            positions = None  # what every layer takes by itself
        with torch.no_grad():
            embedded = self._embedding(ids)
            hidden = self._token(embedded, None if positions is None else int(positions), cache)
            if hidden is None:
                logits = self._logits(embedded, cache, positions, self._layers)
            else:
                cache.saw()
                logits = self._head(self._norm(hidden))
        return self._output(logits=logits, **{CACHE: cache})

    def _is_plain(self, ids: Any, kwargs: dict[str, Any], *, seen: bool) -> bool:
        """Whether a call asks for the next token's logits and nothing else. ``seen``: that the
        layers are as they were has been seen, and still holds."""
        if not isinstance(ids, torch.Tensor) or ids.shape != (1, 1):
            return False
        for name, value in kwargs.items():
            if name in _READ:
                continue
            if name in _WITHOUT_EFFECT:
                if value is False and name != "logits_to_keep":
                    return False
            elif value is not None and value is not False:
                return False
        config = self._model.config
        if any(getattr(config, name, False) for name in _OUTPUTS):
            return False
        base = self._base
        positions = kwargs.get("position_ids")
        if positions is not None and positions.numel() != 1:
            return False
        if torch.is_grad_enabled():
            return False
        return seen or (
            self._watch.untouched()
            and self._untouched()
            and not (base._forward_hooks or base._forward_pre_hooks)
        )

    def _logits(
        self, hidden: torch.Tensor, cache: LeanCache, positions: Any, layers: Sequence[nn.Module]
    ) -> torch.Tensor:
        for layer in layers:
            hidden = layer(hidden, position_ids=positions, **{CACHE: cache})
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits


def _sees_all(mask: Any, tokens: int) -> bool:
    """Whether a mask is one of padding that hides none of so many tokens."""
    if mask is None:
        return True
    known = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] >= tokens
    return known and bool(mask.all())


def take_over(
    model: Any,
    paths: Sequence[str],
    make_cache: Callable[[], LeanCache],
    attachment: Attachment,
    token: Token,
    untouched: Callable[[], bool],
) -> None:
    """Put a ``LeanForward`` in place, or log why not."""
    try:
        LeanForward(model, paths, token, untouched).attach(make_cache(), attachment)
    except (OffloadError, RuntimeError, AttributeError, TypeError, ValueError) as why:
        logger.info("single tokens go through the model's own forward: %s", why)


class _ScaleAndShift(nn.Module):
    """In place of a layer; what a model reads of its layers, it has from the one it stands for."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.__dict__["stands_for"] = layer
        self._scale, self._shift = 1 + index / 16, (index % 3 - 1) / 8

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden * self._scale + self._shift


@contextmanager
def _layers_replaced(model: nn.Module, path: str, by: Sequence[nn.Module]) -> Iterator[None]:
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    before = parent._modules[name]
    parent._modules[name] = nn.ModuleList(by)
    try:
        yield
    finally:
        parent._modules[name] = before
