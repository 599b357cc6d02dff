"""Where blocks live: the budget is a bound, nothing is lost, reads come in the order of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import PlanError
from offload.kv.homes import LEAST_WINDOW, least_slots, place, shares, upcoming
from offload.kv.shape import BlockLayout, KvShape, layout_within

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
