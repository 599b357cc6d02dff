"""A tiny random twin of a causal language model, and what its head does there.

Sizes are a toy's; every switch and every real number of the config (softcaps, multipliers, tied
embeddings, ...) is the model's own, since they decide what becomes of the logits.
"""

# B batch, S tokens of a row, H width of the hidden state, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import UnsupportedModelError
from offload.models.toy import TOY_BYTES, small_config
from offload.units import format_bytes

TWIN_BYTES = 4 * TOY_BYTES
"""A twin's weights are at most this large, in float32. Its gradients take as much, twice."""

SHAPE = (2, 16)
"""Rows and tokens that a twin is shown."""

LOGIT_STD = 8.0
"""Logits are made this large: a softcap bends them visibly, and no exponential overflows."""

_RUN_FLAGS = frozenset(
    "return_dict use_cache is_encoder_decoder torchscript"
    " output_attentions output_hidden_states output_router_logits".split()
)
"""How a model is called, not what it computes. A router's auxiliary loss is added by who trains,
not by the head."""

_FACTORS = ("cap", "scal", "multipl", "factor")
"""Parts of names whose value may be a whole number in a config and still is no size."""


def no_cache(module: nn.Module) -> dict[str, bool]:
    """``use_cache=False`` if the module's forward takes it by name: nobody reads the cache."""
    return {"use_cache": False} if "use_cache" in signature(module.forward).parameters else {}


def linear_head(model: Any) -> tuple[str, nn.Linear]:
    """The output embeddings, by transformers' accessor, and their path.

    Raises:
        UnsupportedModelError: there are none, or they are no plain ``nn.Linear``.
    """
    accessor = getattr(model, "get_output_embeddings", None)
    head = accessor() if accessor is not None else None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = "missing" if head is None else f"of class {type(head).__name__}"
        raise UnsupportedModelError(f"its output embeddings are {kind}, not a plain nn.Linear")
    if more := sorted(set(head._parameters) - {"weight", "bias"}):
        raise UnsupportedModelError(f"its head has adapters or the like: {', '.join(more)}")
    for path, module in model.named_modules():
        if module is head:
            return path, head
    raise UnsupportedModelError("its output embeddings are not among its modules")


def twin_of(model: Any) -> tuple[Twin, Any, dict[str, float]]:
    """A twin that runs, its config, and the model's real numbers by dotted name.

    Raises:
        Exception: whatever the family raises if no toy of it runs.
    """
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    depths: tuple[int | None, ...] = (2, 4, 6)
    if nbytes <= TOY_BYTES:
        depths += (None,)  # a toy already
    failed: Exception | None = None
    for depth in depths:
        try:
            config = copy.deepcopy(model.config) if depth is None else _small(model.config, depth)
            _check_size(type(model), config)
            twin = Twin(type(model), config)
            twin.hidden()
        except Exception as error:  # noqa: BLE001  every family refuses a toy's sizes in its way
            failed = failed or error
            continue
        return twin, config, dict(_numbers(model.config))
    raise failed or UnsupportedModelError("no toy of it runs")


def _check_size(model_cls: Any, config: Any) -> None:
    """Not every config shrinks: some have their sizes layer by layer."""
    with torch.device("meta"):
        meta = model_cls._from_config(copy.deepcopy(config), dtype=torch.float32)
    nbytes = sum(p.nbytes for p in meta.parameters())
    if nbytes > TWIN_BYTES:
        raise UnsupportedModelError(
            f"its smallest twin takes {format_bytes(nbytes)}, more than {format_bytes(TWIN_BYTES)}"
        )


def with_numbers(config: Any, numbers: dict[str, float]) -> Any:
    """A copy of ``config`` with some numbers, by dotted name, replaced; whole ones stay whole."""
    changed = copy.deepcopy(config)
    for name, value in numbers.items():
        *path, last = name.split(".")
        owner = changed
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, type(getattr(owner, last))(value))
    return changed


