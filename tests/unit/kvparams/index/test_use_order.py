"""Tests the order in which the contents of an index are told."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvparams.index.use_order import used_last_first

_LAST = 1 << 20


@given(st.lists(st.lists(st.sampled_from([-2, 0, 1, 2, 3, 9, 70_000]), max_size=9), max_size=5), st.integers(1, 6))
def test_nodes_come_in_the_order_of_their_use_and_else_as_given(ages: list[list[int]], piece: int) -> None:
    numbered = list(enumerate(age for part in ages for age in part))
    begins = np.cumsum([0, *map(len, ages)]).tolist()
    nodes = [
        (np.arange(begin, begin + len(part), dtype=np.uint32), np.array([_LAST - age for age in part], np.uint32))
        for begin, part in zip(begins, ages, strict=False)
    ]
    pieces: list[list[int]] = [each.tolist() for each in used_last_first(nodes, _LAST, piece)]
    assert max(map(len, pieces), default=0) <= piece
    found = [number for each in pieces for number in each]
    assert found == [number for number, _ in sorted(numbered, key=lambda one: max(0, one[1]))]
