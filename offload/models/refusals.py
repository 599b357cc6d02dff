"""What a streamed model cannot do is an error before anything of it is done.

``to``, ``save_pretrained`` and ``load_state_dict`` would do half of it before they meet a weight
that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from offload.errors import OffloadError
from offload.models.absent import UNPACKED, AbsentTensor
from offload.models.shadow import shadow
from offload.models.units import Cut

Undo = Callable[[], Any]


def _packed(model: nn.Module) -> bool:
    """Whether ``offload.unwrap`` is no way out: weights are bytes for our kernels."""
    return bool(getattr(model.__dict__.get("offload"), "packed", False))


def held(module: nn.Module) -> bool:
    """Whether it is a streamed model, or a part of one with weights in it."""
    function = getattr(module.__dict__.get("_apply"), "__func__", None)
    return getattr(function, "__module__", None) == __name__


def refuse_changes(model: nn.Module, cut: Cut, device: torch.device) -> list[Undo]:
    """Have ``model``, cut like this and computing on ``device``, refuse to be moved, copied, saved,
    overwritten or given another vocabulary; returns what undoes it."""
    return [*_refuse_to_move(model, cut, device), *_refuse_to_load(model, cut)]


def _refuse_to_move(model: nn.Module, cut: Cut, device: torch.device) -> list[Undo]:
    """To where it is already (pipelines do that), the model may go, and so may its parts."""
    dtypes = {p.tensor.dtype for params in cut.params.values() for p in params}
    dtypes |= {p.dtype for p in model.parameters()}  # packed bytes have no dtype to compute in

    parts = _parts(model, cut)
    held = {id(part) for part in parts}

    def apply(
        self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        if id(self) not in held:  # a copy of a part
            return type(self)._apply(self, fn, *args, **kwargs)
        for dtype in dtypes:
            probe = torch.empty(0, dtype=dtype, device=device)
            moved = fn(probe)
            if moved.dtype != dtype or moved.device != probe.device:
                way = (
                    "give dtype= and device= when you load it, or call offload.unwrap(model) first"
                )
                if _packed(model):
                    way = f"give device= when you load it; for another dtype {UNPACKED}"
                raise OffloadError(f"a streamed model stays on {device} and in {dtype}; {way}")
        return self

    def save_pretrained(*_: Any, **__: Any) -> None:
        if _packed(model):
            raise OffloadError(
                f"a packed model cannot be saved: its weights are bytes for our kernels; copy the "
                f"directory that it was packed into, or {UNPACKED}, and save that"
            )
        raise OffloadError(
            "a streamed model cannot be saved: its weights are those of its checkpoint; call "
            "offload.unwrap(model) first if you have changed it"
        )

    def pickled(*_: Any) -> None:  # deepcopy asks for it, too
        raise OffloadError(
            "a streamed model cannot be copied or pickled, torch.save of all of it included; "
            "load it twice, or call offload.unwrap(model) first if it was wrapped"
        )

    replaced: dict[str, Callable[..., Any]] = {"__reduce_ex__": pickled}
    for name in ("save_pretrained", "push_to_hub"):  # which makes a repository before it saves
        if hasattr(model, name):
            replaced[name] = save_pretrained
    undo = [shadow(model, name, function) for name, function in replaced.items()]
    undo += [  # others, all of whose weights stay, can be copied: adapters do that
        shadow(part, "__reduce_ex__", pickled)
        for part in parts
        if part is not model and any(isinstance(p, AbsentTensor) for p in part.parameters())
    ]
    # A part that was moved alone would compute with weights that are not its blocks' any more.
    return undo + [shadow(part, "_apply", MethodType(apply, part)) for part in parts]


def _parts(model: nn.Module, cut: Cut) -> list[nn.Module]:
    """All modules with weights of the cut in them: none of adapters that were put on top."""
    own = {id(place.module) for params in cut.params.values() for p in params for place in p.places}
    return [part for part in model.modules() if any(id(inner) in own for inner in part.modules())]


def _refuse_to_load(model: nn.Module, cut: Cut) -> list[Undo]:
    """Adapters that were put on top load as ever."""
    params = [p for block in cut.params.values() for p in block]
    places = {(id(at.module), at.attr) for param in params for at in param.places}

    def refuse(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for path, inner in module.named_modules(prefix=prefix.removesuffix(".")):
            for attr in inner._parameters:
                name = f"{path}.{attr}" if path else attr
                if (id(inner), attr) in places and name in state:
                    way = "load that, or call offload.unwrap(model) first"
                    raise OffloadError(
                        f"load_state_dict would change {name}, which is streamed: a streamed "
                        f"model's weights are those of its checkpoint; write the new ones as a "
                        f"checkpoint and {'pack that' if _packed(model) else way}"
                    )

    return [model.register_load_state_dict_pre_hook(refuse).remove]


__all__ = ["refuse_changes"]
