"""Tests a memory store's eviction order: a scan does not displace hot values, and no sequence loses its head first."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode
from kvparams_connectors.stores.file.store import FileStore
from kvparams_connectors.stores.memory.eviction import EvictionEntry, ScanResistantTable
from kvparams_connectors.stores.memory.store import MemoryStore

WAIT_S = 20.0
UNIT = 4096
UNITS = 400


def put(store: KVStore, keys: list[str]) -> None:
    value = memoryview(bytes(UNIT))
    results = store.put([PutOp(key, (value,)) for key in keys], WAIT_S).result()
    assert {result.code for result in results} == {ResultCode.OK}


def get(store: KVStore, keys: list[str]) -> None:
    store.get([GetOp(key, (memoryview(bytearray(UNIT)),)) for key in keys], WAIT_S).result()


def present(store: KVStore, keys: list[str]) -> int:
    return sum(result.code is ResultCode.OK for result in store.exists(keys, WAIT_S).result())


def after_a_scan(store: KVStore, *, read: bool) -> int:
    """How many of 80 hot pages are left after ten times the store's room was written once and, maybe, read once."""
    hot = [f"hot-{number}" for number in range(80)]
    put(store, hot)
    for round_ in range(4):  # used now and then, while others come
        put(store, [f"warm-{round_}-{number}" for number in range(40)])
        get(store, hot)
    assert present(store, hot) == len(hot)
    for start in range(0, 10 * UNITS, 40):
        scanned = [f"scan-{start + number}" for number in range(40)]
        put(store, scanned)
        if read:  # by the decode engine: a lookup, a load
            assert present(store, scanned) == len(scanned)
            get(store, scanned)
    return present(store, hot)


@pytest.mark.parametrize("read", [False, True], ids=["written", "written-and-read"])
def test_a_scan_does_not_flush_the_hot_set(*, read: bool) -> None:
    store = MemoryStore(UNITS * UNIT, unit_bytes=UNIT)
    assert after_a_scan(store, read=read) == 80
    store.close()


def test_plain_least_recently_used_is_flushed(tmp_path: Path) -> None:
    """The control: the same scan against the store that evicts by last use alone."""
    store = FileStore(tmp_path / "store", (UNITS + 40) * UNIT, unit_bytes=UNIT)
    assert after_a_scan(store, read=True) == 0
    store.close()


def test_without_a_hot_part_the_table_is_plain_least_recently_used() -> None:
    table = ScanResistantTable[EvictionEntry](8, hot_share=0)
    for key in "abcd":
        table.add(key, EvictionEntry(2))
    table.touch(list("abcd"))
    table.touch(["c"])
    assert [key for key, _ in table.eviction_order()] == ["d", "b", "a", "c"]


def test_what_was_hot_once_gives_way_to_what_is_hot_now() -> None:
    store = MemoryStore(UNITS * UNIT, unit_bytes=UNIT)
    first = [f"first-{number}" for number in range(80)]
    second = [f"second-{number}" for number in range(80)]
    for hot in (first, second):
        put(store, hot)
        for round_ in range(3):
            put(store, [f"{hot[0]}-{round_}-{number}" for number in range(40)])
            get(store, hot)
    put(store, [f"scan-{number}" for number in range(300)])
    put(store, [f"more-{number}" for number in range(300)])
    assert present(store, second) == 80
    assert present(store, first) < 40
    store.close()


KEYS = st.sampled_from([f"k{number}" for number in range(10)])
BATCHES = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove"]), st.lists(KEYS, min_size=1, max_size=6, unique=True)),
    max_size=40,
)


@given(BATCHES, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_of_the_keys_used_together_the_last_goes_first(batches: list[tuple[str, list[str]]], share: float) -> None:
    table = ScanResistantTable[EvictionEntry](16, hot_share=share)
    there: dict[str, EvictionEntry] = {}
    for action, keys in batches:
        if action == "remove":
            for key in set(there) & set(keys):
                table.remove(key)
                del there[key]
        else:
            for key in keys:
                if action == "add" and key not in there:
                    there[key] = EvictionEntry(2)
                    table.add(key, there[key])
            table.touch(keys)
        order = [key for key, _ in table.eviction_order()]
        assert sorted(order) == sorted(there)
        assert len(table) == len(there)
        assert all(table.get(key) is value for key, value in there.items())
        if action != "remove":
            assert [key for key in order if key in keys] == [key for key in reversed(keys) if key in there]
