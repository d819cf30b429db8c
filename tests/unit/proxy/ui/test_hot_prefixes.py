"""Tests that hot prefixes are counted as prompts share them, and that labels tell nothing."""

from kvparams_proxy.telemetry.recent_requests import PREFIX_BLOCKS
from kvparams_proxy.ui.hot_prefixes import HotPrefix, PromptBlocks, find_hot_prefixes


def prompt(*blocks: int, cached: int = 0) -> PromptBlocks:
    """A prompt of these blocks. As in the index, a hash stands for its block and all in front of it."""
    return PromptBlocks(
        [hash(blocks[:number]) % (1 << 64) for number in PREFIX_BLOCKS if number <= len(blocks)], cached
    )


def counts(found: list[HotPrefix]) -> list[tuple[int, int, int]]:
    return [(each.blocks, each.requests, each.hits) for each in found]


def test_the_longest_prefix_that_all_share_stands_for_the_shorter_ones() -> None:
    found = find_hot_prefixes([prompt(1, 2, 3, 4, 5), prompt(1, 2, 3, 4, 6, cached=4), prompt(1, 2, 3, 4, cached=1)])
    assert counts(found) == [(4, 3, 1)]
    assert found[0].parent == ""


def test_a_prefix_that_branches_is_the_parent_of_its_branches() -> None:
    left, right = [prompt(1, 2, 3, 4)] * 3, [prompt(1, 2, 5, 6)] * 2
    found = find_hot_prefixes([*left, *right, prompt(9, 9)])
    assert counts(found) == [(2, 5, 0), (4, 3, 0), (4, 2, 0)]
    assert [each.parent for each in found] == ["", found[0].label, found[0].label]


def test_what_one_prompt_has_alone_is_no_hot_prefix() -> None:
    assert find_hot_prefixes([prompt(1, 2), prompt(3, 4), prompt()]) == []


def test_only_so_many_are_named_and_their_parents_are_among_them() -> None:
    prompts = [prompt(1, 2, number // 2, number // 2) for number in range(40)]
    found = find_hot_prefixes(prompts, 5)
    assert len(found) == 5
    assert {each.parent for each in found} <= {"", *(each.label for each in found)}


def test_a_label_is_short_and_is_not_the_hash() -> None:
    shared = prompt(1, 2)
    (found,) = find_hot_prefixes([shared, shared])
    assert len(found.label) == 8
    assert all(found.label not in f"{value:016x}" for value in shared.hashes)
