"""How a model's loss comes of its last hidden state, found and proved on a tiny twin.

Between body and loss there may be a factor (Cohere, Granite, muP) or a softcap (Gemma), under one
name or another of the config. No list of families says which: a twin of the model is watched, what
its head gives is compared with the logits it returns, the factor and the softcap that explain the
one by the other are looked for among the config's own numbers, and a second twin with other numbers
must follow them. Then the loss, and its gradients, must be ours. Whatever is not proved is refused
with a reason, and whoever asked uses the model's own loss and its whole logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import UnsupportedModelError
from offload.train.head_loss import IGNORE, ResidentHead, Transform, head_loss, shift_labels
from offload.train.head_twin import Shown, Twin, linear_head, no_cache, twin_of, with_numbers

logger = logging.getLogger(__name__)

TOLERANCE = 3e-5
"""Largest difference, relative to the largest value, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """``loss = cross_entropy(transform(head(hidden)))``, labels shifted by one."""

    head: str
    """Path of the ``nn.Linear``."""
    body: str | None
    """Path of the module whose ``last_hidden_state`` enters the head; None: the model is run and
    stopped before its head, since something lies between."""
    transform: Transform
    bias: bool
    vocabulary: int
    width: int


def find_head(model: Any) -> tuple[HeadForm | None, str]:
    """The form of a transformers causal language model's loss, or None and why not.

    ``model`` may be on the meta device: only its classes, config and shapes are used.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            form = _prove(model)
    except UnsupportedModelError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001  a family's own code fails in its own ways
        reason = f"its twin does not run: {type(error).__name__}: {error}"
    else:
        logger.info("loss of %s: %s", type(model).__name__, form)
        return form, ""
    logger.info("no form of %s's loss is proved: %s", type(model).__name__, reason)
    return None, reason


def run_body(model: Any, form: HeadForm, **inputs: Any) -> Tensor:
    """The hidden state ``[B, S, H]`` that enters the head, with its graph if gradients are on.

    ``inputs``: the model's own (``input_ids``, ``attention_mask``, ...), without labels.
    """
    # Mamba adds its layers up in float32 and rounds on the way to the head. Twins are float32.
    return _run(model, form.head, form.body, inputs).to(model.get_submodule(form.head).weight.dtype)


class _Stopped(Exception):
    """No error: it carries a result out of a forward."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _stop(_: nn.Module, args: tuple[Any, ...]) -> None:
    raise _Stopped(args[0])


def _run(model: Any, head: str, body: str | None, inputs: dict[str, Any]) -> Tensor:
    module = model if body is None else model.get_submodule(body)
    inputs = {**no_cache(module), **inputs}
    if body is not None:
        output = module(**inputs)
        hidden: Tensor | None = getattr(output, "last_hidden_state", None)
        return output[0] if hidden is None else hidden
    # First of all hooks: nobody shall fetch the head's weights.
    handle = model.get_submodule(head).register_forward_pre_hook(_stop, prepend=True)
    try:
        model(**inputs)
    except _Stopped as stopped:
        return stopped.hidden
    finally:
        handle.remove()
    raise UnsupportedModelError(f"{type(model).__name__} did not call its head {head}")


def _prove(model: Any) -> HeadForm:
    path, head = linear_head(model)
    twin, config, numbers = twin_of(model)
    if twin.path != path or (twin.head.bias is None) != (head.bias is None):
        raise UnsupportedModelError("its twin has another head")
    transform = _find_transform(twin, config, numbers)
    return HeadForm(
        head=path,
        body=_find_body(twin),
        transform=transform,
        bias=head.bias is not None,
        vocabulary=head.out_features,
        width=head.in_features,
    )


