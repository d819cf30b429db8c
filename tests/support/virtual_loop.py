"""Provides an event loop whose clock jumps to the next timer, so that a run takes only its callbacks' time.

Runs repeat exactly. The loop offers only the parts of asyncio that the proxy uses. Callbacks run in the order in which
they became due. An exception in one is kept, never swallowed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, Protocol, TypeVar

__all__ = ["Listener", "Stuck", "VirtualLoop"]

T = TypeVar("T")


class Stuck(Exception):
    """The same moment goes on for ever."""


class Dial(Protocol):
    """The network, as `create_connection` sees it."""

    async def dial(
        self, factory: Callable[[], asyncio.Protocol], port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect."""
        ...


class Listener:
    """The proxy's own: it makes a protocol for each connection of a client until it is closed."""

    factory: Callable[[], asyncio.Protocol] | None = None
    """None while no connection is accepted."""

    def close(self) -> None:
        """Accepts no more connections."""
        self.factory = None


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module. Private to one run; `network` is set by whoever makes it."""

    network: Dial
    broker: object = None
    """Where the broker listens, in runs that have one."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = 0
        self.faults: list[str] = []
        """What went wrong in callbacks and tasks."""

    # asyncio's interface

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heappush(self._timers, (when, self._number, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells it; it is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    async def create_connection(  # pyright: ignore[reportIncompatibleMethodOverride]  only this way is used
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await self.network.dial(protocol_factory, port)

    async def create_server(  # pyright: ignore[reportIncompatibleMethodOverride]  only this way is used
        self, protocol_factory: Callable[[], asyncio.Protocol], *, sock: Listener, **_: Any
    ) -> Listener:
        sock.factory = protocol_factory
        return sock

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        where = ""
        trace = error.__traceback__ if isinstance(error, BaseException) else None
        while trace is not None:
            where = f" at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
            trace = trace.tb_next
        self.faults.append(f"{context.get('message')}: {error!r}{where}")

    # running it

    def run_until(self, when: float) -> None:
        """Run everything that is due until then; the clock is there at the end."""
        ready, timers = self._ready, self._timers
        turns = 0
        while True:
            if not ready:
                while timers and timers[0][2].cancelled():
                    heappop(timers)
                if not timers or timers[0][0] > when:
                    break
                if timers[0][0] > self._now:
                    self._now = timers[0][0]
                    turns = 0
            while timers and timers[0][0] <= self._now:
                handle = heappop(timers)[2]
                if not handle.cancelled():
                    ready.append(handle)
            turns += 1
            if turns > 10_000:
                raise Stuck(f"10,000 turns at {self._now}: {list(ready)[:5]}")
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        self._now = max(self._now, when)

    def run(self, work: Coroutine[Any, Any, T], within_s: float = 3600.0) -> T:
        """Runs a coroutine to its end, and returns its result. `within_s` counts virtual seconds.

        Raises:
            TimeoutError: it has not ended in time, or waits for nothing that is still to come.
        """
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(work)
            end = self._now + within_s
            while not task.done():
                due = (when for when, _, handle in self._timers if not handle.cancelled())
                when = self._now if self._ready else min(due, default=end + 1.0)
                if when > end:
                    raise TimeoutError(f"the work has not ended within {within_s} virtual seconds")
                self.run_until(when)
            return task.result()
        finally:
            asyncio._set_running_loop(None)

    def hold_up(self, seconds: float) -> None:
        """Lets time pass in which the loop runs nothing, as a callback that blocks it does."""
        self._now += seconds

    def left(self) -> list[str]:
        """The callbacks that are still to come."""
        handles = [*self._ready, *(handle for _, _, handle in self._timers)]
        return [repr(handle) for handle in handles if not handle.cancelled()]
