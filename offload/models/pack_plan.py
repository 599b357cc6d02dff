"""Where every byte of a pack goes, decided before the first is written. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from offload.blocks import DTYPE_BYTES, TENSOR_ALIGN, align_up
from offload.cpu_ops.formats import FORMATS, get_format
from offload.cpu_ops.packing import packed_bytes
from offload.errors import OffloadError, UnsupportedModelError
from offload.io.pack_manifest import Block, Kind, Layout, Manifest, Part, digest, to_json
from offload.io.pack_writer import Job
from offload.models.gguf_requant import REQUANTISED, requantised_format
from offload.models.pack_source import COPY_IN_BF16, FLOATS, TORCH_OF, Source, Tensor
from offload.version import __version__

QUANTS = {"none": None, "q8": "q8_0", "q4": "q4_0"}
"""Choices of ``--quant`` and the format of experts and other matrices; None: the source's."""

BUNDLE_BYTES = 2 * 2**30
SMALL_BYTES = 2**20
"""Plain tensors below this share blocks of up to ``SHARED_BYTES``."""
SHARED_BYTES = 16 * 2**20

_QUANTISED = frozenset(FORMATS) - FLOATS


@dataclass(frozen=True, slots=True)
class Piece:
    """What fills one part of a block: a tensor, of one expert or of none."""

    tensor: Tensor
    expert: int | None
    source_format: str


@dataclass(slots=True)
class PackPlan:
    """The blocks of a pack and, for each, what fills its parts."""

    job: Job
    fills: list[tuple[Piece, ...]]
    bytes_in: int
    bytes_out: int
    extras: dict[str, bytes] = field(repr=False)

    @property
    def manifest(self) -> Manifest:
        """Without checksums and errors."""
        return self.job.manifest


def target(tensor: Tensor, native: str, quant: str) -> tuple[str, Layout, str]:
    """Format and layout that ``tensor`` is packed in, and why not as asked for (or nothing).

    Raises:
        OffloadError: the source is quantised already.
        UnsupportedModelError: no kernel multiplies its dtype.
    """
    plain = TORCH_OF.get(native, native)
    if tensor.kind is Kind.PLAIN:
        if native in _QUANTISED:
            raise OffloadError(f"{tensor} is in {native} but is no matrix; it cannot be packed")
        if tensor.group and native in FLOATS:
            return "float32", Layout.PLAIN, ""  # an expert's bias, which a kernel adds
        return plain, Layout.PLAIN, ""
    layout = Layout.ROWS if tensor.kind is Kind.ROWS else Layout.PACKED
    wanted = QUANTS[quant]
    if wanted is not None and tensor.kind in (Kind.HEAD, Kind.ROWS):
        # The first and the last product decide most of the error and little of the time.
        wanted = "q8_0"
    if native in _QUANTISED | REQUANTISED:
        if wanted not in (None, native):
            raise OffloadError(
                f"the source is quantised already ({tensor} is in {native}, {quant} would have it "
                f"in {wanted}); --quant none keeps its bits"
            )
        if native in REQUANTISED:  # with the user's leave, or the source would not give it
            return requantised_format(native, tensor.kind), layout, ""
        return native, layout, ""
    if native not in FLOATS:
        raise UnsupportedModelError(
            f"{tensor} is in {native}, which has no kernels; {COPY_IN_BF16}"
        )
    why = ""
    if wanted is not None:
        block = get_format(wanted).block
        if tensor.columns % block == 0:
            return wanted, layout, ""
        why = f"{tensor.columns} columns are not a multiple of {block}"
    if tensor.group and tensor.columns % get_format(native).block:
        return "f32", Layout.PACKED, why  # experts run on kernels alone, and halves come in pairs
    if tensor.kind is Kind.ROWS or tensor.columns % get_format(native).block:
        return plain, Layout.PLAIN, why
    return native, Layout.PACKED, why


def part_bytes(tensor: Tensor, format: str, layout: Layout) -> int:
    """Bytes of a packed tensor."""
    if layout is Layout.PLAIN:
        return prod(tensor.shape) * DTYPE_BYTES[format]
    if layout is Layout.ROWS:
        return tensor.rows * get_format(format).row_bytes(tensor.columns)
    return packed_bytes(get_format(format), tensor.rows, tensor.columns)