def _find_body(twin: Twin) -> str | None:
    """The module whose output, and its gradients, are the head's input; None: there is no such."""
    want = twin.hidden()
    direction = torch.randn_like(want)
    params = [p for p in twin.model.parameters() if p.requires_grad]

    def grads(hidden: Tensor) -> list[Tensor]:
        found = torch.autograd.grad((hidden * direction).sum(), params, allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    want_grads = grads(want)
    for path in (*_bodies(twin.model), None):
        twin.seed()
        try:
            got = _run(twin.model, twin.path, path, {"input_ids": twin.ids})
            same = got.shape == want.shape and _near(got, want)
            if same and all(map(_near, grads(got), want_grads)):
                return path
        except Exception as error:  # noqa: BLE001  a module that is no body may refuse in any way
            logger.debug("%s is not the body: %s", path, error)
    raise UnsupportedModelError("its head's input cannot be had without its head")


def _bodies(model: Any) -> Iterator[str]:
    """Paths of what may be the body, likely ones first, each once."""
    paths = {id(module): path for path, module in model.named_modules() if path}
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    likely = (model.base_model, decoder, *model.children())
    # A dict keeps their order and one of each.
    yield from dict.fromkeys(paths[id(module)] for module in likely if id(module) in paths)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Which numbers of the config make the transform. ``inverse``: the factor is 1 / number."""

    factor: str | None = None
    inverse: bool = False
    softcap: str | None = None

    def transform(self, numbers: dict[str, float]) -> Transform:
        factor = 1.0 if self.factor is None else numbers[self.factor]
        return Transform(
            factor=1 / factor if self.inverse else factor,
            softcap=None if self.softcap is None else numbers[self.softcap],
        )


def _find_transform(twin: Twin, config: Any, numbers: dict[str, float]) -> Transform:
    shown = twin.shown()
    if shown.logits.shape != shown.raw.shape:
        raise UnsupportedModelError(
            f"its head gives {list(shown.raw.shape)}, its logits are {list(shown.logits.shape)}"
        )
    explained = False
    for origin in _origins(numbers):
        transform = origin.transform(numbers)
        if not _explains(shown, transform):
            continue
        explained = True
        if _follows(type(twin.model), config, origin, numbers):
            _check_loss(twin, shown, transform)
            return transform
    if explained:
        raise UnsupportedModelError("its logits do not follow the numbers of its config")
    raise UnsupportedModelError("no factor or softcap of its config explains its logits")


def _origins(numbers: dict[str, float]) -> Iterator[_Origin]:
    """From plain to complicated: a softcap of 50,000 explains plain logits, too."""
    caps = (None, *(n for n, v in numbers.items() if v > 0))
    for softcap in caps:
        yield _Origin(softcap=softcap)
        if softcap is None:
            yield from (_Origin(n, i) for n in numbers for i in (False, True))
    for softcap in caps[1:]:
        yield from (_Origin(n, i, softcap) for n in numbers for i in (False, True))


def _explains(shown: Shown, transform: Transform) -> bool:
    z = shown.raw.double() * transform.factor
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return _near(shown.logits, z)


def _follows(model_cls: Any, config: Any, origin: _Origin, numbers: dict[str, float]) -> bool:
    """Does a twin with other numbers obey them? If not, they agreed by chance."""
    named = [n for n in (origin.factor, origin.softcap) if n is not None]
    if not named:
        return True
    changed = {n: numbers[n] * times for n, times in zip(named, (2, 3), strict=False)}
    twin = Twin(model_cls, with_numbers(config, changed))
    return _explains(twin.shown(), origin.transform({**numbers, **changed}))


def _check_loss(twin: Twin, shown: Shown, transform: Transform) -> None:
    """Our loss and gradients against the model's own."""
    labels = shift_labels(twin.labels)
    tokens = int((labels != IGNORE).sum())
    head = ResidentHead(twin.head.weight, twin.head.bias, rows=100)
    hidden = shown.hidden.flatten(0, 1)
    loss, grad = head_loss(hidden, labels, head, scale=1 / tokens, transform=transform)
    for what, ours, own in (
        ("loss", loss / tokens, shown.loss),
        ("gradient", grad.view_as(shown.hidden_grad), shown.hidden_grad),
        ("head's gradient", head.weight_grad, shown.weight_grad),
        ("bias's gradient", head.bias_grad, shown.bias_grad),
    ):
        if ours is not own and (ours is None or own is None or not _near(ours, own)):
            raise UnsupportedModelError(
                f"its {what} is not that of the cross-entropy of its logits, shifted by one"
            )


def _near(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape:
        return False
    got, want = got.detach().double(), want.detach().double()
    return bool((got - want).abs().max() <= TOLERANCE * want.abs().max())
