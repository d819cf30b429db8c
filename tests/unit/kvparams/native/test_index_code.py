"""Tests that the native code of the prefix index does the same as the Python code beside it."""

from array import array
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvparams.index import block_hashes, hash_table, leaf_removal
from kvparams.index.block_hashes import BlockHasher
from kvparams.index.hash_table import HashTable
from kvparams.index.leaf_removal import FREED, NodeLinks, RemovedLeaves, remove_leaves
from kvparams.native import NATIVE

if NATIVE is None:
    pytest.skip("asked to do without native code, or there is no compiler", allow_module_level=True)

_IDS = st.integers(0, 2**32 - 1)
_ODD_IDS = st.sampled_from([-1, 2**32, 2**63, 2**64, -(2**70), True, 1.0, "1", None, np.int64(5)])


@contextmanager
def _python_alone() -> Generator[None]:
    with (
        patch.object(block_hashes, "NATIVE", None),
        patch.object(hash_table, "NATIVE", None),
        patch.object(leaf_removal, "NATIVE", None),
    ):
        yield


def _hashes(tokens: Any, block_size: int, start: int, parent: int) -> list[int] | str:
    try:
        return BlockHasher(9, block_size).hashes(tokens, 2**63 + 1, start, parent).tolist()
    except ValueError as error:
        return str(error)


@given(
    st.lists(_IDS | _ODD_IDS, max_size=24) | st.lists(_IDS, max_size=80),
    st.integers(1, 9),
    st.integers(0, 1100),
    st.integers(0, 2**64 - 1),
)
def test_a_list_has_the_same_hashes(tokens: list[Any], block_size: int, start: int, parent: int) -> None:
    found = _hashes(tokens, block_size, start, parent)
    with _python_alone():
        assert _hashes(tokens, block_size, start, parent) == found


@pytest.mark.parametrize("dtype", ["<i4", "<u4", ">u4", "<i8", "<u8", "<u2"])
@pytest.mark.parametrize("step", [1, 2, -1])
@pytest.mark.parametrize("offset", [0, 1])
def test_an_array_has_the_same_hashes(dtype: str, step: int, offset: int) -> None:
    memory = bytes(offset) + np.arange(100, 165).astype(dtype).tobytes()
    tokens = np.frombuffer(memory, dtype, offset=offset)[::step]
    found = _hashes(tokens, 4, 0, 0)
    assert found == _hashes(tokens.tolist(), 4, 0, 0)
    with _python_alone():
        assert _hashes(tokens, 4, 0, 0) == found


