"""Blocks against plain tensors: whatever is appended, cut and forked, with reads and writes that
end whenever they like, and a disk that fills up at any time."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offload.errors import OffloadError, SchedulerError, StoreError
from offload.io.engines import _EngineBase
from offload.io.files import TransferError
from offload.kv.homes import least_slots, place, upcoming
from offload.kv.pool import Pool
from offload.kv.shape import BlockLayout, KvShape
from offload.kv.spill import Spill
from offload.kv.store import BlockStore
from offload.kv.table import LayerTable

LAYERS, MOST_ROWS = 3, 4
SHAPE = KvShape(key_heads=2, key_dim=3, value_heads=1, value_dim=5, dtype="float32")
LAYOUT = BlockLayout(SHAPE, 4)


class Later(Future[Any]):
    """A transfer that takes place when it is waited for, or when the engine is told to."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        if self.done() or not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(self._work())
        except StoreError as error:
            self.set_exception(error)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(timeout)


class Engine(_EngineBase):
    """Runs nothing by itself; ``broken`` makes writes fail."""

    def __init__(self) -> None:
        super().__init__(1)
        self.waiting: deque[Later] = deque()
        self.broken = False

    def submit(self, work: Callable[[], Any], priority: int = 0) -> Future[Any]:
        self.waiting.append(Later(work))
        return self.waiting[-1]

    def write(self, file: Any, offset: int, buf: memoryview) -> Future[int]:
        if self.broken:
            return self.submit(self._fail)
        return super().write(file, offset, buf)

    def _fail(self) -> int:
        raise TransferError("no space left (injected)", path="(injected)", offset=0, errno=28)


