"""Where blocks live: the budget is a bound, nothing is lost, reads come in the order of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.kv.homes import LEAST_WINDOW, KvHomes, least_slots, place, shares, upcoming
from offload.kv.shape import (
    BLOCK_TOKENS,
    LONG_SHARE,
    TRANSFER_BYTES,
    BlockLayout,
    KvShape,
    block_tokens_for,
    layout_within,
)
from offload.models.kv_plan import KvNeed

COUNTS = st.integers(1, 40)


@given(spare=st.integers(0, 500), layers=COUNTS, sequences=COUNTS, tokens=st.integers(0, 9000))
def test_every_block_has_one_home_within_the_budget(
    spare: int, layers: int, sequences: int, tokens: int
) -> None:
    slots = least_slots(layers, sequences) + spare
    homes = place(slots=slots, slot_bytes=2**20, layers=layers, sequences=sequences)
    assert homes.window + homes.tails + sum(homes.resident) == slots
    assert homes.window >= LEAST_WINDOW
    assert max(homes.resident) - min(homes.resident) <= 1
    in_ram, on_disk = homes.at(tokens, 256)
    assert in_ram + homes.window <= slots
    assert in_ram + on_disk == layers * sequences * -(-tokens // 256)


@given(layers=COUNTS, sequences=COUNTS, lack=st.integers(1, 5))
def test_too_few_slots_are_refused_with_the_number_that_works(
    layers: int, sequences: int, lack: int
) -> None:
    slots = max(0, least_slots(layers, sequences) - lack)
    with pytest.raises(PlanError, match=f"{least_slots(layers, sequences)}MiB or more"):
        place(slots=slots, slot_bytes=2**20, layers=layers, sequences=sequences)


@given(st.integers(0, 1000), COUNTS)
def test_shares_are_even_and_complete(count: int, layers: int) -> None:
    found = shares(count, layers)
    assert sum(found) == count
    assert sorted(found, reverse=True) == list(found)


@given(st.lists(st.lists(st.integers()), min_size=1), st.data())
def test_what_comes_next_goes_round_once(layers: list[list[int]], data: st.DataObject) -> None:
    after = data.draw(st.integers(0, len(layers) - 1))
    order = [*layers[after + 1 :], *layers[: after + 1]]
    found = upcoming(layers.__getitem__, len(layers), after)
    assert list(found) == [b for layer in order for b in layer]


@given(
    heads=st.integers(1, 9), key=st.integers(1, 200), value=st.integers(1, 200),
    tokens=st.integers(1, 300), dtype=st.sampled_from(["bfloat16", "float32"]),
)  # fmt: skip
def test_parts_of_a_block_lie_apart_on_pages(
    heads: int, key: int, value: int, tokens: int, dtype: str
) -> None:
    shape = KvShape(key_heads=heads, key_dim=key, value_heads=1, value_dim=value, dtype=dtype)
    block = BlockLayout(shape, tokens)
    assert block.key_bytes <= block.value_at
    assert block.value_at + block.value_bytes <= block.nbytes
    assert block.value_at % 4096 == block.nbytes % 4096 == 0
    assert block.key_bytes + block.value_bytes == tokens * shape.token_bytes
    fitted = layout_within(shape, tokens, block.nbytes // 2)
    assert fitted is None or fitted.nbytes <= block.nbytes // 2


@given(context=st.integers(1, 2**20), token=st.integers(1, 2**16))
def test_blocks_of_a_long_context_are_one_large_transfer(context: int, token: int) -> None:
    tokens = block_tokens_for(context, lambda n: n * token)
    assert tokens % BLOCK_TOKENS == 0
    if tokens > BLOCK_TOKENS:
        assert tokens * LONG_SHARE <= context
        assert tokens * token <= TRANSFER_BYTES
    assert 2 * tokens * LONG_SHARE > context or 2 * tokens * token > TRANSFER_BYTES


def test_a_small_budget_gets_smaller_blocks() -> None:
    shape = KvShape(key_heads=8, key_dim=64, value_heads=8, value_dim=64, dtype="bfloat16")
    need = KvNeed(
        shapes=(shape,) * 16, context=2**17, sequences=1, together=1, block_tokens=2048,
        other_bytes=0, activation_bytes=0, least_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    assert need.within(2**30).need.block_tokens == 2048
    few = need.within(20 * 2**20)
    assert few.need.block_tokens == 512
    assert few.ram_bytes <= 20 * 2**20
    least = need.least.least_bytes
    assert need.within(least).need.block_tokens == BLOCK_TOKENS
    with pytest.raises(PlanError, match="9MiB or more"):
        need.within(least - 1)


@pytest.mark.parametrize("ram", [0, 4 * 2**10, 600 * 2**10])
def test_blocks_beside_the_newest_ones_say_how_much_they_need(ram: int) -> None:
    """Quantised blocks: the newest tokens are apart, and count, too."""
    slot, beside = 24 * 2**10, 512 * 2**10

    def shared(ram: int) -> KvHomes:
        return place(
            slots=(ram - beside) // slot, slot_bytes=slot, layers=8, sequences=1, written=2,
            beside=beside,
        )  # fmt: skip

    with pytest.raises(PlanError, match=r"holds \d full .* \(--kv-ram\) to 608KiB or more"):
        shared(ram)
    assert shared(608 * 2**10).slots == 2 + LEAST_WINDOW
