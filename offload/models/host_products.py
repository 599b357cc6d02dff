"""Linear layers whose weights stay in RAM at decode, where the CPU multiplies with them.

    T tokens of a pass, K inputs, N outputs

Where the plan says so (``Plan.sites``), a unit that runs for a few tokens is entered without these
weights: the layer finds a stand-in in their place, sends its input down and takes the CPU's result.
With many tokens they go up like others. The product is the same call on the same bytes, in the same
shape, so that the answer is the same where both compute alike.

Which layers can do with that is tried on the meta device: those that are called inside their unit,
on no more tokens than the unit has, and whose weight nobody reads but they.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offload.blocks import TENSOR_ALIGN, align_up
from offload.errors import OffloadError
from offload.models.absent import AbsentTensor, absent
from offload.models.footprint import meta_forward
from offload.models.params import Param
from offload.models.shadow import shadow
from offload.models.streamed_forward import as_trained
from offload.models.units import Cut
from offload.runtime.executor import Executor, Views
from offload.scheduler.plan import Plan

ROWS = 32
"""Most tokens of a pass that the CPU has a part in; activations of so many have room."""


Work = Callable[..., torch.Tensor]
"""From a block's tensors in RAM, and what has come down, to a result there."""

PACKED = "packed"
"""The parameter of a ``PackedLinear``, by its name: what it is made of need not be there."""


