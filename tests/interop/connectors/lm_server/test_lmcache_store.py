"""Tests the store on real `lm://` servers: the conformance suite, its URLs, and its own features."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from kvparams_connectors.advice import advice_from_store
from kvparams_connectors.conformance import Floors, Opener, StoreConformance
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.lmcache.store import LMCacheStore
from kvparams_connectors.stores.lmcache.wire import LMCacheNames
from tests.support.connectors.lmcache_server import BareClient, LMCacheServer
from tests.support.connectors.lmcache_steps import resident_mib
from tests.support.connectors.steps import DEADLINE_S, found, value
from tests.support.connectors.valkey_relay import Relay
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.processes import free_ports


class TestLMCacheStore(StoreConformance):
    at_least = Floors(put=0.002, get=0.002)

    @pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 3])
    def opener(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pytest.FixtureRequest, server: LMCacheServer, prefix: str, opened: list[KVStore]
    ) -> Opener:
        def open_one() -> KVStore:
            place = ("127.0.0.1", server.port)
            opened.append(LMCacheStore(place, max_value_bytes=8 << 20, prefix=prefix, threads=request.param))
            return opened[-1]

        return open_one


def test_a_lookup_of_a_thousand_keys_is_one_round_trip(
    server: LMCacheServer, prefix: str, opened: list[KVStore]
) -> None:
    keys = [f"{number:064x}" for number in range(1000)]
    near = open_store(f"{server.url}?prefix={prefix}")
    opened.append(near)
    near.put([PutOp(key, (value(number % 3),)) for number, key in enumerate(keys[:700])], DEADLINE_S).result()
    with Relay(server.port, delay_s=0.2) as relay:
        store = open_store(f"lmcache://127.0.0.1:{relay.port}?prefix={prefix}")
        opened.append(store)
        found(store, "connected")
        before = relay.round_trips
        assert store.exists(keys, DEADLINE_S).result() == [
            Result(ResultCode.OK, number % 3) if number < 700 else Result(ResultCode.MISS) for number in range(1000)
        ]
        assert relay.round_trips == before + 1
        assert found(store, "another") == [ResultCode.MISS]
        assert relay.round_trips == before + 2  # the control
        store.close()


def test_a_lookup_moves_no_values(server: LMCacheServer, prefix: str, opened: list[KVStore]) -> None:
    """The control: the server's own EXIST says nothing of a size, and its GET moves the value."""
    near = open_store(f"{server.url}?prefix={prefix}")
    opened.append(near)
    near.put([PutOp("key", (value(3_000_000),))], DEADLINE_S).result()
    said: list[int] = []

    def heard(data: bytes) -> bytes:
        said.append(len(data))
        return data

    with Relay(server.port) as relay:
        relay.change = heard
        store = open_store(f"lmcache://127.0.0.1:{relay.port}?prefix={prefix}")
        opened.append(store)
        said.clear()
        assert store.exists(["key"], DEADLINE_S).result() == [Result(ResultCode.OK, 3_000_000)]
        assert sum(said) == 36
        store.close()
    name = LMCacheNames(prefix).value("key")
    with BareClient(server.port) as client:
        client.send(3, name)
        assert client.reply()[:2] == (200, 0)
        assert len(client.get(name)[2]) == 3_000_000


def test_deployments_with_prefixes_do_not_meet(server: LMCacheServer, prefix: str, opened: list[KVStore]) -> None:
    one, other, none = stores = [
        open_store(server.url + more) for more in (f"?prefix={prefix}", f"?prefix={prefix}.o", "")
    ]
    opened += stores
    key = f"{prefix}-key"
    one.put([PutOp(key, (value(10),))], DEADLINE_S).result()
    assert [found(store, key) for store in (one, other, none)] == [
        [ResultCode.OK],
        [ResultCode.MISS],
        [ResultCode.MISS],
    ]
    assert other.delete([key], DEADLINE_S).result() == [Result(ResultCode.MISS)]
    assert found(one, key) == [ResultCode.OK]


