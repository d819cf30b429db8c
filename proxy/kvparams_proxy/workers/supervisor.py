"""The supervisor: starts worker processes, restarts those that end, replaces them on SIGHUP, and ends them in order.

It serves no request. All its state is changed on its one event loop; what it decides about restarts is in
`restart_policy.py`.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.channel import Frame, FrameKind
from kvparams_proxy.workers.listeners import WorkerListeners
from kvparams_proxy.workers.metrics_hub import MetricsHub, WorkerGauges
from kvparams_proxy.workers.restart_policy import GiveUp, RestartPolicy, WorkerEnd
from kvparams_proxy.workers.scrapes import ScrapeCoordinator
from kvparams_proxy.workers.worker_process import WorkerProcess

__all__ = ["ShutdownTimes", "Supervisor", "SupervisorEnd", "WorkerPlan"]

_log: Final = logging.getLogger(__name__)
_END_S: Final = 15.0
"""What a worker may take to end, beyond the time that its requests have."""
_NO_PROCESS_S: Final = 1.0
"""Where the system starts no process, it is asked again after this time."""


class ShutdownTimes(NamedTuple):
    """The times that workers take to shut down."""

    drain_delay_s: float
    grace_s: float


class WorkerPlan(NamedTuple):
    """Describes the workers to run."""

    workers: int
    command: Sequence[str]
    """See `WorkerProcess.start`; likewise `arguments`."""
    arguments: Mapping[str, object]
    directory: Path
    """See `WorkerIdentity.directory`."""
    times: ShutdownTimes
    check: Callable[[], ShutdownTimes | None]
    """Reads the configuration again before a reload; None where it is wrong, which is in the log then."""
    on_serving: Callable[[], None]
    """Called once, when every worker has started as far as it can and at least one serves."""


class SupervisorEnd(NamedTuple):
    """The reason why the supervisor has ended."""

    signal: signal.Signals | None
    """The first signal that told it to, if one did."""
    status: int = 0
    message: str | None = None


class _Slot:
    """The place of one worker number: a process, or a restart that is under way."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: WorkerProcess | None = None
        self.is_down = False
        """Whether its worker has ended and no successor is ready."""
        self.changing = asyncio.Lock()
        """Held while a successor starts."""

    @property
    def is_serving(self) -> bool:
        """True while its worker takes requests."""
        return self.worker is not None and self.worker.is_ready and self.worker.end is None

    @property
    def is_settled(self) -> bool:
        """True once its worker is ready or has ended."""
        return self.worker is not None and self.worker.settled.is_set()


