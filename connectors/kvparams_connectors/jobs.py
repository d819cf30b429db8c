"""Work that was submitted, and the threads that do it.

A `Job` can be polled (`done`), waited for (`result`) and awaited: synchronous engines and asyncio use one thing. A
deadline abandons the wait, never the buffers. When the deadline passes, the waiting caller gets the job's time-out
result. The work itself may still run, and only `settled` says that it touches no buffer any more.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final, Generic, TypeVar, cast

__all__ = ["Job", "WorkerPool", "finished_job"]

T = TypeVar("T")
U = TypeVar("U")

_PENDING: Final = object()


class Job(Generic[T]):
    """A `Job` is a piece of submitted work and its result.

    Two moments matter. It is *done* when there is a result to read: the work's own, or the time-out result once the
    deadline has passed. It is *settled* when the work has truly ended: from then on it touches no buffer of the caller.
    """

    def __init__(self, deadline: float, timed_out: T) -> None:
        """Begins as pending; a `WorkerPool` or a store finishes it.

        Args:
            deadline: the time on the clock of `time.monotonic` at which a wait ends.
            timed_out: the result of a wait that the deadline ends.
        """
        self.deadline: Final = deadline
        self._changed = threading.Condition(threading.Lock())
        self._timed_out = timed_out
        self._value: object = _PENDING
        self._error: BaseException | None = None
        self._settled = self._ending = False
        self._before_done: list[Callable[[T | None], object]] = []
        self._in_section = False
        self._on_settled: list[Callable[[], object]] = []
        self._wakers: list[Callable[[], None]] = []
        self._on_offer: list[Callable[[T], None]] = []

    # ---- for those who wait

    def done(self) -> bool:
        """Returns whether there is a result to read; never blocks."""
        with self._changed:
            return self._resolved()

    def settled(self) -> bool:
        """Returns whether the work has truly ended; never blocks."""
        with self._changed:
            return self._settled

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout_s: wait no longer than this; None means until the deadline.

        Raises:
            TimeoutError: `timeout_s` passed before the deadline did; the job goes on.
            Exception: whatever the work raised.
        """
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._resolved():
                now = time.monotonic()
                if give_up is not None and now >= give_up:
                    raise TimeoutError(f"no result after {timeout_s} s; the job goes on")
                until = self.deadline if give_up is None else min(self.deadline, give_up)
                # Behind the deadline only a section is waited for; leaving it notifies.
                self._changed.wait(until - now if until > now else None)
            return self._read()

    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 behind it."""
        return max(0.0, self.deadline - time.monotonic())

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until the work has truly ended, at most `timeout_s`; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled, timeout_s)

    def add_settled_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when the work has truly ended: in the thread that ended it, or at once if it has."""
        with self._changed:
            if not self._settled:
                self._on_settled.append(callback)
                return
        callback()

    def add_before_done_callback(self, callback: Callable[[T | None], object]) -> None:
        """Calls `callback` once, before any waiter hears that the work has ended.

        It runs in the thread that ends the work, with the waiters' result, or None if that is an exception. If the work
        is ending already, it behaves as `add_settled_callback`.
        """
        with self._changed:
            if not self._ending:
                self._before_done.append(callback)
                return
        self.add_settled_callback(lambda: callback(None if self._error is not None else cast("T", self._value)))

    def then(self, change: Callable[[T], U]) -> "Job[U]":
        """A job whose result is `change(result)`.

        `change` runs in the thread that ended this job and must be quick and free of effects: it is applied to what
        the work has reached so far as well.
        """
        derived = Job(self.deadline, change(self._timed_out))
        with self._changed:
            self._on_offer.append(lambda partial: derived.set_partial_result(change(partial)))

        def follow() -> None:
            try:
                derived.finish(change(self.result(0)))
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the derived job
                derived.fail(error)

        self.add_settled_callback(follow)
        return derived

    def __await__(self) -> Generator[object, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._wakers.append(wake)
        try:
            while not self.done():
                changed.clear()
                if self.done():
                    break
                remaining = self.deadline - time.monotonic()
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), remaining if remaining > 0 else None)
        finally:
            with self._changed:
                self._wakers.remove(wake)
        with self._changed:
            return self._read()

    # ---- for those who do the work

    def set_partial_result(self, partial: T) -> None:
        """From now on the time-out result is `partial`: what the work has reached so far."""
        with self._changed:
            self._timed_out = partial
            followers = list(self._on_offer)
        for follow in followers:
            follow(partial)

    @contextmanager
    def guarded_section(self) -> Generator[bool]:
        """A stretch of work that must not outlive the wait, such as writing into the caller's memory.

        Yields False if the wait is over: then nothing may be written. While the section lasts the deadline does not
        resolve the wait, so keep it short.
        """
        with self._changed:
            wanted = not self._resolved()
            self._in_section = wanted
        try:
            yield wanted
        finally:
            with self._changed:
                self._in_section = False
                self._notify()

    def finish(self, value: T) -> None:
        """The work has ended with `value`; if the wait is over already, nobody reads it."""
        self._settle(value, None)

    def fail(self, error: BaseException) -> None:
        """The work has ended by raising `error`; waiting raises it too."""
        self._settle(_PENDING, error)

    def _settle(self, value: object, error: BaseException | None) -> None:
        with self._changed:
            if self._ending:
                raise RuntimeError("a job ends once")
            self._ending = True
            before, self._before_done = self._before_done, []
            heard = value if self._value is _PENDING else self._value  # the deadline may have passed
            callbacks = None if before else self._end(value, error)
        if callbacks is None:
            try:
                for callback in before:
                    callback(None if heard is _PENDING else cast("T", heard))
            finally:
                with self._changed:
                    callbacks = self._end(value, error)
        for callback in callbacks:
            callback()

    def _end(self, value: object, error: BaseException | None) -> list[Callable[[], object]]:
        """Wake whoever waits; what is to be called then. The lock is held."""
        if self._value is _PENDING and self._error is None:
            self._value, self._error = value, error
        self._settled = True
        self._notify()
        callbacks, self._on_settled = self._on_settled, []
        return callbacks

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

    def _resolved(self) -> bool:
        """Returns whether there is a result, after looking at the clock. The lock is held."""
        if self._value is not _PENDING or self._error is not None:
            return True
        if self._in_section or time.monotonic() < self.deadline:
            return False
        self._value = self._timed_out
        return True

    def _read(self) -> T:
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


