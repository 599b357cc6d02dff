"""Host memory and leases."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from offload.blocks import ALIGN, BlockKind, BlockSpec, TensorSpec, layout
from offload.errors import ClosedError, PlanError, SchedulerError
from offload.runtime import memory as memory_module
from offload.runtime.arena import Arena
from offload.runtime.device import Region
from offload.runtime.intervals import IntervalMap
from offload.runtime.memory import HUGE_PAGE, POISON, HostMemory, huge_page_mode
from offload.runtime.null_device import NullDevice
from offload.runtime.regions import check_copy
from offload.runtime.rss import current_rss
from offload.runtime.sim_device import SimDevice

MIB = 1 << 20


def block(name: str, nbytes: int) -> BlockSpec:
    return layout(name, BlockKind.WEIGHT, [("w", "uint8", (nbytes,))])


@pytest.mark.parametrize(("nbytes", "align"), [(1, ALIGN), (5000, ALIGN), (3 * MIB, HUGE_PAGE)])
def test_alignment_and_shared_bytes(nbytes: int, align: int) -> None:
    m = HostMemory(nbytes, "m")
    t = m.tensor()
    assert t.data_ptr() % align == 0
    assert t.shape == (nbytes,)
    assert t.dtype == torch.uint8
    m.view()[nbytes - 1] = 7
    assert int(t[-1]) == 7
    m.fill(POISON)
    assert bytes(m.view()[:1]) == b"\xff"
    m.close()


def test_pages_come_with_use_and_go_with_close_even_while_views_live() -> None:
    nbytes = 64 * MIB
    before = current_rss()
    m = HostMemory(nbytes, "m")
    tensor, view = m.tensor(), m.view()
    assert current_rss() - before < 8 * MIB
    m.fill(1)
    assert current_rss() - before > 60 * MIB
    m.close()
    m.close()
    assert current_rss() - before < 16 * MIB
    # Still mapped: reading is safe, and gives zeros.
    assert int(tensor[123]) == 0
    assert view[nbytes - 1] == 0
    del tensor, view
    gc.collect()


def test_a_tensor_outlives_its_memory() -> None:
    t = HostMemory(8 * ALIGN, "m").tensor()
    gc.collect()
    t.fill_(3)
    assert int(t.sum()) == 3 * 8 * ALIGN


def test_closed_memory_is_refused() -> None:
    m = HostMemory(1, "small")
    m.close()
    with pytest.raises(ClosedError, match="small"):
        m.tensor()
    with pytest.raises(ClosedError, match="small"):
        m.view()


def test_impossible_sizes() -> None:
    with pytest.raises(PlanError, match="smaller budget"):
        HostMemory(1 << 60, "huge")
    with pytest.raises(ValueError, match="positive"):
        HostMemory(0, "none")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("always [madvise] never", "madvise"),
        ("[always] madvise never", "always"),
        ("always madvise [never]", "never"),
        ("what", "unsupported"),
    ],
)
def test_huge_page_mode(tmp_path, monkeypatch, text: str, mode: str) -> None:  # type: ignore[no-untyped-def]
    setting = tmp_path / "enabled"
    monkeypatch.setattr(memory_module, "_THP", setting)
    assert huge_page_mode() == "unsupported"
    setting.write_text(text)
    assert huge_page_mode() == mode
    granted = HostMemory(4 * MIB, "m").huge_pages
    assert granted if mode in ("always", "madvise") else not granted
    assert not HostMemory(MIB, "m").huge_pages


def test_copies_are_checked() -> None:
    a, b = HostMemory(100, "a"), HostMemory(50, "b")
    with pytest.raises(ValueError, match="into a region of 50"):
        check_copy(Region(b, 0, 50), Region(a, 0, 100))
    with pytest.raises(ValueError, match="outside memory 'b'"):
        check_copy(Region(b, 1, 50), Region(a, 0, 10))
    with pytest.raises(ValueError, match="negative"):
        check_copy(Region(b, -1, 50), Region(a, 0, 10))


def test_interval_map_against_one_value_per_integer() -> None:
    gen = torch.Generator().manual_seed(0)
    fast: IntervalMap[int] = IntervalMap()
    slow: dict[int, int] = {}
    for step in range(2000):
        a, n, what = (int(torch.randint(0, hi, (1,), generator=gen)) for hi in (60, 12, 3))
        if what == 0:
            fast.remove(a, a + n)
            for i in range(a, a + n):
                slow.pop(i, None)
        else:
            fast.put(a, a + n, step)
            slow.update(dict.fromkeys(range(a, a + n), step))
        found = {i: v for s, e, v in fast.overlapping(a - 5, a + 20) for i in range(s, e)}
        assert found == {i: v for i, v in slow.items() if a - 5 <= i < a + 20}
        assert {i: v for s, e, v in fast for i in range(s, e)} == slow


@pytest.fixture
def arena():  # type: ignore[no-untyped-def]
    device = NullDevice()
    with Arena(device.host_memory(16 * ALIGN, "ram"), device) as a:
        yield a
    device.close()


def test_leases_may_touch_but_not_overlap(arena: Arena) -> None:
    a = arena.lease(block("a", 2 * ALIGN), 4 * ALIGN)
    b = arena.lease(block("b", 2 * ALIGN), 6 * ALIGN)
    c = arena.lease(block("c", 4 * ALIGN), 0)
    assert arena.live() == (c, a, b)
    for offset, slots in ((3, 2), (4, 2), (5, 1), (5, 3), (7, 1), (0, 16), (3, 1)):
        with pytest.raises(
            SchedulerError, match=r"'new'.*overlaps lease \d of block '[abc]'.*live"
        ):
            arena.lease(block("new", slots * ALIGN), offset * ALIGN)
    arena.release(a)
    d = arena.lease(block("d", 1), 5 * ALIGN)
    assert d.nbytes == ALIGN
    for lease in (b, c, d):
        arena.release(lease)
    assert arena.live() == ()


@pytest.mark.parametrize("offset", [-ALIGN, 100, 15 * ALIGN, 17 * ALIGN])
def test_a_lease_lies_aligned_inside_the_memory(arena: Arena, offset: int) -> None:
    with pytest.raises(SchedulerError, match="65536 bytes"):
        arena.lease(block("a", 2 * ALIGN), offset)


def test_released_leases_are_dead(arena: Arena) -> None:
    spec = block("a", 10)
    lease = arena.lease(spec, 0)
    arena.release(lease)
    for use in (lambda: lease.view, lambda: lease.tensor(spec.tensors[0])):
        with pytest.raises(SchedulerError, match=r"after release: lease 0 of block 'a'"):
            use()
    with pytest.raises(SchedulerError, match="not live"):
        arena.release(lease)


def test_typed_tensors_are_views_of_the_slot(arena: Arena) -> None:
    spec = layout(
        "b",
        BlockKind.WEIGHT,
        [
            ("half", "bfloat16", (3, 5)),
            ("none", "float32", (0, 4)),
            ("one", "float64", ()),
            ("flag", "bool", (7,)),
            ("f8", "float8_e4m3fn", (2, 2)),
        ],
    )
    lease = arena.lease(spec, 2 * ALIGN)
    base = arena.memory.tensor().data_ptr()
    with torch.inference_mode():
        for t in spec.tensors:
            x = lease.tensor(t)
            assert x.shape == t.shape
            assert x.dtype == getattr(torch, t.dtype)
            assert x.is_contiguous()
            assert not x.is_inference()
            assert lease.tensor(t) is x
            if x.numel():
                assert x.data_ptr() == base + 2 * ALIGN + t.offset
    half = lease.tensor(spec.tensors[0])
    half.copy_(torch.arange(15).view(3, 5))
    raw = torch.frombuffer(lease.view, dtype=torch.bfloat16, count=15)
    assert torch.equal(raw, torch.arange(15).bfloat16())
    outside = TensorSpec(name="far", dtype="float32", shape=(2000,), offset=0)
    with pytest.raises(SchedulerError, match="far"):
        lease.tensor(outside)
    arena.release(lease)


def test_a_refill_of_one_slot_does_not_trip_autograd_of_another(arena: Arena) -> None:
    spec = layout("a", BlockKind.WEIGHT, [("w", "float32", (4,))])
    a, b = arena.lease(spec, 0), arena.lease(spec, ALIGN)
    w = a.tensor(spec.tensors[0]).fill_(2.0)
    x = torch.ones(4, requires_grad=True)
    y = (x * w).sum()
    b.tensor(spec.tensors[0]).fill_(5.0)
    (grad,) = torch.autograd.grad(y, x)
    assert torch.equal(grad, torch.full((4,), 2.0))
    arena.release(a)
    arena.release(b)


def test_leaks_are_raised_at_a_clean_exit_and_logged_at_close(caplog) -> None:  # type: ignore[no-untyped-def]
    device = NullDevice()
    arena = Arena(device.host_memory(ALIGN, "ram"), device)
    with pytest.raises(SchedulerError, match=r"1 leaked lease.*'kept'"), arena:
        arena.lease(block("kept", 1), 0)
    arena = Arena(device.host_memory(ALIGN, "ram"), device)
    lease = arena.lease(block("kept", 1), 0)
    with caplog.at_level(logging.ERROR):
        arena.close()
    assert "leaked: lease 0 of block 'kept'" in caplog.text
    assert arena.leaked() == (lease,)
    with pytest.raises(ClosedError):
        arena.lease(block("late", 1), 0)
    device.close()


def test_the_next_owner_gets_the_events_of_all_it_replaces() -> None:
    with SimDevice(MIB) as device, Arena(device.host_memory(8 * ALIGN, "ram"), device) as arena:
        a, b = arena.lease(block("a", 2 * ALIGN), 0), arena.lease(block("b", 2 * ALIGN), 2 * ALIGN)
        assert a.after == ()
        used_a, used_b = device.h2d.record(), device.d2h.record()
        arena.release(a, used_a)
        arena.release(b, used_b, used_a)
        middle = arena.lease(block("m", 2 * ALIGN), ALIGN)
        assert set(middle.after) == {used_a, used_b}
        rest = arena.lease(block("r", ALIGN), 0)
        assert rest.after == (used_a,)
        again = arena.lease(block("s", ALIGN), 3 * ALIGN)
        assert set(again.after) == {used_a, used_b}
        for lease in (middle, rest, again):
            arena.release(lease)


def test_a_lease_given_back_unused_hands_its_events_on() -> None:
    with SimDevice(MIB) as device, Arena(device.host_memory(ALIGN, "ram"), device) as arena:
        spec, used = block("a", ALIGN), device.h2d.record()
        arena.release(arena.lease(spec, 0), used)
        cancelled = arena.lease(spec, 0)
        arena.release(cancelled)
        last = arena.lease(spec, 0)
        assert last.after == (used,)
        arena.release(last)


def test_released_bytes_are_poisoned_once_the_last_use_is_over() -> None:
    with SimDevice(MIB) as device, Arena(device.host_memory(8 * ALIGN, "ram"), device) as arena:
        slot = device.device_memory(ALIGN, "slot")
        spec = block("a", ALIGN)
        for _ in range(20):
            lease = arena.lease(spec, 0)
            for event in lease.after:
                event.wait()
            assert int(lease.tensor(spec.tensors[0]).min()) == POISON
            lease.tensor(spec.tensors[0]).fill_(9)
            device.touch("host", lease.region, "w")
            device.h2d.wait(device.signal("host"))
            arena.release(lease, device.copy(Region(slot, 0, ALIGN), lease.region, device.h2d))
        device.h2d.record().wait()
        assert slot.tensor().tolist() == [9] * ALIGN


def test_whoever_comes_after_all_does_so_where_nobody_was_before() -> None:
    with SimDevice(MIB) as device, Arena(device.device_memory(8 * ALIGN, "up"), device) as arena:
        first = arena.lease(block("first", 2 * ALIGN), 0)
        kept = arena.lease(block("kept", ALIGN), 6 * ALIGN)
        arena.release(first, device.compute.record())
        used, copied = device.compute.record(), device.h2d.record()
        arena.all_after(used, copied)
        for offset in (0, 3 * ALIGN, 7 * ALIGN):
            lease = arena.lease(block(f"at{offset}", ALIGN), offset)
            assert lease.after == (used, copied)
            arena.release(lease)
        arena.release(kept)
