"""Tests snapshots of the prefix index, and the deltas that replicas exchange."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.index.block_hashes import BlockHasher
from kvparams.index.deltas import IndexDelta, apply_deltas, decode_deltas, encode_deltas, snapshot_deltas
from kvparams.index.prefix_index import PrefixIndex

CHAIN = BlockHasher(9, 1)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
CHANGES = st.lists(
    st.tuples(st.sampled_from("srrc"), st.sampled_from(["a", ("b", "pool")]), PROMPTS, st.integers(0, 3))
)


def delta(kind: str, worker: str | tuple[str, str], tokens: list[int], level: int) -> IndexDelta:
    hashes = CHAIN.hashes(tokens, 1)
    if kind == "s":
        return IndexDelta("stored", worker, hashes, 0, level)
    return (
        IndexDelta("removed", worker, hashes[len(hashes) // 2 :], 0, level)
        if kind == "r"
        else IndexDelta("cleared", worker)
    )


def made(changes: list[tuple[str, str | tuple[str, str], list[int], int]], capacity: int) -> PrefixIndex:
    index = PrefixIndex(capacity)
    for prompt in changes:  # filled twice, so that numbers of nodes are used again
        apply_deltas(index, [delta("s", "x", [7, *prompt[2]], 0)])
    apply_deltas(index, [IndexDelta("cleared", "x")])
    apply_deltas(index, [delta(*change) for change in changes])
    return index


@given(changes=CHANGES, step=st.integers(1, 5), capacity=st.sampled_from([6, 1000]))
def test_an_index_made_of_a_snapshot_answers_alike(
    changes: list[tuple[str, str | tuple[str, str], list[int], int]], step: int, capacity: int
) -> None:
    index = made(changes, capacity)
    text = [encode_deltas(deltas, CHAIN) for deltas in snapshot_deltas(index, step)]
    other = PrefixIndex(capacity)
    for part in text + text:  # whatever is said twice
        apply_deltas(other, decode_deltas(part, CHAIN))
    for _, _, tokens, _ in changes:
        hashes = CHAIN.hashes(tokens, 1)
        assert other.match(hashes) == index.match(hashes)


@given(first=CHANGES, second=CHANGES)
def test_two_replicas_that_tell_each_other_everything_believe_the_same(
    first: list[tuple[str, str | tuple[str, str], list[int], int]],
    second: list[tuple[str, str | tuple[str, str], list[int], int]],
) -> None:
    one, other = made(first, 1000), made(second, 1000)
    of_one, of_other = ([delta for part in snapshot_deltas(index) for delta in part] for index in (one, other))
    apply_deltas(one, of_other)
    apply_deltas(other, of_one)
    for _, _, tokens, _ in first + second:
        hashes = CHAIN.hashes(tokens, 1)
        assert one.match(hashes) == other.match(hashes)


def test_a_restored_tree_gives_up_leaves_first() -> None:
    index = PrefixIndex(8)
    index.stored("w", CHAIN.hashes([1, 2, 3, 4, 5, 6], 1))
    other = PrefixIndex(8)
    for part in snapshot_deltas(index, 2):
        apply_deltas(other, part)
    forgotten = other.stored("w", CHAIN.hashes([9, 9, 9, 9], 1))
    assert forgotten.tolist() == CHAIN.hashes([1, 2, 3, 4, 5, 6], 1)[:3:-1].tolist()


@pytest.mark.parametrize("other", [BlockHasher(8, 1), BlockHasher(9, 2)], ids=["seed", "block size"])
def test_deltas_of_another_chain_are_refused(other: BlockHasher) -> None:
    with pytest.raises(ValueError, match="this chain"):
        list(decode_deltas(encode_deltas([], other), CHAIN))


@given(at=st.integers(0, 80), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_deltas_are_refused_or_say_something_else(at: int, byte: int, cut: bool) -> None:
    """Never another exception, whatever was changed."""
    whole = encode_deltas(
        [IndexDelta("stored", "w", np.arange(1, 4, dtype=np.uint64), 7, 1), IndexDelta("cleared", "w")], CHAIN
    )
    damaged = whole[:at] if cut else whole[:at] + bytes([byte]) + whole[at + 1 :]
    try:
        found = list(decode_deltas(damaged, CHAIN))
    except ValueError:
        return
    assert all(one.kind in ("stored", "removed", "cleared") and 0 <= one.level < 4 for one in found)
