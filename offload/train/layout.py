"""A model's parameters as flat blocks, and the tiles in which their optimizer states move.

Every parameter (of fused experts: every expert's slice of one) is a *piece*. The pieces that a
unit needs at once, of one dtype, lie one behind the other in a *block*; each starts at a multiple
of ``PIECE_ALIGN`` elements, so that sums over chunks of gradients never mix parameters, blocks of
8-bit states end with their tensor, and every piece is page-aligned in a file. The gaps between
are zero and stay zero under Adam. *Tiles* cut a block into ranges of at most ``TILE`` elements.
Neither depends on a budget: a run resumes under another one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from offload.blocks import DTYPE_BYTES, align_up
from offload.models.expert_groups import ExpertGroup, expert_groups
from offload.models.params import Param, parameters
from offload.models.units import LEAF_BYTES, unit_modules

PIECE_ALIGN = 4096
"""Elements; a multiple of ``cpu_ops.grad_norm.CHUNK`` and of the 8-bit states' blocks."""

TILE = 1 << 20
"""Elements: with float32 states 12 MiB, enough for the disk to run at full rate."""

REST = "rest"
"""The unit of what is used outside of all others: small, and resident whatever the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``count`` elements of parameter ``param``, from its element ``start``."""

    param: str
    start: int
    count: int
    shape: tuple[int, ...]
    offset: int
    """In elements of the block."""
    expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """``count`` elements of a block from its element ``start``."""

    index: int
    block: int
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What moves at once."""

    index: int
    id: str
    dtype: str
    """torch's name of the dtype that computes."""
    trained: bool
    pieces: tuple[Piece, ...]
    count: int
    """Elements, gaps included."""
    tiles: tuple[int, ...]
    """Indices into ``TrainLayout.tiles``; none for what is frozen."""
    packed: int | None = None
    """Bytes that it takes as a pack has it, if it is kept so (see ``packed_base``)."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in RAM and on its way there."""
        return self.value_bytes if self.packed is None else self.packed

    @property
    def value_bytes(self) -> int:
        """Bytes of the weights in the compute dtype."""
        return self.count * DTYPE_BYTES[self.dtype]


@dataclass(slots=True)
class TrainUnit:
    """A module that runs with ``blocks`` in place; experts come one by one on top."""

    index: int
    name: str
    module: nn.Module
    blocks: list[int] = field(default_factory=list)
    groups: list[ExpertGroup] = field(default_factory=list)
    experts: dict[str, list[int]] = field(default_factory=dict)
    """Group name -> the block of each expert."""


@dataclass(slots=True)
class TrainLayout:
    """All blocks, in the order of a forward pass, and their tiles."""

    units: list[TrainUnit]
    rest: list[int]
    """Blocks outside of units."""
    blocks: list[Block]
    tiles: list[Tile]
    params: dict[str, Param]
    users: list[list[int]]
    """For each block the units that use it."""

    def expert_blocks(self) -> Iterator[int]:
        for unit in self.units:
            for ids in unit.experts.values():
                yield from ids

    @property
    def trained(self) -> list[Block]:
        return [b for b in self.blocks if b.trained]

    @property
    def elements(self) -> int:
        """Trained elements, without gaps."""
        return sum(p.count for b in self.trained for p in b.pieces)


def _units(model: nn.Module, params: Iterable[Param]) -> list[TrainUnit]:
    """The layers, and around them the large leaf modules that alone use their weights."""
    names = {id(m): path for path, m in model.named_modules()}
    found = unit_modules(model)
    inside = {id(m) for _, module in found for m in module.modules()}
    leaves: dict[int, nn.Module] = {}
    for param in params:
        modules = [place.module for place in param.places]
        plain = all(not any(True for _ in m.children()) and id(m) not in inside for m in modules)
        if plain and param.nbytes >= min(LEAF_BYTES, 1 << 16):
            leaves.update((id(m), m) for m in modules)
    order = {id(m): i for i, m in enumerate(model.modules())}
    everything = [*found, *((names[key], module) for key, module in leaves.items())]
    everything.sort(key=lambda item: order[id(item[1])])
    return [TrainUnit(i, name, module) for i, (name, module) in enumerate(everything)]


