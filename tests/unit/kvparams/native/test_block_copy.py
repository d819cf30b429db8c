"""Tests that pages are gathered and scattered like numpy does it, and that nothing outside of its memory is touched."""

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvparams.native import NATIVE

if NATIVE is None:
    pytest.skip("asked to do without native code, or there is no compiler", allow_module_level=True)

LAYERS, HEADS, BLOCKS, TOKENS = 3, 2, 7, 4
Array = npt.NDArray[Any]
Range = tuple[int, int, int]


def blocks_of(dim: int, order: str, seed: int) -> Array:
    """Returns random memory `[layers, heads, blocks, tokens, dim]` that lies in another order in memory."""
    sizes = {"L": LAYERS, "H": HEADS, "B": BLOCKS, "T": TOKENS}
    shape = [*(sizes[letter] for letter in order), dim]
    raw = np.frombuffer(Random(seed).randbytes(int(np.prod(shape))), dtype=np.uint8).reshape(shape)
    return raw.copy().transpose([order.index(letter) for letter in "LHBT"] + [4])


def slices_of(keys: Array, values: Array, tokens: int) -> list[tuple[object, int, int]]:
    k_bytes, v_bytes = (HEADS * tokens * int(one.shape[4]) for one in (keys, values))
    return [(keys, 0, k_bytes + v_bytes), (values, k_bytes, k_bytes + v_bytes)]


def expected(keys: Array, values: Array, ranges: list[Range]) -> bytes:
    return b"".join(
        one[layer, head, block, first : first + count].tobytes()
        for layer in range(LAYERS)
        for one in (keys, values)
        for head in range(HEADS)
        for block, first, count in ranges
    )


RANGES = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, TOKENS), st.integers(0, TOKENS)).filter(
        lambda one: one[1] + one[2] <= TOKENS
    ),
    max_size=4,
)
DIMS = st.sampled_from([1, 16, 64, 130])
ORDERS = st.sampled_from(["LHBT", "LBTH", "BLTH", "HLTB"])


@given(st.lists(RANGES, min_size=1, max_size=3), DIMS, DIMS, ORDERS, st.integers(0, 99))
def test_payloads_are_gathered_and_hashed(
    pages: list[list[Range]], k_dim: int, v_dim: int, order: str, seed: int
) -> None:
    assert NATIVE is not None
    keys, values = blocks_of(k_dim, order, seed), blocks_of(v_dim, order, seed + 1)
    for ranges in pages:
        tokens = sum(count for *_, count in ranges)
        payloads = [memoryview(bytearray(LAYERS * HEADS * tokens * (k_dim + v_dim))) for _ in range(2)]
        found = NATIVE.gather_pages(
            slices_of(keys, values, tokens), [(payload, ranges, 0, tokens, None) for payload in payloads]
        )
        wanted = expected(keys, values, ranges)
        assert [bytes(payload) for payload in payloads] == [wanted] * 2
        assert found == [xxh3_64_intdigest(wanted)] * 2


@given(RANGES, st.integers(0, 3), st.integers(0, 3), DIMS, ORDERS, st.integers(0, 99))
def test_a_part_of_a_payload_is_scattered_and_nothing_else_is_written(
    ranges: list[Range], skip: int, after: int, dim: int, order: str, seed: int
) -> None:
    assert NATIVE is not None
    tokens = skip + sum(count for *_, count in ranges) + after
    payload = Random(seed).randbytes(LAYERS * HEADS * tokens * 2 * dim)
    native, plain = ([blocks_of(dim, order, seed), blocks_of(dim, order, seed + 1)] for _ in range(2))
    page = (memoryview(payload), ranges, skip, tokens, None)
    assert NATIVE.scatter_pages(slices_of(native[0], native[1], tokens), [page]) == 1
    shaped = np.frombuffer(payload, dtype=np.uint8).reshape(LAYERS, 2, HEADS, tokens, dim)
    for number, target in enumerate(plain):
        at = skip
        for block, first, count in ranges:
            target[:, :, block, first : first + count] = shaped[:, number, :, at : at + count]
            at += count
    assert [one.tobytes() for one in native] == [one.tobytes() for one in plain]


