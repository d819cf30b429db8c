"""Tests time-outs: each fires once, late by a tick at most, whatever another does."""

import asyncio

import pytest

from kvparams_proxy.event_loop.deadlines import Deadlines


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


async def test_a_time_out_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    watch = Deadlines(asyncio.get_running_loop())
    bad, same, later, stopped = Leg(watch, fails=True), Leg(watch), Leg(watch), Leg(watch)
    watch.start(bad, 0.0)
    watch.start(same, 0.0)
    watch.start(later, 0.15)
    watch.start(stopped, 0.0)
    watch.stop(stopped)
    async with asyncio.timeout(5):
        while not later.expired:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (bad.expired, same.expired, later.expired, stopped.expired) == (1, 1, 1, 0)
    assert [record.message for record in caplog.records] == ["a time-out could not be acted on"]
    again = Leg(watch)  # it begins anew when there was nothing left to watch
    await asyncio.sleep(0.06)
    watch.start(again, 0.0)
    async with asyncio.timeout(5):
        while not again.expired:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
