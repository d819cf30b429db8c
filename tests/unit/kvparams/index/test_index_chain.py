"""Tests the numpy code for block hashes against the spec, and the properties that the index needs."""

import struct
from array import array
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.index.block_hashes import BlockHasher
from kvparams.tokens import pack
from tests.contract.test_vectors import Case, cases, name_of

MASK = 2**64 - 1
IDS = st.integers(0, 2**32 - 1)
TEXTS = st.none() | st.text(max_size=8)


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def stream(key: int, n: int) -> int:
    return mix(key + (n + 1) * 0x9E3779B97F4A7C15 & MASK)


def plain_namespace(seed: int, *texts: str | None) -> int:
    """As section 16 says it, with Python's integers."""
    encoded = b"kvparams chain namespace 1\n" + seed.to_bytes(8, "little")
    for name, text in zip(("model", "lora", "cache_salt"), texts, strict=True):
        encoded += struct.pack("<I", len(name)) + name.encode()
        raw = (text or "").encode()
        encoded += b"\0" if text is None else b"\1" + struct.pack("<I", len(raw)) + raw
    return int.from_bytes(sha256(encoded).digest()[:8], "little")


def plain_hashes(seed: int, size: int, namespace: int, ids: list[int]) -> list[int]:
    """As section 16 says it, block by block."""
    digest = sha256(b"kvparams chain 1\n" + seed.to_bytes(8, "little") + struct.pack("<I", size)).digest()
    weights, positions = struct.unpack_from("<QQ", digest)
    found: list[int] = []
    before = 0
    for i in range(len(ids) // size):
        block = ids[i * size : (i + 1) * size]
        total = sum((stream(weights, j) | 1) * token for j, token in enumerate(block))
        before = (before + mix(namespace + stream(positions, i) + total & MASK)) & MASK
        found.append(before)
    return found


@pytest.mark.parametrize("case", cases("chain"), ids=name_of)
def test_the_sdk_derives_the_block_hashes_that_the_vector_says(case: Case) -> None:
    """Spec-mandated, 1.0#16.1, 1.0#16.2."""
    seed, named = int(case["seed"], 16), case["namespace"]
    chain = BlockHasher(seed, case["block_size"])
    namespace = chain.namespace(named["model"], named["lora"], named["cache_salt"])
    assert f"{namespace:016x}" == case["number"]
    found = chain.hashes(case["token_ids"], namespace).tolist()
    assert [f"{one:016x}" for one in found] == case["hashes"]


@pytest.mark.parametrize("case", cases("chain"), ids=name_of)
def test_the_words_of_the_spec_give_the_block_hashes_that_the_vector_says(case: Case) -> None:
    """Spec-mandated, 1.0#16.1: computed without any code of the package."""
    seed, named = int(case["seed"], 16), case["namespace"]
    namespace = plain_namespace(seed, named["model"], named["lora"], named["cache_salt"])
    assert f"{namespace:016x}" == case["number"]
    found = plain_hashes(seed, case["block_size"], namespace, case["token_ids"])
    assert [f"{one:016x}" for one in found] == case["hashes"]


@given(
    seed=st.integers(0, MASK),
    size=st.integers(1, 40),
    texts=st.tuples(st.text(min_size=1, max_size=8), TEXTS, TEXTS),
    ids=st.lists(IDS, max_size=200),
)
def test_what_is_vectorised_is_what_the_words_say(
    seed: int, size: int, texts: tuple[str, str | None, str | None], ids: list[int]
) -> None:
    """Spec-mandated, 1.0#16.1, 1.0#16.2."""
    chain = BlockHasher(seed, size)
    namespace = chain.namespace(*texts)
    assert namespace == plain_namespace(seed, *texts)
    assert chain.hashes(ids, namespace).tolist() == plain_hashes(seed, size, namespace, ids)


@given(ids=st.lists(IDS, min_size=30, max_size=120), at=st.integers(0, 12))
def test_hashes_can_be_continued_behind_any_block(ids: list[int], at: int) -> None:
    chain = BlockHasher(7, 3)
    whole = chain.hashes(ids, 5)
    at = min(at, len(whole))
    parent = int(whole[at - 1]) if at else 0
    assert chain.hashes(ids[3 * at :], 5, at, parent).tolist() == whole[at:].tolist()


@given(ids=st.lists(IDS, min_size=1, max_size=60), tail=st.lists(IDS, max_size=60))
def test_a_hash_depends_on_nothing_behind_its_block(ids: list[int], tail: list[int]) -> None:
    chain = BlockHasher(7, 4)
    alone = chain.hashes(ids, 5).tolist()
    assert chain.hashes(ids + tail, 5).tolist()[: len(alone)] == alone


@given(ids=st.lists(IDS, min_size=8, max_size=64), place=st.integers(0, 63), other=IDS)
def test_one_other_token_changes_every_hash_from_its_block_on(ids: list[int], place: int, other: int) -> None:
    place %= len(ids) - len(ids) % 4
    changed = [*ids[:place], other, *ids[place + 1 :]]
    same = np.asarray(BlockHasher(7, 4).hashes(ids, 5) == BlockHasher(7, 4).hashes(changed, 5)).tolist()
    first = place // 4 if other != ids[place] else len(same)
    assert same == [block < first for block in range(len(same))]


def test_every_way_to_give_ids_gives_the_same_hashes() -> None:
    ids = [0, 1, 127, 31_999, 2**31 - 1, 5, 6, 7]
    forms: list[Any] = [
        tuple(ids),
        array("I", ids),
        pack(ids),
        bytearray(pack(ids)),
        memoryview(pack(ids)),
        np.array(ids, np.int32),
        np.array(ids, ">u4"),
        np.array(ids, np.int64),
        np.repeat(np.array(ids, np.uint64), 2)[::2],
    ]
    chain = BlockHasher(1, 2)
    expected = chain.hashes(ids, 0).tolist()
    assert [chain.hashes(form, 0).tolist() for form in forms] == [expected] * len(forms)


@pytest.mark.parametrize(
    "ids",
    [
        *([-1], [2**32], [1.0], ["1"], [None], b"123"),
        *(np.array([-1], np.int32), np.array([2**32], np.uint64), np.array([1.0]), np.array([[1]])),
    ],
    ids=repr,
)
def test_what_is_no_token_id_is_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="ids"):
        BlockHasher(1, 1).hashes(ids, 0)