class Blocks(RuleBasedStateMachine):
    """Tables of three layers over as few slots as possible, and tensors that say what is right."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.folder = tempfile.TemporaryDirectory()
        self.generator = torch.Generator().manual_seed(0)

    @initialize(rows=st.integers(1, 2), spare=st.integers(0, 6))
    def begin(self, rows: int, spare: int) -> None:
        slots = least_slots(LAYERS, MOST_ROWS) + spare
        homes = place(slots=slots, slot_bytes=LAYOUT.nbytes, layers=LAYERS, sequences=rows)
        self.pool = Pool(slots, LAYOUT.nbytes)
        self.spill = Spill(self.folder.name, LAYOUT.nbytes, self.engine)
        self.store = BlockStore(self.pool, self.spill, homes)
        self.tables = [LayerTable(self.store, i, LAYOUT) for i in range(LAYERS)]
        self.want = [
            (torch.empty(rows, 2, 0, 3), torch.empty(rows, 1, 0, 5)) for _ in range(LAYERS)
        ]

    @rule(layer=st.integers(0, LAYERS - 1), tokens=st.integers(1, 11))
    def append(self, layer: int, tokens: int) -> None:
        table, (keys, values) = self.tables[layer], self.want[layer]
        rows = keys.shape[0]
        new_k = torch.rand(rows, 2, tokens, 3, generator=self.generator)
        new_v = torch.rand(rows, 1, tokens, 5, generator=self.generator)
        try:
            table.append(new_k, new_v)
        except OffloadError:
            # Only a disk that takes nothing is a reason; what was stored before stays.
            assert self.engine.broken or self.store._refused is not None
        else:
            assert table.length == keys.shape[2] + tokens
        kept = table.length - keys.shape[2]
        assert kept >= 0
        self.want[layer] = (
            torch.cat([keys, new_k[:, :, :kept]], 2), torch.cat([values, new_v[:, :, :kept]], 2),
        )  # fmt: skip

    @rule(layer=st.integers(0, LAYERS - 1), share=st.floats(0, 1))
    def cut(self, layer: int, share: float) -> None:
        keys, values = self.want[layer]
        length = int(share * keys.shape[2])
        self.tables[layer].truncate(length)
        self.want[layer] = keys[:, :, :length], values[:, :, :length]

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """As beams do: all layers alike."""
        if any(t.sequences != self.want[0][0].shape[0] for t in self.tables):
            return  # not all have begun
        known = self.want[0][0].shape[0]
        rows = data.draw(
            st.lists(st.integers(0, known - 1), min_size=1, max_size=MOST_ROWS), label="rows"
        )
        for table in self.tables:
            table.select(rows)
        self.want = [(k[rows], v[rows]) for k, v in self.want]

    @rule(layer=st.integers(0, LAYERS - 1))
    def read(self, layer: int) -> None:
        table, (want_k, want_v) = self.tables[layer], self.want[layer]
        if not table.sequences:
            return
        keys, values = torch.full_like(want_k, -1), torch.full_like(want_v, -1)
        behind = (u.block for t in self.tables[layer + 1 :] for u in t.uses())
        table.gather(keys, values, behind)
        assert torch.equal(keys, want_k)
        assert torch.equal(values, want_v)

    @rule(last=st.booleans())
    def transfer_ends(self, last: bool) -> None:
        if self.engine.waiting:
            (self.engine.waiting.pop() if last else self.engine.waiting.popleft()).run()

    @rule(broken=st.booleans())
    def disk(self, broken: bool) -> None:
        self.engine.broken = broken
        if not broken:
            self.store.retry()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "store"):
            self.store.validate()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for layer in range(LAYERS):
                self.read(layer)
            for table in self.tables:
                table.clear()
            while self.engine.waiting:
                self.engine.waiting.popleft().run()
            self.store.settle()
            assert self.store.counts() == (0, 0), "blocks are left without an owner"
            self.spill.close()
            self.pool.close()
        self.folder.cleanup()


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_each_lap_reads_what_is_on_disk_once(tmp_path: Path) -> None:
    """However small the window: nothing that was read ahead is read again."""
    homes = place(slots=least_slots(4, 1) + 2, slot_bytes=LAYOUT.nbytes, layers=4, sequences=1)
    pool, spill = Pool(homes.slots, LAYOUT.nbytes), Spill(tmp_path, LAYOUT.nbytes, Engine())
    store = BlockStore(pool, spill, homes)
    tables = [LayerTable(store, layer, LAYOUT) for layer in range(4)]
    for table in tables:
        table.append(torch.rand(1, 2, 18, 3), torch.rand(1, 1, 18, 5))
    laps = 5
    for _ in range(laps):
        for layer, table in enumerate(tables):
            order = [[u.block for u in t.uses()] for t in tables]
            behind = upcoming(order.__getitem__, len(order), layer)
            table.gather(torch.zeros(1, 2, 18, 3), torch.zeros(1, 1, 18, 5), behind)
    store.settle()
    _, on_disk = store.counts()
    reads = spill.read_bytes // LAYOUT.nbytes
    assert on_disk > homes.window
    assert laps * on_disk - homes.window <= reads <= laps * on_disk + homes.window
    spill.close()
    pool.close()


def test_a_full_disk_leaves_what_is_in_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StoreError("too little space")

    monkeypatch.setattr("offload.kv.spill.reserve", full)
    homes = place(slots=12, slot_bytes=LAYOUT.nbytes, layers=1, sequences=1)
    pool, spill = Pool(12, LAYOUT.nbytes), Spill(tmp_path, LAYOUT.nbytes, Engine())
    store = BlockStore(pool, spill, homes)
    table = LayerTable(store, 0, LAYOUT)
    keys, values = torch.rand(1, 2, 100, 3), torch.rand(1, 1, 100, 5)
    with pytest.raises(StoreError, match=r"KV cache is full.*nothing can be spilled.*--kv-ram"):
        table.append(keys, values)
    # All but the window is used, and what was stored is whole.
    assert table.length == 4 * (12 - homes.window)
    assert "stay in RAM from now on" in caplog.text
    got_k, got_v = torch.zeros(1, 2, table.length, 3), torch.zeros(1, 1, table.length, 5)
    table.gather(got_k, got_v, iter(()))
    assert torch.equal(got_k, keys[:, :, : table.length])
    assert torch.equal(got_v, values[:, :, : table.length])
    spill.close()
    pool.close()


@pytest.mark.parametrize("slots", [12, 13])
def test_a_row_without_room_takes_the_other_rows_blocks_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """A slot for the first sequence's next block and none for the second's: what was left of it
    was in the way of the next tokens, and those were stored where nobody reads."""

    def full(*_: Any, **__: Any) -> None:
        raise StoreError("too little space")

    monkeypatch.setattr("offload.kv.spill.reserve", full)
    homes = place(slots=slots, slot_bytes=LAYOUT.nbytes, layers=1, sequences=2)
    pool, spill = Pool(slots, LAYOUT.nbytes), Spill(tmp_path, LAYOUT.nbytes, Engine())
    store = BlockStore(pool, spill, homes)
    table = LayerTable(store, 0, LAYOUT)
    keys, values = torch.rand(2, 2, 100, 3), torch.rand(2, 1, 100, 5)
    for start in (0, 4):
        with pytest.raises(StoreError, match="KV cache is full"):
            table.append(keys[:, :, start:], values[:, :, start:])
        columns = (slots - homes.window) // 2
        assert table.length == 4 * columns
        assert store.counts() == (2 * columns, 0)
        table.truncate(4)
    more = 4 * (columns - 1)
    table.append(keys[:, :, 50 : 50 + more], values[:, :, 50 : 50 + more])
    got_k, got_v = torch.zeros(2, 2, 4 + more, 3), torch.zeros(2, 1, 4 + more, 5)
    table.gather(got_k, got_v, iter(()))
    assert torch.equal(got_k, torch.cat([keys[:, :, :4], keys[:, :, 50 : 50 + more]], 2))
    assert torch.equal(got_v, torch.cat([values[:, :, :4], values[:, :, 50 : 50 + more]], 2))
    table.clear()
    assert store.counts() == (0, 0)
    spill.close()
    pool.close()


def test_a_block_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    homes = place(slots=3, slot_bytes=LAYOUT.nbytes, layers=1, sequences=1)
    engine = Engine()
    pool, spill = Pool(3, LAYOUT.nbytes), Spill(tmp_path, LAYOUT.nbytes, engine)
    table = LayerTable(BlockStore(pool, spill, homes), 0, LAYOUT)
    table.append(torch.rand(1, 2, 30, 3), torch.rand(1, 1, 30, 5))
    while engine.waiting:
        engine.waiting.popleft().run()
    spill._open().truncate(0)
    spill._open().size = 1 << 20  # as it was
    with pytest.raises(StoreError, match="shrank"):
        table.gather(torch.zeros(1, 2, 30, 3), torch.zeros(1, 1, 30, 5), iter(()))
    spill.close()
    pool.close()


def test_a_slot_given_back_twice_is_a_bug() -> None:
    pool = Pool(2, 4096)
    slot = pool.take()
    assert slot is not None
    pool.give(slot)
    with pytest.raises(SchedulerError, match="twice"):
        pool.give(slot)
    pool.close()
