"""Tests that blocks are shared while they are used, kept while there is room, and given out once."""

import random

from reference_engine.cache import BlockPool, chain

ROOT = b"root"


def names_of(tokens: list[int]) -> list[bytes]:
    return chain(ROOT, tokens, 4)


def test_a_block_is_named_after_everything_up_to_its_end() -> None:
    tokens = list(range(12))

    assert len(names_of(tokens)) == 3
    assert names_of(tokens[:11]) == names_of(tokens)[:2]
    assert names_of([9, *tokens[1:]])[2] != names_of(tokens)[2]
    assert chain(b"other", tokens, 4)[0] != names_of(tokens)[0]
    assert chain(names_of(tokens)[0], tokens[4:], 4) == names_of(tokens)[1:]


def test_a_released_prefix_is_found_again_and_does_not_count_as_in_use() -> None:
    pool, names = BlockPool(8), names_of(list(range(8)))
    first = pool.allocate(names, 3)
    assert first is not None
    blocks, held = first
    assert held == 0
    for block, name in zip(blocks, names, strict=False):
        pool.name(block, name)
    pool.release(blocks)

    assert (pool.in_use, pool.cached) == (0, 2)
    assert pool.allocate(names, 3) is not None
    assert (pool.in_use, pool.cached) == (3, 0)


def test_a_prefix_in_use_is_shared() -> None:
    pool, names = BlockPool(4), names_of(list(range(8)))
    first = pool.allocate(names, 2)
    assert first is not None
    for block, name in zip(first[0], names, strict=True):
        pool.name(block, name)

    second = pool.allocate(names, 3)

    assert second is not None
    assert second[0][:2] == first[0]
    assert second[1] == 2
    assert pool.in_use == 3
    pool.release(first[0])
    assert pool.in_use == 3


def test_cached_blocks_are_taken_when_free_ones_run_out_the_end_of_a_prefix_first() -> None:
    pool, names = BlockPool(4), names_of(list(range(12)))
    first = pool.allocate(names, 3)
    assert first is not None
    for block, name in zip(first[0], names, strict=True):
        pool.name(block, name)
    pool.release(first[0])

    assert pool.allocate([], 2) is not None  # the free one and the least useful cached one

    kept = pool.allocate(names, 2)
    assert kept is not None
    assert kept[1] == 2


def test_nothing_is_given_out_when_not_all_blocks_are_free() -> None:
    pool = BlockPool(4)
    assert pool.allocate([], 3) is not None

    assert pool.allocate([], 2) is None
    assert pool.in_use == 3


def test_blocks_are_conserved_over_any_order_of_requests() -> None:
    draw = random.Random(5)
    pool, holding = BlockPool(32), list[tuple[list[int], list[bytes]]]()
    for _ in range(2_000):
        if holding and draw.random() < 0.5:
            blocks, names = holding.pop(draw.randrange(len(holding)))
            for block, name in zip(blocks, names, strict=False):
                pool.name(block, name)
            pool.release(blocks)
        else:
            names = names_of([draw.randrange(2) for _ in range(draw.randrange(24))])
            found = pool.allocate(names, len(names) + draw.randrange(1, 3))
            if found is not None:
                holding.append((found[0], names))
        used = {block for blocks, _ in holding for block in blocks}
        assert pool.in_use == len(used)
        assert pool.in_use + pool.cached <= 32
    for blocks, _ in holding:
        pool.release(blocks)
    assert pool.in_use == 0
    everything = pool.allocate([], 32)
    assert everything is not None
    assert sorted(everything[0]) == list(range(32))