def tokens_of(values: Iterable[Any]) -> int:
    """Most tokens that any of a module's inputs has: tensors of numbers [..., T, width], and tuples
    of such."""
    most = 0
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.is_floating_point():
            most = max(most, value.numel() // max(1, value.shape[-1]))
        elif isinstance(value, tuple):
            most = max(most, tokens_of(value))
    return most


def apart_layers(model: Any, units: Sequence[tuple[str, nn.Module]]) -> frozenset[str]:
    """Paths of linear layers that compute on their unit's tokens and on nothing else's, as a prompt
    and a token show. ``model``: on meta, its linear layers still its own; left as it was.
    """
    if not units:
        return frozenset()
    running: list[int] = []
    called: set[str] = set()
    strange: set[str] = set()
    undo: list[Callable[[], Any]] = []

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        running.append(tokens_of((*args, *kwargs.values())))

    def leave(*_: Any) -> None:
        running.pop()

    def product(path: str, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        called.add(path)
        if not running or tokens_of((x,)) > running[-1]:
            strange.add(path)
        return x.new_empty((*x.shape[:-1], layer.out_features))

    try:
        for path, unit in units:
            first = unit.register_forward_pre_hook(enter, with_kwargs=True)
            last = unit.register_forward_hook(leave, always_call=True)
            undo += [first.remove, last.remove]
            for name, layer in unit.named_modules():
                if type(layer) is not nn.Linear or "forward" in layer.__dict__:
                    continue
                where = f"{path}.{name}" if name else path
                undo.append(shadow(layer, "forward", partial(product, where, layer)))
                for attr, tensor in list(layer._parameters.items()):
                    if tensor is not None:
                        layer._parameters[attr] = absent(f"{where}.{attr}", tensor, tensor.device)
                        undo.append(partial(layer._parameters.__setitem__, attr, tensor))
        meta_forward(model, tokens=4, batch=1, decode=True)
    except Exception:  # noqa: BLE001  whatever fails: not shown to be so
        return frozenset()
    finally:
        while undo:
            undo.pop()()
    return frozenset(called - strange)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer and where its parameters are."""

    module: Any
    attr: str
    """Of its weight: what is absent while the CPU is to compute."""
    names: Mapping[str, str]
    """Attribute → tensor of the block, of what moves with it."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of a row of its input, of its output, and of what else goes down."""
        packed = self.attr == PACKED
        item = 4 if packed else self.module._parameters[self.attr].element_size()
        bias = 0 if packed or self.module.bias is None else item * self.module.out_features
        return item * self.module.in_features, item * self.module.out_features, bias


def layers_of(cut: Cut, apart: frozenset[str]) -> dict[str, list[_Layer]]:
    """By block: its linear layers, of blocks that hold nothing else than layers of ``apart``."""
    owners: dict[str, int] = {}
    for unit in cut.units:
        for block in unit.blocks:
            owners[block] = owners.get(block, 0) + 1
    found: dict[str, list[_Layer]] = {}
    for block, params in cut.params.items():
        if owners.get(block) == 1 and params and block not in cut.resident:
            layers = _layers(params, apart)
            if layers:
                found[block] = layers
    return found


def _layers(params: Sequence[Param], apart: frozenset[str]) -> list[_Layer] | None:
    """The layers whose weights, and biases if they are of the same block, are all of ``params``."""
    modules: dict[int, tuple[Any, dict[str, str]]] = {}
    for param in params:
        path, _, attr = param.names[0].rpartition(".")
        if len(param.places) > 1 or path not in apart:
            return None
        module = param.places[0].module
        modules.setdefault(id(module), (module, {}))[1][attr] = param.name
    layers = []
    for module, names in modules.values():
        attr = PACKED if PACKED in module._parameters else "weight"
        if attr not in names or not names.keys() <= {attr, "bias"}:
            return None
        layers.append(_Layer(module, attr, names))
    return layers


def apart_blocks(cut: Cut, apart: frozenset[str]) -> frozenset[str]:
    """Blocks that the CPU can compute by themselves, slices of the head among them."""
    head = cut.head.blocks if cut.head is not None else ()
    return frozenset({*layers_of(cut, apart), *head})


def product_bytes(cut: Cut, apart: frozenset[str]) -> int:
    """Most bytes that a product of ``ROWS`` tokens sends between the sites."""
    sizes = [layer.sizes for layers in layers_of(cut, apart).values() for layer in layers]
    if cut.head is not None:
        item = cut.head.param.tensor.element_size()
        columns = cut.head.param.tensor.shape[1]
        slice_rows = max(b - a for a, b in cut.head.rows)
        sizes.append((item * columns, item * slice_rows, item * slice_rows))
    return _most_bytes(sizes)


def packed_product_bytes(layers: Iterable[nn.Linear]) -> int:
    """As ``product_bytes``, of layers that packed ones will take the place of."""
    return _most_bytes((4 * layer.in_features, 4 * layer.out_features, 0) for layer in layers)


def _most_bytes(sizes: Iterable[tuple[int, int, int]]) -> int:
    """``sizes``: as of ``_Layer``."""
    most = 0
    for down, up, beside in sizes:
        parts = (ROWS * down, ROWS * up, beside)
        most = max(most, sum(align_up(n, TENSOR_ALIGN) for n in parts))
    return align_up(most)


class HostProducts:
    """Has the CPU multiply with weights in RAM, for an attachment's modules."""

    def __init__(self, executor: Executor, plan: Plan) -> None:
        assert plan.sites is not None
        self.blocks = plan.sites.blocks
        self._executor = executor
        self._rows = plan.sites.rows

    def takes(self, tokens: int) -> bool:
        """Whether the CPU has a part in a pass of so many tokens: of a single sequence."""
        return 0 < tokens <= self._rows and self._executor.road() is self._executor

    def attach(self, cut: Cut, undo: list[Callable[[], Any]]) -> None:
        """Have the layers of these blocks look for their weights in RAM when they find none."""
        every = frozenset(p.names[0].rpartition(".")[0] for ps in cut.params.values() for p in ps)
        for block, layers in layers_of(cut, every).items():
            if block in self.blocks:
                undo += [shadow(one.module, "forward", self._forward(block, one)) for one in layers]

    def _forward(self, block: str, layer: _Layer) -> Callable[[torch.Tensor], torch.Tensor]:
        module, inner = layer.module, layer.module.forward
        own = module._parameters
        if layer.attr == PACKED:
            product = partial(self._packed, block, layer)
        else:
            product = partial(self._plain, block, layer)

        def forward(x: torch.Tensor) -> torch.Tensor:
            if isinstance(own[layer.attr], AbsentTensor):
                return product(x)
            return inner(x)  # type: ignore[no-any-return]

        return forward

    def _plain(self, block: str, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        own, names = layer.module._parameters, layer.names
        moved = [(attr, name, own[attr].requires_grad) for attr, name in names.items()]
        beside = () if "bias" in names or own["bias"] is None else (own["bias"],)

        def work(views: Views, x: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
            # As in the resident model: torch picks kernels by this flag, also without grad.
            here = {attr: as_trained(views[name], grad) for attr, name, grad in moved}
            bias = beside or ((here["bias"],) if "bias" in here else ())
            return F.linear(x, here["weight"], *bias)

        return self.linear(block, work, (x, *beside), layer.module.out_features)

    def linear(
        self, block: str, work: Work, inputs: Sequence[torch.Tensor], outputs: int
    ) -> torch.Tensor:
        """``work(views, *inputs)`` on the CPU, for ``inputs`` of the device, the first [..., K]:
        [..., N] there."""
        shape = (*inputs[0].shape[:-1], outputs)
        return self._run(block, work, [one.detach() for one in inputs], shape)

    def _packed(self, block: str, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        module, name = layer.module, layer.names[PACKED]
        x_TK = x.detach().reshape(-1, module.in_features).float().contiguous()

        def work(views: Views, x_TK: torch.Tensor) -> torch.Tensor:
            out_TN = torch.empty(len(x_TK), module.out_features, dtype=torch.float32, device="cpu")
            module.multiply(views[name].data_ptr(), x_TK, out_TN)
            return out_TN

        out_TN = self._run(block, work, [x_TK], (len(x_TK), module.out_features))
        if module.bias is not None:
            out_TN += module.bias
        return out_TN.view(*x.shape[:-1], module.out_features).to(x.dtype)

    def _run(
        self, block: str, work: Work, inputs: Sequence[torch.Tensor], shape: Sequence[int]
    ) -> torch.Tensor:
        tokens = math.prod(shape[:-1])
        if tokens > self._rows:
            raise OffloadError(
                f"a layer of {block} is called with {tokens} tokens by a unit that runs for at "
                f"most {self._rows}; run without --hybrid"
            )

        def laid(views: Views, *below: torch.Tensor) -> torch.Tensor:
            return work(views, *map(_laid_as, below, inputs))

        # The next product overwrites where it lies.
        return self._executor.compute_below(block, inputs, laid, shape).clone()


def _laid_as(below: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What has come down, with the strides of ``x``: torch picks kernels by them."""
    if x.is_contiguous() or 0 in x.stride():
        return below
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(below)


__all__ = [
    "ROWS", "HostProducts", "apart_blocks", "apart_layers", "layers_of", "product_bytes",
    "tokens_of",
]  # fmt: skip
