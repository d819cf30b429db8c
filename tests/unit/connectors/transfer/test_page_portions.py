"""Tests that a batch is cut into portions, and that every slot of the arena is free when it ends."""

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count

import pytest

from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.jobs import Job, finished_job
from kvparams_connectors.transfer.page_portions import transfer_portions

SLOTS = 8
Begin = Callable[[Sequence[int], Sequence[Slot]], Job[list[int]] | None]


def moved(items: Sequence[int], slots: Sequence[Slot]) -> Job[list[int]]:
    assert slots
    return finished_job(list(items))


def run(
    arena: Arena,
    begin: Begin,
    items: int,
    *,
    slots_per_item: int = 1,
    most: int | None = None,
    remaining_s: Callable[[], float] = lambda: 1.0,
) -> list[int]:
    """Moves items by portions of 3, 2 on their way, and looks at no more than `most` portions."""
    done: list[int] = []
    portions = transfer_portions(
        range(items),
        arena,
        begin,
        portion_items=3,
        ahead=2,
        remaining_s=remaining_s,
        slots_per_item=slots_per_item,
    )
    with closing(portions):
        for number, portion in enumerate(portions, 1):
            done += portion.job.result()
            if number == most:
                break
    return done


@pytest.fixture
def arena() -> Arena:
    return Arena(SLOTS * 64, 64)


@pytest.mark.parametrize("slots_per_item", [1, 3])
def test_all_are_moved_in_their_order(arena: Arena, slots_per_item: int) -> None:
    assert run(arena, moved, 20, slots_per_item=slots_per_item) == list(range(20))
    assert arena.free_slots == SLOTS


def test_slots_are_held_while_a_portion_is_looked_at(arena: Arena) -> None:
    """The control: free slots can tell whether any are held."""
    free: list[int] = []

    def watched(items: Sequence[int], slots: Sequence[Slot]) -> Job[list[int]]:
        free.append(arena.free_slots)
        return moved(items, slots)

    run(arena, watched, 6)
    assert free == [SLOTS - 3, SLOTS - 6]


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_no_more_is_begun_once_it_is_refused(arena: Arena, refused: int) -> None:
    numbers = count(1)

    def begin(items: Sequence[int], slots: Sequence[Slot]) -> Job[list[int]] | None:
        return None if next(numbers) == refused else moved(items, slots)

    assert run(arena, begin, 20) == list(range(3 * (refused - 1)))
    assert next(numbers) == refused + 1
    assert arena.free_slots == SLOTS


@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_what_raises_holds_nothing(arena: Arena, faulty: int) -> None:
    numbers = count(1)

    def begin(items: Sequence[int], slots: Sequence[Slot]) -> Job[list[int]]:
        if next(numbers) == faulty:
            raise OSError("the store is gone")
        return moved(items, slots)

    with pytest.raises(OSError, match="gone"):
        run(arena, begin, 20)
    assert arena.free_slots == SLOTS


def test_a_caller_that_stops_holds_nothing(arena: Arena) -> None:
    assert run(arena, moved, 20, most=1) == [0, 1, 2]
    assert arena.free_slots == SLOTS


def test_nothing_is_begun_without_time(arena: Arena) -> None:
    assert run(arena, moved, 20, remaining_s=lambda: 0.0) == []
    assert arena.free_slots == SLOTS


def test_a_full_arena_ends_it_within_the_time_that_is_left(arena: Arena) -> None:
    held = arena.lease_many(1, SLOTS, 0.0)
    assert run(arena, moved, 20, remaining_s=lambda: 0.01) == []
    for slot in held:
        slot.release()
    assert arena.free_slots == SLOTS
