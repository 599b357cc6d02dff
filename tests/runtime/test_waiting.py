"""The watchdog counts the time in which something could have finished."""

from __future__ import annotations

import pytest

from offload.errors import WatchdogError
from offload.runtime import waiting
from offload.runtime.interrupts import Shield


class Stopped:
    """A clock, and a condition whose waits take as long as said: a process that was stopped for a
    while finds that it has waited for hours."""

    def __init__(self, seconds: list[float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.waits = 0

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float) -> bool:
        self.now += self.seconds[self.waits] if self.waits < len(self.seconds) else timeout
        self.waits += 1
        return False


def made(clock: Stopped, monkeypatch: pytest.MonkeyPatch) -> waiting.Waiting:
    found = waiting.Waiting(Shield(), 60.0, lambda block: f"story of {block}", lambda: 1)
    monkeypatch.setattr(found.changed, "wait", clock.wait)
    monkeypatch.setattr(waiting, "time", clock)
    return found


def test_a_process_that_was_stopped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Stopped([3600.0])
    lock = made(clock, monkeypatch)

    def arrives(timeout: float) -> bool:
        if clock.waits == 3:
            lock.progress += 1
        return Stopped.wait(clock, timeout)

    monkeypatch.setattr(lock.changed, "wait", arrives)
    lock.wait("unit", ["block"], 0)
    assert clock.now > 3600


def test_nothing_that_moves_is_an_error_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Stopped([])
    with pytest.raises(WatchdogError, match="unit has waited 60 s for block"):
        made(clock, monkeypatch).wait("unit", ["block"], 0)
    assert clock.now == pytest.approx(60)
