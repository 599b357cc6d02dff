"""From a configuration to the tensors of its published checkpoint, without the weights.

The model is built on the meta device (shapes, no memory). Its parameter names are not always the
names of the family's published files: transformers keeps the experts of a layer stacked in one
parameter, say, and splits them on save. Its own reversal is run here on the meta tensors, so the
names and shapes are those ``save_pretrained`` would write.

Vectors (norm weights, biases, decay rates, sinks: anything with one axis longer than one) are
real from the start and are filled by the family's own ``_init_weights``, which knows that one
family's neutral norm weight is 1 and another's is 0. They pass through the same reversal as
values. Matrices stay meta and get a standard deviation to be drawn with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.blocks import DTYPE_BYTES
from offload.errors import UnsupportedModelError
from offload.models.synth_config import Source
from offload.models.synth_values import ValueSource, derive_key

if TYPE_CHECKING:
    import torch

TO_RESIDUAL = re.compile(
    r"\.(o_proj|out_proj|c_proj|down_proj|w2|wo|fc2|dense|dense_4h_to_h)(\.weight)?$"
)
"""Matrices whose output a layer adds to the residual stream. Radford et al. (2019), "Language
Models are Unsupervised Multitask Learners", section 2.3, scale them by 1/sqrt(2 * layers);
without, what the layers add drowns the tokens, and a MoE sends them all to the same experts."""

RESIDUAL_SCALE = 0.125
"""As for 32 layers, whatever their number: a model cut to fewer keeps the values of those."""

_BUFFER_LIMIT = 64 * 2**20
_ZEROS = bytes(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of the checkpoint. Exactly one of ``literal`` (its bytes), ``std`` > 0 (normal
    values) or neither (zeros) says what it holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    std: float = 0.0
    literal: bytes | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * DTYPE_BYTES[self.dtype]

    def chunks(self, values: ValueSource) -> Iterator[bytes | memoryview]:
        """The tensor's bytes in order, in pieces of at most 1 MiB (vectors: as a whole)."""
        if self.literal is not None:
            yield self.literal
        elif self.std > 0.0:
            yield from values.normal(self.name, self.count, self.dtype, self.std)
        else:
            for start in range(0, self.nbytes, len(_ZEROS)):
                yield _ZEROS[: self.nbytes - start]


def plan_tensors(source: Source, seed: int) -> list[PlannedTensor]:
    """The tensors of the published checkpoint of ``source``, in the order they are saved.

    Raises:
        UnsupportedModelError: the family cannot be built from its config alone.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    model = skeleton(source, seed)
    state = _state_dict(model, getattr(torch, source.dtype))
    kinds = {id(tensor): spread(model, key, tensor) for key, tensor in state.items()}
    try:
        published = revert_weight_conversion(model, dict(state))
    except Exception as e:  # whatever a family's conversion raises
        raise UnsupportedModelError(
            f"the published names of {source.config.model_type} cannot be derived: "
            f"{type(e).__name__}: {e}"
        ) from e
    planned = []
    for name, tensor in published.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if dtype not in DTYPE_BYTES:
            raise UnsupportedModelError(f"{name} is {dtype}, which is not written")
        if tensor.device.type == "meta":
            # What no conversion touched is the same object; the rest are split or merged matrices.
            std = kinds.get(id(tensor), _matrix_std(shape)) if tensor.is_floating_point() else 0.0
            if TO_RESIDUAL.search(name):
                std *= RESIDUAL_SCALE
            planned.append(PlannedTensor(name=name, dtype=dtype, shape=shape, std=std))
        else:
            literal = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            planned.append(PlannedTensor(name=name, dtype=dtype, shape=shape, literal=literal))
    return _expert_by_expert(planned)


def _expert_by_expert(planned: list[PlannedTensor]) -> list[PlannedTensor]:
    """The same tensors, those of an expert side by side, as in files saved from modules that had
    each expert by itself: then a shard ends between experts, not between an expert's matrices."""
    where: dict[str, int] = {}

    def key(item: tuple[int, PlannedTensor]) -> tuple[int, int, int]:
        at, tensor = item
        found = re.match(r"(.*\bexperts\.)(\d+)\.", tensor.name)
        if found is None:
            return at, 0, at
        return where.setdefault(found[1], at), int(found[2]), at

    return [tensor for _, tensor in sorted(enumerate(planned), key=key)]


