"""The KV cache of a model over RAM and SSD: memory, file, threads, and the caches made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.blocks import align_up
from offload.errors import ClosedError, OffloadError, PlanError
from offload.io.engines import DEFAULT_QUEUE_DEPTH, make_engine
from offload.kv.cache import Life, TieredCache, layer_makers
from offload.kv.coarse import (
    QUANTISED,
    WRITTEN,
    Coarse,
    coarse_layout,
    slot_bytes_of,
    stored_shape,
    tails_homes,
)
from offload.kv.generation import take_place
from offload.kv.homes import KvHomes, place
from offload.kv.keep import Keep
from offload.kv.kernel_layout import is_latent
from offload.kv.named import CACHE, given_cache
from offload.kv.pool import Pool
from offload.kv.shape import BLOCK_TOKENS, BlockLayout, KvShape, layout_within
from offload.kv.spill import Spill
from offload.kv.store import BlockStore
from offload.kv.table import LayerTable
from offload.runtime.memory import HostMemory
from offload.units import format_bytes

_IN_ONE_PIECE = "load the model without kv_ram, kv, kv_keep and attention='offload'"
"""Whatever it was that put keys and values into blocks."""


class KvTiers:
    """Blocks of keys and values under ``ram`` bytes, and the file for what does not fit.

    Memory, file and threads are made with the first token: only then are heads and dtype known.
    For one thread at a time.
    """

    def __init__(
        self,
        config: Any,
        *,
        ram: int,
        directory: str | Path,
        slot_bytes: int | None = None,
        block_tokens: int = BLOCK_TOKENS,
        context: int = 0,
        caches: int = 1,
        engine: str | None = None,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
        in_place: bool = False,
        kind: str | None = None,
        tail_bytes: int | None = None,
        sequences: int = 1,
        keep: Keep | None = None,
    ) -> None:
        """
        Args:
            config: the model's.
            ram: bytes for blocks. The gathered keys and values of one layer come on top.
            directory: of the private file.
            slot_bytes: of a block of the largest layer; None: of the first layer that is cached.
            block_tokens: of that layer; others have as many or fewer.
            context: tokens that are expected, so that the buffer need not grow.
            caches: that live at the same time, for sequences that run beside each other.
            in_place: the model attends with attention "offload", which gathers nothing.
            kind: "q8" or "q4": full blocks are quantised; "bf16": rounded. Only ``in_place``.
            tail_bytes: of a newest block of the largest layer, where full ones are quantised.
            sequences: that have newest blocks at the same time, at most, if they are apart.
            keep: of each layer's tokens; None: all stay. Only ``in_place``.
        """
        self.config = config
        self.ram = ram
        self.in_place = in_place
        self._kind, self._tail_bytes, self._sequences = kind, tail_bytes, sequences
        self.tails: BlockStore | None = None
        """The newest blocks, where full ones are quantised."""
        self.error: float | None = None
        """See ``note_error``; the largest so far, None: it was not measured."""
        self.keep = keep
        self._evicted = 0
        self._directory = directory
        self._slot_bytes = slot_bytes
        self._block_tokens = block_tokens
        self._context = context
        self._engine_name, self._queue_depth = engine, queue_depth
        self._layers = sum(in_blocks for _, in_blocks in layer_makers(config))
        self._caches = caches
        self._lives: list[Life] = []
        self._closed = False
        self._engine: Any = None
        self._spill: Spill | None = None
        self._buffer: HostMemory | None = None
        self.homes: KvHomes | None = None
        self.pool: Pool | None = None
        self.store: BlockStore | None = None

    def new_cache(self) -> TieredCache:
        """An empty cache, to be given as ``past_key_values``. If there are as many as may live
        (one, unless more were asked for), the oldest loses its memory; ``release`` gives one's
        back before.

        Raises:
            ClosedError: the model is closed.
        """
        if self._closed:
            raise ClosedError("the KV cache's model is closed")
        while len(self._lives) >= self._caches:
            self._lives.pop(0).release()
        if self.store is not None:
            self.store.retry()
        cache = TieredCache(self.config, self)
        self._lives.append(cache.life)
        return cache

    def release(self, cache: TieredCache) -> None:
        """A cache is not needed any more. No-op if its memory has gone already."""
        if cache.life in self._lives:
            self._lives.remove(cache.life)
            cache.life.release()

    def lives(self) -> list[Life]:
        """Of all caches, oldest first."""
        return self._lives

    def table(self, layer: int, shape: KvShape, sequences: int) -> LayerTable:
        """An empty table of a layer. Raises PlanError: the budget is too small for it."""
        if self.store is None:
            self._start(shape, sequences)
        if self.store is None or self.pool is None:
            raise AssertionError("_start makes them")
        shape = stored_shape(shape, self._kind)
        if self.tails is not None and self._kind is not None and not is_latent(shape):
            layout = layout_within(shape, self._block_tokens, self.tails.pool.slot_bytes)
            if layout is not None:
                coarse = coarse_layout(shape, layout.tokens, self._kind)
                if coarse.nbytes <= self.pool.slot_bytes:
                    return LayerTable(self.store, layer, layout, Coarse(self.tails, coarse))
        layout = layout_within(shape, self._block_tokens, self.pool.slot_bytes)
        if layout is None:
            raise PlanError(
                f"a token of layer {layer} takes {format_bytes(shape.token_bytes)}, and KV blocks "
                f"have {format_bytes(self.pool.slot_bytes)}; raise kv_ram (--kv-ram)"
            )
        return LayerTable(self.store, layer, layout)

    def _start(self, shape: KvShape, sequences: int) -> None:
        shape, tails_bytes, written = stored_shape(shape, self._kind), 0, None
        size = self._slot_bytes or slot_bytes_of(shape, self._block_tokens, self._kind)
        if self._kind in QUANTISED:
            tail = self._tail_bytes or BlockLayout(shape, self._block_tokens).nbytes
            count = self._layers * max(sequences * self._caches, self._sequences)
            tails_bytes, written = tail * count, WRITTEN
        homes = place(
            slots=(self.ram - tails_bytes) // size,
            slot_bytes=size,
            layers=self._layers,
            sequences=sequences * self._caches,
            written=written,
            beside=tails_bytes,
        )
        engine = (
            make_engine(self._engine_name, self._queue_depth)
            if self._engine_name
            else make_engine(queue_depth=self._queue_depth)
        )
        self.homes, self._engine = homes, engine
        self.pool = Pool(homes.slots, size)
        self._spill = Spill(self._directory, size, engine)
        self.store = BlockStore(self.pool, self._spill, homes)
        self.store.others = sequences * (self._caches - 1)
        if tails_bytes:
            apart = tails_homes(count, tail, self._layers, sequences * self._caches)
            self.tails = BlockStore(Pool(count, tail), self._spill, apart)
            self.tails.others = self.store.others

    def note_error(self, error: float) -> None:
        """A layer's attention is off by that part of its largest number, from quantising."""
        self.error = max(self.error or 0.0, error)

    def note_evicted(self, tokens: int) -> None:
        """So many tokens of a layer have gone."""
        self._evicted += tokens

    def gather_buffers(
        self, shape: KvShape, sequences: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, H, T, D]`` of one layer, contiguous, not initialised. The same
        memory each time; for latents of caches that take turns, memory of their own: projections
        that expand a latent may be a unit of their own, at which another sequence's turn comes."""
        nbytes = shape.gathered_bytes(tokens, sequences)
        if self._caches > 1 and is_latent(shape):
            with torch.inference_mode(False):
                own = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            return self._gathered(own, shape, sequences, tokens)
        if self._buffer is None or self._buffer.nbytes < nbytes:
            if self._buffer is not None:
                self._buffer.close()
            room = max(tokens + tokens // 8 + self._block_tokens, self._context)
            with torch.inference_mode(False):
                self._buffer = HostMemory(
                    shape.gathered_bytes(room, sequences), "gathered keys and values"
                )
        return self._gathered(self._buffer.tensor(), shape, sequences, tokens)

    @staticmethod
    def _gathered(
        memory: torch.Tensor, shape: KvShape, sequences: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        keys = (sequences, shape.key_heads, tokens, shape.key_dim)
        values = (sequences, shape.value_heads, tokens, shape.value_dim)
        with torch.inference_mode(False):
            return (
                _typed(memory, 0, dtype, keys),
                _typed(memory, align_up(_nbytes(dtype, keys)), dtype, values),
            )

    def stats(self) -> dict[str, Any]:
        """Figures since the model was opened. Sizes in bytes, times in seconds; ``evicted_tokens``:
        as a mean over layers."""
        store, spill = self.store, self._spill
        in_ram, on_disk = store.counts() if store is not None else (0, 0)
        counts = store.stats if store is not None else None
        pools = [s.pool for s in (self.store, self.tails) if s is not None]
        return {
            "ram_bytes": sum(p.slots * p.slot_bytes for p in pools),
            "kind": self._kind,
            "attention_error": self.error,
            "keep_tokens": None if self.keep is None else self.keep.tokens,
            "evicted_tokens": self._evicted // max(1, self._layers),
            "slot_bytes": self.homes.slot_bytes if self.homes else 0,
            "blocks_in_ram": in_ram,
            "blocks_on_disk": on_disk,
            "hits": counts.hits if counts else 0,
            "ahead": counts.ahead if counts else 0,
            "late": counts.late if counts else 0,
            "copies": counts.copies if counts else 0,
            "stall_s": counts.stall_s if counts else 0.0,
            "read_bytes": spill.read_bytes if spill else 0,
            "written_bytes": spill.written_bytes if spill else 0,
        }

    def serve(self, model: Any, on_detach: Callable[[Callable[[], None]], None]) -> None:
        """Have ``model.generate`` use a cache of these tiers where it is given none.

        ``on_detach`` is called with what undoes it. A call that asks for another kind of cache by
        name raises OffloadError: that would go past the budget; so does one that drafts with the
        model's own first layers, whose cache would end the call's own, and any that drafts where
        tokens go for good. A cache that the caller made is the caller's business.
        """
        inner = model.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            def setting(name: str) -> Any:
                own = getattr(model, "generation_config", None)
                said = (getattr(w, name, None) for w in (kwargs.get("generation_config"), own))
                return next((v for v in (kwargs.get(name), *said) if v is not None), None)

            if given_cache(kwargs) is None and setting("use_cache") is not False:
                if (named := setting("cache_implementation")) is not None:
                    raise OffloadError(
                        f"cache_implementation={named!r} would keep keys and values past the KV "
                        f"budget of {format_bytes(self.ram)}; drop it, or {_IN_ONE_PIECE} and with "
                        f"RAM for all of them"
                    )
                if setting("assistant_early_exit") is not None:
                    raise OffloadError(
                        "assistant_early_exit drafts with some of the layers and a cache of their "
                        "own, and one cache of blocks is alive at a time; drop it, or "
                        f"{_IN_ONE_PIECE}"
                    )
                drafts = ("assistant_model", "prompt_lookup_num_tokens")
                drafting = [name for name in drafts if setting(name) is not None]
                if self.keep is not None and drafting:
                    raise OffloadError(
                        f"{drafting[0]} takes tokens back that were drafted and not right, and of "
                        f"the {self.keep.tokens} tokens that are kept those that went for them are "
                        f"gone; drop it, or load the model without kv_keep"
                    )
                kwargs[CACHE] = self.new_cache()
            self._divide(args, kwargs)
            return inner(*args, **kwargs)

        on_detach(take_place(model, generate))

    def _divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have a prompt that is longer than what stays read in parts, so that it is not all there
        at once. A shorter one is read as ever: then nothing is lossy, nor rounded otherwise."""
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if self.keep is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        asked = kwargs.get("generation_config")
        named = kwargs.get("prefill_chunk_size") or getattr(asked, "prefill_chunk_size", None)
        if ids.shape[1] > self.keep.tokens:
            # More at once would not fit, and what stays would depend on who asks.
            most = self.keep.pass_tokens
            kwargs["prefill_chunk_size"] = most if named is None else min(named, most)

    def close(self) -> None:
        """Wait for transfers, free memory, file and threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for life in self._lives:
            life.live = False
        if self._engine is not None:
            self._engine.close()
        tails = self.tails.pool if self.tails is not None else None
        for part in (self._spill, self.pool, tails, self._buffer):
            if part is not None:
                part.close()


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _typed(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    return memory[offset : offset + _nbytes(dtype, shape)].view(dtype).view(shape)