def test_what_is_deleted_frees_the_servers_memory(server: LMCacheServer, prefix: str, opened: list[KVStore]) -> None:
    """256 MiB are put and deleted, 16 MiB at a time. What remains of each value is small."""
    store = open_store(f"{server.url}?prefix={prefix}")
    opened.append(store)
    content = value(4 << 20)

    def turn(number: int) -> None:
        keys = [f"{number}-{one}" for one in range(4)]
        assert {r.code for r in store.put([PutOp(key, (content,)) for key in keys], DEADLINE_S).result()} == {
            ResultCode.OK
        }
        assert {r.code for r in store.delete(keys, DEADLINE_S).result()} == {ResultCode.OK}
        assert set(found(store, *keys)) == {ResultCode.MISS}

    turn(0)
    before = resident_mib(server.pid)
    for number in range(1, 17):
        turn(number)
    assert resident_mib(server.pid) - before < 100


def test_a_value_that_does_not_fit_is_thrown_away_and_the_rest_of_the_batch_arrives(
    server: LMCacheServer, prefix: str, opened: list[KVStore]
) -> None:
    store = open_store(f"{server.url}?prefix={prefix}")
    opened.append(store)
    store.put([PutOp(f"key-{number}", (value(700_000, number),)) for number in range(3)], DEADLINE_S).result()
    targets = [memoryview(bytearray(size)) for size in (700_000, 699_999, 700_000)]
    ops = [GetOp(f"key-{number}", (target,)) for number, target in enumerate(targets)]
    assert store.get(ops, DEADLINE_S).result() == [
        Result(ResultCode.OK, 700_000),
        Result(ResultCode.TOO_LARGE, 700_000),
        Result(ResultCode.OK, 700_000),
    ]
    assert targets[1] == bytes(699_999)
    assert (targets[0], targets[2]) == (value(700_000, 0), value(700_000, 2))
    assert isinstance(store, LMCacheStore)
    assert store.connections == 1


def test_connections_are_used_again(server: LMCacheServer, prefix: str, opened: list[KVStore]) -> None:
    store = LMCacheStore(("127.0.0.1", server.port), prefix=prefix, threads=2)
    opened.append(store)
    for number in range(50):
        store.put([PutOp(f"key-{number}", (value(1000),))], DEADLINE_S).result()
        found(store, f"key-{number}")
    assert 1 <= store.connections <= 2


def test_a_key_that_stands_twice_in_a_batch(server: LMCacheServer, prefix: str, opened: list[KVStore]) -> None:
    store = LMCacheStore(("127.0.0.1", server.port), max_value_bytes=1000, prefix=prefix)
    opened.append(store)
    ops = [PutOp("a", (value(size),)) for size in (1001, 10, 20)]
    assert store.put(ops, DEADLINE_S).result() == [
        Result(ResultCode.TOO_LARGE),
        Result(ResultCode.OK, 10),
        Result(ResultCode.EXISTS),
    ]
    assert store.delete(["b", "a", "a"], DEADLINE_S).result() == [
        Result(ResultCode.MISS),
        Result(ResultCode.OK),
        Result(ResultCode.MISS),
    ]


def test_a_buffer_that_was_released_spoils_its_own_operation_only(
    server: LMCacheServer, prefix: str, opened: list[KVStore]
) -> None:
    store = open_store(f"{server.url}?prefix={prefix}")
    opened.append(store)
    assert isinstance(store, LMCacheStore)
    gone, good = memoryview(bytearray(10)), value(10)
    ops = [PutOp("a", (good,)), PutOp("b", (gone,)), PutOp("c", (good,))]
    gets = [GetOp("a", (memoryview(bytearray(10)),)), GetOp("a", (gone,))]
    gone.release()
    # As the lane calls it: the buffers were whole when the batch was submitted.
    deadline = time.monotonic() + DEADLINE_S
    assert [result.code for result in store.put_blocking(ops, deadline)] == [
        ResultCode.OK,
        ResultCode.INVALID,
        ResultCode.OK,
    ]
    assert [result.code for result in store.get_blocking(gets, deadline)] == [ResultCode.OK, ResultCode.INVALID]


