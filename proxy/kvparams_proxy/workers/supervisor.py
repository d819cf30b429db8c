"""The supervisor: it starts worker processes, restarts those that exit, replaces all on SIGHUP, and shuts them down.

It serves no requests. Its state changes on one event loop only. `restart_policy.py` decides about restarts.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvparams_proxy.event_loop.first_of import first_of
from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.channel import Frame, FrameKind
from kvparams_proxy.workers.listeners import WorkerListeners
from kvparams_proxy.workers.metrics_hub import MetricsHub, WorkerGauges
from kvparams_proxy.workers.part_coordinator import PartCoordinator
from kvparams_proxy.workers.restart_policy import GiveUp, RestartPolicy, WorkerEnd
from kvparams_proxy.workers.scrapes import ScrapeCoordinator
from kvparams_proxy.workers.worker_process import WorkerProcess

__all__ = ["ShutdownTimes", "Supervisor", "SupervisorEnd", "WorkerPlan"]

_log: Final = logging.getLogger(__name__)
_END_S: Final = 15.0
"""How long a worker may take to exit after the time that its requests have."""
_NO_PROCESS_S: Final = 1.0
"""The time between two attempts where the system cannot start a process."""


class ShutdownTimes(NamedTuple):
    """The time limits of a worker's shutdown: see `ServerSettings`."""

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
    """Reads the configuration again before a reload. Returns None if it is invalid, after logging the reasons."""
    on_serving: Callable[[], Coroutine[Any, Any, None]]
    """Run once, when a worker is ready and no first worker is still starting."""
    on_stopping: Callable[[float], None]
    """Called once, when the workers are told to shut down, with the seconds that this may take."""
    on_reload: Callable[[bool], None] = lambda begins: None
    """Called with True when a reload begins, and with False when it is over."""


class SupervisorEnd(NamedTuple):
    """The reason for the end of the supervisor."""

    signal: signal.Signals | None
    """The first SIGINT or SIGTERM, if there was one."""
    status: int = 0
    message: str | None = None