@pytest.mark.parametrize(("seed", "size"), [(-1, 16), (2**64, 16), (0, 0), (0, 65_537)])
def test_a_chain_of_no_seed_or_no_block_is_refused(seed: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"seed|block"):
        BlockHasher(seed, size)


def test_a_namespace_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model"):
        BlockHasher(1, 16).namespace("")


@pytest.mark.parametrize("shape", ["random", "counting", "one token differs", "two tokens trade places", "high bits"])
def test_hashes_of_prompts_of_any_shape_spread_over_every_bit(shape: str) -> None:
    """25,000 hashes of one deployment: none equal (chance 2e-11), every bit set in half of them, every pair of
    neighbouring prompts 32 bits apart."""
    rows, size = 5_000, 16
    rng = np.random.default_rng(3)
    ids = np.zeros((rows, 5 * size), np.uint32)
    if shape == "random":
        ids[:] = rng.integers(0, 128_000, ids.shape)
    elif shape == "counting":
        ids[:] = np.arange(ids.size).reshape(ids.shape)
    elif shape == "one token differs":
        ids[:, 0] = np.arange(rows)
    elif shape == "two tokens trade places":
        ids[:, 0], ids[:, 15] = np.arange(rows), np.arange(rows)[::-1]
    else:
        ids[:, 3] = np.arange(rows, dtype=np.uint32) << np.uint32(17)
    chain = BlockHasher(2**63 + 11, size)
    found = np.stack([chain.hashes(row, 99) for row in ids])
    assert len(np.unique(found)) == found.size
    bits = (found.reshape(-1, 1) >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02
    flips = np.bitwise_count(found[1:] ^ found[:-1]).mean(axis=0)
    assert np.abs(flips - 32).max() < 0.4


def test_a_pattern_that_defeats_polynomial_hashes_does_not_defeat_this_one() -> None:
    """The control: modulo 2^64 the Thue-Morse word and its complement have one polynomial hash, whatever the base."""
    word = np.array([bin(n).count("1") % 2 for n in range(2048)], np.uint32)
    values = np.array([11, 13], np.uint64)
    powers = np.cumprod(np.full(2048, 0x9E3779B97F4A7C15, np.uint64))
    assert (values[word] * powers).sum() == (values[1 - word] * powers).sum()
    chain = BlockHasher(3, 1)
    assert not (chain.hashes(word, 0) == chain.hashes(1 - word, 0)).any()
