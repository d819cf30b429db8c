"""How much work a decode node takes, whatever becomes of its channels."""

import asyncio
from typing import Any, cast

from aiormq.abc import AbstractChannel

from kvparams_proxy.queue.appetite import Appetite
from kvparams_proxy.upstream.interface import Upstream
from kvparams_proxy.upstream.terms import Head, Sink

from .scenes import until


class Well:
    """An engine that is there: of an `Upstream` what a probe uses."""

    def get(self, path: bytes) -> bytes:
        return path

    def exchange(self, request: bytes, sink: Sink) -> "Well":
        asyncio.get_running_loop().call_soon(self._answer, sink)
        return self

    def _answer(self, sink: Sink) -> None:
        sink.on_head(Head(200))
        sink.on_done(None)

    def discard(self) -> None:
        """Nothing runs."""


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
    appetite = Appetite(cast("Upstream", Well()), 3, 1.0, take, stuck.set)
    try:
        for error in (asyncio.CancelledError(), ConnectionError(), None):
            channel = Channel(error)
            stuck.clear()
            await appetite.opened(cast("AbstractChannel", channel), "work")
            await until(lambda channel=channel: channel.asked == [3])
            await until(lambda error=error: stuck.is_set() is (error is not None))
        assert appetite.ready
    finally:
        await appetite.close()
