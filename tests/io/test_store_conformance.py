"""What every store promises, on both engines; and a state machine against a dict."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from io_support import (
    DEPTH,
    REQUEST_BYTES,
    SPECS,
    STORES,
    Case,
    content_of,
    filled,
    payload,
    read_block,
    rig,
)

from offload.blocks import ALIGN, BlockKind, layout
from offload.errors import ClosedError, StoreError
from offload.io.engines import make_engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.store import DEMAND, PREFETCH, Span, Store
from offload.io.stores import PackStore

BY_ID = {s.id: s for s in SPECS}


@pytest.fixture(params=STORES)
def case(request: pytest.FixtureRequest, engine_name: str, tmp_path: Path) -> Iterator[Case]:
    with rig(engine_name) as (engine, staging):
        built = STORES[request.param](tmp_path, engine, staging)
        yield built
        built.store.close()


def test_is_a_store(case: Case) -> None:
    assert isinstance(case.store, Store)
    assert sorted(case.store.ids()) == sorted(BY_ID)
    assert all(case.store.spec(i) == BY_ID[i] for i in BY_ID)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole_slot", [True, False])
@pytest.mark.parametrize("block_id", BY_ID)
def test_reads_what_is_there(case: Case, block_id: str, whole_slot: bool) -> None:
    want = payload(BY_ID[block_id], case.contents[block_id])
    assert read_block(case.store, block_id, whole_slot=whole_slot) == want


@pytest.mark.parametrize("block_id", BY_ID)
def test_leaves_memory_behind_the_slot_alone(case: Case, block_id: str) -> None:
    spec = BY_ID[block_id]
    with AlignedBuffer(spec.slot_nbytes + ALIGN) as buf:
        buf[spec.slot_nbytes :] = b"\x5a" * ALIGN
        case.store.read_into(block_id, buf).result(timeout=30)
        assert bytes(buf[spec.slot_nbytes :]) == b"\x5a" * ALIGN
    with AlignedBuffer(spec.slot_nbytes + ALIGN) as buf:
        buf[spec.nbytes :] = b"\x5a" * (len(buf) - spec.nbytes)
        case.store.read_into(block_id, buf[: spec.nbytes]).result(timeout=30)
        assert bytes(buf[spec.nbytes :]) == b"\x5a" * (len(buf) - spec.nbytes)


def test_receipt(case: Case) -> None:
    for block_id, spec in BY_ID.items():
        with AlignedBuffer(spec.slot_nbytes) as buf:
            got = case.store.read_into(block_id, buf).result(timeout=30)
        assert got.payload_bytes == spec.payload_nbytes
        if case.on_disk and spec.nbytes:
            ranges = len(spec.tensors)
            assert spec.payload_nbytes <= got.physical_bytes
            assert got.physical_bytes <= spec.payload_nbytes + 8192 * ranges
            assert got.requests >= -(-spec.nbytes // case.request_bytes)
            assert got.copied_bytes in range(spec.payload_nbytes + 1)


def test_many_at_once(case: Case) -> None:
    ids = list(BY_ID) * 8
    bufs = [AlignedBuffer(BY_ID[i].slot_nbytes) for i in ids]
    futures = [
        case.store.read_into(i, buf.view, priority=(DEMAND, PREFETCH)[n % 2])
        for n, (i, buf) in enumerate(zip(ids, bufs, strict=True))
    ]
    for i, buf, future in zip(ids, bufs, futures, strict=True):
        future.result(timeout=30)
        assert payload(BY_ID[i], buf.view) == payload(BY_ID[i], case.contents[i])
        buf.close()


def test_spans_fill_only_what_was_asked(case: Case) -> None:
    spans = [Span(5, 1, 3), Span(69990, 10, 11), Span(4000, 4096, 9000), Span(4000, 4, 3)]
    want = bytearray(b"\x11" * 20000)
    for s in spans:
        want[s.dst : s.dst + s.nbytes] = case.contents["odd"][s.src : s.src + s.nbytes]
    with filled(b"\x11" * 20000) as buf:
        got = case.store.read_spans_into("odd", spans, buf).result(timeout=30)
        assert bytes(buf) == bytes(want)
        assert got.payload_bytes == sum(s.nbytes for s in spans)


def test_spans_on_page_boundaries(case: Case) -> None:
    spans = [Span(4096, 8192, 4096), Span(16384, 0, 5000)]
    want = bytearray(b"\x11" * 16384)
    for s in spans:
        want[s.dst : s.dst + s.nbytes] = case.contents["long"][s.src : s.src + s.nbytes]
    with filled(b"\x11" * 16384) as buf:
        case.store.read_spans_into("long", spans, buf).result(timeout=30)
        assert bytes(buf) == bytes(want)


def test_spans_into_unaligned_memory(case: Case) -> None:
    out = bytearray(50)
    case.store.read_spans_into("small", [Span(2, 7, 20)], memoryview(out)[1:]).result(timeout=30)
    assert bytes(out[8:28]) == case.contents["small"][2:22]
    assert not any(out[:8])
    assert not any(out[28:])


def test_no_spans(case: Case) -> None:
    got = case.store.read_spans_into("small", [], memoryview(bytearray())).result(timeout=30)
    assert got.payload_bytes == 0


def test_callers_mistakes_raise_at_once(case: Case) -> None:
    with pytest.raises(KeyError):
        case.store.spec("nobody")
    with AlignedBuffer(8192) as buf:
        with pytest.raises(KeyError):
            case.store.read_into("nobody", buf)
        with pytest.raises(ValueError, match="4096"):
            case.store.read_into("page", buf[:100])
        with pytest.raises(ValueError, match="aligned"):
            case.store.read_into("page", buf[64:])
        with pytest.raises(ValueError, match="read-only"):
            case.store.read_into("page", buf.toreadonly())
        with pytest.raises(ValueError, match="outside"):
            case.store.read_spans_into("page", [Span(4000, 0, 97)], buf)
        with pytest.raises(ValueError, match="buffer"):
            case.store.read_spans_into("page", [Span(0, 8190, 3)], buf)


def test_writes(case: Case) -> None:
    new = content_of(BY_ID["odd"], seed=1)
    if not case.store.writable:
        with filled(new) as buf, pytest.raises(StoreError):
            case.store.write_from("odd", buf).result(timeout=30)
        return
    for length in (BY_ID["odd"].slot_nbytes, BY_ID["odd"].nbytes):
        new = content_of(BY_ID["odd"], seed=length)
        with filled(new, length) as buf:
            receipt = case.store.write_from("odd", buf.toreadonly()).result(timeout=30)
        assert receipt.payload_bytes == BY_ID["odd"].payload_nbytes
        assert read_block(case.store, "odd") == payload(BY_ID["odd"], new)
    shifted = memoryview(bytearray(1) + content_of(BY_ID["odd"], seed=9))[1:]
    case.store.write_from("odd", shifted).result(timeout=30)
    assert read_block(case.store, "odd") == payload(BY_ID["odd"], shifted)
    for other in ("page", "long"):
        assert read_block(case.store, other) == payload(BY_ID[other], case.contents[other])


def test_closed(case: Case) -> None:
    with AlignedBuffer(BY_ID["long"].slot_nbytes) as buf:
        last = case.store.read_into("long", buf)
        case.store.close()
        wait([last], timeout=30)
        assert payload(BY_ID["long"], buf) == payload(BY_ID["long"], case.contents["long"])
        case.store.close()
        with pytest.raises(ClosedError, match="closed"):
            case.store.read_into("long", buf).result(timeout=30)
        with pytest.raises(ClosedError, match="closed"):
            case.store.read_spans_into("long", [Span(0, 0, 1)], buf).result(timeout=30)
        with pytest.raises((ClosedError, StoreError)):
            case.store.write_from("long", buf).result(timeout=30)


def test_a_done_future_has_let_go_of_the_buffer(case: Case) -> None:
    for block_id in BY_ID:
        buf = AlignedBuffer(BY_ID[block_id].slot_nbytes)
        futures: list[Future[object]] = [case.store.read_into(block_id, buf.view)]
        futures.append(case.store.read_spans_into(block_id, [], buf.view))
        for future in futures:
            future.result(timeout=30)
        buf.close()  # BufferError while anybody holds a view


MACHINE_SPECS = [
    layout("a", BlockKind.STATE, [("x", "uint8", (1,))]),
    layout("b", BlockKind.STATE, [("x", "uint8", (4096,))]),
    layout("c", BlockKind.STATE, [("x", "uint8", (40000,)), ("y", "float32", (3,))]),
]
IDS = st.sampled_from([s.id for s in MACHINE_SPECS])


class PackMachine(RuleBasedStateMachine):
    """A pack against a dict. A crash forgets what was not committed and nothing else."""

    @initialize(name=st.sampled_from(["aiofiles", "threads"]), sums=st.booleans())
    def start(self, name: str, sums: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="offload-machine-"))
        self.staging = Staging(DEPTH, REQUEST_BYTES)
        self.engine = make_engine(name, DEPTH)
        self.sums = sums
        self.model: dict[str, bytes] = {}
        self.committed: dict[str, bytes] | None = None
        self.commits = 0
        self.sealed = False
        self._create()

    def _create(self) -> None:
        self.store = PackStore.create(
            self.folder, MACHINE_SPECS, self.engine, self.staging, checksums=self.sums
        )
        self.model, self.sealed = {}, False

    @rule(block_id=IDS, seed=st.integers(0, 9), slot=st.booleans())
    def write(self, block_id: str, seed: int, slot: bool) -> None:
        spec = self.store.spec(block_id)
        content = content_of(spec, seed)
        with filled(content, spec.slot_nbytes if slot else spec.nbytes) as buf:
            future = self.store.write_from(block_id, buf)
            if self.sealed:
                with pytest.raises(StoreError, match="committed"):
                    future.result(timeout=30)
            else:
                future.result(timeout=30)
                self.model[block_id] = content

    @rule(block_id=IDS, slot=st.booleans())
    def read(self, block_id: str, slot: bool) -> None:
        spec = self.store.spec(block_id)
        if block_id in self.model:
            got = read_block(self.store, block_id, whole_slot=slot)
            assert got == payload(spec, self.model[block_id])
        else:
            with pytest.raises(StoreError, match="never written"):
                read_block(self.store, block_id)

    @rule(block_id=IDS, data=st.data())
    def read_span(self, block_id: str, data: st.DataObject) -> None:
        if block_id not in self.model:
            return
        n = self.store.spec(block_id).nbytes
        src = data.draw(st.integers(0, n))
        nbytes = data.draw(st.integers(0, n - src))
        out = bytearray(nbytes)
        self.store.read_spans_into(block_id, [Span(src, 0, nbytes)], memoryview(out)).result(
            timeout=30
        )
        assert bytes(out) == self.model[block_id][src : src + nbytes]

    @rule()
    def commit(self) -> None:
        if self.sealed or len(self.model) < len(MACHINE_SPECS):
            with pytest.raises(StoreError, match=r"written|committed"):
                self.store.commit(self.folder / "pack", {"n": self.commits})
            return
        self.commits += 1
        self.store.commit(self.folder / "pack", {"n": self.commits})
        self.committed, self.sealed = dict(self.model), True

    @rule()
    def crash_and_start_over(self) -> None:
        self.store.close()
        self._create()

    @precondition(lambda self: self.committed is not None)
    @rule()
    def crash_and_reopen(self) -> None:
        self.store.close()
        self.store = PackStore.open(
            self.folder / "pack",
            self.engine,
            self.staging,
            expect_meta={"n": self.commits},
            verify=self.sums,
        )
        self.model, self.sealed = dict(self.committed or {}), True

    @invariant()
    def nothing_else_has_a_name(self) -> None:
        want = ["pack"] if self.committed is not None else []
        assert [p.name for p in self.folder.iterdir()] == want

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.engine.close()
            self.staging.close()
            shutil.rmtree(self.folder)


TestPackMachine = PackMachine.TestCase
TestPackMachine.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