class Supervisor:
    """Runs the workers of one proxy. A `WorkerListener`."""

    def __init__(self, plan: WorkerPlan, listeners: WorkerListeners) -> None:
        self._plan = plan
        self._times = plan.times
        self._listeners = listeners
        self._slots = [_Slot(number) for number in range(1, plan.workers + 1)]
        self._running: set[WorkerProcess] = set()
        """All processes, also those that are retired."""
        self._serials = count(1)
        self._policy = RestartPolicy()
        self._gauges = WorkerGauges()
        self._metrics = MetricsHub(self._gauges)
        self._scrapes = ScrapeCoordinator(self._metrics)
        self._told: list[signal.Signals] = []
        self._given_up: GiveUp | None = None
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        """Set whenever a process has become ready or has ended."""
        self._is_serving = False
        self._reloading = asyncio.Lock()
        self._reload_wanted = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> SupervisorEnd:
        """Runs workers until told to stop by SIGINT or SIGTERM, or until no worker can start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._want_reload)
        try:
            for slot in self._slots:
                self._spawn_task(self._fill(slot))
            await self._stopping.wait()
            await self._wait_ended()
        finally:
            for worker in self._running:
                worker.kill()
            for task in self._tasks:
                task.cancel()
        if self._given_up is not None:
            return SupervisorEnd(None, *self._given_up)
        return SupervisorEnd(self._told[0] if self._told else None)

    # what workers say: a `WorkerListener`

    def worker_ready(self, worker: WorkerProcess) -> None:
        """See `WorkerListener`."""
        self._policy.ready(worker.identity.number)
        self._update()

    def worker_sent(self, worker: WorkerProcess, frame: Frame) -> None:
        """See `WorkerListener`."""
        self._scrapes.received(worker, frame)

    def worker_ended(self, worker: WorkerProcess, end: WorkerEnd) -> None:
        """See `WorkerListener`."""
        self._running.discard(worker)
        self._scrapes.ended(worker)
        slot = self._slots[worker.identity.number - 1]
        if slot.worker is worker and not self._stopping.is_set():
            slot.is_down = True
            self._spawn_task(self._follow(slot, worker, end))
        else:
            _log.info("worker %d has ended (%s)", slot.number, end.cause)
        self._update()

    # inside

    def _update(self) -> None:
        """Does what follows from a change of a worker."""
        self._changed.set()
        serving = [slot for slot in self._slots if slot.is_serving]
        self._gauges.ready = len(serving)
        if self._stopping.is_set():
            return
        for slot in serving:
            slot.is_down = False
        self._listeners.steer([slot.number for slot in self._slots if not slot.is_down])
        if serving and not self._is_serving and all(slot.is_settled for slot in self._slots):
            self._is_serving = True
            self._plan.on_serving()

    async def _fill(self, slot: _Slot) -> None:
        """Starts the first worker of a number."""
        async with slot.changing:
            slot.worker = await self._start(slot)
            if slot.worker is None:
                self._give_up(GiveUp(1, "the system starts no process for a worker"))

    async def _start(self, slot: _Slot) -> WorkerProcess | None:
        """Starts a process; returns None if the system does not let it."""
        plan = self._plan
        identity = WorkerIdentity(slot.number, plan.workers, next(self._serials), plan.directory)
        try:
            worker = await WorkerProcess.start(
                plan.command, identity, self._listeners[slot.number], plan.arguments, self
            )
        except OSError as error:
            _log.error("no process can be started for worker %d: %s", slot.number, error)
            return None
        self._running.add(worker)
        self._scrapes.started(worker)
        if self._stopping.is_set():
            worker.kill()
        return worker

    async def _follow(self, slot: _Slot, worker: WorkerProcess, end: WorkerEnd) -> None:
        """Starts a successor of a worker that has ended unasked."""
        async with slot.changing:
            if slot.worker is not worker or self._stopping.is_set():
                return
            decision = self._policy.ended(slot.number, end)
            if isinstance(decision, GiveUp):
                self._give_up(decision)
                return
            if decision.report is not None:
                _log.error("worker %d has failed: %s", slot.number, decision.report)
            when = f"in {decision.delay_s:g} s" if decision.delay_s else "now"
            _log.warning("worker %d has ended (%s): another one starts %s", slot.number, end.cause, when)
            self._gauges.restarts += 1
            delay_s = decision.delay_s
            successor: WorkerProcess | None = None
            while successor is None:
                await _first(delay_s, self._stopping.wait())
                if self._stopping.is_set():
                    return
                successor = await self._start(slot)
                delay_s = _NO_PROCESS_S
            slot.worker = successor

    # reload

    def _want_reload(self) -> None:
        if self._reload_wanted:
            return
        self._reload_wanted = True
        self._spawn_task(self._reload())

    async def _reload(self) -> None:
        """Replaces one worker after the other. A signal that comes meanwhile is for a reload after this one."""
        async with self._reloading:
            self._reload_wanted = False
            times = self._plan.check()
            if times is None:
                _log.error("the configuration is wrong: all workers go on with the one that they have")
                return
            _log.info("all workers are replaced, one after the other")
            self._times = times
            for slot in self._slots:
                if not await self._replace(slot):
                    return
            _log.info("all workers have been replaced")

    async def _replace(self, slot: _Slot) -> bool:
        """Replaces the worker of a number; returns whether that worked."""
        async with slot.changing:
            old = slot.worker
            new = await self._start(slot)
            if new is None:
                return False
            await _first(None, new.settled.wait(), self._stopping.wait())
            if self._stopping.is_set():
                return False
            if new.end is not None:
                why = new.end.cause if new.end.failure is None else new.end.failure.message
                _log.error(
                    "no more workers are replaced: the successor of worker %d could not start: %s", slot.number, why
                )
                return False
            slot.worker = new
            if old is not None:
                old.send(FrameKind.RETIRE)
            self._update()
            return True

    # the end

    def _stop(self, number: signal.Signals) -> None:
        self._told.append(number)
        if len(self._told) == 1:
            self._end_workers()
        else:
            for worker in self._running:
                worker.send(FrameKind.CUT)
            self._kill_later(0.0)

    def _give_up(self, decision: GiveUp) -> None:
        if not self._stopping.is_set():
            self._given_up = decision
            self._end_workers()

    def _end_workers(self) -> None:
        """Tells all workers to shut down. Their listening sockets are theirs alone from now on, and end with them."""
        self._stopping.set()
        self._listeners.close()
        for worker in self._running:
            worker.send(FrameKind.DRAIN)
            if not worker.is_ready:
                worker.terminate()
        self._kill_later(sum(self._times))

    def _kill_later(self, after_s: float) -> None:
        """Kills workers that have not ended by then: something keeps their event loops."""
        asyncio.get_running_loop().call_later(after_s + _END_S, self._kill)

    def _kill(self) -> None:
        for worker in self._running:
            _log.error("worker %d does not end and is killed", worker.identity.number)
            worker.kill()

    async def _wait_ended(self) -> None:
        while self._running:
            self._changed.clear()
            await self._changed.wait()

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _first(longest_s: float | None, *events: Coroutine[Any, Any, object]) -> None:
    """Waits until one of `events` is over, or `longest_s` have passed."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
