"""Runs long work in steps: a few milliseconds of it in each turn of the event loop, whatever else has to be done.

Work that is done within the first turn's share is done at once, so what is ordinary is not delayed. All work shares one
allowance for each turn, so several long pieces hold up the event loop no more than one. New work goes first for a
moment, and what it does not complete then takes turns with the rest: ordinary work does not wait for long work.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any, Final, TypeVar

__all__ = ["StepRunner", "StepTask"]

T = TypeVar("T")
_TURN_S: Final = 0.004
"""Of each turn of the event loop. One step may take as long besides."""
_FIRST_SHARE: Final = 0.25
"""Of the allowance: what each piece of new work may use before it has to wait."""
_NEW_SHARE: Final = 0.75
"""... and all of it together, where other work waits."""
_log: Final = logging.getLogger(__name__)


class StepTask:
    """A piece of work that a `StepRunner` has been given."""

    __slots__ = ("_done", "_failed", "_steps")

    def __init__(
        self,
        steps: Generator[None, None, Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._steps: Generator[None, None, Any] | None = steps
        self._done = done
        self._failed = failed

    @property
    def is_finished(self) -> bool:
        """True once the work is complete, has failed or was cancelled."""
        return self._steps is None

    def cancel(self) -> None:
        """Cancels the rest of the work without a callback. Does nothing once it is over."""
        steps, self._steps = self._steps, None
        if steps is not None:
            del self._done, self._failed
            steps.close()

    def advance(self, until: float) -> None:
        """Runs steps until this time; only the runner calls it."""
        steps = self._steps
        while steps is not None:
            try:
                next(steps)
            except StopIteration as end:
                self._steps = None
                self._tell(self._done, end.value)
                return
            except Exception as error:  # noqa: BLE001  whoever gave the work is told
                self._steps = None
                self._tell(self._failed, error)
                return
            if perf_counter() >= until:
                return

    def _tell(self, told: Callable[[Any], None], outcome: object) -> None:
        failed = self._failed
        del self._done, self._failed  # they know of what the work was done for
        try:
            told(outcome)
        except Exception as error:  # noqa: BLE001  a fault of the proxy: other work goes on
            if told is failed:
                _log.exception("work has failed, and so has telling it")
            else:
                failed(error)


class StepRunner:
    """Runs work on one event loop, in whose thread everything here is called."""

    __slots__ = ("_loop", "_new", "_turn_s", "_used", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, turn_s: float = _TURN_S) -> None:
        """`turn_s`: seconds of each turn of the loop."""
        self._loop = loop
        self._turn_s = turn_s
        self._new: deque[StepTask] = deque()
        """Work of which nothing is done yet."""
        self._waiting: deque[StepTask] = deque()
        self._used = False
        """Whether the allowance of this turn is in use; then the next turn is asked for."""

    def run(
        self,
        steps: Generator[None, None, T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
        *,
        at_once: bool = True,
    ) -> StepTask:
        """Runs the work, now or later.

        Args:
            steps: does one step of bounded time at each `next`.
            done: hears what the work has returned, at once if it is short.
            failed: hears what it, or `done`, has raised.
            at_once: whether to begin in this turn, if it has time left.

        Returns:
            A handle to cancel it.
        """
        work = StepTask(steps, done, failed)
        if self._used or not at_once:
            self._new.append(work)
        else:
            work.advance(perf_counter() + self._turn_s)
            if not work.is_finished:
                self._waiting.append(work)
        if not self._used:
            self._used = True
            self._loop.call_soon(self._turn)
        return work

    async def complete(self, steps: Generator[None, None, T]) -> T:
        """Does the work as `run` does and waits for what it returns or raises; cancelled, it does no more of it."""
        outcome: asyncio.Future[T] = self._loop.create_future()
        work = self.run(steps, outcome.set_result, outcome.set_exception)
        try:
            return await outcome
        finally:
            work.cancel()

    def _turn(self) -> None:
        new, waiting = self._new, self._waiting
        if not new and not waiting:
            self._used = False
            return
        self._loop.call_soon(self._turn)
        began = perf_counter()
        until = began + self._turn_s
        latest = began + self._turn_s * _NEW_SHARE if waiting else until
        while new and (now := perf_counter()) < latest:
            self._advance(new, now + self._turn_s * _FIRST_SHARE)
        while waiting and perf_counter() < until:
            self._advance(waiting, until)

    def _advance(self, works: deque[StepTask], until: float) -> None:
        work = works.popleft()
        work.advance(until)
        if not work.is_finished:
            self._waiting.append(work)
