"""AdamW for a streamed model, in the shape of a ``torch.optim.Optimizer``.

``step`` freezes the hyper-parameters of that moment and returns; the updates run behind the next
forward, each weight's before its next use. Hyper-parameters are read from ``self.param_groups``
then and only then: schedulers write there, and wrappers replace the dictionaries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from offload.errors import OffloadError
from offload.train.engine import Group
from offload.train.foreign import ForeignLoop
from offload.train.layout import Piece
from offload.train.lazy_grad import GradientError
from offload.train.streamed import StreamedParameter

REFERENCE = "offload"
"""The key of ``state_dict`` that says where the states are."""
BEGUN = "begun"
"""In it: whether they are the optimizer's, and not those of another one before it."""


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) over streamed states.

    As ``torch.optim.AdamW`` in arithmetic (within 2 ulp in float32) and in interface: learning rate
    schedulers, accelerate, ``clip_grad_norm_``. The states' format (float32, bfloat16 with
    stochastic rounding, 8 bit) was chosen when the model was loaded.

    ``step`` takes the gradients: ``p.grad`` is None afterwards, zeroed or not. A parameter's
    moments are of the optimizer that took its last step: a new one begins with none, as torch's.

    Args:
        params: parameters, or groups of them, of one model from ``offload.load(..., train=True)``.
        lr, betas, eps, weight_decay: as of torch; 0 <= lr, eps, weight_decay; betas in [0, 1).
        in_backward: update a block as soon as backward is through with it, not after ``step``: no
            gradient is ever kept, and nothing can be clipped (that raises). With several backward
            passes per step, all but the last go into ``accumulating()``; accelerate's accumulation
            is noticed by itself.

    Raises:
        OffloadError: parameters that are not streamed, or of several models.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, *, in_backward: bool = False,
    ) -> None:  # fmt: skip
        self._loop: ForeignLoop | None = None
        self._mine: set[str] = set()
        """Parameters whose moments are this optimizer's."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        loop = self.loop
        loop.in_backward = in_backward
        if in_backward:
            loop.engine.in_backward = self._group_in_backward
        else:
            loop.engine.in_backward = None

    @property
    def loop(self) -> ForeignLoop:
        if self._loop is None:
            raise OffloadError("the optimizer has no parameters")
        return self._loop

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch.

        Raises:
            OffloadError: see the class; values out of range.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                self._check(param)
            _group(group)
        except BaseException:
            self.param_groups.pop()
            raise

    def _check(self, param: Any) -> None:
        if not param.numel():
            return  # nothing to train, and nothing that streams
        if not isinstance(param, StreamedParameter):
            raise OffloadError(
                f"a parameter of shape {tuple(param.shape)} is in memory, not streamed; give it to "
                f"an optimizer of its own (torch.optim.AdamW){_ONE_OF_TWO}"
            )
        source: Any = param._source
        if self._loop is None:
            self._loop = source
        elif self._loop is not source:
            raise OffloadError("the parameters are of several streamed models; one optimizer each")

    # -- steps ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the gradients there are; returns what ``closure`` returns.

        Raises:
            GradientError: there are no gradients, or parameters that are not this optimizer's have
                some.
            NotFinite: a gradient is NaN or infinite. The gradients are still there, ``zero_grad``
                drops them; nothing was updated (but what in_backward=True had updated before).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        loop = self.loop
        owned = loop.names_of(p for group in self.param_groups for p in group["params"])
        if not loop.in_backward:
            self._begin(loop.with_gradients().intersection(owned))
        loop.step(self._groups(), owned)
        if loop.owner is not None:
            loop.owner.stepped()
        return loss

    def _groups(self) -> Callable[[Piece], Group]:
        of = {}
        for group in self.param_groups:
            made = _group(group)
            of.update(dict.fromkeys(self.loop.names_of(group["params"]), made))

        def group_of(piece: Piece) -> Group:
            if piece.param not in of:
                raise GradientError(
                    f"{piece.param} has a gradient but is not in the optimizer; give it to it, or "
                    f"freeze it: requires_grad_(False)"
                )
            return of[piece.param]

        return group_of

    def _group_in_backward(self, piece: Piece) -> Group:
        group = self._groups()(piece)
        self._begin([piece.param])
        return group

    def _begin(self, names: Iterable[str]) -> None:
        """Before a step of these: moments that another optimizer has left are none of ours.

        Raises:
            GradientError: ours are gone, because another one has taken steps since.
        """
        loop = self.loop
        for name in sorted(names):
            last = loop.stepped_by.get(name)
            if last is not None and last is not self._mine:
                if name in self._mine:
                    raise GradientError(
                        f"another optimizer has taken steps of {name} since this one did: there is "
                        f"room for the moments of one; have one optimizer per parameter"
                    )
                loop.engine.steps[name] = 0  # its first step finds no moments (``tiles.Slot``)
            loop.stepped_by[name] = self._mine
            self._mine.add(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; they are None afterwards whatever ``set_to_none`` is."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside do not complete the step; needed with ``in_backward`` only."""
        self.loop.accumulating, before = True, self.loop.accumulating
        try:
            yield
        finally:
            self.loop.accumulating = before

    # -- states ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The groups, and a reference to the states: they stay in the store, committed, after all
        pending updates. Some hundred bytes; restored with ``load_state_dict``."""
        out = super().state_dict()
        owner = self.loop.owner
        if owner is not None:
            # Who has no moments has none when this is loaded, either: accelerate loads what it
            # has just saved.
            out[REFERENCE] = {**owner.reference(), BEGUN: bool(self._mine)}
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the groups of a ``state_dict`` whose states this model has.

        Raises:
            OffloadError: it refers to other states: of another store, or of another commit of this
                one; says how to load the model so that it has them.
        """
        reference = state_dict.get(REFERENCE)
        if reference is None:
            raise OffloadError(
                "this state_dict is not of offload.AdamW: states of another optimizer cannot be "
                "taken over; start without resuming"
            )
        if self.loop.owner is not None:
            self.loop.owner.check_reference(reference)
        if reference.get(BEGUN, True):
            for name in self.loop.names_of(p for g in self.param_groups for p in g["params"]):
                self.loop.stepped_by[name] = self._mine
                self._mine.add(name)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != REFERENCE})