def finished_job(value: T, deadline_s: float = 0.0) -> Job[T]:
    """Returns a job that has ended with `value`; its deadline is `deadline_s` from now."""
    job = Job(time.monotonic() + deadline_s, value)
    job.finish(value)
    return job


class WorkerPool:
    """A few threads that do jobs in the order in which they were submitted."""

    def __init__(self, name: str, *, threads: int = 1, max_waiting: int = 4096) -> None:
        """Starts the threads.

        Args:
            name: the prefix of the threads' names.
            threads: the number of jobs that run at a time.
            max_waiting: the number of jobs that may wait; `submit` refuses more.
        """
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._lock = threading.Lock()
        self._closed = False
        # Daemons: a worker stuck in somebody else's call must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Job[T]], T], deadline_s: float, *, timed_out: T, refused: T) -> Job[T]:
        """Do `work(job)` in one of the threads.

        Args:
            work: gets its own job, for `deadline`, `offer` and `section`; what it returns is the result. It is not
                started at all if the deadline has passed by then.
            deadline_s: seconds from now.
            timed_out: the result if the deadline passes first.
            refused: the result if the lane is closed or full.
        """
        job = Job(time.monotonic() + deadline_s, timed_out)

        def task() -> None:
            if job.done():  # the deadline passed while it waited
                job.finish(timed_out)
                return
            try:
                value = work(job)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the job
                job.fail(error)
            else:
                job.finish(value)

        with self._lock:
            accepted = not self._closed
            if accepted:
                try:
                    self._tasks.put_nowait(task)
                except queue.Full:
                    accepted = False
        if not accepted:
            job.finish(refused)
        return job

    @property
    def is_closed(self) -> bool:
        """Returns whether it takes no more work."""
        return self._closed

    def close(self, timeout_s: float = 10.0) -> bool:
        """Take no more work and wait until what was submitted has ended, at most `timeout_s`; whether it has."""
        give_up = time.monotonic() + timeout_s
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for _ in self._threads:
                with suppress(queue.Full):
                    self._tasks.put(None, timeout=max(0.0, give_up - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