def lay_out(
    model: nn.Module, *, tile: int = TILE, split_experts: Sequence[ExpertGroup] | None = None,
    packed: Container[str] = (),
) -> TrainLayout:  # fmt: skip
    """Lay out all parameters of ``model`` (on any device: only shapes and flags are used).

    ``split_experts``: fused experts to move one by one; None: all that are found. The rest moves
    with its layer. ``packed``: frozen parameters that get blocks of their own kind, because they
    are kept packed; not those outside of units, which are always in place.
    """
    by_id = parameters(model)
    units = _units(model, by_id.values())
    groups = expert_groups(model) if split_experts is None else list(split_experts)
    groups = [g for g in groups if _are_alike(g)]
    layout = TrainLayout(units, [], [], [], {p.name: p for p in by_id.values()}, [])
    fused: dict[int, str] = {}
    for unit in units:
        inside = set(map(id, unit.module.modules()))
        unit.groups = [g for g in groups if id(g.module) in inside]
        for group in unit.groups:
            fused.update((id(p.tensor), group.name) for p in group.params)

    users: dict[int, list[int]] = {key: [] for key in by_id}
    within = [set(map(id, unit.module.modules())) for unit in units]
    for unit, inside in zip(units, within, strict=True):
        for key, param in by_id.items():
            if any(id(place.module) in inside for place in param.places):
                users[key].append(unit.index)
    outside = {
        key
        for key, param in by_id.items()
        if key not in fused
        and (
            not users[key]
            or any(
                not any(id(place.module) in within[u] for u in users[key]) for place in param.places
            )
        )
    }

    def add(label: str, dtype: str, trained: bool, pieces: list[Piece], of: list[int]) -> int:
        index = len(layout.blocks)
        count = align_up(sum(align_up(p.count, PIECE_ALIGN) for p in pieces), PIECE_ALIGN)
        tiles: list[int] = []
        if trained:
            for start in range(0, count, tile):
                tiles.append(len(layout.tiles))
                layout.tiles.append(
                    Tile(index=len(layout.tiles), block=index, start=start,
                         count=min(tile, count - start))
                )  # fmt: skip
        layout.blocks.append(
            Block(index=index, id=label, dtype=dtype, trained=trained, pieces=tuple(pieces),
                  count=count, tiles=tuple(tiles))
        )  # fmt: skip
        layout.users.append(of)
        return index

    def dense(label: str, keys: list[int], of: list[int]) -> list[int]:
        kinds: dict[tuple[bool, str, bool], list[Piece]] = {}
        ends: dict[tuple[bool, str, bool], int] = {}
        for key in keys:
            param = by_id[key]
            trained = param.tensor.requires_grad
            stays = not trained and key not in outside and param.name in packed
            kind = (trained, str(param.tensor.dtype).removeprefix("torch."), stays)
            at = ends.get(kind, 0)
            count = param.tensor.numel()
            kinds.setdefault(kind, []).append(
                Piece(param=param.name, start=0, count=count, shape=tuple(param.tensor.shape),
                      offset=at)
            )  # fmt: skip
            ends[kind] = at + align_up(count, PIECE_ALIGN)
        out = []
        for kind, pieces in kinds.items():
            trained, dtype, stays = kind
            suffix = "~packed" if stays else "" if trained else "~frozen"
            alone = len({d for t, d, p in kinds if (t, p) == (trained, stays)}) == 1
            suffix += "" if alone else f"~{dtype}"
            if ends[kind]:
                out.append(add(label + suffix, dtype, trained, pieces, of))
        return out

    # First, because it is needed first: what is pending is updated in the order of the blocks.
    layout.rest = dense(REST, [k for k in by_id if k in outside], [])
    placed: set[int] = set()
    for unit in units:
        mine = [
            k for k in by_id if users[k] == [unit.index] and k not in outside and k not in fused
        ]
        unit.blocks += dense(unit.name, mine, [unit.index])
        placed.update(mine)
        for key in by_id:  # shared with other units, and not outside
            many = users[key]
            if key in placed or key in fused or key in outside or unit.index not in many:
                continue
            shared = dense(by_id[key].name, [key], list(many))
            placed.add(key)
            for other in many:
                units[other].blocks += shared
        for group in unit.groups:
            unit.experts[group.name] = [
                _expert_block(group, e, add, unit.index) for e in range(group.n_experts)
            ]
    return layout


def _are_alike(group: ExpertGroup) -> bool:
    """Whether a block can hold an expert: all of it is trained, or nothing."""
    return len({(p.tensor.requires_grad, p.tensor.dtype) for p in group.params}) == 1


def _expert_block(group: ExpertGroup, expert: int, add: Callable[..., int], unit: int) -> int:
    pieces, at = [], 0
    first = group.params[0].tensor
    for param in group.params:
        shape = tuple(param.tensor.shape[1:])
        count = param.tensor.numel() // group.n_experts
        pieces.append(
            Piece(param=param.name, start=expert * count, count=count, shape=shape, offset=at,
                  expert=expert)
        )  # fmt: skip
        at += align_up(count, PIECE_ALIGN)
    width = len(str(group.n_experts - 1))
    dtype = str(first.dtype).removeprefix("torch.")
    return add(f"{group.name}#{expert:0{width}}", dtype, first.requires_grad, pieces, [unit])
