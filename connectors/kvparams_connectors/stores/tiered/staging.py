"""Values on their way from one tier to others, in memory of their own.

A caller's buffers are the caller's again when its job has settled, so what goes on afterwards goes on from a copy. A
delete waits for a staged value of its key, so none is left behind. A value that was read before or during a delete of
its key is not copied to another tier.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from kvparams_connectors.jobs import Job, finished_job
from kvparams_connectors.store import KVStore, PutOp, Result, ResultCode, Results
from kvparams_connectors.stores.extents import Extent, ExtentAllocator, copy_in, units_for

__all__ = ["OnTierDone", "StagedValue", "StagingArea", "submit_to_tier"]

Op = TypeVar("Op")

_LOGGER: Final = logging.getLogger(__name__)

_UNIT: Final = 64 << 10
_DEADLINE_S: Final = 30.0
"""For a put in the background: nobody waits for it but whoever wants its memory."""


OnTierDone = Callable[[int, Sequence[str], Results], None]
"""The place of a tier among those that values were put into, the keys that it was given, and what it said."""


@dataclass(frozen=True, slots=True)
class StagedValue:
    """A `StagedValue` is a value in staging memory."""

    op: PutOp
    nbytes: int
    runs: list[Extent]


class StagingArea:
    """Staging memory, what is in it, and the deletes that must not cross it."""

    def __init__(self, size_bytes: int) -> None:
        """Allocates the staging memory and touches every page of it.

        Args:
            size_bytes: the size for all values in transfer, in bytes; rounded up to a whole unit of 64 KiB.
        """
        units = max(1, -(-size_bytes // _UNIT))
        self._memory = np.empty(units * _UNIT, dtype=np.uint8)
        self._memory.fill(0)  # touch every page now, not during a transfer
        self._extents = ExtentAllocator(np.ones(units, dtype=np.bool_))
        self._used = 0
        self._changed = threading.Condition(threading.Lock())
        self._keys: Counter[str] = Counter()
        self._waiting: list[tuple[frozenset[str], Callable[[], None]]] = []
        self._deleting = 0
        self._epoch = 0
        """Grows with the beginning and the end of every delete."""

    @property
    def is_idle(self) -> bool:
        """Returns whether nothing is on its way and all memory is free."""
        with self._changed:
            return not self._keys and not self._used

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._keys, timeout_s)

    # ---- deletes

    def mark(self) -> int:
        """Before a get: what `stage` wants to know afterwards."""
        with self._changed:
            return self._epoch

    def begin_delete(self, keys: Iterable[str], go: Callable[[], None]) -> None:
        """Call `go` once none of `keys` is on its way: now, or in the thread in which that comes true."""
        wanted = frozenset(keys)
        with self._changed:
            self._deleting += 1
            self._epoch += 1
            if any(key in self._keys for key in wanted):
                self._waiting.append((wanted, go))
                return
        go()

    def end_delete(self) -> None:
        """Records that all tiers have ended a delete."""
        with self._changed:
            self._deleting -= 1
            self._epoch += 1

    # ---- moves

    def stage(self, ops: Sequence[tuple[str, Sequence[memoryview], int]], mark: int | None) -> list[StagedValue | None]:
        """Copy values, as far as there is room; None where there is not.

        Args:
            ops: key, buffers, and how many bytes of them.
            mark: from before they were read; None for values that are being put. If there was a delete since, nothing
                is taken: it may have been for what was read.
        """
        taken: list[StagedValue | None] = []
        for key, buffers, nbytes in ops:
            units = units_for(nbytes, _UNIT)
            with self._changed:
                stale = mark is not None and (self._deleting > 0 or self._epoch != mark)
                runs = None if stale or (mark is not None and key in self._keys) else self._extents.allocate(units)
                if runs is not None:
                    self._keys[key] += 1
                    self._used += units
            if runs is None:
                taken.append(None)
                continue
            value = StagedValue(PutOp(key, self._views(runs, nbytes)), nbytes, runs)
            try:
                copy_in(self._memory, _UNIT, runs, buffers, nbytes)
            except ValueError:  # the caller released a buffer that it had leased to us
                self._release([value])
                taken.append(None)
            else:
                taken.append(value)
        return taken

    def put(self, values: Sequence[StagedValue], tiers: Sequence[KVStore], ended: OnTierDone) -> None:
        """Put values that were taken into `tiers`, in the background; `ended` hears of each tier.

        A tier that cannot take a value so large is not asked for it. The memory is free again when all have settled.
        """
        left = [len(tiers)]
        lock = threading.Lock()

        def settled(number: int, ops: Sequence[PutOp], results: Results) -> None:
            ended(number, [op.key for op in ops], results)
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                self._release(values)

        if not tiers:
            self._release(values)
        for number, tier in enumerate(tiers):
            limit = tier.capabilities.max_value_bytes
            ops = [value.op for value in values if value.nbytes <= limit]
            if ops:
                submit_to_tier(
                    tier.put, ops, _DEADLINE_S, lambda said, number=number, ops=ops: settled(number, ops, said)
                )
            else:
                settled(number, [], [])

    def _views(self, runs: Sequence[Extent], nbytes: int) -> list[memoryview]:
        views: list[memoryview] = []
        for first, units in runs:
            start = first * _UNIT
            length = min(units * _UNIT, nbytes)
            views.append(self._memory[start : start + length].data)
            nbytes -= length
        return views

    def _release(self, values: Sequence[StagedValue]) -> None:
        with self._changed:
            for value in values:
                self._extents.free(value.runs)
                self._used -= units_for(value.nbytes, _UNIT)
                self._keys[value.op.key] -= 1
                if not self._keys[value.op.key]:
                    del self._keys[value.op.key]
            free = [entry for entry in self._waiting if not any(key in self._keys for key in entry[0])]
            self._waiting = [entry for entry in self._waiting if entry not in free]
            self._changed.notify_all()
        for _, go in free:
            go()


def submit_to_tier(
    call: Callable[[Sequence[Op], float], Job[Results]],
    ops: Sequence[Op],
    deadline_s: float,
    settled: Callable[[Results], None],
) -> None:
    """Ask one tier; `settled` gets one result for each of `ops`, whatever the tier does, in whatever thread."""

    def follow() -> None:
        try:
            results = job.result(0)
            if len(results) != len(ops):
                raise ValueError(f"{len(results)} results for {len(ops)} operations")
        except Exception:
            _LOGGER.exception("a tier failed")
            results = [Result(ResultCode.INTERNAL)] * len(ops)
        try:
            settled(results)
        except Exception:  # it would end the tier's thread
            _LOGGER.exception("what follows a tier's answer failed")

    try:
        job = call(ops, deadline_s)
    except Exception:
        _LOGGER.exception("a tier raised where it should have answered")
        job = finished_job([Result(ResultCode.INTERNAL)] * len(ops))
    job.add_settled_callback(follow)
