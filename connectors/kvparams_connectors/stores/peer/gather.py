"""A batch over several places: what this process has itself, then side by side what others have of the rest.

Invariant: a place that fails or is slow affects no other place's answer. A key that only that place had is a MISS.
Every other key is answered before the deadline, and once an answer is final nothing writes into its buffers.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvparams_connectors.deadline_timer import DeadlineTimer
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store import Result, ResultCode, Results
from kvparams_connectors.stores.peer.addresses import PeerAddress

__all__ = ["AskPeer", "BatchGatherer"]

_LOGGER: Final = logging.getLogger(__name__)

_MARGIN: Final = 0.2
_MOST_MARGIN_S: Final = 0.1
"""This share of the time, and no more than so many seconds, are kept back for the answer to come in time."""

AskPeer = Callable[[PeerAddress, Sequence[int], float], Results]
"""What a place has of these operations of the batch, until then; it gives up in time, and never raises for a place."""


class _GatherBatch:
    """A `_GatherBatch` is a batch, guarded by the lock of its `BatchGatherer`."""

    def __init__(
        self, job: Job[Results], results: Results, left: Mapping[PeerAddress, Sequence[int]], until: float
    ) -> None:
        self.job: Final = job
        self.results: Final = results
        self.until: Final = until
        self.waiting: Final = set(left)
        """Places that no thread has begun to ask."""
        self.asked: Final[set[PeerAddress]] = set()
        self.over = False


class BatchGatherer:
    """The batches that are under way, and the threads that ask."""

    def __init__(self, threads: int) -> None:
        """Starts the threads that read from other places.

        Args:
            threads: the number of places that are read from at a time.
        """
        self._threads: Final = threads
        self._lane: Final = WorkerPool("kvparams-peer", threads=threads)
        self._alarm: Final = DeadlineTimer("kvparams-peer-alarm", self._ring)
        self._lock: Final = threading.Lock()
        self._open: Final[set[_GatherBatch]] = set()

    def gather(
        self,
        own: Job[Results],
        where: Callable[[Results], Mapping[PeerAddress, Sequence[int]]],
        ask: AskPeer,
        count: int,
    ) -> Job[Results]:
        """Complete what this process has with what others have.

        Args:
            own: the batch, asked of this process alone.
            where: gets its results; which operations are left, and where to ask for them.
            ask: called by threads of this, once for each place at most.
            count: operations in the batch.
        """
        job = Job(own.deadline, [Result(ResultCode.TIMEOUT)] * count)
        own.add_settled_callback(lambda: self._begin(own, job, where, ask))
        return job

    def close(self, timeout_s: float) -> bool:
        """Take no more and wait for what is under way; whether it has ended."""
        ended = self._lane.close(timeout_s)
        self._alarm.close()
        return ended

    def _begin(
        self,
        own: Job[Results],
        job: Job[Results],
        where: Callable[[Results], Mapping[PeerAddress, Sequence[int]]],
        ask: AskPeer,
    ) -> None:
        """This process has answered; runs in the thread that did."""
        try:
            results = list(own.result(0))
            left = where(results)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the job
            job.fail(error)
            return
        now = time.monotonic()
        if not left or now >= job.deadline:
            job.finish(results)
            return
        job.set_partial_result(list(results))
        until = job.deadline - min(_MOST_MARGIN_S, _MARGIN * (job.deadline - now))
        share_s = (until - now) / math.ceil(len(left) / self._threads)
        gathering = _GatherBatch(job, results, left, until)
        with self._lock:
            self._open.add(gathering)
        self._alarm.schedule(until)
        for place, indexes in left.items():
            asked = self._lane.submit(
                lambda _, place=place, indexes=indexes: self._ask(gathering, place, indexes, ask, share_s),
                math.inf,  # `_ask` says whether it is too late
                timed_out=None,
                refused=None,
            )
            asked.add_settled_callback(lambda place=place: self._ended(gathering, place))

    def _ask(
        self, gathering: _GatherBatch, place: PeerAddress, indexes: Sequence[int], ask: AskPeer, share_s: float
    ) -> None:
        with self._lock:
            if place not in gathering.waiting:  # nobody waits for it any more, and its buffers are not ours
                return
            gathering.waiting.discard(place)
            gathering.asked.add(place)
        try:
            found = ask(place, indexes, min(gathering.until, time.monotonic() + share_s))
        except Exception:
            _LOGGER.exception("peer: reading from others failed")
            return
        with self._lock:
            for index, result in zip(indexes, found, strict=True):
                gathering.results[index] = result
            known = list(gathering.results)
        gathering.job.set_partial_result(known)

    def _ended(self, gathering: _GatherBatch, place: PeerAddress) -> None:
        """It was asked, or will not be."""
        with self._lock:
            gathering.waiting.discard(place)
            gathering.asked.discard(place)
            over = self._is_over(gathering)
        if over:
            gathering.job.finish(gathering.results)

    def _ring(self, now: float) -> float | None:
        """Batches whose time is over: places that nobody has begun to ask are not asked any more."""
        with self._lock:
            due = [one for one in self._open if one.until <= now]
            for one in due:
                one.waiting.clear()
            over = [one for one in due if self._is_over(one)]
            following = min((one.until for one in self._open if one.until > now), default=None)
        for one in over:
            one.job.finish(one.results)
        return following

    def _is_over(self, gathering: _GatherBatch) -> bool:
        """Returns whether nothing is left to be done, said once; the lock is held."""
        if gathering.over or gathering.waiting or gathering.asked:
            return False
        gathering.over = True
        self._open.discard(gathering)
        return True
