"""Tests memory in front of a real server: what an engine sees when the server is stopped, killed, and back."""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest

from kvparams.routing.breaker import BreakerLimits, BreakerState
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, open_store
from kvparams_connectors.stores.guard.store import GuardedStore, GuardLimits
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.tiered.store import TieredStore
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import wait_until

WAIT_S = 20.0
VALUE = 300_000
DEADLINE_S = 0.2
LIMITS = GuardLimits(breaker=BreakerLimits(consecutive=3, window=20, failures=10, open_s=0.1, longest_s=0.5))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "server") as one:
        yield one


def content(key: str) -> bytes:
    return Random(key).randbytes(VALUE)


def put(store: KVStore, *keys: str) -> list[ResultCode]:
    ops = [PutOp(key, (memoryview(content(key)),)) for key in keys]
    return [result.code for result in store.put(ops, WAIT_S).result()]


def get(store: KVStore, *keys: str, deadline_s: float = WAIT_S) -> list[ResultCode]:
    """Codes; what is OK is right, and nothing takes longer than its deadline."""
    targets = [memoryview(bytearray(VALUE)) for _ in keys]
    ops = [GetOp(key, (target,)) for key, target in zip(keys, targets, strict=True)]
    before = time.monotonic()
    results = store.get(ops, deadline_s).result()
    assert time.monotonic() - before < deadline_s + 2  # for a machine that has other things to do
    for key, target, result in zip(keys, targets, results, strict=True):
        assert result.code is not ResultCode.OK or target == content(key)
    return [result.code for result in results]


def test_a_stopped_server_costs_its_deadline_a_few_times_and_then_nothing(server: ValkeyServer) -> None:
    store = GuardedStore(open_store(server.url), LIMITS, name="valkey")
    assert put(store, "key") == [ResultCode.OK]
    server.stop()
    before = time.monotonic()
    codes = [get(store, "key", deadline_s=DEADLINE_S)[0] for _ in range(200)]
    assert codes == [ResultCode.TIMEOUT] * 3 + [ResultCode.UNAVAILABLE] * 197
    assert time.monotonic() - before < WAIT_S / 2  # not 200 deadlines
    server.go_on()
    wait_until(lambda: store.statistics.state is BreakerState.HALF_OPEN)  # without being used
    wait_until(lambda: get(store, "key") == [ResultCode.OK])
    store.close()


def test_a_server_that_is_killed_and_started_again_is_used_again(server: ValkeyServer) -> None:
    store = GuardedStore(open_store(server.url), LIMITS, name="valkey")
    assert put(store, "key") == [ResultCode.OK]
    server.kill()
    wait_until(lambda: get(store, "key", deadline_s=DEADLINE_S) == [ResultCode.UNAVAILABLE])
    server.start()
    wait_until(lambda: put(store, "key") == [ResultCode.OK])
    assert get(store, "key") == [ResultCode.OK]
    store.close()


def test_memory_goes_on_without_the_server_behind_it(server: ValkeyServer) -> None:
    store = TieredStore([MemoryStore(8 << 20), GuardedStore(open_store(server.url), LIMITS)])
    assert put(store, "a", "b") == [ResultCode.OK] * 2
    server.stop()
    assert get(store, "a", "x", "b", deadline_s=DEADLINE_S)[::2] == [ResultCode.OK] * 2
    for _ in range(5):
        get(store, "x", deadline_s=DEADLINE_S)
    before = time.monotonic()
    for _ in range(20):
        assert get(store, "a", "x", "b") == [ResultCode.OK, ResultCode.UNAVAILABLE, ResultCode.OK]
    assert time.monotonic() - before < WAIT_S / 4
    server.go_on()
    wait_until(lambda: get(store, "x") == [ResultCode.MISS])
    store.close()


def test_two_engines_share_through_the_server_and_promote_into_their_own_memory(server: ValkeyServer) -> None:
    url = f"tiered:?l1={quote('memory:?size=8MiB', safe='')}&l2={quote(server.url, safe='')}"
    first, second = open_store(url), open_store(url)
    assert isinstance(second, TieredStore)
    keys = [f"page-{number}" for number in range(8)]
    assert put(first, *keys) == [ResultCode.OK] * 8
    assert get(second, *keys) == [ResultCode.OK] * 8
    wait_until(lambda: second.idle)
    assert second.statistics.found == (0, 8)
    assert get(second, *keys) == [ResultCode.OK] * 8
    assert second.statistics.found == (8, 8)
    first.close()
    second.close()
