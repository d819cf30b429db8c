"""Tests that pages are gathered and scattered like numpy does it, and that nothing outside of its memory is touched."""

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
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
            slices_of(keys, values, tokens), [(payload, ranges, 0, tokens) for payload in payloads]
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
    assert NATIVE.scatter_pages(slices_of(native[0], native[1], tokens), [(memoryview(payload), ranges, skip, tokens)])
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
    assert NATIVE.gather_pages(slices, [(payload, [(0, 0, 4)], 0, 4)]) is not None
    assert NATIVE.gather_pages(slices[:1], [(payload, [(0, 0, 4)], 0, 4)]) is None
    assert NATIVE.gather_pages(slices, [(payload, [(0, 0, 3)], 0, 4)]) is None
    assert NATIVE.gather_pages(slices, [(payload, [(0, 0, 3)], 1, 4)]) is None


def test_a_payload_whose_slices_overlap_has_no_checksum() -> None:
    """What was hashed first is not what the payload holds at the end."""
    assert NATIVE is not None
    one, other, last = (blocks_of(1, "LHBT", seed)[:1, :1] for seed in range(3))
    payload = memoryview(bytearray(TOKENS * 2))
    pages = [(payload, [(0, 0, TOKENS)], 0, TOKENS)]
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
        (good, [(payload, [(BLOCKS, 0, 4)], 0, 4)]),
        (good, [(payload, [(-1, 0, 4)], 0, 4)]),
        (good, [(payload, [(0, 1, 4)], 0, 4)]),
        (good, [(payload, [(0, 0, 2**62)], 0, 4)]),
        (good, [(payload, [(0, 0, 4)], 1, 4)]),
        (good, [(payload, [(0, 0, 4)], 0, 5)]),
        (good, [(payload, [(0, 0, 4)], 0, 2**62)]),
        (good, [(payload[:-1], [(0, 0, 4)], 0, 4)]),
        (good, [(payload, [(0, 0, 4)], 0, 4), None]),
        (good, [(payload, [(0, 0)], 0, 4)]),
        (good, [(payload, [(0, 0, "4")], 0, 4)]),
        ([(keys, 1, 64)], [(payload, [(0, 0, 4)], 0, 4 * LAYERS * 4)]),
        ([(keys, 0, 2**62)], [(payload, [(0, 0, 4)], 0, 4)]),
        ([(keys, 2**62, 64)], [(payload, [(0, 0, 4)], 0, 4)]),
        ([(keys[..., ::2], 0, 64)], [(payload, [(0, 0, 4)], 0, 4)]),
        ([(keys[:, :, ::-1], 0, 64)], [(payload, [(0, 0, 4)], 0, 4)]),
        ([(keys[0], 0, 64)], [(payload, [(0, 0, 4)], 0, 4)]),
        ([(np.ndarray(keys.shape, "V0"), 0, 0)], [(payload, [(0, 0, 4)], 0, 4)]),  # elements without a byte
        ([(endless, 0, 0)], [(payload, [(0, 0, 2**50)] * 2**14, 0, 4)]),  # 2**64 tokens in all
        ([(keys, 0)], [(payload, [(0, 0, 4)], 0, 4)]),
        ([], [(payload, [(0, 0, 4)], 0, 4)]),
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
        NATIVE.gather_pages(slices, [(fixed, [(0, 0, 4)], 0, 4)])
    keys.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        NATIVE.scatter_pages(slices, [(fixed, [(0, 0, 4)], 0, 4)])
    fixed.release()
    with pytest.raises(ValueError, match="released"):
        NATIVE.scatter_pages(slices_of(values.copy(), values.copy(), 4), [(fixed, [(0, 0, 4)], 0, 4)])
    with pytest.raises(TypeError):
        NATIVE.gather_pages([])  # type: ignore[call-arg]