class _Layouter:
    """Puts blocks into bundles, one behind the other."""

    def __init__(self, bundle_bytes: int) -> None:
        self._most = bundle_bytes
        self.blocks: list[Block] = []
        self.files: list[int] = []

    def add(self, name: str, kind: Kind, group: str, parts: tuple[Part, ...]) -> None:
        nbytes = parts[-1].offset + parts[-1].nbytes
        slot = align_up(nbytes)
        if not self.files or (self.files[-1] and self.files[-1] + slot > self._most):
            self.files.append(0)
        self.blocks.append(
            Block(
                name=name, kind=kind, group=group, file=len(self.files) - 1,
                offset=self.files[-1], nbytes=nbytes, parts=parts,
            )
        )  # fmt: skip
        self.files[-1] += slot


def plan_pack(source: Source, quant: str, *, bundle_bytes: int = BUNDLE_BYTES) -> PackPlan:
    """Lay out a pack of ``source``.

    Args:
        quant: ``none``, ``q8`` or ``q4``.
        bundle_bytes: most bytes per bundle; a larger block has one to itself.

    Raises:
        OffloadError: the source cannot be packed in this way.
    """
    if quant not in QUANTS:
        raise OffloadError(f"quant {quant!r} is not one of {', '.join(QUANTS)}")
    out = _Layouter(bundle_bytes)
    fills: list[tuple[Piece, ...]] = []
    kept: dict[str, str] = {}
    converted = dict(source.outline.converted)
    shared: list[Piece] = []
    aliases: dict[str, str] = {}

    def lay(tensors: list[Tensor], end: int = 0) -> tuple[tuple[Part, ...], list[str]]:
        parts, formats = [], []
        for t in tensors:
            native = source.format_of(t)
            format, layout, why = target(t, native, quant)
            if why:
                kept[str(t)] = why
            if native in REQUANTISED:
                converted[str(t)] = f"{native}, which has no kernels, became {format}"
            offset = align_up(end, TENSOR_ALIGN)
            nbytes = part_bytes(t, format, layout)
            parts.append(
                Part(
                    name=t.name, format=format, layout=layout, shape=t.shape,
                    offset=offset, nbytes=nbytes,
                )
            )  # fmt: skip
            formats.append(native)
            end = offset + nbytes
        return tuple(parts), formats

    def flush() -> None:
        if shared:
            parts, _ = lay([piece.tensor for piece in shared])
            out.add(f"plain/{len(fills)}", Kind.PLAIN, "", parts)
            fills.append(tuple(shared))
            shared.clear()

    items = list(source.outline.items)
    # What is small and always in memory first: it is read together, before anything else.
    size = 0
    for item in items:
        if isinstance(item, Tensor):
            aliases.update((name, item.name) for name in item.names[1:])
            if item.kind is Kind.PLAIN:
                (part,), (native,) = lay([item])
                if part.nbytes < SMALL_BYTES:
                    size = align_up(size, TENSOR_ALIGN) + part.nbytes
                    if size > SHARED_BYTES:
                        flush()
                        size = part.nbytes
                    shared.append(Piece(item, None, native))
    flush()
    small = {piece.tensor.name for fill in fills for piece in fill}
    for item in items:
        if isinstance(item, Tensor):
            if item.name not in small:
                parts, (native,) = lay([item])
                out.add(item.name, item.kind, "", parts)
                fills.append((Piece(item, None, native),))
            continue
        parts, formats = lay(list(item.parts))
        width = len(str(item.count - 1))
        for expert in range(item.count):
            out.add(f"{item.name}#{expert:0{width}}", Kind.EXPERT, item.name, parts)
            fills.append(
                tuple(Piece(t, expert, f) for t, f in zip(item.parts, formats, strict=True))
            )
    manifest = Manifest(
        source=source.id,
        quant=quant,
        offload=__version__,
        model=source.outline.facts,
        blocks=tuple(out.blocks),
        files=tuple(out.files),
        aliases=aliases,
        kept=kept,
        converted=converted,
    )
    extras = source.extras()
    extra_bytes = sum(map(len, extras.values())) + 512 * len(out.blocks) + 2**20
    plan = digest({key: value for key, value in to_json(manifest).items() if key != "source"})
    return PackPlan(
        job=Job(manifest=manifest, plan=plan, extra_bytes=extra_bytes),
        fills=fills,
        bytes_in=source.total_bytes,
        bytes_out=sum(out.files),
        extras=extras,
    )