class _Slot:
    """A worker number and the process that currently has it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: WorkerProcess | None = None
        self.is_down = False
        """True while the worker has exited and no successor is ready."""
        self.changing = asyncio.Lock()
        """Held while a successor starts."""

    @property
    def is_serving(self) -> bool:
        """True while its worker accepts connections."""
        return self.worker is not None and self.worker.is_ready and self.worker.end is None

    @property
    def is_settled(self) -> bool:
        """True once its worker is ready or has exited."""
        return self.worker is not None and self.worker.settled.is_set()


class Supervisor:
    """Runs the workers of one proxy. A `WorkerListener`."""

    def __init__(self, plan: WorkerPlan, listeners: WorkerListeners) -> None:
        self._plan = plan
        self._times = plan.times
        self._listeners = listeners
        self._slots = [_Slot(number) for number in range(1, plan.workers + 1)]
        self._running: set[WorkerProcess] = set()
        """All processes, including retired ones."""
        self._serials = count(1)
        self._policy = RestartPolicy()
        self._gauges = WorkerGauges()
        self._metrics = MetricsHub(self._gauges)
        self._scrapes = ScrapeCoordinator(self._metrics)
        self._parts = PartCoordinator(self._metrics)
        self._signals: list[signal.Signals] = []
        self._given_up: GiveUp | None = None
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        """Set whenever a process is ready or has exited."""
        self._is_serving = False
        self._reloading = asyncio.Lock()
        self._reload_requested = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> SupervisorEnd:
        """Runs workers until SIGINT or SIGTERM, or until it is clear that no worker can start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._request_reload)
        try:
            for slot in self._slots:
                self._spawn_task(self._start_first(slot))
            await self._stopping.wait()
            await self._wait_ended()
        finally:
            for worker in self._running:
                worker.kill()
            for task in self._tasks:
                task.cancel()
        if self._given_up is not None:
            return SupervisorEnd(None, *self._given_up)
        return SupervisorEnd(self._signals[0] if self._signals else None)

    # `WorkerListener`

    def worker_ready(self, worker: WorkerProcess) -> None:
        """See `WorkerListener`."""
        self._policy.ready(worker.identity.number)
        self._update()

    def worker_sent(self, worker: WorkerProcess, frame: Frame) -> None:
        """See `WorkerListener`."""
        (self._parts if frame.kind in PartCoordinator.KINDS else self._scrapes).received(worker, frame)

    def worker_ended(self, worker: WorkerProcess, end: WorkerEnd) -> None:
        """See `WorkerListener`."""
        self._running.discard(worker)
        self._scrapes.ended(worker)
        self._parts.ended(worker)
        slot = self._slots[worker.identity.number - 1]
        if slot.worker is worker and not self._stopping.is_set():
            slot.is_down = True
            self._spawn_task(self._restart(slot, worker, end))
        else:
            _log.info("worker %d exited (%s)", slot.number, end.cause)
        self._update()

    # starts and restarts

    def _update(self) -> None:
        """Updates everything that depends on which workers are ready."""
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
            self._spawn_task(self._plan.on_serving())

    async def _start_first(self, slot: _Slot) -> None:
        """Starts the first worker of a number."""
        async with slot.changing:
            slot.worker = await self._start(slot)
            if slot.worker is None:
                self._give_up(GiveUp(1, "kvparams proxy: the system cannot start a worker process"))

    async def _start(self, slot: _Slot) -> WorkerProcess | None:
        """Starts a process. Returns None if the system cannot."""
        plan = self._plan
        identity = WorkerIdentity(slot.number, plan.workers, next(self._serials), plan.directory)
        try:
            worker = await WorkerProcess.start(
                plan.command, identity, self._listeners[slot.number], plan.arguments, self
            )
        except OSError as error:
            _log.error("worker %d: the process cannot be started: %s", slot.number, error)
            return None
        self._running.add(worker)
        self._scrapes.started(worker)
        self._parts.started(worker)
        if self._stopping.is_set():
            worker.kill()
        return worker

    async def _restart(self, slot: _Slot, worker: WorkerProcess, end: WorkerEnd) -> None:
        """Starts the successor of a worker that exited without being told to."""
        async with slot.changing:
            if slot.worker is not worker or self._stopping.is_set():
                return
            decision = self._policy.ended(slot.number, end)
            if isinstance(decision, GiveUp):
                self._give_up(decision)
                return
            if decision.report is not None:
                _log.error("worker %d failed: %s", slot.number, decision.report)
            when = f"in {decision.delay_s:g} s" if decision.delay_s else "now"
            _log.warning("worker %d exited (%s); restarting %s", slot.number, end.cause, when)
            self._gauges.restarts += 1
            delay_s = decision.delay_s
            successor: WorkerProcess | None = None
            while successor is None:
                await first_of(delay_s, self._stopping.wait())
                if self._stopping.is_set():
                    return
                successor = await self._start(slot)
                delay_s = _NO_PROCESS_S
            slot.worker = successor

    # reload

    def _request_reload(self) -> None:
        if self._reload_requested:
            return
        self._reload_requested = True
        self._spawn_task(self._reload())

    async def _reload(self) -> None:
        """Replaces the workers one at a time. A SIGHUP that arrives meanwhile causes another reload afterwards."""
        async with self._reloading:
            self._reload_requested = False
            if self._stopping.is_set():
                return
            self._plan.on_reload(True)
            try:
                await self._replace_all()
            finally:
                self._plan.on_reload(False)

    async def _replace_all(self) -> None:
        times = self._plan.check()
        if times is None:
            _log.error("reload refused: the configuration is invalid; the workers keep the current one")
            return
        _log.info("reload: replacing all workers, one at a time")
        self._times = times
        for slot in self._slots:
            if not await self._replace(slot):
                return
        _log.info("reload: all workers are replaced")

    async def _replace(self, slot: _Slot) -> bool:
        """Replaces the worker of one number. Returns whether the successor is ready."""
        async with slot.changing:
            old = slot.worker
            new = await self._start(slot)
            if new is None:
                return False
            await first_of(None, new.settled.wait(), self._stopping.wait())
            if self._stopping.is_set():
                return False
            if new.end is not None:
                why = new.end.cause if new.end.failure is None else new.end.failure.message
                _log.error("reload stopped: the successor of worker %d failed to start: %s", slot.number, why)
                return False
            slot.worker = new
            if old is not None:
                old.send(FrameKind.RETIRE)
            self._update()
            return True

    # shutdown

    def retire(self) -> None:
        """Has all workers accept no more connections and end with those they have: a successor serves new ones."""
        if not self._stopping.is_set():
            self._end_workers(FrameKind.RETIRE)

    def _stop(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            self._plan.on_stopping(sum(self._times))
            self._end_workers(FrameKind.DRAIN)
        else:
            for worker in self._running:
                worker.send(FrameKind.CUT)
            self._kill_later(0.0)

    def _give_up(self, decision: GiveUp) -> None:
        if not self._stopping.is_set():
            self._given_up = decision
            self._plan.on_stopping(sum(self._times))
            self._end_workers(FrameKind.DRAIN)

    def _end_workers(self, command: FrameKind) -> None:
        """Tells all workers to shut down. Each then holds the last copy of its socket, which closes with it."""
        self._stopping.set()
        self._listeners.close()
        for worker in self._running:
            worker.send(command)
            if not worker.is_ready:
                worker.terminate()
        self._kill_later(sum(self._times))

    def _kill_later(self, after_s: float) -> None:
        """Kills the workers that have not exited by then, for example because their event loops are blocked."""
        asyncio.get_running_loop().call_later(after_s + _END_S, self._kill)

    def _kill(self) -> None:
        for worker in self._running:
            _log.error("worker %d does not exit and is killed", worker.identity.number)
            worker.kill()

    async def _wait_ended(self) -> None:
        while self._running:
            self._changed.clear()
            await self._changed.wait()

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the supervisor failed in one step and goes on", exc_info=error)
