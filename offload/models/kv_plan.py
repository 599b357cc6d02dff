"""How much of a model's keys and values is kept in RAM, and what that means for a plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from offload.errors import OffloadError, PlanError, UnsupportedModelError
from offload.kv.coarse import (
    QUANTISED,
    WRITTEN,
    coarse_layout,
    is_lossy,
    slot_bytes_of,
    stored_shape,
)
from offload.kv.homes import (
    LEAST_WINDOW,
    WINDOW_SHARE,
    KvHomes,
    least_slots,
    most_window,
    place,
)
from offload.kv.keep import Keep
from offload.kv.kernel_layout import is_latent, kernel_layout
from offload.kv.shape import BLOCK_TOKENS, BlockLayout, KvShape, block_tokens_for
from offload.models.footprint import Footprint, decode_peak
from offload.models.options import Options, check_device
from offload.models.pieces import why_not_in_pieces
from offload.models.prompt_plan import Rounded
from offload.models.recipes import spill_directory
from offload.units import format_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeed:
    """What a model caches for ``context`` tokens of ``sequences`` sequences; sizes in bytes.

    Attributes:
        together: of the sequences, in one forward pass.
        shapes: of the layers that are kept in blocks.
        other_bytes: of all others: windows, recurrent states.
        activation_bytes: of one more token at the end of the context.
        kind: of full blocks, as ``--kv`` names them; None: as they come.
        in_place: attention reads blocks where they are, and no layer is put in one piece.
        attention_bytes: what it then holds beside queries and results.
    """

    shapes: tuple[KvShape, ...]
    context: int
    sequences: int
    together: int
    block_tokens: int
    other_bytes: int
    activation_bytes: int
    in_place: bool = False
    attention_bytes: int = 0
    kind: str | None = None
    lossy: bool = False
    half_queries: bool = False
    """Whether the model computes in bfloat16."""
    keep: Keep | None = None
    """What stays of ``context``; None: all."""
    least_tokens: int | None = None
    """Of a block, where a budget is too small for ``block_tokens``; None: those. Quantised blocks
    keep theirs: which tokens are in full precision would hang on the budget."""

    @property
    def slot_bytes(self) -> int:
        return max(slot_bytes_of(s, self.block_tokens, self.kind) for s in self.shapes)

    @property
    def tail_bytes(self) -> int:
        """Of a block of newest tokens where those are apart; else 0."""
        if self.kind not in QUANTISED:
            return 0
        return max(BlockLayout(s, self.block_tokens).nbytes for s in self.shapes)

    @property
    def tails_bytes(self) -> int:
        """Of all of them."""
        return self.tail_bytes * len(self.shapes) * self.sequences

    @property
    def gathered_bytes(self) -> int:
        """Of the largest layer in one piece, as the model's own attention takes it."""
        whole = (s for s in self.shapes if not self.in_place or is_latent(s))
        return max(
            (
                # Caches that take turns share the memory, but for latents.
                s.gathered_bytes(self.context, self.sequences if is_latent(s) else self.together)
                for s in whole
            ),
            default=0,
        )

    @property
    def whole_slots(self) -> int:
        """With which nothing is ever read from the disk."""
        columns = -(-self.context // self.block_tokens)
        # One more for each newest block, and the largest window.
        every = (columns + 1) * len(self.shapes) * self.sequences
        window = min(most_window(self.slot_bytes), -(-every // (WINDOW_SHARE - 1)))
        return every + max(LEAST_WINDOW, window)

    @property
    def token_bytes(self) -> int:
        """Of a token of one sequence, in blocks."""
        return sum(s.token_bytes for s in self.shapes)

    def kernels(self) -> list[Any]:
        """What attention in place needs compiled."""
        from offload.cpu_ops.block_attention import kernels_for
        from offload.cpu_ops.block_quantise import quantise_kernel

        found: dict[Any, None] = {}
        for s in self.shapes:
            if is_latent(s):
                continue
            layouts = [kernel_layout(BlockLayout(s, self.block_tokens))]
            if self.kind in QUANTISED:
                found |= {quantise_kernel(str(self.kind), layouts[0].kind.value): None}
                layouts.append(coarse_layout(s, self.block_tokens, str(self.kind)))
            for layout in layouts:
                found |= dict.fromkeys(kernels_for(layout, half_queries=self.half_queries))
        return list(found)

    def homes(self, ram: int) -> KvHomes:
        """Raises PlanError: ``ram`` bytes are too few."""
        size = self.slot_bytes
        return place(
            slots=min((ram - self.tails_bytes) // size, self.whole_slots),
            slot_bytes=size,
            layers=len(self.shapes),
            sequences=self.sequences,
            written=WRITTEN if self.tails_bytes else None,
            beside=self.tails_bytes,
        )

    def within(self, ram: int) -> KvPlan:
        """With ``ram`` bytes, and smaller blocks if they are too few for those.

        Raises:
            PlanError: they are too few.
        """
        need = self
        while True:
            try:
                return KvPlan(need=need, homes=need.homes(ram))
            except PlanError:
                if need.block_tokens <= (self.least_tokens or self.block_tokens):
                    raise
                need = dataclasses.replace(need, block_tokens=need.block_tokens // 2)

    @property
    def whole(self) -> KvPlan:
        """With all blocks in RAM."""
        homes = self.homes(self.whole_slots * self.slot_bytes + self.tails_bytes)
        return KvPlan(need=self, homes=homes)

    @property
    def least(self) -> KvNeed:
        """With the smallest blocks."""
        return dataclasses.replace(self, block_tokens=self.least_tokens or self.block_tokens)

    @property
    def least_bytes(self) -> int:
        if self.tails_bytes:
            return (WRITTEN + LEAST_WINDOW) * self.slot_bytes + self.tails_bytes
        return least_slots(len(self.shapes), self.sequences) * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """Keys and values in blocks: where they are when the context is full."""

    need: KvNeed
    homes: KvHomes

    @property
    def ram_bytes(self) -> int:
        """Of all blocks."""
        return self.homes.ram_bytes + self.need.tails_bytes

    @property
    def reserves(self) -> dict[str, int]:
        """Bytes of RAM by what takes them."""
        found = {"KV blocks": self.ram_bytes}
        if gathered := self.need.gathered_bytes:
            found["KV of one layer in one piece"] = gathered
        if self.need.in_place:
            found["attention over blocks"] = self.need.attention_bytes
        found["KV windows and states"] = self.need.other_bytes
        return found

    @property
    def blocks(self) -> tuple[int, int]:
        """In RAM and on disk, at the end of the context."""
        return self.homes.at(self.need.context, self.need.block_tokens)

    @property
    def disk_bytes_per_token(self) -> int:
        """Read for a token at the end of the context."""
        return self.blocks[1] * self.homes.slot_bytes

    def note(self, options: Options) -> str:
        """One sentence for people."""
        in_ram, on_disk = self.blocks
        size, tokens = self.homes.slot_bytes, self.need.context
        where = f"all in RAM ({format_bytes(in_ram * size)})"
        if on_disk:
            where = (
                f"{in_ram} of them ({format_bytes(in_ram * size)}) in RAM, {on_disk} "
                f"({format_bytes(on_disk * size)}) in a private file in "
                f"{spill_directory(options.disk)}, read once for each token"
            )
        return (
            f"keys and values of {tokens} tokens make {in_ram + on_disk} blocks of "
            f"{self.need.block_tokens} tokens: {where}"
            + ("; attention 'offload' reads them where they are" if self.need.in_place else "")
            + (f"; in {self.need.kind}, which is lossy" if self.need.lossy else "")
            + (
                f"; at most {self.need.keep.tokens} tokens of each layer stay (--kv-keep), which "
                f"is lossy beyond them"
                if self.need.keep is not None
                else ""
            )
        )

    def to_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        in_ram, on_disk = self.blocks
        return {
            "kind": self.need.kind,
            "keep_tokens": None if self.need.keep is None else self.need.keep.tokens,
            "budget_bytes": self.ram_bytes,
            "block_bytes": self.homes.slot_bytes,
            "block_tokens": self.need.block_tokens,
            "window_blocks": self.homes.window,
            "blocks_in_ram": in_ram,
            "blocks_on_disk": on_disk,
            "bytes_per_token_of_context": self.need.token_bytes,
            "disk_bytes_per_token": self.disk_bytes_per_token,
            "gathered_bytes": self.need.gathered_bytes,
            "attention": "offload" if self.need.in_place else "exact",
            "other_bytes": self.need.other_bytes,
        }


def kv_need(model: Any, footprint: Footprint, options: Options, tokens: int) -> KvNeed | None:
    """What ``model`` (on meta) caches, or None if that cannot be kept in blocks.

    ``tokens``: that ``footprint`` was measured with.
    """
    layers = footprint.layers
    shapes = tuple(n.shape for n in layers if n.shape is not None)
    supported = getattr(type(model), "_supports_default_dynamic_cache", lambda: False)
    if not shapes or not supported() or check_device(options) != "cpu":
        return None
    context = max(options.context, options.prompt_tokens or 0)
    in_place, lossy = attends_in_place(options), is_lossy(shapes, options.kv)
    keep = options.keep
    if keep is not None:
        if any(is_latent(s) for s in shapes):
            raise UnsupportedModelError(
                f"{type(model).__name__} expands what it caches before it attends (MLA), and "
                f"--kv-keep cannot tell what attention went to; drop --kv-keep"
            )
        if (why := why_not_in_pieces(model)) is not None:
            raise UnsupportedModelError(
                f"--kv-keep reads long prompts in pieces, and {why}; drop --kv-keep"
            )
        # Where nothing would ever go blocks are as large as ever: the same partial results.
        keep = keep if keep.tokens < context else None
    if keep is not None:
        context = min(context, keep.tokens + keep.pass_tokens)
    half_queries = shapes[0].dtype == "bfloat16"
    if in_place:
        try:
            stored = tuple(_stored(s, options) for s in shapes)
        except OffloadError as e:
            if asks_for_our_attention(options):
                raise
            logger.info("attention stays the model's own: %s", e)
            in_place = False
        else:
            shapes = stored
    block_tokens = keep.block_tokens if keep is not None else options.kv_block_tokens
    fixed = block_tokens is not None or options.kv in QUANTISED
    if block_tokens is None:
        block_tokens = block_tokens_for(
            context, lambda n: max(slot_bytes_of(s, n, options.kv) for s in shapes)
        )
    other = 0
    for layer in layers:
        if layer.shape is None:
            # A window's tensors are views into all of a prompt until the next token comes.
            reach = context if layer.window is None else max(tokens, min(layer.window, context))
            other += layer.nbytes if layer.window == 0 else -(-layer.nbytes * reach // tokens)
    return KvNeed(
        shapes=shapes,
        context=context,
        sequences=options.batch,
        together=options.batch,
        block_tokens=block_tokens,
        keep=keep,
        least_tokens=None if fixed else BLOCK_TOKENS,
        other_bytes=other,
        # Only a latent cache is expanded; attention reads plain keys and values where they are
        # (on meta it is another, which copies them, so that measuring it would say too much).
        activation_bytes=_last_token_bytes(model, context, options.batch)
        if any((s.key_heads, s.key_dim) != (s.value_heads, s.value_dim) for s in shapes)
        else 0,
        in_place=in_place,
        kind=options.kv,
        lossy=lossy,
        half_queries=half_queries,
        attention_bytes=_attention_bytes(model, shapes, options, tokens) if in_place else 0,
    )


def _stored(shape: KvShape, options: Options) -> KvShape:
    """A layer's keys and values as blocks that are attended to in place hold them.

    Raises:
        OffloadError: our attention has no kernel for them.
    """
    found, tokens = stored_shape(shape, options.kv), options.kv_block_tokens or BLOCK_TOKENS
    if not is_latent(found):
        kernel_layout(BlockLayout(found, tokens))
        slot_bytes_of(found, tokens, options.kv)
    return found


def _attention_bytes(model: Any, shapes: tuple[KvShape, ...], options: Options, tokens: int) -> int:
    from offload.cpu_ops.block_attention import scratch_bytes

    config = model.config.get_text_config(decoder=True)
    heads = int(getattr(config, "num_attention_heads", 0) or max(s.key_heads for s in shapes))
    return max(
        scratch_bytes(
            sequences=options.batch, heads=heads, key_heads=s.key_heads, queries=tokens,
            key_dim=s.key_dim, dim=s.value_dim,
        )
        for s in shapes
    )  # fmt: skip


def attends_in_place(options: Options) -> bool:
    """Whether keys and values that are in blocks are attended to there: with ``--attention
    offload``, and with kernels that were asked to be fast where those take the model's heads."""
    if options.attention is None and options.kernels == "fast":
        return True
    return asks_for_our_attention(options)


def asks_for_our_attention(options: Options) -> bool:
    """Whether a flag says so, or one that cannot do without."""
    lossy = options.kv is not None or options.kv_keep is not None
    return lossy or options.attention == "offload"


def asked_for(need: KvNeed | None, options: Options, name: str) -> KvPlan | None:
    """The plan for ``--kv-ram`` or what needs ``--attention offload``; None without both.

    Raises:
        UnsupportedModelError: the model's cache cannot be kept in blocks.
        PlanError: it is too small.
    """
    if options.kv_ram is None:
        flag = "--attention offload" if options.attention == "offload" else None
        flag = flag if options.kv is None else f"--kv {options.kv}"
        flag = flag if options.kv_keep is None else f"--kv-keep {options.kv_keep}"
        if flag is None:
            return None
        if need is None:
            raise UnsupportedModelError(
                f"{name} has a cache that cannot be kept in blocks (a kind of its own, or no layer "
                f"that attends to all tokens); drop {flag}"
            )
        return need.whole
    if (kind := check_device(options)) != "cpu":
        who = "a simulated accelerator" if kind == "sim" else "a card"
        raise UnsupportedModelError(
            f"--kv-ram shares keys and values out between RAM and the disk, and {who} keeps them "
            f"itself; drop {'--device sim' if kind == 'sim' else '--gpu'} or --kv-ram"
        )
    if need is None:
        raise UnsupportedModelError(
            f"{name} has a cache that cannot be kept in blocks (a kind of its own, or no layer "
            f"that attends to all tokens); drop --kv-ram"
        )
    of_all(need, options).within(options.kv_ram)  # first: its error names a budget that is enough
    return need.within(options.kv_ram)


def rounded(plan: KvPlan | None, options: Options) -> Rounded | None:
    """How blocks keep keys and values; None: as they are computed."""
    if plan is None or options.kv is None:
        return None
    return Rounded(options.kv, plan.need.block_tokens)


def of_all(need: KvNeed, options: Options) -> KvNeed:
    """What one sequence needs, for as many as run beside each other."""
    return dataclasses.replace(
        need,
        sequences=need.sequences * options.sequences,
        other_bytes=need.other_bytes * options.sequences,
    )


def beside(plan: KvPlan | None, options: Options) -> KvPlan | None:
    """The same for as many sequences as run beside each other.

    All of them are in RAM where one's would be, unless ``options.kv_spill`` says that they need
    not: then they share what one has, or the least they take.

    Raises:
        PlanError: ``options.kv_ram`` is too little.
    """
    if plan is None or options.sequences == 1:
        return plan
    need = of_all(plan.need, options)
    if options.kv_ram is not None:
        return need.within(options.kv_ram)
    if not plan.blocks[1] and not options.kv_spill:
        return need.whole
    return need.within(max(plan.ram_bytes, need.least.least_bytes))


def in_ram_or_spilled(options: Options, make: Callable[[], T]) -> T:
    """What ``make`` makes of a plan with the keys and values of all sequences in RAM; where that
    does not fit, with a part of them on the disk.

    Raises:
        PlanError: neither fits.
    """
    options.kv_spill = False
    try:
        return make()
    except PlanError:
        if options.sequences == 1 or options.kv_ram is not None:
            raise
        options.kv_spill = True
        return make()


def least(need: KvNeed) -> KvPlan:
    """With as little RAM as possible."""
    return need.within(need.least.least_bytes)


def with_spare(need: KvNeed, plan: KvPlan, spare: int) -> KvPlan:
    """As ``plan``, which is the least that ``need`` takes, with up to ``spare`` bytes more."""
    return need.within(plan.ram_bytes + max(0, spare))


def _last_token_bytes(model: Any, context: int, sequences: int) -> int:
    """Activations of a token that sees all the context (a latent cache expanded, heads repeated),
    with the gathered layer apart. 0 where meta tensors do not do."""
    from offload.kv.measure import whole_cache

    try:
        return int(1.05 * decode_peak(model, whole_cache(model, context, sequences), sequences))
    except Exception as error:  # noqa: BLE001  any op may refuse meta tensors
        logger.info("activations at the end of the context are not measured: %s", error)
        return 0
