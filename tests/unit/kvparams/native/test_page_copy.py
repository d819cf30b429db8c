"""Tests that values are copied byte for byte, and that their checksums are those of the package xxhash."""

from collections.abc import Sequence
from random import Random
from typing import Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvparams.native import NATIVE
from kvparams.pages import HEADER_BYTES
from kvparams_connectors import hashed_copy

if NATIVE is None:
    pytest.skip("asked to do without native code, or there is no compiler", allow_module_level=True)

STREAMED: Final = 128 << 10
"""From so many bytes on a value is written past the caches, if its memory is aligned."""
SIZES: Final = st.one_of(
    st.integers(0, 2_000),
    st.integers(STREAMED - 70, STREAMED + 1_100),
    st.sampled_from([STREAMED + 1024 * 3 + 256, 300_000, (1 << 20) + 257]),
)
PLACES: Final = st.one_of(st.integers(0, 300_000), st.integers(0, 4_000).map(lambda number: 64 * number))
"""Where a value is cut into pieces. They are written past the caches if they are multiples of 64."""
GUARD: Final = 64


def memory_of(nbytes: int, misaligned: int) -> npt.NDArray[np.uint8]:
    """Returns zeroed memory that begins `misaligned` bytes behind a multiple of 64, between two guards."""
    memory = np.full(nbytes + 256, 0xA5, dtype=np.uint8)
    start = GUARD + (misaligned - GUARD - memory.ctypes.data) % 64
    memory[start : start + nbytes] = 0
    return memory[start - GUARD : start + nbytes + GUARD]


def cut(memory: npt.NDArray[np.uint8], places: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    return list(np.split(memory, sorted(place for place in places if place <= memory.size)))


@given(
    st.lists(st.tuples(SIZES, st.lists(PLACES, max_size=3)), max_size=4),
    st.sampled_from([0, 1, 31, 32]),
    st.sampled_from([0, 1, 255, HEADER_BYTES, 5_000]),
    st.integers(0, 99),
)
@example([(STREAMED + HEADER_BYTES, [])], 0, HEADER_BYTES, 1)
@example([(1 << 20, [HEADER_BYTES])], 0, HEADER_BYTES, 1)
@example([((1 << 20) + HEADER_BYTES, [64 << 10, 192 << 10])], 0, HEADER_BYTES, 1)
@example([((1 << 20) + HEADER_BYTES, [128, 64 << 10]), (STREAMED, [64])], 32, HEADER_BYTES, 2)
def test_values_are_copied_and_hashed(
    values: list[tuple[int, list[int]]], misaligned: int, skip: int, seed: int
) -> None:
    assert NATIVE is not None
    sources = [np.frombuffer(Random(seed).randbytes(size), dtype=np.uint8) for size, _ in values]
    targets = [memory_of(size, misaligned) for size, _ in values]
    pairs: list[list[tuple[object, object]]] = [
        list(zip(cut(target[GUARD:-GUARD], places), cut(source, places), strict=True))
        for (_, places), target, source in zip(values, targets, sources, strict=True)
    ]
    checksums = NATIVE.copy_values(pairs, skip)
    assert checksums == [xxh3_64_intdigest(source[skip:].tobytes()) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        assert target[GUARD:-GUARD].tobytes() == source.tobytes()
        assert set(target[:GUARD].tolist() + target[-GUARD:].tolist()) == {0xA5}, "written outside of the target"


@given(
    st.lists(SIZES, max_size=3),
    st.lists(st.integers(0, 300_000), max_size=3),
    st.sampled_from([0, HEADER_BYTES, 5_000]),
    st.integers(0, 99),
)
def test_the_python_code_says_the_same(sizes: list[int], places: list[int], skip: int, seed: int) -> None:
    def copied() -> tuple[list[int], list[bytes]]:
        targets = [np.zeros(size, dtype=np.uint8) for size in sizes]
        sources = [np.frombuffer(Random(seed).randbytes(size), dtype=np.uint8) for size in sizes]
        pairs = [
            list(zip(cut(target, places), cut(source, places), strict=True))
            for target, source in zip(targets, sources, strict=True)
        ]
        return hashed_copy.copy_hashed(pairs, skip), [target.tobytes() for target in targets]

    native = copied()
    with patch.object(hashed_copy, "NATIVE", None):
        assert copied() == native


@pytest.mark.parametrize("places", [[], [64 << 10, 80 << 10]])
def test_a_flipped_bit_changes_the_checksum(places: list[int]) -> None:
    """The control: every part of a streamed value counts, its last bytes among them."""
    assert NATIVE is not None
    source = np.frombuffer(Random(1).randbytes(STREAMED + 1_024), dtype=np.uint8).copy()
    target = memory_of(source.size, 0)[GUARD:-GUARD]
    seen: set[int] = set()
    for place in (None, HEADER_BYTES, 1_500, STREAMED - 1, STREAMED + 255, source.size - 65, source.size - 1):
        if place is not None:
            source[place] ^= 1
        pairs: list[tuple[object, object]] = list(zip(cut(target, places), cut(source, places), strict=True))
        checksums = NATIVE.copy_values([pairs], HEADER_BYTES)
        assert checksums is not None
        assert checksums == [xxh3_64_intdigest(target[HEADER_BYTES:].tobytes())]
        seen.update(checksums)
    assert len(seen) == 7


def test_what_is_not_ordinary_is_left_to_python() -> None:
    assert NATIVE is not None
    memory = np.zeros(2_000, dtype=np.uint8)
    other = bytes(1_000)
    odd: list[object] = [
        [[(memory[:1_000], memory[500:1_500])]],  # they overlap
        [[(memory[:999], other)]],
        [((memory[:1_000], other),)],
        [[[memory[:1_000], other]]],
        [[(memory[:1_000],)]],
        ((),),
        [[(memory[:1_000], other)], None],
    ]
    for values in odd:
        assert NATIVE.copy_values(values, 0) is None  # pyright: ignore[reportArgumentType]
    assert NATIVE.copy_values([[(memory[:1_000], other)]], -1) is None
    assert not memory.any()


def test_memory_that_cannot_be_used_is_refused() -> None:
    assert NATIVE is not None
    released = memoryview(bytearray(8))
    released.release()
    memory = np.zeros(16, dtype=np.uint8)
    for target, source, error in (
        (bytes(8), bytes(8), BufferError),
        (memory[::2], bytes(8), (BufferError, ValueError)),
        (released, bytes(8), ValueError),
        (memory[:8], released, ValueError),
        (memory[:8], 8, TypeError),
    ):
        with pytest.raises(error):
            NATIVE.copy_values([[(memory[:8], bytes(8)), (target, source)]], 0)
    with pytest.raises(TypeError):
        NATIVE.copy_values([])  # type: ignore[call-arg]


def test_overlapping_memory_is_copied_by_python_as_numpy_does() -> None:
    memory = np.arange(200, dtype=np.uint8)
    expected = memory[:100].tobytes()
    hashed_copy.copy_hashed([[(memory[50:150], memory[:100])]])
    assert memory[50:150].tobytes() == expected
