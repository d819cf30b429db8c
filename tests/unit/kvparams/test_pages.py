"""Tests sealed pages: a page is read as itself or not at all."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvparams.keys import Geometry, KVShard, Namespace, chain_pages
from kvparams.pages import (
    HEADER_BYTES,
    PAGE_REFUSAL_REASONS,
    PageIdentity,
    PageRefusalReason,
    page_identity,
    seal,
    verify,
)

SHAPE = Geometry(layers=2, kv_heads=2, k_dim=4, v_dim=4)
SPACE = Namespace("model", "revision", "float16", SHAPE, page_tokens=8)
PART = KVShard.whole(SHAPE)
IDENTITY = page_identity(SPACE, chain_pages(SPACE, list(range(8)))[0], PART)


def sealed(identity: PageIdentity = IDENTITY, seed: int = 0) -> bytearray:
    page = bytearray(HEADER_BYTES) + bytearray(Random(seed).randbytes(identity.payload_bytes))
    seal(memoryview(page), identity)
    return page


def reason(page: bytes | bytearray, expected: PageIdentity = IDENTITY) -> PageRefusalReason | None:
    refusal = verify(memoryview(page), expected)
    return None if refusal is None else refusal.reason


def resealed(page: bytearray) -> bytearray:
    """The page with a header checksum that fits again: what a hostile or foreign writer would produce."""
    page[248:256] = xxh3_64_intdigest(bytes(page[:248])).to_bytes(8, "little")
    return page


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_a_page_is_read_as_what_was_sealed(tokens: int, seed: int) -> None:
    namespace = replace(SPACE, page_tokens=tokens)
    identity = page_identity(namespace, chain_pages(namespace, list(range(tokens)))[0], PART)
    page = sealed(identity, seed)
    payload = bytes(page[HEADER_BYTES:])
    assert reason(page, identity) is None
    assert bytes(page[HEADER_BYTES:]) == payload
    assert reason(bytes(page), identity) is None  # a read-only buffer is as good


def test_a_checksum_that_the_writer_has_computed_already_is_taken_and_a_wrong_one_is_found_by_the_reader() -> None:
    page = sealed()
    again = bytearray(HEADER_BYTES) + page[HEADER_BYTES:]
    checksum = xxh3_64_intdigest(bytes(page[HEADER_BYTES:]))
    seal(memoryview(again), IDENTITY, payload_checksum=checksum)
    assert again == page
    seal(memoryview(again), IDENTITY, payload_checksum=checksum ^ 1)
    assert reason(again) == "flipped_payload"


def test_the_header_is_what_the_documentation_says_byte_by_byte() -> None:
    """Spec-mandated, 1.0#11.1: of a part whose layers are not numbered as its heads are."""
    identity = replace(IDENTITY, shard=KVShard(0, 2, 1, 2), payload_bytes=8 * 2 * 1 * 8 * 2)
    page = sealed(identity)
    assert page[:16] == b"KVPG" + bytes([1, 0, 0, 1, 0, 0, 0, 0, 8, 0, 0, 0])
    assert [int.from_bytes(page[at : at + 4], "little") for at in range(16, 32, 4)] == [0, 2, 1, 2]
    assert int.from_bytes(page[32:40], "little") == SPACE.payload_bytes(8, KVShard(0, 2, 1, 2)) == 8 * 2 * 1 * 8 * 2
    assert int.from_bytes(page[40:48], "little") == xxh3_64_intdigest(bytes(page[256:]))
    assert page[48:80] == SPACE.digest
    assert page[80:112] == IDENTITY.chain
    assert page[112:248] == bytes(136)
    assert int.from_bytes(page[248:256], "little") == xxh3_64_intdigest(bytes(page[:248]))


