"""Puts and deletes of a tiered store.

The caller gets the answer of the deciding tier: the last one with write-through, the first one with write-back. The
caller's buffers are read until every tier that was given them has settled, and no longer.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from kvparams_connectors.jobs import Job
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
    is_valid_key,
    is_valid_put,
)
from kvparams_connectors.stores.tiered.staging import StagingArea, submit_to_tier
from kvparams_connectors.stores.tiered.statistics import TieredCounters
from kvparams_connectors.stores.tiered.tier_results import merge_deleted
from kvparams_connectors.stores.tiered.value_origins import ValueOrigins

__all__ = ["TieredWriter"]

_DECIDED: Final = frozenset({ResultCode.OK, ResultCode.EXISTS, ResultCode.INVALID})
"""write-back: what the first tier may say for the others to have no say any more."""


class TieredWriter:
    """The way in."""

    def __init__(
        self, tiers: Sequence[KVStore], moves: StagingArea, counts: TieredCounters, *, write_back: bool
    ) -> None:
        self._tiers = tiers
        self._moves = moves
        self._counts = counts
        self._write_back = write_back

    def put(self, job: Job[Results], ops: Sequence[PutOp]) -> None:
        """Put values and finish `job`."""
        limit = self._tiers[-1].capabilities.max_value_bytes
        results = [Result(ResultCode.TIMEOUT)] * len(ops)
        good: list[int] = []
        gone = list(ops)
        for index, op in enumerate(ops):
            if not is_valid_put(op):
                results[index] = Result(ResultCode.INVALID)
            elif _nbytes(op.buffers) > limit:
                results[index] = Result(ResultCode.TOO_LARGE)
            else:
                good.append(index)
                gone[index] = op.resolve_before_read()  # several tiers look at it
        if not good or not job.remaining_s():
            job.finish(results)
            return
        job.set_partial_result(list(results))
        if self._write_back:
            self._put_first(job, gone, good, results)
        else:
            self._put_into(self._tiers, job, gone, good, results, decided=frozenset())

    def _put_into(
        self,
        tiers: Sequence[KVStore],
        job: Job[Results],
        ops: Sequence[PutOp],
        indexes: Sequence[int],
        results: Results,
        *,
        decided: frozenset[int],
    ) -> None:
        """Put from the caller's buffers; the last tier's word goes into `results`, but for what is `decided`."""
        lock = threading.Lock()
        heard: dict[int, Results] = {}
        last = len(tiers) - 1

        def settled(number: int, said: Results) -> None:
            with lock:
                heard[number] = said
                over = len(heard) == len(tiers)
                if number == last:
                    for index, result in zip(indexes, said, strict=True):
                        if index not in decided:
                            results[index] = result
                    job.set_partial_result(list(results))
            if self._write_back:
                self._counts.record_written_back(said)
            elif over:
                self._drop_losers([op.key for op in asked], heard, lambda: job.finish(results))
                return
            if over:
                job.finish(results)

        asked = [ops[index] for index in indexes]
        for number, tier in enumerate(tiers):
            submit_to_tier(tier.put, asked, job.remaining_s(), lambda said, number=number: settled(number, said))

    def _drop_losers(self, keys: Sequence[str], heard: Mapping[int, Results], then: Callable[[], None]) -> None:
        """Drops values from faster tiers if another writer was first in the last tier."""
        winners = heard[len(self._tiers) - 1]
        lost = {
            number: [
                key
                for key, ours, theirs in zip(keys, heard[number], winners, strict=True)
                if ours.code is ResultCode.OK and theirs.code is ResultCode.EXISTS
            ]
            for number in range(len(self._tiers) - 1)
        }
        lost = {number: wrong for number, wrong in lost.items() if wrong}
        if not lost:
            then()
            return
        lock = threading.Lock()
        left = [len(lost)]

        def settled(_: Results) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            self._moves.end_delete()
            then()

        def go() -> None:
            for number, wrong in lost.items():
                submit_to_tier(self._tiers[number].delete, wrong, DEFAULT_DEADLINE_S, settled)

        self._moves.begin_delete([key for wrong in lost.values() for key in wrong], go)

    def _put_first(self, job: Job[Results], ops: Sequence[PutOp], good: Sequence[int], results: Results) -> None:
        """write-back: what the first tier has taken goes on from a copy, the rest from the caller's buffers.

        So does what finds no room to be staged: whoever writes faster than the slower tiers can take it waits for them.
        """
        rest = self._tiers[1:]

        def settled(said: Results) -> None:
            new: list[int] = []
            kept: set[int] = set()
            for index, result in zip(good, said, strict=True):
                if result.code in _DECIDED:
                    results[index] = result
                    kept.add(index)
                if result.code is ResultCode.OK:
                    new.append(index)
            job.set_partial_result(list(results))
            taken = self._moves.stage([(ops[at].key, ops[at].buffers, _nbytes(ops[at].buffers)) for at in new], None)
            staged = [value for value in taken if value is not None]
            self._moves.put(staged, rest, lambda _number, _keys, said: self._counts.record_written_back(said))
            unstaged = {index for index, value in zip(new, taken, strict=True) if value is None}
            direct = [index for index in good if index not in kept or index in unstaged]
            if direct and job.remaining_s():
                self._put_into(rest, job, ops, direct, results, decided=frozenset(kept))
                return
            for _ in rest if direct else ():
                self._counts.record_written_back([Result(ResultCode.TIMEOUT)] * len(direct))
            job.finish(results)

        submit_to_tier(self._tiers[0].put, [ops[index] for index in good], job.remaining_s(), settled)

    def delete(self, job: Job[Results], keys: Sequence[str]) -> None:
        """Delete everywhere and finish `job`."""
        every = range(len(self._tiers))
        self._remove(job, keys, lambda _: every, [tier.delete for tier in self._tiers])

    def discard(self, job: Job[Results], keys: Sequence[str], origins: ValueOrigins) -> None:
        """Delete where the bytes came from that were read last, and finish `job`.

        Where that is, is asked when nothing is on its way any more: they may have been promoted meanwhile.
        """
        self._remove(job, keys, origins.tiers_of, [tier.discard for tier in self._tiers])

    def _remove(
        self,
        job: Job[Results],
        keys: Sequence[str],
        tiers_of: Callable[[str], Collection[int]],
        calls: Sequence[Callable[[Sequence[str], float], Job[Results]]],
    ) -> None:
        valid = [index for index, key in enumerate(keys) if is_valid_key(key)]
        results = [Result(ResultCode.INVALID)] * len(keys)
        for index in valid:
            results[index] = Result(ResultCode.TIMEOUT)
        if not valid or not job.remaining_s():
            job.finish(results)
            return
        job.set_partial_result(list(results))
        wanted = [keys[index] for index in valid]
        lock = threading.Lock()
        answers: dict[int, list[Result]] = {index: [] for index in valid}

        def settled(asked: Sequence[int], said: Results, left: set[int], number: int) -> None:
            with lock:
                for index, result in zip(asked, said, strict=True):
                    answers[index].append(result)
                left.discard(number)
                if left:
                    return
            for index, heard in answers.items():
                results[index] = merge_deleted(heard)
            end()

        def end() -> None:
            self._moves.end_delete()
            job.finish(results)

        def go() -> None:
            left_s = job.remaining_s()
            if not left_s:
                end()
                return
            places = {index: tiers_of(keys[index]) for index in valid}
            asks = {number: [index for index in valid if number in places[index]] for number in range(len(calls))}
            left = {number for number, asked in asks.items() if asked}
            for number in sorted(left):
                asked = asks[number]
                submit_to_tier(
                    calls[number],
                    [keys[index] for index in asked],
                    left_s,
                    lambda said, asked=asked, number=number: settled(asked, said, left, number),
                )

        self._moves.begin_delete(wanted, go)


def _nbytes(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)