def _carried(config: Any) -> dict[str, Any]:
    """Switches and real numbers of a config; no sizes, no nested configs."""
    default = type(config)().to_dict()
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name.startswith("_") or name in _RUN_FLAGS or name not in default:
            continue
        whole = isinstance(value, int) and default[name] is None
        if (
            isinstance(value, bool | float)
            or (isinstance(default[name], float) and (value is None or isinstance(value, int)))
            or (whole and any(part in name for part in _FACTORS))
        ):
            found[name] = value
    return found


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    for name in getattr(type(config), "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield name, part


def _small(config: Any, depth: int) -> Any:
    known = type(config)().to_dict()
    overrides = {**_carried(config), **{n: _small(part, depth) for n, part in _parts(config)}}
    overrides |= {n: depth for n in ("num_hidden_layers", "n_layer", "n_layers") if n in known}
    # A toy's vocabulary has no padding; one that has must have it in the twin, too.
    for name, value in config.to_dict().items():
        # One kind for each layer: the model's own kinds in turn, not its class's default ones.
        if isinstance(value, list) and len(value) == getattr(config, "num_hidden_layers", None):
            kinds = list(dict.fromkeys(v for v in value if isinstance(v, str)))
            if kinds and name in known:
                overrides[name] = [kinds[i % len(kinds)] for i in range(depth)]
    unpadded = getattr(config, "unpadded_vocab_size", None)
    if unpadded is not None and unpadded != config.vocab_size:
        overrides["unpadded_vocab_size"] = 250
    return small_config(type(config), **overrides)


def _numbers(config: Any) -> Iterator[tuple[str, float]]:
    for name, value in _carried(config).items():
        if value and not isinstance(value, bool) and 1e-6 < abs(value) < 1e6:
            yield name, float(value)
    for prefix, part in _parts(config):
        for name, value in _numbers(part):
            yield f"{prefix}.{name}", value


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the model made of a hidden state, and the gradients of its own loss."""

    hidden: Tensor
    """``[B, S, H]``: what the head was given."""
    raw: Tensor
    """``[B, S, V]``: what the head gave."""
    logits: Tensor
    """``[B, S, V]``: what the model returned."""
    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None


class Twin:
    """A tiny random model in training mode. Use inside ``torch.random.fork_rng``."""

    def __init__(self, model_cls: Any, config: Any) -> None:
        torch.manual_seed(0)
        for part in (config, *(part for _, part in _parts(config))):
            part.output_router_logits = False
        self.model = model_cls._from_config(config, dtype=torch.float32).train()
        self.model.set_experts_implementation("eager")
        self.path, self.head = linear_head(self.model)
        rows, _ = self.head.weight.shape
        embeddings = self.model.get_input_embeddings()
        words = min(rows, getattr(embeddings, "num_embeddings", rows))
        self.ids = torch.randint(3, words, SHAPE)
        self.labels = torch.randint(3, words, SHAPE)
        self.labels[0, :5] = -100
        self.labels[1, 9] = -100

    def hidden(self) -> Tensor:
        """``[B, S, H]``, with its graph: what the head is given in the model's own forward."""
        given: list[Tensor] = []

        def look(_: nn.Module, args: tuple[Any, ...]) -> None:
            given.append(args[0])

        with self._hook(lambda: self.head.register_forward_pre_hook(look)):
            self._forward()
        if len(given) != 1:
            raise UnsupportedModelError(f"its head is called {len(given)} times in one forward")
        return given[0]

    def shown(self) -> Shown:
        """Put a random hidden state of the right size into the head, and watch."""
        width, factor = self.head.in_features, 1.0
        shown = self._show(torch.randn(*SHAPE, width), factor)
        for _ in range(2):  # the size of logits is not linear in the hidden state's
            factor *= LOGIT_STD / max(1e-6, float(shown.logits.detach().std()))
            shown = self._show(torch.randn(*SHAPE, width), min(factor, 1e4))
            if float(shown.logits.std()) > LOGIT_STD / 2:
                break
        return shown

    def seed(self) -> None:
        """Before every forward: the same dropout."""
        torch.manual_seed(1)

    def _show(self, hidden: Tensor, factor: float) -> Shown:
        hidden = (hidden * factor).requires_grad_()
        raw: list[Tensor] = []

        def give(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if args[0].shape != hidden.shape:
                raise UnsupportedModelError(
                    f"its head is given {list(args[0].shape)}, not {list(hidden.shape)}"
                )
            return (hidden, *args[1:])

        def look(_: nn.Module, args: Any, output: Tensor) -> None:
            raw.append(output.detach().clone())

        with (
            self._hook(lambda: self.head.register_forward_pre_hook(give)),
            self._hook(lambda: self.head.register_forward_hook(look)),
        ):
            output = self._forward()
        weights = [p for p in (self.head.weight, self.head.bias) if p is not None]
        grads = torch.autograd.grad(output.loss, [hidden, *weights])
        return Shown(
            hidden=hidden.detach(), raw=raw[0], logits=output.logits.detach(),
            loss=output.loss.detach(), hidden_grad=grads[0], weight_grad=grads[1],
            bias_grad=grads[2] if len(grads) > 2 else None,
        )  # fmt: skip

    def _forward(self) -> Any:
        self.seed()
        return self.model(
            input_ids=self.ids, labels=self.labels, return_dict=True, **no_cache(self.model)
        )

    @contextmanager
    def _hook(self, register: Callable[[], Any]) -> Iterator[None]:
        handle = register()
        try:
            yield
        finally:
            handle.remove()
