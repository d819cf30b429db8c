"""Tests the shipped stores with the conformance suite, and the parsing of their URLs."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.errors import PluginError
from kvparams_connectors.conformance import Floors, Opener, StoreConformance
from kvparams_connectors.store import KVStore, ResultCode, is_valid_key, open_store
from kvparams_connectors.store_url import StoreError, parse_size
from kvparams_connectors.stores.file.store import FileStore
from kvparams_connectors.stores.memory.store import MemoryStore

SIZE = 8 << 20


def closing(open_one: Callable[[], KVStore]) -> Iterator[Opener]:
    opened: list[KVStore] = []

    def opener() -> KVStore:
        opened.append(open_one())
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


class TestMemoryStore(StoreConformance):
    at_least = Floors(put=0.02, get=0.05)

    @pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 3], ids=["one-thread", "three-threads"])
    def opener(self, request: pytest.FixtureRequest) -> Iterator[Opener]:  # pyright: ignore[reportIncompatibleMethodOverride]
        threads: int = request.param
        yield from closing(lambda: MemoryStore(SIZE, unit_bytes=4096, threads=threads))


class TestFileStore(StoreConformance):
    at_least = Floors(put=0.01, get=0.03)

    @pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 3], ids=["one-thread", "three-threads"])
    def opener(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:  # pyright: ignore[reportIncompatibleMethodOverride]
        threads: int = request.param
        yield from closing(lambda: FileStore(tmp_path / "store", SIZE, unit_bytes=4096, threads=threads))


def test_stores_are_opened_by_url(tmp_path: Path) -> None:
    memory = open_store("memory:?size=1MiB")
    file = open_store(f"file://{tmp_path}/a%20store?size=1MiB")
    again = open_store(f"file://{tmp_path}/a%20store")
    assert isinstance(memory, MemoryStore)
    assert isinstance(file, FileStore)
    assert memory.capabilities.max_value_bytes == 1 << 20
    assert (tmp_path / "a store").stat().st_size == 1 << 20
    assert again.capabilities == file.capabilities
    for store in (memory, file, again):
        store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nothing",
        "/only/a/path",
        "memory:?size",
        "memory:?size=",
        "memory:?size=1GB",
        "memory:?size=-1",
        "memory:?size=1.5GiB",
        "memory:?size=0",
        "memory:?size=1KiB",
        "memory:?sise=1GiB",
        "memory:?size=1MiB&size=2MiB",
        "memory:?size=1MiB&threads=2",
        "memory://host?size=1MiB",
        "memory:/path?size=1MiB",
        "file:relative?size=1MiB",
        "file://host/path?size=1MiB",
        "file:///nowhere/at/all?size=1MiB",
        "file:///dev/null?size=1MiB",
        "file:///dev/shm?size=1MiB",
        "file:///tmp/x?size=1MiB&color=red",
        "file:///tmp/x?size=1MiB&unit=4KiB",
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_in_words(url: str) -> None:
    with pytest.raises(StoreError):
        open_store(url)


def test_an_unknown_setting_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(StoreError) as refused:
        open_store("memory:?sise=1GiB")
    words = "memory store: sise: is not known here; did you mean size? known: size, in 'memory:?sise=...'"
    assert str(refused.value) == words


SCHEMES = ["memory", "file", "valkey", "valkeys", "mooncake", "tiered", "lmcache", "lmcache-mp", "peer"]


def test_every_setting_of_every_store_stands_in_the_guides_table() -> None:
    """One thing has one name: whoever adds a setting meets the table."""
    known: set[str] = set()
    for scheme in SCHEMES:
        with pytest.raises(StoreError) as refused:
            open_store(f"{scheme}://127.0.0.1:1/?no_such_setting=1")
        known |= set(str(refused.value).partition("known: ")[2].partition(", in ")[0].split(", "))
    guide = (Path(__file__).parents[4] / "connectors" / "STORES.md").read_text()
    table = guide.partition("| setting |")[2].partition("\n\n")[0]
    names = {name for row in table.splitlines()[2:] for name in re.findall("`([a-z0-9_]+)`", row.split("|")[1])}
    assert known == names | {"l2", "l3"}


def test_an_unknown_store_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(PluginError, match="file, lmcache, lmcache-mp, memory"):
        open_store("mamory:?size=1GiB")


def test_sizes_are_read_with_their_units() -> None:
    assert [parse_size(text) for text in ("7", "7B", "2KiB", "3MiB", "1GiB", "1TiB")] == [
        7,
        7,
        2 << 10,
        3 << 20,
        1 << 30,
        1 << 40,
    ]


@given(
    st.lists(
        st.one_of(
            st.text("aZ09._-", min_size=1, max_size=5),
            st.sampled_from(["", "k" * 128, "k" * 129, "a b", "a/b", "ä", "a\n", "\n", "a\0", "\ud800", "٣"]),
        ),
        max_size=8,
    )
)
def test_the_keys_of_a_lookup_are_checked_as_each_by_itself(keys: list[str]) -> None:
    store = MemoryStore(1 << 20)
    results = store.exists(keys, 20.0).result()
    assert [result.code is ResultCode.MISS for result in results] == [is_valid_key(key) for key in keys]
    assert {result.code for result in results} <= {ResultCode.MISS, ResultCode.INVALID}
    store.close()
