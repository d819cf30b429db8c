"""Tests that native code finds in the index of a `file` store what the Python code finds, whatever lies there."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams.native import NATIVE
from kvparams_connectors.store import PutOp
from kvparams_connectors.stores.file import index as index_module
from kvparams_connectors.stores.file.index import FileIndex
from kvparams_connectors.stores.file.store import FileStore

if NATIVE is None:
    pytest.skip("asked to do without native code, or there is no compiler", allow_module_level=True)

WAIT_S = 20.0
KEYS = ["a", "b" * 128, "c" * 127, "key-1", *(f"page.{number}" for number in range(60))]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore(tmp_path / "store", 400_000, unit_bytes=4096)
    yield store
    store.close()


def index_of(store: FileStore) -> FileIndex:
    return store._values._index  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]


def found(index: FileIndex) -> list[tuple[int, int, int] | None]:
    """What native code finds; the Python code finds the same."""
    native = index.find_sizes(KEYS)
    with patch.object(index_module, "NATIVE", None):
        assert index.find_sizes(KEYS) == native
    return native


def put(store: FileStore, key: str, nbytes: int) -> None:
    store.put([PutOp(key, (memoryview(bytes(nbytes)),))], WAIT_S).result()


def test_values_are_found_as_they_come_and_go(store: FileStore) -> None:
    chance = Random(1)
    index = index_of(store)
    assert found(index) == [None] * len(KEYS)
    seen: set[bool] = set()
    for _ in range(200):
        key = chance.choice(KEYS)
        if chance.random() < 0.3:
            store.delete([key]).result()
        else:
            put(store, key, chance.choice([0, 1, 4096, 30_000]))
        sizes = store.exists(KEYS).result()
        values = found(index)
        assert [one.nbytes for one in sizes] == [0 if value is None else value[2] for value in values]
        seen |= {value is None for value in values}
    assert seen == {True, False}


@pytest.mark.parametrize("part", ["buckets", "words", "records"])
def test_what_was_changed_by_others_is_found_or_not_as_the_python_code_finds_it(store: FileStore, part: str) -> None:
    """And a flipped bit hides something, so that the comparison is one."""
    for number, key in enumerate(KEYS[:30]):
        put(store, key, 3000 * (number % 4))
    index = index_of(store)
    before = found(index)
    assert sum(value is not None for value in before) >= 25
    memory: memoryview = getattr(index._file, part).cast("B")  # pyright: ignore[reportPrivateUsage]
    chance = Random(2)
    hidden = 0
    for _ in range(300):
        at = chance.choice([place for place in range(memory.nbytes) if memory[place]])
        bit = 1 << chance.randrange(8)
        memory[at] ^= bit
        hidden += found(index) != before
        memory[at] ^= bit
    assert hidden
    assert found(index) == before


@given(st.binary(min_size=64, max_size=64), st.integers(0, 2**64 - 1), st.binary(min_size=256, max_size=256))
@settings(deadline=None)
def test_no_content_of_the_memory_is_trusted(buckets: bytes, word: int, record: bytes) -> None:
    assert NATIVE is not None
    words = memoryview(word.to_bytes(8, "little"))
    values = NATIVE.find_file_values(memoryview(buckets), words, memoryview(record), 4096, ["key", "a" * 128])
    assert values == [None, None]


def test_memory_of_another_shape_is_left_to_python() -> None:
    assert NATIVE is not None
    good = memoryview(bytes(64)), memoryview(bytes(8)), memoryview(bytes(256))
    assert NATIVE.find_file_values(*good, 4096, ["key", "", "a" * 129]) == [None] * 3
    for number, size in ((0, 63), (0, 192), (0, 0), (1, 16), (1, 0), (2, 512), (2, 255)):
        odd = [*good]
        odd[number] = memoryview(bytes(size))
        assert NATIVE.find_file_values(odd[0], odd[1], odd[2], 4096, ["key"]) is None, (number, size)
    assert NATIVE.find_file_values(*good, 0, ["key"]) is None
    assert NATIVE.find_file_values(*good, 4096, ("key",)) is None  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        NATIVE.find_file_values(*good, 4096, [b"key"])  # pyright: ignore[reportArgumentType]
