"""Tests that proxies that share nothing rank engines alike, and expect of foreign prefixes what they have found."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvparams.routing.foreign_prefixes import ForeignHits, PrefixBranches, block_key, rank_instances

IDS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
KEYS = st.integers(0, 2**64 - 1)


def names(ids: list[str], key: int) -> list[str]:
    return [ids[index] for index in rank_instances(ids, [0] * len(ids), key)]


@given(IDS, KEYS)
def test_the_order_in_which_a_proxy_knows_engines_does_not_matter(ids: list[str], key: int) -> None:
    backwards = ids[::-1]
    assert names(ids, key) == names(backwards, key)


@given(IDS, KEYS, st.data())
def test_an_engine_that_leaves_changes_the_order_of_no_others(ids: list[str], key: int, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(ids))
    rest = [id for id in ids if id != gone]
    assert names(rest, key) == [id for id in names(ids, key) if id != gone]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), KEYS)
def test_an_engine_that_holds_more_comes_first(cached: list[int], key: int) -> None:
    ids = [f"p{number}" for number in range(len(cached))]
    ranked = [cached[index] for index in rank_instances(ids, cached, key)]
    assert ranked == sorted(cached, reverse=True)


def test_prompts_are_spread_evenly_and_few_move_when_an_engine_leaves() -> None:
    ids = [f"prefill-{number}" for number in range(8)]
    keys = [block_key(number.to_bytes(4, "little")) for number in range(4000)]
    firsts = [names(ids, key)[0] for key in keys]
    counts = Counter(firsts)
    assert len(counts) == 8
    assert max(counts.values()) < 1.2 * 500
    moved = sum(one != names(ids[1:], key)[0] for one, key in zip(firsts, keys, strict=True))
    assert moved == counts["prefill-0"]


def test_a_prefix_that_prompts_leave_twice_belongs_to_several_conversations() -> None:
    branches = PrefixBranches(most=2)
    branches.record(1)
    assert not branches.is_shared(1)
    branches.record(1)
    assert branches.is_shared(1)
    branches.record(2)
    branches.record(3)
    assert not branches.is_shared(1)  # forgotten: two others were used later


def test_where_nothing_is_found_nothing_is_expected() -> None:
    hits = ForeignHits()
    assert hits.expected_share(is_first=True) > 0.7  # proxies start by agreeing
    for _ in range(100):
        hits.record(0, 8000, is_first=True)
    assert hits.expected_share(is_first=True) < 0.01
    assert hits.expected_share(is_first=False) == 0.0


def test_more_is_expected_than_was_found_so_that_proxies_go_on_agreeing() -> None:
    hits = ForeignHits()
    for number in range(400):
        hits.record(2400 if number % 2 else 400, 8000, is_first=bool(number % 2))
    assert 0.5 < hits.expected_share(is_first=True) < 0.65
    assert 0.04 < hits.expected_share(is_first=False) < 0.06


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 10_000), st.booleans()), max_size=50))
def test_a_share_is_never_more_than_all(legs: list[tuple[int, int, bool]]) -> None:
    hits = ForeignHits()
    for found, asked, is_first in legs:
        hits.record(min(found, asked), asked, is_first=is_first)
    assert all(0.0 <= hits.expected_share(is_first=each) <= 1.0 for each in (True, False))
