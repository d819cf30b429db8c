"""Batches of pages cut into portions, a few of them on their way to or from the store at a time.

The one rule: a slot is given back when it has been looked at and the store has let go of it, whatever became of the
wait and of whoever waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.engines.sglang.page_buffers import PageBuffers
from kvparams_connectors.engines.sglang.page_keys import HiCacheStoredPage
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import Results

__all__ = ["BatchPortion", "BeginPortion", "PageTransferItem", "TransferBatch"]

_AHEAD: Final = 3
"""Portions on their way at a time."""


@dataclass(frozen=True, slots=True)
class PageTransferItem:
    """One page, and where it lies."""

    page: HiCacheStoredPage
    place: PageBuffers


@dataclass(frozen=True, slots=True)
class BatchPortion:
    """Pages that were given to the store together."""

    cargo: Sequence[PageTransferItem]
    slots: Sequence[Slot]
    """One for each page."""
    job: Job[Results]


BeginPortion = Callable[[Sequence[PageTransferItem], Sequence[Slot], float], Job[Results]]
"""Gives pages to the store, with a slot for each, within so many seconds."""


class TransferBatch:
    """One batch. Iterating yields its portions in their order, begun before they are yielded; `close` ends it."""

    def __init__(
        self,
        cargo: Sequence[PageTransferItem],
        arena: Arena,
        begin: BeginPortion,
        *,
        portion: int,
        give_up: float,
    ) -> None:
        """Args:
        cargo: all pages.
        arena: where slots come from.
        begin: gives a portion to the store.
        portion: pages of one, at most.
        give_up: when no more is begun, on the clock of `time.monotonic`.
        """
        self._cargo = cargo
        self._arena = arena
        self._begin = begin
        self._portion = portion
        self._give_up = give_up
        self._begun = 0
        self._flying: deque[BatchPortion] = deque()
        self._shown: BatchPortion | None = None
        """The one that was yielded last."""

    def stop_beginning(self) -> None:
        """Begin no more portions; those that are on their way are still yielded."""
        self._cargo = self._cargo[: self._begun]

    def __iter__(self) -> Iterator[BatchPortion]:
        while self._begun < len(self._cargo) or self._flying:
            if self._begin_one():
                continue
            if not self._flying:  # no time is left, or no slot came free in it
                return
            self._shown = self._flying.popleft()
            yield self._shown
            self._looked()

    def close(self) -> None:
        """Nobody looks at what was yielded or is still on its way."""
        self.stop_beginning()
        self._looked()
        while self._flying:
            _settle(self._flying.popleft())

    def _looked(self) -> None:
        portion, self._shown = self._shown, None
        if portion is not None:
            _settle(portion)

    def _begin_one(self) -> bool:
        left_s = self._give_up - time.monotonic()
        waiting = len(self._cargo) - self._begun
        if not waiting or len(self._flying) >= _AHEAD or left_s <= 0:
            return False
        slots = self._arena.lease_many(1, min(self._portion, waiting), 0.0 if self._flying else left_s)
        if not slots:
            return False
        cargo = self._cargo[self._begun : self._begun + len(slots)]
        try:
            job = self._begin(cargo, slots, max(0.0, self._give_up - time.monotonic()))
        except BaseException:
            _give_back(slots)
            raise
        self._begun += len(slots)
        self._flying.append(BatchPortion(cargo, slots, job))
        return True


def _settle(portion: BatchPortion) -> None:
    portion.job.add_settled_callback(lambda: _give_back(portion.slots))


def _give_back(slots: Sequence[Slot]) -> None:
    for slot in slots:
        slot.release()
