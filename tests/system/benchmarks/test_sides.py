"""Tests that the comparison of stores with bare clients notices a side that reads nothing."""

from collections.abc import Sequence

import pytest

from benchmarks.sides import in_turns

PAGES = [memoryview(bytes([number]) * 1000) for number in range(1, 4)]


class Kept:
    """A side that keeps what is put; one that is `idle` gives nothing back."""

    def __init__(self, *, idle: bool = False) -> None:
        self._idle = idle
        self._pages: dict[str, bytes] = {}

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        self._pages.update(zip(keys, map(bytes, pages), strict=True))

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for key, page in zip(keys, pages, strict=True):
            if not self._idle:
                page[:] = self._pages[key]


def compared(*sides: Kept) -> None:
    targets = [memoryview(bytearray(page.nbytes)) for page in PAGES]
    named = {f"side {number}": side for number, side in enumerate(sides)}
    in_turns(named, PAGES, targets, rounds=1, warm_ups=1, clean=lambda _: None)


def test_sides_that_read_what_they_put_are_timed() -> None:
    compared(Kept(), Kept())


def test_a_side_that_reads_nothing_is_noticed_whoever_read_before() -> None:
    with pytest.raises(SystemExit, match="what was read is not what was put"):
        compared(Kept(), Kept(idle=True), Kept())
