"""Asks all workers for something, in rounds: questions that arrive during a round are answered by the next one.

Rounds are numbered. Workers send the number back, so an answer that comes too late counts for no other round.
"""

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from kvparams_proxy.workers.channel import FrameKind
from kvparams_proxy.workers.worker_process import WorkerProcess

__all__ = ["ROUND_HEAD", "WorkerRounds"]

ROUND_HEAD: Final = struct.Struct("!Q")
"""The number of a round: the payload of its question, and the beginning of the payload of answers."""
_ROUND_S: Final = 2.0
"""A worker that takes longer is waited for no more."""
_log: Final = logging.getLogger(__name__)

Question = TypeVar("Question")


class WorkerRounds(Generic[Question]):
    """The workers, the questions that wait, and the round that runs. There is never more than one."""

    def __init__(self, kind: FrameKind, answer: Callable[[list[Question]], Awaitable[None]]) -> None:
        """Creates rounds without workers.

        Args:
            kind: the frame that asks a worker.
            answer: answers all questions that wait; it calls `collect`, unless it still has what it needs.
        """
        self._kind = kind
        self._answer = answer
        self._workers: set[WorkerProcess] = set()
        self._asked: list[Question] = []
        self._task: asyncio.Task[None] | None = None
        self._round = 0
        self._awaited: set[WorkerProcess] = set()
        """Workers that have not answered in this round."""
        self._all_arrived = asyncio.Event()

    def started(self, worker: WorkerProcess) -> None:
        """Adds a worker."""
        self._workers.add(worker)

    def ended(self, worker: WorkerProcess) -> None:
        """Removes a worker that has exited."""
        self._workers.discard(worker)
        self._arrived(worker)

    def ask(self, question: Question) -> None:
        """Answers a question by the next round."""
        self._asked.append(question)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def arrived(self, worker: WorkerProcess, payload: bytes) -> bool:
        """Hears an answer. Returns whether it is awaited: it belongs to this round and is in time."""
        if worker not in self._awaited or payload[: ROUND_HEAD.size] != ROUND_HEAD.pack(self._round):
            return False
        self._arrived(worker)
        return True

    async def collect(self) -> None:
        """Asks all workers that are ready, and waits for their answers up to the time limit."""
        self._round += 1
        self._awaited = {worker for worker in self._workers if worker.is_ready}
        self._all_arrived.clear()
        for worker in self._awaited:
            worker.send(self._kind, ROUND_HEAD.pack(self._round))
        try:
            if self._awaited:
                async with asyncio.timeout(_ROUND_S):
                    await self._all_arrived.wait()
        except TimeoutError:
            pass
        finally:
            self._awaited = set()

    def _arrived(self, worker: WorkerProcess) -> None:
        self._awaited.discard(worker)
        if not self._awaited:
            self._all_arrived.set()

    async def _run(self) -> None:
        """Answers all questions, including those that arrive meanwhile. A fault costs the questions of one round."""
        try:
            while self._asked:
                asked, self._asked = self._asked, []
                try:
                    await self._answer(asked)
                except Exception:  # noqa: BLE001  the next round must not suffer
                    _log.exception("what workers were asked for could not be collected (%s)", self._kind.name)
        finally:
            self._task = None