def test_every_flipped_bit_of_the_header_is_refused() -> None:
    page = sealed()
    for bit in range(8 * HEADER_BYTES):
        page[bit // 8] ^= 1 << bit % 8
        expected = "malformed" if bit < 32 else "version" if bit < 48 else "flipped_header"
        assert reason(page) == expected, bit
        page[bit // 8] ^= 1 << bit % 8
    assert reason(page) is None  # the control: unflipped it is good


@given(st.integers(0, 8 * IDENTITY.payload_bytes - 1))
def test_every_flipped_bit_of_the_payload_is_refused(bit: int) -> None:
    page = sealed()
    page[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    assert reason(page) == "flipped_payload"


@given(st.integers(0, IDENTITY.stored_bytes - 1))
def test_a_page_that_was_cut_anywhere_is_torn(length: int) -> None:
    assert reason(sealed()[:length]) == "torn"


def test_a_page_with_something_behind_it_is_torn() -> None:
    assert reason(sealed() + b"\0") == "torn"


@given(st.integers(1, IDENTITY.stored_bytes // 64 - 1))
def test_two_writings_mixed_in_one_page_are_refused(at: int) -> None:
    """What a torn write leaves: the front of one page, the rest of another, both of the same key."""
    first, second = sealed(seed=1), sealed(seed=2)
    assert reason(first[: 64 * at] + second[64 * at :]) in ("flipped_payload", "flipped_header")


def test_the_page_of_another_request_is_refused_by_what_differs() -> None:
    """Spec-mandated, 1.0#11.3."""
    pages = chain_pages(SPACE, list(range(11)))
    other = page_identity(SPACE, chain_pages(SPACE, [9] * 8)[0], PART)
    partial = page_identity(SPACE, pages[1], PART)
    salted = replace(SPACE, cache_salt="salt")
    cases: list[tuple[PageIdentity, PageRefusalReason]] = [
        (page_identity(salted, chain_pages(salted, list(range(8)))[0], PART), "namespace"),
        (other, "prefix"),
        (partial, "prefix"),
        (replace(IDENTITY, tokens=7), "length"),
        (replace(IDENTITY, payload_bytes=IDENTITY.payload_bytes - 1), "length"),
        (replace(IDENTITY, shard=KVShard(0, 2, 1, 3)), "rectangle"),
        (replace(IDENTITY, shard=KVShard(1, 3, 0, 2)), "rectangle"),
    ]
    for identity, expected in cases:
        assert reason(sealed(identity)) == expected
        assert reason(sealed(identity), identity) is None  # the control: it is a good page, only not this one


def version(page: bytearray) -> None:
    page[4] = 2


def longer_header(page: bytearray) -> None:
    page[6:8] = (512).to_bytes(2, "little")


def flags(page: bytearray) -> None:
    page[8] = 1


def impossible_rectangle(page: bytearray) -> None:
    page[16:32] = b"\xff" * 16


@pytest.mark.parametrize(
    ("change", "expected"),
    [(version, "version"), (longer_header, "version"), (flags, "version"), (impossible_rectangle, "rectangle")],
)
def test_a_well_formed_header_that_says_something_else_is_refused(
    change: Callable[[bytearray], None], expected: PageRefusalReason
) -> None:
    page = sealed()
    change(page)
    assert reason(resealed(page)) == expected


@given(st.binary(max_size=600))
def test_no_bytes_whatever_raise_an_error(noise: bytes) -> None:
    assert reason(noise) in PAGE_REFUSAL_REASONS


@given(st.binary(min_size=248, max_size=248))
def test_no_header_with_a_good_checksum_raises_an_error(header: bytes) -> None:
    page = resealed(bytearray(b"KVPG\1\0" + header[6:] + bytes(8)) + bytearray(IDENTITY.payload_bytes))
    assert reason(page) in PAGE_REFUSAL_REASONS


def test_sealing_writes_the_header_and_nothing_else() -> None:
    memory = bytearray(Random(7).randbytes(64 + IDENTITY.stored_bytes + 64))
    before = bytes(memory)
    seal(memoryview(memory)[64:-64], IDENTITY)
    assert memory[:64] == before[:64]
    assert memory[64 + HEADER_BYTES :] == before[64 + HEADER_BYTES :]


@pytest.mark.parametrize("size", [0, HEADER_BYTES, IDENTITY.stored_bytes - 1, IDENTITY.stored_bytes + 1])
def test_a_buffer_of_another_size_is_not_sealed(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        seal(memoryview(bytearray(size)), IDENTITY)
