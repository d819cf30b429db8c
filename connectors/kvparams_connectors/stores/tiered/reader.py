"""Gets and lookups of a tiered store: one batch that is composed from several tiers.

A tier that hangs costs no more than the deadline, and delays no other tier's answers. It may still write into the
buffers that it was given, so no other tier gets these before it has settled.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvparams_connectors.deadline_timer import DeadlineTimer
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    GetOp,
    KVStore,
    ResultCode,
    Results,
    are_valid_keys,
    is_valid_get,
    is_valid_key,
)
from kvparams_connectors.stores.tiered.staging import StagingArea, submit_to_tier
from kvparams_connectors.stores.tiered.statistics import TieredCounters
from kvparams_connectors.stores.tiered.tier_results import TierResults
from kvparams_connectors.stores.tiered.value_origins import ValueOrigins

__all__ = ["TieredReader"]

_SHARE: Final = 1 / 2
"""Of the time that is left, for a tier that is not the last: the next one must have some too."""
_GIVEN: Final = (ResultCode.OK, ResultCode.TOO_LARGE)
"""get: what the caller may find damaged."""


class TieredReader:
    """The way out."""

    def __init__(
        self,
        tiers: Sequence[KVStore],
        moves: StagingArea,
        counts: TieredCounters,
        origins: ValueOrigins,
        *,
        promote: bool,
    ) -> None:
        self._tiers = tiers
        self._moves = moves
        self._counts = counts
        self._origins = origins
        self._promote = promote
        self._lock = threading.Lock()
        self._telling = [False] * len(tiers)
        """Whether a tier is being told what was used."""
        self._hurries: dict[int, tuple[float, Callable[[], None]]] = {}
        """What to do, and when, should the first tier hang."""
        self._alarm = DeadlineTimer("kvparams-tiered", self._ring)

    def close(self) -> None:
        """Closes the reader, which must have no running operation."""
        self._alarm.close()

    # ---- get: one tier after the other, for they fill the same buffers

    def get(self, job: Job[Results], ops: Sequence[GetOp]) -> None:
        """Read values and finish `job`."""
        answers = TierResults([is_valid_get(op) for op in ops], len(self._tiers))
        ops = _unannounced(ops)
        mark = self._moves.mark()

        def ask(number: int, wanted: Sequence[int]) -> None:
            left = job.remaining_s()
            if not wanted or number == len(self._tiers) or not left:
                end()
                return

            def settled(said: Results) -> None:
                answers.take(number, wanted, said)
                given = zip(wanted, said, strict=True)
                self._origins.record_source(number, [ops[at].key for at, result in given if result.code in _GIVEN])
                following = answers.open()
                if following:
                    job.set_partial_result(answers.results())
                ask(number + 1, following)

            share = 1 if number == len(self._tiers) - 1 else _SHARE
            submit_to_tier(self._tiers[number].get, [ops[index] for index in wanted], left * share, settled)

        def end() -> None:
            results = answers.results()
            try:
                self._got(ops, answers, results, mark)
            finally:
                job.finish(results)

        valid = answers.open()
        if len(valid) < len(ops):
            job.set_partial_result(answers.results())
        ask(0, valid)

    def _got(self, ops: Sequence[GetOp], answers: TierResults, results: Results, mark: int) -> None:
        """While the buffers are still ours: stage what goes into faster tiers."""
        self._counts.record_get(answers.source, results)
        damaged: set[int] = set()
        for number, index in answers.corrupt:
            damaged.add(index)
            if results[index].code is ResultCode.OK:  # a good copy can take its place only when it is gone
                submit_to_tier(self._tiers[number].delete, [ops[index].key], DEFAULT_DEADLINE_S, _nothing)
        self._tell([op.key for op in ops], answers.source)
        for number in range(1, len(self._tiers) if self._promote else 0):
            indexes = [at for at, source in enumerate(answers.source) if source == number and at not in damaged]
            faster = self._tiers[:number]
            room = max(tier.capabilities.max_value_bytes for tier in faster)
            fitting = [at for at in indexes if results[at].nbytes <= room]
            taken = self._moves.stage([(ops[at].key, ops[at].buffers, results[at].nbytes) for at in fitting], mark)
            values = [value for value in taken if value is not None]
            self._counts.record_not_staged(len(indexes) - len(values))
            self._moves.put(
                values, faster, lambda at, keys, said, source=number: self._promoted(source, at, keys, said)
            )

    def _promoted(self, source: int, number: int, keys: Sequence[str], said: Results) -> None:
        """Records a faster tier's results for values that came from a slower one."""
        self._counts.record_promoted(said)
        taken = [key for key, result in zip(keys, said, strict=True) if result.code is ResultCode.OK]
        self._origins.record_copy(number, source, taken)

    # ---- exists: the first tier, then all others at once

    def exists(self, job: Job[Results], keys: Sequence[str]) -> None:
        """Look values up and finish `job`."""
        answers = TierResults(are_valid_keys(keys), len(self._tiers))
        valid = answers.open()
        if len(valid) < len(keys):
            job.set_partial_result(answers.results())
        if not valid or not job.remaining_s():
            job.finish(answers.results())
            return
        lock = threading.Lock()
        unheard = [len(self._tiers)]
        asked_others, over = threading.Event(), threading.Event()

        def ask(number: int, wanted: Sequence[int]) -> None:
            def settled(said: Results) -> None:
                with lock:
                    answers.take(number, wanted, said)
                    unheard[0] -= 1
                    following = answers.open()
                    if following:
                        job.set_partial_result(answers.results())
                if number == 0 and following:
                    others()
                if not following or not unheard[0]:
                    end()

            submit_to_tier(self._tiers[number].exists, [keys[index] for index in wanted], job.remaining_s(), settled)

        def others() -> None:
            """Ask all other tiers: the first has answered, or should have."""
            with lock:
                wanted = answers.open()
                if asked_others.is_set() or not wanted:
                    return
                asked_others.set()
            for number in range(1, len(self._tiers)):
                ask(number, wanted)

        def end() -> None:
            with lock:
                if over.is_set():
                    return
                over.set()
                results, source = answers.results(), list(answers.source)
            with self._lock:
                self._hurries.pop(id(job), None)
            try:
                self._tell(keys, source)
            finally:
                job.finish(results)  # a tier that has not answered has no buffer of the caller's

        hurry = time.monotonic() + job.remaining_s() * _SHARE
        with self._lock:
            self._hurries[id(job)] = (hurry, others)
        ask(0, valid)
        self._alarm.schedule(hurry)

    def _ring(self, now: float) -> float | None:
        """First tiers that hang: ask the others without them."""
        with self._lock:
            late = [name for name, (when, _) in self._hurries.items() if when <= now]
            calls = [self._hurries.pop(name)[1] for name in late]
            following = min((when for when, _ in self._hurries.values()), default=None)
        for call in calls:
            call()
        return following

    # ---- use

    def _tell(self, keys: Sequence[str], source: Sequence[int | None]) -> None:
        """Tell slower tiers, in the background, that a whole sequence was used.

        One that was asked for the tail of it alone would evict the head first. One such message at a time for a tier:
        it is told less often, never more slowly.
        """
        for number in range(1, len(self._tiers)):
            before = sum(at is not None and at < number for at in source)
            if 0 < before < len(source):
                known = [key for key in keys if is_valid_key(key)]
                with self._lock:
                    busy, self._telling[number] = self._telling[number], True
                if not busy:
                    call = self._tiers[number].exists
                    submit_to_tier(call, known, DEFAULT_DEADLINE_S, lambda _, number=number: self._told(number))

    def _told(self, number: int) -> None:
        with self._lock:
            self._telling[number] = False


def _unannounced(ops: Sequence[GetOp]) -> list[GetOp]:
    """Without `arrived`: another tier may fill the buffers again after one that has announced a value."""
    return [GetOp(op.key, op.buffers) for op in ops]


def _nothing(_: Results) -> None:
    """Nobody waits for this."""