def test_a_payload_that_is_gathered_in_part_has_no_checksum() -> None:
    assert NATIVE is not None
    keys = values = blocks_of(8, "LHBT", 1)
    payload = memoryview(bytearray(LAYERS * HEADS * 4 * 16))
    slices = slices_of(keys, values, 4)
    assert NATIVE.gather_pages(slices, [(payload, [(0, 0, 4)], 0, 4, None)]) is not None
    assert NATIVE.gather_pages(slices[:1], [(payload, [(0, 0, 4)], 0, 4, None)]) is None
    assert NATIVE.gather_pages(slices, [(payload, [(0, 0, 3)], 0, 4, None)]) is None
    assert NATIVE.gather_pages(slices, [(payload, [(0, 0, 3)], 1, 4, None)]) is None


def test_a_payload_whose_slices_overlap_has_no_checksum() -> None:
    """What was hashed first is not what the payload holds at the end."""
    assert NATIVE is not None
    one, other, last = (blocks_of(1, "LHBT", seed)[:1, :1] for seed in range(3))
    payload = memoryview(bytearray(TOKENS * 2))
    pages: list[Any] = [(payload, [(0, 0, TOKENS)], 0, TOKENS, None)]
    assert NATIVE.gather_pages([(one, 0, 0), (last, TOKENS, 0)], pages) is not None, "the control: side by side"
    assert NATIVE.gather_pages([(one, 0, 0), (other, TOKENS // 2, 0), (last, TOKENS, 0)], pages) is None


def test_what_lies_outside_is_not_copied() -> None:
    assert NATIVE is not None
    keys = values = blocks_of(8, "LHBT", 1)
    before = keys.tobytes()
    payload = memoryview(bytearray(b"\1" * (LAYERS * HEADS * 4 * 16)))
    good = slices_of(keys, values, 4)
    endless = np.lib.stride_tricks.as_strided(keys, (1, 1, 1, 2**50, 1), (1, 1, 1, 0, 1))
    odd: list[tuple[list[Any], list[Any]]] = [
        (good, [(payload, [(BLOCKS, 0, 4)], 0, 4, None)]),
        (good, [(payload, [(-1, 0, 4)], 0, 4, None)]),
        (good, [(payload, [(0, 1, 4)], 0, 4, None)]),
        (good, [(payload, [(0, 0, 2**62)], 0, 4, None)]),
        (good, [(payload, [(0, 0, 4)], 1, 4, None)]),
        (good, [(payload, [(0, 0, 4)], 0, 5, None)]),
        (good, [(payload, [(0, 0, 4)], 0, 2**62, None)]),
        (good, [(payload[:-1], [(0, 0, 4)], 0, 4, None)]),
        (good, [(payload, [(0, 0, 4)], 0, 4, None), None]),
        (good, [(payload, [(0, 0)], 0, 4, None)]),
        (good, [(payload, [(0, 0, "4")], 0, 4, None)]),
        ([(keys, 1, 64)], [(payload, [(0, 0, 4)], 0, 4 * LAYERS * 4, None)]),
        ([(keys, 0, 2**62)], [(payload, [(0, 0, 4)], 0, 4, None)]),
        ([(keys, 2**62, 64)], [(payload, [(0, 0, 4)], 0, 4, None)]),
        ([(keys[..., ::2], 0, 64)], [(payload, [(0, 0, 4)], 0, 4, None)]),
        ([(keys[:, :, ::-1], 0, 64)], [(payload, [(0, 0, 4)], 0, 4, None)]),
        ([(keys[0], 0, 64)], [(payload, [(0, 0, 4)], 0, 4, None)]),
        ([(np.ndarray(keys.shape, "V0"), 0, 0)], [(payload, [(0, 0, 4)], 0, 4, None)]),  # elements without a byte
        ([(endless, 0, 0)], [(payload, [(0, 0, 2**50)] * 2**14, 0, 4, None)]),  # 2**64 tokens in all
        ([(keys, 0)], [(payload, [(0, 0, 4)], 0, 4, None)]),
        ([], [(payload, [(0, 0, 4)], 0, 4, None)]),
    ]
    for slices, pages in odd:
        assert NATIVE.gather_pages(slices, pages) is None, (slices, pages)
        assert NATIVE.scatter_pages(slices, pages) is None, (slices, pages)
    assert set(bytes(payload)) == {1}
    assert keys.tobytes() == before


def test_memory_that_cannot_be_used_is_refused() -> None:
    assert NATIVE is not None
    keys = values = blocks_of(8, "LHBT", 1)
    slices = slices_of(keys, values, 4)
    fixed = memoryview(bytes(LAYERS * HEADS * 4 * 16))
    with pytest.raises(BufferError):
        NATIVE.gather_pages(slices, [(fixed, [(0, 0, 4)], 0, 4, None)])
    keys.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        NATIVE.scatter_pages(slices, [(fixed, [(0, 0, 4)], 0, 4, None)])
    fixed.release()
    with pytest.raises(ValueError, match="released"):
        NATIVE.scatter_pages(slices_of(values.copy(), values.copy(), 4), [(fixed, [(0, 0, 4)], 0, 4, None)])
    with pytest.raises(TypeError):
        NATIVE.gather_pages([])  # type: ignore[call-arg]


# ---- large pages, which are written past the caches

LARGE_TOKENS = 64
STREAMED = 128 << 10
"""From so many bytes on a payload is written past the caches."""


def aligned(raw: bytes, misaligned: int) -> Array:
    """Returns these bytes in memory that begins `misaligned` bytes behind a multiple of 64, between two guards."""
    memory = np.full(len(raw) + 256, 0xA5, dtype=np.uint8)
    start = 64 + (misaligned - memory.ctypes.data) % 64
    memory[start : start + len(raw)] = np.frombuffer(raw, dtype=np.uint8)
    return memory[start - 64 : start + len(raw) + 64]


def large_blocks_of(dim: int, order: str, seed: int, misaligned: int) -> tuple[Array, Array]:
    """Returns all of the memory with its guards, and the view of the blocks."""
    sizes = {"L": LAYERS, "H": HEADS, "B": BLOCKS, "T": LARGE_TOKENS}
    shape = [*(sizes[letter] for letter in order), dim]
    memory = aligned(Random(seed).randbytes(int(np.prod(shape))), misaligned)
    view = memory[64:-64].reshape(shape).transpose([order.index(letter) for letter in "LHBT"] + [4])
    return memory, view


LARGE_RANGES = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, LARGE_TOKENS - 1), st.integers(1, LARGE_TOKENS)).filter(
        lambda one: one[1] + one[2] <= LARGE_TOKENS
    ),
    min_size=6,
    max_size=9,
)
LARGE_DIMS = st.sampled_from([64, 128, 192, 200])
MISALIGNED = st.sampled_from([0, 0, 32, 8])


