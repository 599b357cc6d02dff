"""Attention over blocks: against float64 and torch, and the same bits however it is divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernel_support import ISAS, restore_threads

from offload.cpu_ops import threads
from offload.cpu_ops.block_attention import BlockAttention, Table, kernels_for
from offload.cpu_ops.block_bodies import mode_of
from offload.cpu_ops.block_kernels import BLOCK
from offload.cpu_ops.block_layout import (
    PART,
    BlockKind,
    BlockLayout,
    pack_keys,
    pack_values,
    quantise,
    unpack_keys,
    unpack_values,
)
from offload.cpu_ops.block_quantise import quantise_block
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import from_bf16, to_bf16
from offload.errors import OffloadError

__all__ = ["restore_threads"]

Array = npt.NDArray[Any]
HALF = 2.0**-8
"""Of bfloat16: twice the rounding error."""


def normal(seed: int, *shape: int) -> npt.NDArray[np.float32]:
    """Exact in bfloat16, so that all kinds and dtypes see the same numbers."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return from_bf16(to_bf16(x))


class Blocks:
    """One sequence's keys and values [G, T, D] in blocks with nothing but NaN around them."""

    def __init__(self, layout: BlockLayout, keys: Array, values: Array) -> None:
        self.layout, count = layout, keys.shape[1]
        self.keep: list[Array] = []
        self.table: Table = np.empty((-(-count // layout.tokens), 3), np.int64)
        read: list[list[Array]] = [[], []]
        for i in range(len(self.table)):
            memory = np.full(layout.nbytes + 64 * (i + 1), 0xFF, np.uint8)
            block = memory[64 * i : 64 * i + layout.nbytes]
            first = i * layout.tokens
            filled = min(layout.tokens, count - first)
            for x, is_keys in ((keys, True), (values, False)):
                some = x[:, first : first + filled]
                if layout.kind.quantised:  # what is behind the last token: anything
                    some = np.pad(some, ((0, 0), (0, layout.tokens - filled), (0, 0)))
                    layout.write(block, some, keys=is_keys)
                elif layout.kind is BlockKind.F32:
                    layout.plain(block, keys=is_keys)[:, :filled] = some
                else:
                    layout.plain(block, keys=is_keys)[:, :filled] = to_bf16(some)
                read[not is_keys].append(layout.read(block, keys=is_keys)[:, :filled])
            self.table[i] = address_of(block), address_of(block) + layout.values_at, filled
            self.keep.append(memory)
        self.keys, self.values = (np.concatenate(parts, axis=1) for parts in read)


def exact(
    q: Array, blocks: Blocks, *, position: int, scale: float, cap: float = 0.0, window: int = 0,
    first: int = 0, sinks: Array | None = None,
) -> Array:  # fmt: skip
    """[Hq, n, Dv] in float64, from what is in the blocks."""
    group = q.shape[0] // blocks.keys.shape[0]
    keys, values = (
        np.repeat(x.astype(np.float64), group, axis=0) for x in (blocks.keys, blocks.values)
    )
    scores = np.einsum("hnd,htd->hnt", q.astype(np.float64), keys) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    token, place = np.arange(keys.shape[1]), position + np.arange(q.shape[1])[:, None]
    seen = (token <= place) & (token >= first)
    if window:
        seen &= token > place - window
    top = np.where(seen, scores, -np.inf).max(axis=2, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.where(seen, np.exp(np.where(seen, scores, 0.0) - top), 0.0)
    total = weights.sum(axis=2, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64)[:, None, None] - top)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.asarray(np.einsum("hnt,htd->hnd", weights, values))


def attend(q: Array, blocks: Blocks, *, position: int, **given: Any) -> Array:
    """[Hq, n, Dv], one sequence, as ``exact`` names things."""
    sinks = given.pop("sinks", None)
    if "first" in given:
        given["firsts"] = [given.pop("first")]
    layout = blocks.layout
    one = BlockAttention(
        q[None], key_heads=layout.key_heads, dim=layout.dim, positions=[position], **given
    )
    one.add(layout, [blocks.table])
    return np.asarray(one.result(sinks)[0])


CASES = [
    # kind, bfloat16 queries, key heads, group, Dk, Dv, block, tokens, queries, further arguments
    ("f32", False, 2, 4, 64, 64, 256, 700, 1, {}),
    ("f32", False, 1, 3, 80, 48, 16, 77, 6, {"cap": 5.0, "window": 20}),
    ("bf16", False, 2, 5, 192, 128, 512, 777, 3, {"first": 33}),
    ("bf16", True, 4, 8, 128, 128, 256, 1100, 1, {}),
    ("bf16", True, 1, 32, 80, 80, 64, 300, 1, {"sinks": True}),
    ("bf16", True, 2, 1, 96, 112, 48, 500, 40, {"cap": 8.0}),
    ("bf16", True, 2, 7, 256, 64, 256, 600, 70, {"window": 100, "first": 250, "sinks": True}),
    ("q8", False, 2, 4, 64, 80, 512, 600, 1, {}),
    ("q8", True, 2, 7, 64, 128, 256, 512, 11, {"window": 300, "sinks": True}),
    ("q4", False, 2, 4, 64, 96, 64, 192, 1, {"first": 70}),
    ("q4", True, 1, 5, 128, 64, 256, 600, 9, {"cap": 10.0}),
]


LATER = ("f32", "q8")
"""On the portable set these are for the sweep: bf16 and q4 have all in which kinds differ there."""
ON_EACH = [
    pytest.param(isa, *case, marks=[pytest.mark.sweep] * (isa != ISAS[0] and case[0] in LATER))
    for isa in (ISAS[0], "portable")
    for case in CASES
]


@pytest.mark.parametrize(
    ("isa", "kind", "half", "heads", "group", "key_dim", "dim", "block", "tokens", "n", "more"),
    ON_EACH,
)
def test_against_float64(
    isa: str, kind: str, half: bool, heads: int, group: int, key_dim: int, dim: int, block: int,
    tokens: int, n: int, more: dict[str, Any],
) -> None:  # fmt: skip
    """float32: sums of T and D terms in float32. bfloat16 queries: weights are rounded to 2^-9
    each where dot products are used, and the result is rounded once."""
    layout = BlockLayout(BlockKind(kind), heads, key_dim, dim, block)
    blocks = Blocks(layout, normal(1, heads, tokens, key_dim), normal(2, heads, tokens, dim))
    q = 2 * normal(3, heads * group, n, key_dim)
    given = {"position": tokens - n, "scale": key_dim**-0.5, **more}
    if given.get("sinks"):
        given["sinks"] = normal(4, heads * group)
    want = exact(q, blocks, **given)
    got = attend(to_bf16(q) if half else q, blocks, isa=isa, **given)
    largest = np.abs(blocks.values).max()
    if half:
        # Rounding of a weight (2^-9 of it) and of the result (2^-9 of it), each at most 2^-9 of
        # the largest value.
        np.testing.assert_allclose(from_bf16(got), want, rtol=0, atol=HALF * largest)
    else:  # quantised: queries and weights are rounded to 15 bits of the largest
        near = 1e-3 if layout.kind.quantised else 4e-6
        np.testing.assert_allclose(got, want, rtol=0, atol=near * largest)


def test_against_torch() -> None:
    """No further from torch's SDPA in float32 than bfloat16 rounds; nearer than SDPA in bfloat16
    is, or as near."""
    layout = BlockLayout(BlockKind.BF16, 4, 128, 128, 256)
    blocks = Blocks(layout, normal(1, 4, 900, 128), normal(2, 4, 900, 128))
    q = normal(3, 32, 1, 128)
    k, v = torch.from_numpy(blocks.keys[None]), torch.from_numpy(blocks.values[None])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    want = sdpa(torch.from_numpy(q[None]), k, v, enable_gqa=True)[0].numpy()
    plain = attend(q, blocks, position=899, scale=128**-0.5)
    np.testing.assert_allclose(plain, want, rtol=0, atol=2e-6)
    half = from_bf16(attend(to_bf16(q), blocks, position=899, scale=128**-0.5))
    peer = sdpa(torch.from_numpy(q[None]).bfloat16(), k.bfloat16(), v.bfloat16(), enable_gqa=True)
    error = np.abs(half - want).max()
    assert error <= max(2 * np.abs(peer[0].float().numpy() - want).max(), HALF * np.abs(want).max())


@pytest.mark.parametrize(
    ("kind", "half"), [("f32", False), ("bf16", False), ("bf16", True), ("q8", True), ("q4", True)]
)
@pytest.mark.usefixtures("restore_threads")
def test_same_bits(kind: str, half: bool) -> None:
    """For any number of threads, placement, division into goes and chunks, and company."""
    layout = BlockLayout(BlockKind(kind), 2, 64, 64, 64)
    keys, values = normal(1, 2, 301, 64), normal(2, 2, 301, 64)
    blocks, elsewhere = Blocks(layout, keys, values), Blocks(layout, keys, values)
    q = normal(3, 10, 30, 64)
    q = to_bf16(q) if half else q
    given: dict[str, Any] = {"scale": 0.2, "cap": 20.0, "window": 130, "first": 7}
    threads.setup(1)
    together = attend(q, blocks, position=271, **given)
    assert np.array_equal(together, attend(q, elsewhere, position=271, **given))
    # Few rows and many take different ways through the kernels.
    alone = [attend(q[:, i : i + 1], blocks, position=271 + i, **given) for i in range(30)]
    assert np.array_equal(together, np.concatenate(alone, axis=1))
    halves = [attend(q[:, s], blocks, position=271 + s.start, **given)
              for s in (slice(0, 13), slice(13, 30))]  # fmt: skip
    assert np.array_equal(together, np.concatenate(halves, axis=1))
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads.setup(3)  # two heads: rows that stand alone are divided by blocks
        assert np.array_equal(together, attend(q, blocks, position=271, **given))
        assert np.array_equal(alone[29], attend(q[:, 29:], blocks, position=300, **given))
    finally:
        torch.set_num_threads(torch_threads)
    for rows in (slice(0, 30), slice(29, 30)):
        one = BlockAttention(
            q[None, :, rows], key_heads=2, dim=64, positions=[271 + rows.start], scale=0.2,
            cap=20.0, window=130, firsts=[7],
        )  # fmt: skip
        for cut in (slice(0, 1), slice(1, 1), slice(1, 4), slice(4, 5)):
            one.add(layout, [blocks.table[cut]])
        assert np.array_equal(together[:, rows], one.result()[0])


def test_batch_and_kinds() -> None:
    """Sequences of different lengths with padding of their own; old blocks quantised, new ones
    not."""
    coarse, fine = (BlockLayout(kind, 2, 64, 64, 32) for kind in (BlockKind.Q8, BlockKind.BF16))
    lengths, firsts = (150, 71), [3, 40]
    q = to_bf16(normal(9, 2, 4, 1, 64))
    old, new, whole = [], [], []
    for b, length in enumerate(lengths):
        keys, values = normal(b, 2, length, 64), normal(b + 5, 2, length, 64)
        old.append(Blocks(coarse, keys[:, :64], values[:, :64]))
        new.append(Blocks(fine, keys[:, 64:], values[:, 64:]))
        both = Blocks(fine, keys, values)
        both.keys = np.concatenate([old[b].keys, new[b].keys], axis=1)
        both.values = np.concatenate([old[b].values, new[b].values], axis=1)
        whole.append(both)
    one = BlockAttention(
        q, key_heads=2, dim=64, positions=[n - 1 for n in lengths], scale=0.125, firsts=firsts
    )
    one.add(coarse, [blocks.table for blocks in old])
    one.add(fine, [blocks.table for blocks in new])
    for b, got in enumerate(from_bf16(one.result())):
        want = exact(
            from_bf16(q[b]), whole[b], position=lengths[b] - 1, scale=0.125, first=firsts[b]
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=HALF * np.abs(whole[b].values).max())


def test_blocks_nobody_sees_are_not_touched() -> None:
    """Their addresses may be anything; a query that sees nothing gets zeros."""
    layout = BlockLayout(BlockKind.F32, 1, 32, 32, 32)
    blocks = Blocks(layout, normal(1, 1, 160, 32), normal(2, 1, 160, 32))
    q = normal(3, 2, 2, 32)
    want = attend(q, blocks, position=158, scale=1.0, window=30)
    blocks.table[:3, :2] = 8
    assert np.array_equal(want, attend(q, blocks, position=158, scale=1.0, window=30))
    assert np.array_equal(want, attend(q, blocks, position=158, scale=1.0, window=30, first=100))
    nothing = attend(q, blocks, position=158, scale=1.0, first=160)
    assert not nothing.any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_quantise(bits: int, axis: int) -> None:
    """No value is further from what is stored than half a step, which is the range's share."""
    x = normal(5, 48, 64) * np.exp(normal(6, 48, 1)) + 3 * normal(7, 1, 64)
    x[:, 1] = 2.5
    steps, lows, codes = quantise(x, bits, axis)
    step, low = (np.expand_dims(from_bf16(a), axis) for a in (steps, lows))
    assert (np.abs(low + step * codes - x) <= step * 0.5001 + 1e-6).all()
    reach = x.max(axis=axis, keepdims=True) - x.min(axis=axis, keepdims=True)
    magnitude = np.abs(x).max(axis=axis, keepdims=True)
    assert (step <= (reach + magnitude / 64) / (2**bits - 1) * 1.01 + 1e-30).all()
    assert np.array_equal(unpack_keys(pack_keys(codes, bits), bits, 64), codes)
    assert np.array_equal(unpack_values(pack_values(codes, bits), bits, 64), codes)


@pytest.mark.parametrize(("kind", "half"), [("q8", True), ("q8", False), ("q4", True)])
def test_quantise_block(kind: str, half: bool) -> None:
    """The kernels write what numpy does, bit for bit, and nothing else."""
    layout = BlockLayout(BlockKind(kind), 2, 64, 96, 512)
    spread = np.exp(normal(1, 2, 512, 1))
    keys, values = normal(2, 2, 512, 64) * 3, normal(3, 2, 512, 96) * spread
    keys[:, :, 5], keys[:, 300:, 9], values[0, 7], values[1, 9] = 2.5, -1e30, 0.0, -4.0
    keys, values = from_bf16(to_bf16(keys)), from_bf16(to_bf16(values))
    memory = np.full(layout.nbytes + 128, 0xA5, np.uint8)
    block, want = memory[64:-64], np.full(layout.nbytes, 0xA5, np.uint8)
    layout.write(want, keys, keys=True)
    layout.write(want, values, keys=False)
    k, v = (to_bf16(keys), to_bf16(values)) if half else (keys, values)
    quantise_block(layout, k, v, block)
    assert np.array_equal(block, want)
    assert (memory[:64] == 0xA5).all()
    assert (memory[-64:] == 0xA5).all()
    with pytest.raises(OffloadError, match="must be contiguous"):
        quantise_block(layout, k, v[:, ::-1], block)
    with pytest.raises(OffloadError, match="must be contiguous"):
        quantise_block(layout, k, k, block)


def test_layout() -> None:
    assert PART == BLOCK
    layout = BlockLayout(BlockKind.Q4, 8, 128, 64, 512)
    assert (layout.span, layout.parts) == (256, 2)
    assert layout.record(keys=True) == 4 * 128 + 256 * 64
    assert layout.record(keys=False) == 4 * 256 + 256 * 32
    assert layout.values_at % 4096 == 0 == layout.nbytes % 4096
    for kind in ("f32", "bf16", "q8", "q4"):
        assert mode_of(kind, half_queries=True, whole=True, isa=Isa.PORTABLE) == kind
        assert mode_of(kind, half_queries=False, whole=False, isa=Isa.AVX512VNNI) == kind
    assert mode_of("q4", half_queries=False, whole=True, isa=Isa.AVX512VNNI) == "q4dot"
    names = [kernel.what for kernel in kernels_for(layout, half_queries=True, isa="portable")]
    assert names == ["attention over q4 blocks", "attention's last division"]
    for wrong in ((8, 72, 64, 256), (8, 64, 528, 256), (0, 64, 64, 256), (8, 64, 64, 300)):
        with pytest.raises(OffloadError):
            BlockLayout(BlockKind.BF16, *wrong)
    with pytest.raises(OffloadError, match="multiples of 32"):
        BlockLayout(BlockKind.Q4, 8, 80, 64, 256)


def test_refusals() -> None:
    layout = BlockLayout(BlockKind.F32, 2, 32, 32, 32)
    blocks = Blocks(layout, normal(1, 2, 40, 32), normal(2, 2, 40, 32))
    q = normal(3, 1, 4, 1, 32)
    given: dict[str, Any] = {"key_heads": 2, "dim": 32, "positions": [39], "scale": 1.0}
    for wrong in ({"key_heads": 3}, {"positions": [1, 2]}, {"firsts": [1, 2]}):
        with pytest.raises(OffloadError):
            BlockAttention(q, **{**given, **wrong})
    with pytest.raises(OffloadError, match="float64"):
        BlockAttention(q.astype(np.float64), **given)
    one = BlockAttention(q, **given)
    with pytest.raises(OffloadError, match="do not fit"):
        one.add(BlockLayout(BlockKind.F32, 2, 64, 32, 32), [blocks.table])
    with pytest.raises(OffloadError, match="must hold all 32"):
        one.add(layout, [blocks.table[::-1]])
    with pytest.raises(OffloadError, match="a table is"):
        one.add(layout, [blocks.table.astype(np.int32)])
    with pytest.raises(OffloadError, match="sinks"):
        one.result(np.zeros(3, np.float32))
