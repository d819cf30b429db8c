"""Decides how much work a decode node takes: up to its room, one piece on trial, or none while its engine fails.

A node whose engine is missing takes no work: it would fail fastest, and so take the most.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiormq.abc import AbstractChannel, ConsumerCallback

from kvparams.routing.breaker import Breaker, BreakerLimits, BreakerState
from kvparams_proxy.event_loop.clock import ClockTimer, StallAwareClock
from kvparams_proxy.fleet.state_log import StateLog
from kvparams_proxy.upstream.interface import ExchangeHandle, Upstream
from kvparams_proxy.upstream.types import (
    ResponseCollector,
    ResponseHead,
    UpstreamError,
    UpstreamOverflow,
    UpstreamTimeout,
)

__all__ = ["ConsumerPrefetch"]

_RETRY_S: Final = 0.25
_PROBE_S: Final = 5.0
_ANSWER_S: Final = 5.0
_MOST_BYTES: Final = 1 << 20


class ConsumerPrefetch:
    """Asks the engine from time to time, and keeps the broker told how much may come."""

    def __init__(
        self, engine: Upstream, room: int, every_s: float, take: ConsumerCallback, stuck: Callable[[], None]
    ) -> None:
        """`take` is given the work; `stuck` hears that the broker does not answer."""
        self._stuck = stuck
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._room = room
        self._every_s = every_s
        self._take = take
        self._breaker = Breaker(BreakerLimits())
        self._states = StateLog(self._loop.time)
        self._ready = False
        self._closed = False
        self._channel: AbstractChannel | None = None
        self._queue = ""
        self._asked = 0
        """What the broker may have sent and not been answered for, by the last word; 0 is nothing."""
        self._tag = ""
        self._numbers = 0
        self._probe: ExchangeHandle | None = None
        self._changed = asyncio.Event()
        self._task = self._loop.create_task(self._follow(), name="appetite")
        self._clock = StallAwareClock(self._loop)
        self._timer: asyncio.TimerHandle | ClockTimer | None = None
        self._ask()

    async def on_broker_opened(self, channel: AbstractChannel, queue: str) -> None:
        """Hears that the broker is connected."""
        self._channel, self._queue, self._asked = channel, queue, 0
        self._changed.set()

    def on_broker_closed(self) -> None:
        """Hears that the broker is gone."""
        self._channel, self._asked = None, 0

    async def close(self) -> None:
        """Stops taking work. Done when the broker has heard it, if there is one."""
        self._closed = True
        self._clock.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._probe is not None:
            self._probe.discard()
        self._changed.set()
        with suppress(Exception):
            async with asyncio.timeout(_PROBE_S):
                await asyncio.shield(self._task)
        self._task.cancel()

    def work_started(self) -> None:
        """Hears that a piece of work has begun."""
        if self._breaker.state is BreakerState.HALF_OPEN:
            self._breaker.trial = True
            self._changed.set()

    def record_outcome(self, error: UpstreamError | None, *, well: bool) -> None:
        """Records the outcome of a piece of work."""
        if well:
            if self._breaker.record_success():
                self._changed.set()
                self._tell("its work succeeds again")
        elif isinstance(error, UpstreamOverflow):
            self.release_trial()
        else:
            if error is not None and not error.connected:
                self._ready = False
            self._breaker.record_failure(self._loop.time())
            self._changed.set()
            self._tell("its work fails" if error is None else error.reason)

    def release_trial(self) -> None:
        """Hears that a piece of work has ended without a result for the breaker."""
        if self._breaker.trial:
            self._breaker.end_trial()
            self._changed.set()

    @property
    def ready(self) -> bool:
        """True while the engine is reachable and works."""
        return self._ready and self._breaker.state is not BreakerState.OPEN

    @property
    def _wanted(self) -> int:
        if self._closed or not self._ready or not self._breaker.allows_requests:
            return 0
        return self._room if self._breaker.state is BreakerState.CLOSED else 1

    def _tell(self, why: str) -> None:
        """Logs how it stands with the engine, if that has changed."""
        if not self._ready:
            self._states.log_change(
                self, "away", f"the engine is not ready: {why}; the node takes no requests", good=False
            )
        elif self._breaker.state is BreakerState.CLOSED:
            self._states.log_change(self, "ready", f"the engine is ready: {why}", good=True)
        else:
            self._states.log_change(
                self, "broken", f"the engine fails: {why}; it gets no requests for a while", good=False
            )

    async def _follow(self) -> None:
        """Brings the broker's prefetch limit to ours, one change after the other."""
        while True:
            self._changed.clear()
            channel = self._channel
            if channel is not None and self._asked != self._wanted:
                try:
                    # a broker that was killed may never answer: then it is closed
                    async with asyncio.timeout(_ANSWER_S):
                        await self._change(channel, self._wanted)
                except (Exception, asyncio.CancelledError):  # the channel is of no use: there will be another
                    if self._task.cancelling():  # else it was the library, whose broker had been silent for too long
                        raise
                    if self._channel is channel:
                        self.on_broker_closed()
                        self._stuck()
            if self._closed and (self._channel is None or not self._asked):
                return
            if self._asked == self._wanted or self._channel is None:
                await self._changed.wait()

    async def _change(self, channel: AbstractChannel, wanted: int) -> None:
        if self._asked:
            self._asked = 0
            await channel.basic_cancel(self._tag)
        if wanted:
            self._numbers += 1
            self._tag = f"work-{self._numbers}"
            await channel.basic_qos(prefetch_count=wanted)
            self._asked = wanted
            await channel.basic_consume(self._queue, self._take, consumer_tag=self._tag)

    # the engine

    def _ask(self) -> None:
        self._probe = self._engine.exchange(
            self._engine.get(b"/v1/models"), ResponseCollector(_MOST_BYTES, self._answered)
        )
        self._timer = ClockTimer(self._loop, self._clock, _PROBE_S, self._expire)

    def _expire(self) -> None:
        if self._probe is not None:
            self._probe.abort(UpstreamTimeout("does not answer a probe"))

    def _answered(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        self._probe = None
        if self._timer is not None:
            self._timer.cancel()
        if self._closed:
            return
        ready = isinstance(error, UpstreamOverflow) or (error is None and head.status < 500)
        self._ready = ready
        if error is not None:
            self._tell(error.reason)
        else:
            self._tell("it answers probes" if ready else f"a probe was answered {head.status}")
        if ready:
            self._breaker.record_probe_success(self._loop.time())
        self._breaker.poll(self._loop.time())
        self._changed.set()
        steady = ready and self._breaker.state is BreakerState.CLOSED
        self._timer = self._loop.call_later(self._every_s if steady else min(self._every_s, _RETRY_S), self._ask)