@given(LARGE_RANGES, LARGE_DIMS, LARGE_DIMS, ORDERS, st.integers(0, 99), MISALIGNED, MISALIGNED)
@settings(deadline=None, max_examples=60)
def test_large_payloads_are_gathered_and_hashed(
    ranges: list[Range], k_dim: int, v_dim: int, order: str, seed: int, of_blocks: int, of_payload: int
) -> None:
    assert NATIVE is not None
    _, keys = large_blocks_of(k_dim, order, seed, of_blocks)
    _, values = large_blocks_of(v_dim, order, seed + 1, of_blocks)
    pages = [ranges, ranges[::-1]]
    tokens = sum(count for *_, count in ranges)
    nbytes = LAYERS * HEADS * tokens * (k_dim + v_dim)
    payloads = [aligned(bytes(nbytes), of_payload) for _ in pages]
    found = NATIVE.gather_pages(
        slices_of(keys, values, tokens),
        [(payload[64:-64].data, page, 0, tokens, None) for payload, page in zip(payloads, pages, strict=True)],
    )
    wanted = [expected(keys, values, page) for page in pages]
    assert [payload[64:-64].tobytes() for payload in payloads] == wanted
    assert found == [xxh3_64_intdigest(one) for one in wanted]
    assert {guard for payload in payloads for guard in (*payload[:64].tolist(), *payload[-64:].tolist())} == {0xA5}


