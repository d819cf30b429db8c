"""Tests how much work a decode node takes, whatever becomes of its channels, and its log of engine states."""

import asyncio
import logging
from typing import Any, cast

import pytest
from aiormq.abc import AbstractChannel

from kvparams_proxy.queue.consumer_prefetch import ConsumerPrefetch
from kvparams_proxy.upstream.interface import Upstream
from kvparams_proxy.upstream.types import ResponseHead, ResponseSink, UpstreamError
from tests.support.waiting import until


class Well:
    """An engine that is there: of an `Upstream` what a probe uses."""

    def get(self, path: bytes) -> bytes:
        return path

    def exchange(self, request: bytes, sink: ResponseSink) -> "Well":
        asyncio.get_running_loop().call_soon(self._answer, sink)
        return self

    def _answer(self, sink: ResponseSink) -> None:
        sink.on_head(ResponseHead(200))
        sink.on_done(None)

    def discard(self) -> None:
        """Nothing runs."""


class Away(Well):
    """An engine that is not there until it is told to be."""

    def __init__(self) -> None:
        self.there = False
        self.asked = 0

    def _answer(self, sink: ResponseSink) -> None:
        self.asked += 1
        if self.there:
            super()._answer(sink)
        else:
            sink.on_done(UpstreamError("no connection to the engine (refused)", connected=False))


class Channel:
    """Of a channel what is used; `error` ends its calls."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self.asked: list[int] = []

    async def basic_qos(self, *, prefetch_count: int) -> None:
        self.asked.append(prefetch_count)
        if self._error is not None:
            raise self._error

    async def basic_consume(self, queue: str, take: object, *, consumer_tag: str) -> None:
        """Nothing comes."""

    async def basic_cancel(self, tag: str) -> None:
        """It is as it was."""


async def test_a_library_that_gives_up_its_own_calls_does_not_end_it() -> None:
    """aiormq does so when a broker has been silent for too long."""
    stuck = asyncio.Event()
    take = cast("Any", None)
    appetite = ConsumerPrefetch(cast("Upstream", Well()), 3, 1.0, take, stuck.set)
    try:
        for error in (asyncio.CancelledError(), ConnectionError(), None):
            channel = Channel(error)
            stuck.clear()
            await appetite.on_broker_opened(cast("AbstractChannel", channel), "work")
            await until(lambda channel=channel: channel.asked == [3])
            await until(lambda error=error: stuck.is_set() is (error is not None))
        assert appetite.ready
    finally:
        await appetite.close()


async def test_each_change_of_its_engine_is_told_once_whoever_notices(caplog: pytest.LogCaptureFixture) -> None:
    """Also of an engine that was never up, of one that work finds gone first, and of one whose work fails."""
    caplog.set_level(logging.INFO)
    engine = Away()
    appetite = ConsumerPrefetch(cast("Upstream", engine), 3, 0.01, cast("Any", None), lambda: None)

    def said() -> list[str]:
        return [f"{one.levelname[0]} {one.getMessage()}" for one in caplog.records]

    try:
        await until(lambda: engine.asked >= 3)
        gone = "W the engine is not ready: no connection to the engine (refused); the node takes no requests"
        assert said() == [gone]
        engine.there = True
        await until(lambda: appetite.ready)
        assert said()[1:] == ["I the engine is ready: it answers probes"]
        engine.there = False
        appetite.record_outcome(UpstreamError("no connection to the engine (refused)", connected=False), well=False)
        asked = engine.asked
        await until(lambda: engine.asked >= asked + 3)
        assert said()[2:] == [gone]
        engine.there = True
        await until(lambda: appetite.ready)
        for _ in range(5):
            appetite.record_outcome(None, well=False)
        assert said()[4:] == ["W the engine fails: its work fails; it gets no requests for a while"]
        await until(lambda: appetite.ready)  # half open
        appetite.record_outcome(None, well=True)
        assert said()[5:] == ["I the engine is ready: its work succeeds again"]
    finally:
        await appetite.close()
