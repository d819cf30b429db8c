"""Tests the memory that peers read from, when it is full of leases, and the count of pinned bytes."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvparams_connectors.store import KVStore, PutOp, ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from tests.support.connectors.peer_steps import WAIT_S, get, names, peer, put
from tests.support.waiting import wait_until

UNIT = 4096


def small(store: KVStore, keys: list[str]) -> list[ResultCode]:
    return [one.code for one in store.put([PutOp(key, (memoryview(b"x"),)) for key in keys], WAIT_S).result()]


def test_a_put_into_memory_full_of_leases_looks_once(opened: list[KVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks holds the lock; what was looked at is counted."""
    store = MemoryStore(400 * UNIT, unit_bytes=UNIT, lease_s=2.0)
    opened.append(store)
    table = store._values  # pyright: ignore[reportPrivateUsage]
    order, looked = table.eviction_order, [0]

    def counted() -> Iterator[object]:
        for one in order():
            looked[0] += 1
            yield one

    monkeypatch.setattr(table, "eviction_order", counted)
    keys = [f"k{number}" for number in range(400)]
    assert small(store, keys) == [ResultCode.OK] * 400
    for _ in range(10):
        assert set(small(store, [f"n{number}" for number in range(20)])) == {ResultCode.FULL}
    assert 400 <= looked[0] <= 800
    wait_until(lambda: small(store, ["new"]) == [ResultCode.OK], WAIT_S)  # the control: leases end


def test_what_comes_free_is_seen_at_once(opened: list[KVStore]) -> None:
    """A delete, a lease that has ended under a pin, and a writer that gave up."""
    store = MemoryStore(4 * UNIT, unit_bytes=UNIT, lease_s=0.4)
    opened.append(store)
    assert small(store, ["a", "b", "c", "d"]) == [ResultCode.OK] * 4
    assert small(store, ["e"]) == [ResultCode.FULL]
    store.delete(["b"], WAIT_S).result()
    assert small(store, ["e"]) == [ResultCode.OK]
    held = [one for one in store.pin_values(["a", "c", "d", "e"]) if one is not None]
    wait_until(lambda: small(store, ["f"]) == [ResultCode.FULL])
    over = time.monotonic() + 0.5
    wait_until(lambda: time.monotonic() > over)
    assert small(store, ["f"]) == [ResultCode.FULL]  # all pinned, no lease any more
    store.unpin_values(held[:1])
    assert small(store, ["f"]) == [ResultCode.OK]
    assert small(store, ["g"]) == [ResultCode.FULL]
    store.unpin_values(held[1:])
    assert small(store, ["g", "h", "i"]) == [ResultCode.OK] * 3


def test_evicted_is_as_little_as_needed_in_order(opened: list[KVStore]) -> None:
    store = MemoryStore(100 * UNIT, unit_bytes=UNIT)
    opened.append(store)
    keys = [f"k{number}" for number in range(100)]
    for key in keys:
        small(store, [key])
    assert (
        small(store, [f"n{number}" for number in range(70)]) == [ResultCode.OK] * 70
    )  # more than is looked for at once
    found = store.exists(keys, WAIT_S).result()
    assert [one.code for one in found] == [ResultCode.MISS] * 70 + [ResultCode.OK] * 30


def test_what_is_held_counts_as_pinned_also_when_it_was_deleted(opened: list[KVStore]) -> None:
    store = MemoryStore(1 << 20, unit_bytes=UNIT)
    opened.append(store)
    put(store, [1])
    held = [one for one in store.pin_values(names([1])) + store.pin_values(names([1])) if one is not None]
    store.delete(names([1]), WAIT_S).result()
    assert store.pinned_count == 1
    store.unpin_values(held[:1])
    assert store.pinned_count == 1
    store.unpin_values(held[1:])
    assert store.pinned_count == 0


def test_closing_is_bounded_in_sum(opened: list[KVStore]) -> None:
    """Many readers that are connected cost no time each."""
    owner = peer(opened)
    readers = [peer(opened, "127.0.0.1:0") for _ in range(8)]
    put(owner, [1])
    for reader in readers:
        reader.hint_location(names([1]), str(owner.address))
        assert get(reader, [1]) == [ResultCode.OK]
    server = owner._server  # pyright: ignore[reportPrivateUsage]
    assert server is not None
    stuck = threading.Event()
    late = [threading.Thread(target=stuck.wait, args=(WAIT_S,)) for _ in readers]
    for thread in late:
        thread.start()
    readers_now = server._readers  # pyright: ignore[reportPrivateUsage]
    for channel, thread in zip(list(readers_now), late, strict=True):
        readers_now[channel] = thread  # as if they did not end
    start = time.monotonic()
    server.close(1.0)
    assert time.monotonic() - start < 2.0
    stuck.set()
    for thread in late:
        thread.join(WAIT_S)
