"""Batches of pages cut into portions, a few of them on their way to or from a store at a time.

A slot is given back when it has been examined and the store no longer uses it, even if the caller no longer waits.
"""

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.jobs import Job

__all__ = ["PagePortion", "begin_portion", "release_slots", "transfer_portions"]

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
_Begin = Callable[[Sequence[Item], Sequence[Slot]], Job[Outcome] | None]


@dataclass(frozen=True, slots=True)
class PagePortion(Generic[Item, Outcome]):
    """Pages that were given to a store together."""

    items: Sequence[Item]
    slots: Sequence[Slot]
    """The same number for each item, in their order."""
    job: Job[Outcome]
    """Settled when nothing but the holder of this portion uses the slots."""

    def give_back(self) -> None:
        """Gives the slots back as soon as nothing uses them."""
        self.job.add_settled_callback(lambda: release_slots(self.slots))


def transfer_portions(
    items: Sequence[Item],
    arena: Arena,
    begin: _Begin[Item, Outcome],
    *,
    portion_items: int,
    ahead: int,
    remaining_s: Callable[[], float],
    slots_per_item: int = 1,
) -> Generator[PagePortion[Item, Outcome]]:
    """Yields portions in their order, each with those behind it begun already. Close it to give all slots back.

    It ends early when no time is left, no slot comes free in it, or `begin` returns None.

    Args:
        items: all of the batch.
        arena: where slots come from. They are waited for only while none is held: two transfers that hold some would
            wait for each other.
        begin: gives items with their slots to the store; None if no more is to be begun.
        portion_items: items of a portion, at most.
        ahead: portions on their way at a time, at most.
        remaining_s: seconds until no more is begun.
        slots_per_item: slots that each item needs.
    """
    begun = 0
    flying: deque[PagePortion[Item, Outcome]] = deque()
    try:
        while True:
            while begun < len(items) and len(flying) < ahead and (left_s := remaining_s()) > 0:
                most = min(portion_items, len(items) - begun) * slots_per_item
                slots = arena.lease_many(slots_per_item, most, 0.0 if flying else left_s)
                whole = len(slots) // slots_per_item
                release_slots(slots[whole * slots_per_item :])
                if not whole:
                    break
                portion = begin_portion(items[begun : begun + whole], slots[: whole * slots_per_item], begin)
                if portion is None:
                    items = items[:begun]
                    break
                begun += whole
                flying.append(portion)
            if not flying:
                return
            yield flying[0]
            flying.popleft().give_back()
    finally:
        for portion in flying:
            portion.give_back()


def begin_portion(
    items: Sequence[Item], slots: Sequence[Slot], begin: _Begin[Item, Outcome]
) -> PagePortion[Item, Outcome] | None:
    """Gives items to the store; gives the slots back if `begin` raises or returns None."""
    job = None
    try:
        job = begin(items, slots)
    finally:
        if job is None:
            release_slots(slots)
    return None if job is None else PagePortion(items, slots, job)


def release_slots(slots: Collection[Slot]) -> None:
    """Ends the leases of all these slots, which are of one arena."""
    if slots:
        next(iter(slots)).arena.release_many(slots)