class _Table:
    """A table, and the array that its hashes stand in."""

    def __init__(self, capacity: int) -> None:
        self.keys = np.zeros(capacity + 1, np.uint64)
        self.table = HashTable(self.keys)

    def insert(self, hashes: NDArray[np.uint64], numbers: NDArray[np.uint32]) -> None:
        self.keys[numbers] = hashes
        self.table.insert(numbers)

    def remove(self, numbers: NDArray[np.uint32]) -> None:
        self.table.remove(numbers)
        self.keys[numbers] = 0


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 120)), max_size=12),
    st.sampled_from([1, 1 << 20, 1 << 32, 1 << 58]),
    st.integers(0, 2**32),
)
def test_tables_with_and_without_native_code_answer_as_a_dict(
    changes: list[tuple[bool, int]], step: int, seed: int
) -> None:
    """`step`: hashes that differ in a few bits alone."""
    rng = np.random.default_rng(seed)
    native, python = _Table(300), _Table(300)
    every = np.arange(1, 301).astype(np.uint64) * np.uint64(step) + np.uint64(seed)
    every = np.unique(every[every != 0])
    held: dict[int, int] = {}
    for is_insertion, count in changes:
        if is_insertion:
            absent = [one for one in every.tolist() if one not in held]
            free = [one for one in range(1, 301) if one not in held.values()]
            hashes = np.array(rng.permutation(np.array(absent, np.uint64))[:count], np.uint64)
            numbers = np.array(free[: len(hashes)], np.uint32)
            held |= dict(zip(hashes.tolist(), numbers.tolist(), strict=True))
            native.insert(hashes, numbers)
        else:
            hashes = rng.permutation(np.array(list(held), np.uint64))[:count]
            numbers = np.array([held.pop(one) for one in hashes.tolist()], np.uint32)
            native.remove(numbers)
        with _python_alone():
            python.insert(hashes, numbers) if is_insertion else python.remove(numbers)
        values = np.arange(301, dtype=np.uint32) // 7
        leading = np.array([*list(held)[: count // 2], 77, *list(held)[:3]], np.uint64)
        asked = np.array([0, *every.tolist(), 0, *list(held), 0], np.uint64)
        found = native.table.find(asked), native.table.find_runs(leading, values)
        with _python_alone():
            assert python.table.find(asked).tolist() == found[0].tolist()
            assert python.table.find_runs(leading, values) == found[1]
        assert found[0].tolist() == [held.get(one, 0) for one in asked.tolist()]
        assert len(native.table) == len(python.table) == len(held)


@pytest.mark.parametrize("is_python", [False, True])
def test_a_row_of_numbers_is_found_wherever_the_hashes_stand(is_python: bool) -> None:
    with _python_alone() if is_python else nullcontext():
        _find_a_row()


def _find_a_row() -> None:
    table = _Table(40)
    hashes = np.arange(11, 51, dtype=np.uint64)
    table.insert(hashes, np.arange(1, 41, dtype=np.uint32))
    values = table.keys.astype(np.uint32)
    assert table.table.find(np.array([13, 14, 0], np.uint64)).tolist() == [3, 4, 0]
    assert table.table.find_runs(np.array([11, 0], np.uint64), values) == [(1, 11)]
    assert table.table.find_runs(hashes[:0], values) == []
    shifted = np.frombuffer(b"x" + hashes.tobytes(), np.uint64, offset=1)
    two = np.concatenate((hashes[20:], hashes[:20]))
    for asked in (hashes, hashes[::-1], shifted, np.repeat(hashes, 2)[::2], two, np.append(two, two[:3])):
        assert table.table.find(asked).tolist() == [one - 10 for one in asked.tolist()]
        assert table.table.find_runs(asked, values)[-1] == (len(asked), asked.item(-1))
    table.remove(np.array([25], np.uint32))
    with_gap = [0 if one == 35 else one - 10 for one in two.tolist()]
    assert table.table.find(two).tolist() == with_gap
    two[two == 35] = 0  # no hash, though number 25 has it
    assert table.table.find(two).tolist() == with_gap
    assert table.table.find_runs(two, values)[-1] == (4, 34)


def _links(parents: list[int], sets: list[int], epochs: list[int]) -> NodeLinks:
    """Returns a tree: node `i + 1` stands behind node `parents[i]`, which has a lower number."""
    children = [0] * (len(parents) + 1)
    for parent in parents:
        children[parent] += 1
    children[0] = 0
    return _arrays([0, *parents], children, [0, *sets], [0, *epochs])


def _arrays(parents: list[int], children: list[int], sets: list[int], epochs: list[int]) -> NodeLinks:
    return NodeLinks(
        memoryview(array("I", parents)),
        memoryview(array("I", children)),
        memoryview(array("I", sets)),
        memoryview(array("I", epochs)),
        memoryview(bytearray(len(parents))),
    )


@given(st.data(), st.integers(1, 30), st.sampled_from([0, 3, 6]), st.integers(1, 12))
def test_the_same_leaves_are_removed(data: st.DataObject, nodes: int, epoch: int, most: int) -> None:
    parents = [data.draw(st.integers(0, number)) for number in range(nodes)]
    few = st.integers(0, 2)
    sets, epochs = ([data.draw(few) for _ in parents] for _ in range(2))
    candidates = data.draw(st.lists(st.integers(1, nodes), unique=True, max_size=nodes))
    given = np.array(candidates, np.uint32)
    outcomes: list[tuple[object, ...]] = []
    for is_python in (False, True):
        links = _links(parents, sets, [3 * one + 2 for one in epochs])
        for number in candidates if epoch else candidates[:1]:
            links.is_queued[number] = 1
        if is_python:
            with _python_alone():
                outcome = remove_leaves(links, given, epoch, most)
        else:
            outcome = remove_leaves(links, given, epoch, most)
        outcomes.append((*_lists(outcome), *(each.tolist() for each in links)))
        children = links.children.tolist()
        assert {number for number in range(1, nodes + 1) if children[number] == FREED} == set(outcomes[-1][1])  # pyright: ignore[reportArgumentType]
    assert outcomes[0] == outcomes[1]


def _lists(outcome: RemovedLeaves) -> tuple[int, list[int], list[int]]:
    return outcome.left, outcome.removed.tolist(), outcome.queued.tolist()


def test_arrays_that_are_no_table_are_refused() -> None:
    assert NATIVE is not None
    hashes, numbers = np.zeros(4, np.uint64), np.zeros(4, np.uint32)
    table = (hashes, np.zeros(64, np.uint32), numbers.copy())
    NATIVE.find_nodes(table, 64, 64, hashes, numbers)  # this one is a table
    wrong: list[tuple[Any, int, int]] = [
        *((table[:2], 64, 64), ([*table], 64, 64), (table, 0, 0), (table, 64, 63), (table, 64, 65), (table, 32, 65)),
        *(((hashes, table[1], numbers[:3]), 64, 64), ((hashes, table[1], bytes(16)), 64, 64), (table, -1, 64)),
        (((np.zeros(9, np.uint8)), table[1], numbers), 64, 64),
    ]
    for arguments in wrong:
        with pytest.raises((TypeError, ValueError, BufferError, OverflowError)):
            NATIVE.find_nodes(*arguments, hashes, numbers)
    with pytest.raises(ValueError, match="different lengths"):
        NATIVE.remove_leaves((numbers, numbers, numbers, numbers[:3], bytearray(4)), numbers, 0, 9)


def test_numbers_outside_of_the_arrays_are_not_followed() -> None:
    assert NATIVE is not None
    keys, far = np.full(4, 5, np.uint64), np.full(64, 2**31, np.uint32)
    numbers = np.ones(3, np.uint32)
    NATIVE.find_nodes((keys, far, far[:4].copy()), 64, 64, np.array([5, 6, 7], np.uint64), numbers)
    assert numbers.tolist() == [0, 0, 0]
    NATIVE.unlink_nodes((keys, far, far[:4].copy()), 64, 64, np.array([9, 3], np.uint32))
    links = _arrays([0, 99], [0, 0], [0, 99], [0, 99])
    found = NATIVE.remove_leaves(links, np.array([7, 1], np.uint32), 0, 9)
    assert np.frombuffer(found[1], np.uint32).tolist() == [1]


def test_a_long_chain_is_removed_at_once() -> None:
    links = _links([*range(5000)], [0] * 5000, [1] * 5000)
    found = remove_leaves(links, np.array([5000], np.uint32), 0, 1)
    assert _lists(found) == (0, [*range(5000, 0, -1)], [])


@pytest.mark.parametrize("is_python", [False, True])
def test_of_held_nodes_no_more_go_than_were_asked_for(is_python: bool) -> None:
    links = _links([*range(5)], [1, 0, 1, 1, 1], [2] * 5)
    with _python_alone() if is_python else nullcontext():
        assert _lists(remove_leaves(links, np.array([5], np.uint32), 2, 2)) == (0, [5, 4], [3])
        assert _lists(remove_leaves(links, np.array([3], np.uint32), 2, 1)) == (0, [3, 2], [1])  # nobody holds node 2
