"""The end of a prompt from the disk: nothing of a prompt that comes again whole is computed.

``PromptReuse`` brings a prompt's whole groups into the cache; what is behind them, one token to a
whole pass, ``generate`` would compute each time: 3 % of a prompt of 8k tokens in groups of 256,
more of a shorter one, and all weights are read for it if they stream. That pass is the same one
each time, too, so what it leaves in the cache is stored with the logits that it gave, and stands
for the pass.

It takes the place of transformers' ``_prefill``, the step of ``generate`` that makes that pass. A
transformers without it, or a model with a step of its own, computes the end each time; so does
one whose keys and values are rounded in blocks, as the last of those is not full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from offload.kv.named import CACHE, given_cache
from offload.kv.prefix_cache import PrefixCache
from offload.models.shadow import shadow

_STEP = "_prefill"

_ASKED = ("output_attentions", "output_hidden_states", "output_router_logits", "output_mtp_logits")
"""Settings by which somebody wants more of the pass than its logits."""


class PromptEnds:
    """Ends of prompts, stored and brought back, of an open model."""

    def __init__(self, model: Any, prefixes: PrefixCache) -> None:
        self._model = model
        self._prefixes = prefixes
        self._known = WeakKeyDictionary[Any, list[int]]()
        own = type(model)
        after = "_update_model_kwargs_for_generation"
        self._usable = prefixes.grain == 1 and all(
            getattr(own, name, None) is getattr(GenerationMixin, name, 0) for name in (_STEP, after)
        )
        self._forward = self._around_forward()

    def serve(self, on_detach: Callable[[Callable[[], None]], None]) -> None:
        """Stand in for ``_prefill``; ``on_detach`` is called with what undoes it."""
        if self._usable:
            inner = getattr(self._model, _STEP)
            on_detach(shadow(self._model, _STEP, self._step(inner)))

    def expect(self, cache: Any, tokens: list[int], asked: Callable[[str], Any]) -> None:
        """A ``generate`` begins whose prompt is ``tokens``; ``cache`` holds its whole groups.

        Args:
            asked: a setting of this call, by name.
        """
        plain = not any(self._config(name) or asked(name) for name in _ASKED)
        if self._usable and plain and self._forward == self._around_forward():
            self._known[cache] = tokens

    def _step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def prefill(
            ids: Any, settings: Any, kwargs: Mapping[str, Any], *more: Any, **rest: Any
        ) -> Any:
            cache = given_cache(kwargs)
            tokens = self._known.pop(cache, None) if cache is not None else None
            if tokens is None:
                return inner(ids, settings, kwargs, *more, **rest)
            logits = self._prefixes.restore_end(tokens, cache)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
            with self._prefixes.recording_end(tokens, cache) as put:
                out = inner(ids, settings, kwargs, *more, **rest)
                if (found := getattr(out, "logits", None)) is not None:
                    put(found[:, -1:])
                return out

        return prefill

    def _config(self, name: str) -> bool:
        return bool(getattr(self._model.config.get_text_config(), name, False))

    def _around_forward(self) -> tuple[object, ...]:
        """What a program may have put around the whole model's forward, which has to run then. Our
        own hooks are no reason: by them sequences wait for each other's passes."""
        model = self._model
        hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
        return (sum(not _is_ours(hook) for hook in hooks), model.__dict__.get("forward"))


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("offload.")