def test_no_memory_of_the_size_of_a_page_is_allocated_on_the_way(
    server: LMCacheServer, prefix: str, opened: list[KVStore]
) -> None:
    store = open_store(f"{server.url}?prefix={prefix}")
    opened.append(store)
    size = 1 << 20
    sources, targets = [value(size, seed) for seed in range(8)], [memoryview(bytearray(size)) for _ in range(8)]

    def turn(number: int) -> None:
        keys = [f"{number}-{one}" for one in range(8)]
        puts = [PutOp(key, (source,)) for key, source in zip(keys, sources, strict=True)]
        gets = [GetOp(key, (target,)) for key, target in zip(keys, targets, strict=True)]
        assert {result.code for result in store.put(puts, DEADLINE_S).result()} == {ResultCode.OK}
        assert {result.code for result in store.get(gets, DEADLINE_S).result()} == {ResultCode.OK}

    turn(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        turn(1)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert targets == sources
    assert peak < size // 4


@pytest.mark.parametrize(
    "url",
    [
        "lmcache:",
        "lmcache://",
        "lmcache://host",
        "lmcache://host:0",
        "lmcache://host:65536",
        "lmcache://host:many",
        "lmcache://user@host:1",
        "lmcache://host:1/path",
        "lmcache://host:1?size=1GiB",
        "lmcache://host:1?threads=2",
        "lmcache://host:1?connect_ms=500",
        "lmcache://host:1?prefix=",
        "lmcache://host:1?prefix=a%40b",
        f"lmcache://host:1?prefix={'p' * 65}",
        "lmcache://host:1?max_value=8MiB",
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(StoreError) as refused:
        open_store(url)
    assert "cannot be used" not in str(refused.value)


@contextmanager
def stranger(answer: bytes) -> Generator[int]:
    """A server of something else: it takes one connection, says `answer` to what it hears, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1000)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(DEADLINE_S)


def test_something_else_that_listens_is_no_store(tmp_path: Path) -> None:
    """One that answers in its own way, one that closes, a Valkey, one that says nothing, and nobody."""
    page = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    for answer, words in ((page, "not an lm:// server"), (b"", "no lm:// server"), (page[:20], "no lm:// server")):
        with stranger(answer) as port, pytest.raises(StoreError, match=words):
            open_store(f"lmcache://127.0.0.1:{port}")
    with ValkeyServer(tmp_path) as valkey:
        start = time.monotonic()
        with pytest.raises(StoreError, match="lm:// server"):
            open_store(f"lmcache://127.0.0.1:{valkey.port}")
        assert time.monotonic() - start < 2
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(StoreError, match="lm:// server"):
            open_store(f"lmcache://127.0.0.1:{silent.getsockname()[1]}")
        assert 0.9 <= time.monotonic() - start < 3
    with pytest.raises(StoreError, match="cannot be used"):
        open_store(f"lmcache://127.0.0.1:{free_ports(1)[0]}")


def test_the_doctor_is_told_what_such_a_server_does_not_do(
    server: LMCacheServer, prefix: str, opened: list[KVStore]
) -> None:
    store = open_store(f"{server.url}?prefix={prefix}")
    opened.append(store)
    found = advice_from_store(store)
    assert [one.level for one in found] == ["ok", "warning"]
    assert "never evicts" in found[1].finding
    assert all(one.action for one in found if one.level != "ok")


@pytest.mark.slow
@pytest.mark.alone
def test_a_lookup_of_a_thousand_keys_is_measured(
    server: LMCacheServer, prefix: str, opened: list[KVStore], record: Callable[[dict[str, object]], None]
) -> None:
    """The server parses each name in Python: it is one round trip, and takes tens of milliseconds all the same."""
    store = open_store(f"{server.url}?prefix={prefix}")
    opened.append(store)
    keys = [f"{number:064x}" for number in range(1000)]
    store.put([PutOp(key, (value(100),)) for key in keys[:900]], DEADLINE_S).result()
    times: list[float] = []
    for _ in range(50):
        start = time.perf_counter()
        store.exists(keys, DEADLINE_S).result()
        times.append(1000 * (time.perf_counter() - start))
    assert min(times) < 200
    record({"lookup_of_1000_ms": round(median(times), 1), "at_best_ms": round(min(times), 1)})