def _group(group: Mapping[str, Any]) -> Group:
    """A group's values as of now. Raises OffloadError where one is out of range, or asks for what
    is not done."""
    for other in ("amsgrad", "maximize", "differentiable"):
        if group.get(other):
            raise OffloadError(f"{other}=True is not what offload.AdamW does; leave it out")
    if not group.get("decoupled_weight_decay", True):
        raise OffloadError(
            "decoupled_weight_decay=False is Adam's decay; offload.AdamW's is decoupled: leave it "
            "out, or set weight_decay=0"
        )
    beta1, beta2 = group["betas"]
    made = Group(
        lr=float(group["lr"]), beta1=float(beta1), beta2=float(beta2), eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )  # fmt: skip
    made.step(1, 1.0)  # judges the ranges
    return made


def trainer_optimizer(
    args: Any, *, in_backward: bool = False
) -> tuple[type[AdamW], dict[str, Any]]:
    """``optimizer_cls_and_kwargs`` for transformers' ``Trainer`` (and TRL's): ``AdamW`` with the
    learning rate, betas, eps and weight decay of ``args``, a ``TrainingArguments``. Where it is no
    argument of a trainer (``Seq2SeqTrainer``), it is an attribute, to be set before ``train``.

    Raises:
        OffloadError: ``args`` ask for fp16, for another optimizer than AdamW, for torch.compile,
            for the best weights in the place of the last, for evaluation in another dtype, or for
            clipping with ``in_backward``.
    """
    if getattr(args, "fp16", False):
        raise OffloadError("fp16 with a GradScaler is not supported; use bf16=True, or neither")
    asked = getattr(args.optim, "value", args.optim)
    if asked not in ("adamw_torch", "adamw_torch_fused"):
        raise OffloadError(
            f"optim={asked!r} is not what streamed states are updated by; leave optim at its "
            f"default (adamw_torch) and choose their format when loading: states='bf16' or '8bit'"
        )
    if getattr(args, "torch_compile", False):
        raise OffloadError(
            "torch_compile=True cannot be used: streamed weights come and go inside the model; "
            "leave it out"
        )
    if getattr(args, "load_best_model_at_end", False):
        raise OffloadError(
            "load_best_model_at_end=True cannot be used: streamed weights are not replaced while "
            "the model is open; leave it out, and load trainer.state.best_model_checkpoint when "
            "training is over (metric_for_best_model and save_strategy='best' still choose it)"
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise OffloadError(
                f"{name}=True cannot be used: it converts the model to evaluate it, and streamed "
                f"weights keep their dtype; leave it out (a dtype is chosen when the model is "
                f"loaded: dtype='bfloat16')"
            )
    if in_backward and args.max_grad_norm and args.max_grad_norm > 0:
        raise OffloadError(
            f"in_backward=True cannot clip, and max_grad_norm is {args.max_grad_norm}: set it to "
            f"0, or drop in_backward=True"
        )
    return AdamW, {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "in_backward": in_backward,
    }


def refuse_others() -> None:
    """From now on a step of any other optimizer over streamed parameters raises, before it makes
    states of their size. Idempotent."""
    global _refusing
    if not _refusing:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_refuse)
        _refusing = True


_refusing = False


def _refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, AdamW):
        return
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    streamed = [p for p in trained if isinstance(p, StreamedParameter)]
    if not streamed:
        return
    kind, name = type(optimizer).__name__, streamed[0]._name
    if len(streamed) < len(trained):
        raise OffloadError(
            f"{kind} cannot train {name} and what else of its {len(trained)} parameters is "
            f"streamed ({len(streamed)}); the others are in memory: offload.AdamW trains those, "
            f"and {kind} these{_ONE_OF_TWO}"
        )
    raise OffloadError(
        f"{kind} cannot train {name}, whose weights are streamed: use "
        f"offload.AdamW(model.parameters(), ...); with a Trainer, "
        f"optimizer_cls_and_kwargs=offload.trainer_optimizer(args), or where that is no argument "
        f"of it (Seq2SeqTrainer), trainer.optimizer_cls_and_kwargs = "
        f"offload.trainer_optimizer(args)"
    )


_ONE_OF_TWO = (
    ". A loop of your own takes steps of both; a Trainer has one optimizer: freeze there what is "
    "streamed, or what is not (PEFT's adapters: bias='none')"
)


__all__ = ["AdamW", "refuse_others", "trainer_optimizer"]
