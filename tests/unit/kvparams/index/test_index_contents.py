"""Tests copies of an index: what one feed believes, told to another, is believed there."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.prefix_index import PrefixIndex
from kvparams.index.routing_feed import RoutingFeed

_CHAINS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), st.integers(0, 12), st.integers(1, 12)), max_size=24
)


def _prompt(family: int, shared: int, own: int, number: int) -> BlockHashes:
    """Blocks: the first ones are those of all prompts of a family."""
    die = random.Random(family)
    front = [die.getrandbits(63) + 1 for _ in range(shared)]
    die = random.Random(1000 + number)
    return np.array(front + [die.getrandbits(63) + 1 for _ in range(own)], np.uint64)


def _feed(capacity: int = 1000) -> tuple[PrefixIndex, RoutingFeed]:
    index = PrefixIndex(5000)
    return index, RoutingFeed(index, capacity, capacity)


@given(_CHAINS)
def test_a_copy_gives_the_same_answers(chains: list[tuple[str, int, int, int]]) -> None:
    index, feed = _feed()
    prompts = [_prompt(family, shared, own, number) for number, (_, family, shared, own) in enumerate(chains)]
    for (worker, *_), prompt in zip(chains, prompts, strict=True):
        feed.record_routed(worker, prompt)
    copied, other = _feed()
    for worker, capacity, hashes, parents in feed.contents():
        other.record_contents(worker, capacity, hashes, parents)
    for prompt in prompts:
        assert copied.match(prompt) == index.match(prompt)
        last = int(prompt[-1])
        assert copied.chain_to(last, len(prompt)).tolist() == prompt.tolist()


@given(_CHAINS, st.integers(1, 30))
def test_a_chain_is_found_by_its_last_block(chains: list[tuple[str, int, int, int]], most: int) -> None:
    index, feed = _feed()
    for number, (worker, family, shared, own) in enumerate(chains):
        prompt = _prompt(family, shared, own, number)
        feed.record_routed(worker, prompt)
        for end in range(1, len(prompt) + 1):
            found = index.chain_to(int(prompt[end - 1]), most)
            assert found.tolist() == prompt[max(0, end - most) : end].tolist()
    assert not len(index.chain_to(12345, most))


def test_what_has_no_room_is_left_out_and_the_newest_are_kept() -> None:
    _, feed = _feed(64)
    for number in range(8):
        feed.record_routed("a", _prompt(number, 0, 8, number))
    copied, other = _feed(24)
    for worker, _, hashes, parents in feed.contents():
        other.record_contents(worker, 24, hashes, parents)
    assert len(copied) == 24
    assert other.capacity("a") == 24
    other.record_routed("a", _prompt(50, 0, 8, 50))  # it goes on as ever
    assert copied.match(_prompt(50, 0, 8, 50)).held[0] == {"a": 8}


def test_blocks_behind_unknown_ones_are_kept_apart() -> None:
    index, feed = _feed()
    hashes = np.array([5, 6, 7], np.uint64)
    feed.record_contents("a", 10, hashes, np.array([99, 5, 6], np.uint64))
    assert index.chain_to(7, 10).tolist() == [5, 6, 7]
    feed.record_contents("a", 10, hashes, np.array([0, 5, 6], np.uint64))  # repeated: nothing changes
    assert len(index) == 3


@pytest.mark.parametrize("hashes", [[5, 5], [0, 1]])
def test_hashes_that_cannot_be_are_refused(hashes: list[int]) -> None:
    index, feed = _feed()
    with pytest.raises(ValueError, match="twice, or is 0"):
        feed.record_contents("a", 10, np.array(hashes, np.uint64), np.zeros(2, np.uint64))
    assert not len(index)
    assert not index.match(np.array([5], np.uint64)).held[0]


def test_many_blocks_are_added_and_then_evicted_one_chain_after_the_other() -> None:
    index, feed = _feed(4000)
    prompts = [_prompt(number, 0, 40, number) for number in range(100)]
    for prompt in prompts:
        feed.record_routed("a", prompt)
    copied, other = _feed(4000)
    for worker, capacity, hashes, parents in feed.contents():
        other.record_contents(worker, capacity, hashes, parents)
    assert len(copied) == len(index) == 4000
    for number in range(100, 150):
        other.record_routed("a", _prompt(number, 0, 40, number))
    assert len(copied) <= 4000
    whole = sum(len(prompt) == copied.match(prompt).held[0].get("a", 0) for prompt in prompts)
    assert 40 <= whole <= 60  # leaves go first, so hardly a chain is cut in the middle


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=40, unique_by=lambda each: each[0]))
def test_blocks_that_stand_in_front_of_themselves_are_kept_without_a_front(told: list[tuple[int, int]]) -> None:
    index = PrefixIndex(64)
    index.stored("b", np.array([31, 30], np.uint64))
    columns = np.array(told, np.uint64).reshape(-1, 2)
    index.stored_forest("a", columns[:, 0], columns[:, 1])
    fronts = {30: 31, **{block: front for block, front in told if block != 30}}

    def chain(block: int) -> list[int]:
        """Returns the blocks up to this one, or it alone where following its fronts leads nowhere."""
        found: list[int] = []
        at = block
        while at in (*fronts, 31) and len(found) < 50:
            found.append(at)
            at = fronts.get(at, 0)
        return found[::-1] if len(found) < 50 else [block]

    for block in fronts:
        assert index.chain_to(block, 1000).tolist() == chain(block)
    index.forget(1000)
    assert not len(index), "they can be evicted"


def test_what_is_evicted_while_contents_are_read_is_not_told() -> None:
    """A copy is read in pieces; between two of them nodes are freed, and used for other blocks."""
    index = PrefixIndex(1 << 15)
    prompts = [_prompt(number, 0, 100, number) for number in range(100)]
    for prompt in prompts:
        index.stored("a", prompt)
    pieces = index.contents("a", 0)
    told = set(next(hashes for hashes, _ in pieces if len(hashes)).tolist())
    gone = [hash for prompt in prompts for hash in prompt.tolist() if hash not in told]
    index.removed("a", np.array(gone[:3000], np.uint64))
    for number in range(100, 120):
        index.stored("b", _prompt(number, 0, 100, number))
    rest = [hash for hashes, _ in pieces for hash in hashes.tolist()]
    assert sorted(rest) == sorted(gone[3000:])
    index.cleared("a")
    assert not list(index.contents("a", 0))


def test_a_worker_that_is_emptied_while_contents_are_read_is_not_told_any_more() -> None:
    _, feed = _feed(5000)
    for number in range(50):
        feed.record_routed("a", _prompt(number, 0, 100, number))
    pieces = feed.contents()
    assert 0 < len(next(hashes for _, _, hashes, _ in pieces if len(hashes))) < 5000
    feed.forget_worker("a")
    feed.record_routed("a", _prompt(99, 0, 5, 99))
    assert not list(pieces)


def _told(prompts: int, capacity: int = 100_000) -> tuple[PrefixIndex, RoutingFeed]:
    """Returns a feed that was told what another one knows: so many prompts of 300 blocks, one used after the other."""
    feed = RoutingFeed(PrefixIndex(1 << 17), capacity, capacity)
    for number in range(prompts):
        feed.record_routed("a", _prompt(number, 0, 300, number))
    copied = PrefixIndex(1 << 17)
    other = RoutingFeed(copied, capacity, capacity)
    for worker, told, hashes, parents in feed.contents():
        other.record_contents(worker, told, hashes, parents)
    return copied, other


def _known(index: PrefixIndex, prompts: int) -> list[bool]:
    return [bool(index.match(_prompt(number, 0, 300, number)).held[0]) for number in range(prompts)]


def test_of_what_was_told_only_what_was_used_before_a_missing_block_is_forgotten() -> None:
    copied, other = _told(40)
    assert _known(copied, 40) == [True] * 40
    other.record_reported(other.record_routed("a", _prompt(10, 0, 300, 10)), 0)
    known = _known(copied, 40)
    assert not any(known[:9])
    assert all(known[12:])


def test_a_feed_that_has_learnt_nothing_believes_the_capacity_that_it_is_told() -> None:
    _, feed = _feed(1000)
    feed.record_contents("a", 40, np.array([5], np.uint64), np.array([0], np.uint64))
    assert feed.capacity("a") == 40
    feed.record_contents("a", 30, np.array([6], np.uint64), np.array([0], np.uint64))
    assert feed.capacity("a") == 40  # it knows better now


def test_distrusted_capacities_are_as_at_first() -> None:
    _, feed = _feed(1000)
    for number in range(4):
        feed.record_routed("a", _prompt(number, 0, 100, number))
    feed.record_reported(feed.record_routed("a", _prompt(2, 0, 100, 2)), 0)
    assert feed.capacity("a") < 1000
    feed.distrust_capacities()
    assert feed.capacity("a") == 1000


def test_of_much_that_has_gone_each_call_forgets_a_part() -> None:
    index = PrefixIndex(1 << 17)
    feed = RoutingFeed(index, 100_000, 100_000)
    prompts = [_prompt(number, 0, 500, number) for number in range(60)]
    for prompt in prompts:
        feed.record_routed("a", prompt)
    feed.record_reported(feed.record_routed("a", prompts[50]), 0)
    lengths = [len(index)]
    for number in range(5):
        feed.record_routed("a", _prompt(100 + number, 0, 1, 100 + number))
        lengths.append(len(index))
    assert all(before - 8500 < after for before, after in zip([30_000, *lengths], lengths, strict=False))
    assert lengths[0] > lengths[1] > lengths[2] > 0
    assert not any(len(index.match(prompt).held[0]) for prompt in prompts[:50])
    assert index.match(prompts[50]).held[0] == {"a": 500}
    assert feed.capacity("a") <= lengths[-1] < 10_000
