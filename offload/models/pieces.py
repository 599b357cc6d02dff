"""Whether a family's prompt may be read in pieces, one forward pass after the other.

A cache is meant to make that the same as one pass over the whole prompt. For some families
transformers' own code does otherwise: Jamba and Zamba begin their states anew with every piece,
RecurrentGemma has them outside of the cache, masks of encoders that decode see what is behind them
or do not, sparse attention chooses among other tokens. Nothing in a class says so; a toy shows it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

LAYERS = (6, 4, 2)
"""Of a toy: as many as have each kind of layer, if the family's config can be made so."""
PROMPT, PIECE, TOKENS = 29, 8, 3
"""Tokens of a toy's prompt, of its pieces, and that it says behind them."""
_DEPTHS = {"prophetnet": ("num_encoder_layers", "num_decoder_layers")}
"""What sets the number of layers where the usual name only reads it."""
_OF_ITS_USE = frozenset({
    "architectures", "dtype", "_name_or_path", "transformers_version", "model_type", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "_attn_implementation",
    "_experts_implementation", "torchscript", "chunk_size_feed_forward",
})  # fmt: skip
"""What a config says of where it comes from and what is done with it."""
CLOSE = 1e-3
"""Of the largest logit: what pieces of whole sums round otherwise is a thousand times less."""


def why_not_in_pieces(model: nn.Module) -> str | None:
    """Why a prompt has to be read as a whole; None: it need not, as far as a toy of the model's
    family can say. For models that ``generate``."""
    return _why(*family_of(model))


def learn_pieces(options: Any, kind: type, config: Any) -> None:
    """Ask the toy now, before the process is weighed, if a model of class ``kind`` opened with
    ``options`` will be asked: its budget would pay for the toy, a MiB or two of weights, of code
    that nobody has run before, and of the heap."""
    if options.in_pieces or options.prompt_cache is not None or options.kv_keep is not None:
        _why(*_family(kind, config))


@functools.cache
def _why(*family: Any) -> str | None:
    model_cls = family[0]
    for model in toys(*family):
        _spread(model)
        try:
            whole = _logits(model)
        except Exception as error:  # noqa: BLE001  families refuse toys in their own ways
            logger.info("a toy of %s does not run: %s", model_cls.__name__, error)
            continue
        try:
            parts = _logits(model, prefill_chunk_size=PIECE)
        except Exception as error:  # noqa: BLE001  whatever it is: not in pieces
            return f"{model_cls.__name__} cannot go on behind a piece of a prompt ({error})"
        if not torch.isfinite(whole).all():
            continue
        if not (whole - parts).abs().max() <= CLOSE * whole.abs().max():
            return (
                f"{model_cls.__name__} makes something else of a prompt in pieces than of the whole"
            )
        return None
    if getattr(model_cls, "_is_stateful", False):
        return f"{model_cls.__name__} has states, and no toy of it shows that they go on"
    return None


def family_of(model: nn.Module) -> tuple[Any, ...]:
    """Equal for models of one class, with layers of the same kinds, whose configs say the same but
    for numbers; for ``toys``."""
    return _family(type(model), model.config)


def _family(kind: type, config: Any) -> tuple[Any, ...]:
    text = config.get_text_config()
    lists = [(k, v) for k, v in vars(text).items() if isinstance(v, list) and v]
    kinds = [
        (name, tuple(dict.fromkeys(value)))
        for name, value in lists
        if len(value) == getattr(text, "num_hidden_layers", 0) and isinstance(value[0], str)
    ]
    if text is not config:
        return kind, type(config), (), ()
    return kind, type(config), tuple(kinds), _switches(config)


def _switches(config: Any) -> tuple[tuple[str, Any], ...]:
    """What a config says in words, or with yes and no, otherwise than its class does."""
    try:
        usual = type(config)().to_dict()
    except Exception as error:  # noqa: BLE001  config classes validate in their own ways
        logger.info("%s has no defaults: %s", type(config).__name__, error)
        return ()
    said = config.to_dict()
    return tuple(
        (name, said[name])
        for name, value in sorted(usual.items())
        if name not in _OF_ITS_USE
        and isinstance(said.get(name), bool | str)
        and said[name] != value
    )


def toys(
    model_cls: Any, config_cls: Any, kinds: tuple[tuple[str, tuple[str, ...]], ...],
    switches: tuple[tuple[str, Any], ...] = (),
) -> Iterator[Any]:  # fmt: skip
    """Small random models of a family in float32, with fewer and fewer layers. Random numbers are
    left as they were."""
    from offload.models.toy import TOY_BYTES, quiet, small_config

    depth = _DEPTHS.get(getattr(config_cls, "model_type", ""), ("num_hidden_layers",))
    for layers, said in itertools.product(LAYERS, dict.fromkeys((switches, ()))):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
                torch.manual_seed(0)
                of_each = {name: [v[i % len(v)] for i in range(layers)] for name, v in kinds}
                more = {**dict(said), **dict.fromkeys(depth, layers), **of_each}
                config = small_config(config_cls, **more)
                with torch.device("meta"):
                    meta = model_cls._from_config(config, dtype=torch.float32)
                if sum(p.nbytes for p in meta.parameters()) > TOY_BYTES:
                    continue
                model = model_cls._from_config(config, dtype=torch.float32).eval()
        except Exception as error:  # noqa: BLE001  families refuse toys in their own ways
            logger.info("no toy of %s: %s", model_cls.__name__, error)
            continue
        yield model


def _spread(model: nn.Module) -> None:
    """Matrices of unit gain: as a class draws them, tokens make next to no difference."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2 or any(part in name for part in ("A_log", "dt_", "time_")):
                continue
            fan_in = p.shape[-1] if p.dim() == 2 else p[0].numel() // p.shape[1]
            p.copy_(torch.randn(p.shape, generator=draw) * max(1, fan_in) ** -0.5)


def _logits(model: Any, **more: Any) -> torch.Tensor:
    ids = torch.arange(3, 3 + PROMPT)[None] % max(4, model.config.get_text_config().vocab_size)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = model.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=[], pad_token_id=0,
            output_logits=True, return_dict_in_generate=True, **more,
        )  # fmt: skip
    return torch.cat(found.logits)


__all__ = ["family_of", "toys", "why_not_in_pieces"]
