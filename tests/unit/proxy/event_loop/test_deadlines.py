"""Tests time-outs: each fires once, late by a tick at most, whatever another does."""

import pytest

from kvparams_proxy.event_loop.deadlines import TICK_S, Deadlines
from tests.support.virtual_loop import VirtualLoop


class Leg:
    """Notes that its time is over."""

    def __init__(self, watch: Deadlines, *, fails: bool = False) -> None:
        self.expired = 0
        self._watch = watch
        self._fails = fails

    def expire(self) -> None:
        self.expired += 1
        if self._fails:
            raise RuntimeError("a fault")


def test_a_time_out_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    loop = VirtualLoop()
    watch = Deadlines(loop)
    bad, same, later, stopped = Leg(watch, fails=True), Leg(watch), Leg(watch), Leg(watch)
    watch.start(bad, 0.0)
    watch.start(same, 0.0)
    watch.start(later, 0.15)
    watch.start(stopped, 0.0)
    watch.stop(stopped)
    loop.run_until(loop.time() + TICK_S)
    assert (bad.expired, same.expired, later.expired, stopped.expired) == (1, 1, 0, 0)
    loop.run_until(loop.time() + 0.15)
    assert (bad.expired, same.expired, later.expired, stopped.expired) == (1, 1, 1, 0)
    assert [record.message for record in caplog.records] == ["a time-out could not be acted on"]
    again = Leg(watch)  # it begins anew when there was nothing left to watch
    assert loop.left() == []
    watch.start(again, 0.0)
    loop.run_until(loop.time() + TICK_S)
    assert again.expired == 1