@given(LARGE_RANGES, st.integers(0, 9), st.integers(0, 9), LARGE_DIMS, ORDERS, st.integers(0, 99), MISALIGNED)
@settings(deadline=None, max_examples=60)
def test_large_payloads_are_scattered_and_nothing_else_is_written(
    ranges: list[Range], skip: int, after: int, dim: int, order: str, seed: int, misaligned: int
) -> None:
    assert NATIVE is not None
    tokens = skip + sum(count for *_, count in ranges) + after
    payload = Random(seed).randbytes(LAYERS * HEADS * tokens * 2 * dim)
    native, plain = ([large_blocks_of(dim, order, seed + at, misaligned) for at in range(2)] for _ in range(2))
    page = (memoryview(payload), ranges, skip, tokens, xxh3_64_intdigest(payload))
    assert NATIVE.scatter_pages(slices_of(native[0][1], native[1][1], tokens), [page]) == 1
    shaped = np.frombuffer(payload, dtype=np.uint8).reshape(LAYERS, 2, HEADS, tokens, dim)
    for number, (_, target) in enumerate(plain):
        at = skip
        for block, first, count in ranges:
            target[:, :, block, first : first + count] = shaped[:, number, :, at : at + count]
            at += count
    assert [memory.tobytes() for memory, _ in native] == [memory.tobytes() for memory, _ in plain]


@pytest.mark.parametrize("tokens", [4, 200])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_no_byte_of_a_payload_with_another_checksum_is_written(tokens: int, bad: int) -> None:
    """And none of those behind it. The control: without a checksum the same page is written."""
    assert NATIVE is not None
    _, keys = large_blocks_of(128, "LBTH", 1, 0)
    _, values = large_blocks_of(128, "LBTH", 2, 0)
    payloads = [bytearray(Random(seed).randbytes(LAYERS * HEADS * tokens * 256)) for seed in range(3)]
    checksums = [xxh3_64_intdigest(payload) for payload in payloads]
    payloads[bad][tokens * 256 + 5] ^= 1
    places = [
        [(number, 0, tokens)] if tokens <= 64 else [(number, 0, 64)] * 3 + [(number, 0, tokens - 192)]
        for number in (0, 2, 4)
    ]
    slices = slices_of(keys, values, tokens)

    def scatter(checked: bool) -> int | None:
        assert NATIVE is not None
        return NATIVE.scatter_pages(
            slices,
            [
                (memoryview(payload), place, 0, tokens, checksum if checked else None)
                for payload, place, checksum in zip(payloads, places, checksums, strict=True)
            ],
        )

    before = keys.copy(), values.copy()
    assert scatter(checked=True) == bad
    for number, (block, *_) in enumerate(place[0] for place in places):
        same = [
            bool((now[:, :, block] == then[:, :, block]).all())
            for now, then in zip((keys, values), before, strict=True)
        ]
        assert same == [number >= bad] * 2, number
    assert scatter(checked=False) == 3
    assert not (keys[:, :, 4] == before[0][:, :, 4]).all()
    assert NATIVE.scatter_pages(slices, [(memoryview(payloads[0]), places[0], 0, tokens, "1")]) is None  # pyright: ignore[reportArgumentType]
    assert NATIVE.scatter_pages(slices, [(memoryview(payloads[0]), places[0], 0, tokens, -1)]) is None