def skeleton(source: Source, seed: int) -> Any:
    """The model on meta, with real, initialised vectors."""
    import torch

    try:
        with torch.device("meta"):
            model = source.model_class._from_config(
                source.config,
                dtype=getattr(torch, source.dtype),
                attn_implementation="eager",
                experts_implementation="eager",
            )
        _make_vectors_real(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _init_modules(model, model, "", seed)
    except Exception as e:  # a config can be wrong in as many ways as families
        raise UnsupportedModelError(
            f"{source.model_class.__name__} cannot be built from this config: "
            f"{type(e).__name__}: {e}"
        ) from e
    return model


def _make_vectors_real(model: torch.nn.Module) -> None:
    """Give every vector and every stored buffer memory, zeroed; tied ones stay tied."""
    import torch

    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        stored: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name) for name in module._parameters
        ] + [
            (module._buffers, name)
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        for holder, name in stored:
            tensor = holder[name]
            if tensor is None or not tensor.is_meta:
                continue
            is_buffer = holder is module._buffers
            # Buffers are tables and statistics, not weights: their family fills them.
            if tensor.numel() != max(tensor.shape, default=1) and not (
                is_buffer and tensor.nbytes <= _BUFFER_LIMIT
            ):
                continue
            real = made.get(id(tensor))
            if real is None:
                real = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
                if not is_buffer:
                    real = torch.nn.Parameter(real, requires_grad=False)
                made[id(tensor)] = real
            holder[name] = real


def _init_modules(module: Any, owner: Any, name: str, seed: int) -> None:
    """The family's initialisation, children first, each module with a seed of its own.

    ``owner`` is the nearest enclosing model: parts of a composite follow their own family's rule.
    Transformers' ``initialize_weights`` walks the same way but draws from one running generator,
    so a model cut to fewer layers would get other values.
    """
    import torch
    from transformers import PreTrainedModel

    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        _init_modules(child, child_owner, f"{name}.{child_name}" if name else child_name, seed)
    torch.manual_seed(derive_key(seed, name) >> 1)
    owner._init_weights(module)


def _state_dict(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What is saved: one name per tied group, parts the family keeps in float32 as float32."""
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    _drop_tied(state, model)
    keep = model._get_dtype_plan(dtype)  # patterns of names -> float32
    if keep:
        pattern = re.compile("|".join(key.replace("*", ".*") for key in keep))
        for name, tensor in state.items():
            if tensor.is_floating_point() and pattern.search(name):
                state[name] = tensor.float()
    return state


def _drop_tied(state: dict[str, torch.Tensor], model: Any) -> None:
    """Keep one name of tensors that share memory: the one that transformers ties the others to."""
    groups: dict[int, list[str]] = {}
    for name in state:
        groups.setdefault(id(model.get_parameter_or_buffer(name)), []).append(name)
    targets: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for names in groups.values():
        if len(names) == 1:
            continue
        kept = [name for name in names if name not in targets] or [max(names)]
        if len(kept) > 1:
            raise UnsupportedModelError(
                f"{', '.join(kept)} share memory but {type(model).__name__} does not declare it"
            )
        for name in names:
            if name != kept[0]:
                del state[name]


def spread(model: Any, key: str, tensor: torch.Tensor) -> float:
    """The standard deviation of a matrix, by the module it belongs to.

    1/sqrt(fan in) keeps what a layer adds to the residual stream near 1 at any width, so bfloat16
    stays finite over a hundred layers and logits vary; the usual 0.02 fades in narrow models.
    Embeddings start the stream at 1 as well: below what the layers add, all tokens of a context
    would look alike and be routed to the same few experts. Tied ones follow the output matrix.
    """
    import torch

    if tensor.ndim < 2:
        return 0.0
    module = model.get_submodule(key.rpartition(".")[0])
    if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        return float(math.prod(tensor.shape[1:]) ** -0.5)
    head = model.get_output_embeddings()
    if module is head:
        return float(tensor.shape[-1] ** -0.5)
    if isinstance(module, torch.nn.Embedding):
        tied = head is not None and getattr(head, "weight", None) is module.weight
        return float(tensor.shape[-1] ** -0.5) if tied else 1.0
    return _matrix_std(tuple(tensor.shape))


def _matrix_std(shape: tuple[int, ...]) -> float:
    """1/sqrt of the longer side: families disagree on which of the two is the input."""
    return max(1, *shape[-2:]) ** -0.5 if len(shape) >= 2 else 0.0
