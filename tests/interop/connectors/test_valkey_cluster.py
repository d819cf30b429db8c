"""Tests the Valkey store on a cluster of three real servers: slots, redirects, and a server that is gone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvparams_connectors.conformance import Opener
from kvparams_connectors.conformance.levels import BytesLevel
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.stores.valkey.store import ValkeyStore
from kvparams_connectors.stores.valkey.topology import hash_slot
from tests.support.connectors.valkey_server import Cluster, ValkeyServer
from tests.support.waiting import wait_until

DEADLINE_S = 20.0
KEYS = [f"key-{number}" for number in range(60)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    for server in started.servers:
        assert server.ask("FLUSHALL", "SYNC").startswith("+OK")
    return started


def page(number: int) -> memoryview:
    return memoryview(bytearray([number, 7]) * (5000 + number))


def put(store: KVStore) -> list[ResultCode]:
    ops = [PutOp(key, (page(number),)) for number, key in enumerate(KEYS)]
    return [result.code for result in store.put(ops, DEADLINE_S).result()]


def get(store: KVStore) -> list[ResultCode]:
    targets = [memoryview(bytearray(20_000)) for _ in KEYS]
    ops = [GetOp(key, (target,)) for key, target in zip(KEYS, targets, strict=True)]
    results = store.get(ops, DEADLINE_S).result()
    for number, (target, result) in enumerate(zip(targets, results, strict=True)):
        assert result.code is not ResultCode.OK or target[: result.nbytes] == page(number)
    return [result.code for result in results]


class TestValkeyCluster(BytesLevel):
    @pytest.fixture
    def opener(self, cluster: Cluster, opened: list[KVStore]) -> Opener:  # pyright: ignore[reportIncompatibleMethodOverride]
        def open_one() -> KVStore:
            opened.append(open_store(cluster.url))
            return opened[-1]

        return open_one


def test_keys_are_spread_over_all_servers_and_asked_of_them(cluster: Cluster, opened: list[KVStore]) -> None:
    store = open_store(cluster.servers[2].url)
    opened.append(store)
    assert put(store) == [ResultCode.OK] * 60
    assert put(store) == [ResultCode.EXISTS] * 60
    assert get(store) == [ResultCode.OK] * 60
    empty = store.put([PutOp("empty", ())], DEADLINE_S).result()
    assert empty == [Result(ResultCode.OK, 0)]
    found = store.exists(["none", *KEYS, "empty", "nothing"], DEADLINE_S).result()
    assert found == [
        Result(ResultCode.MISS),
        *(Result(ResultCode.OK, page(number).nbytes) for number in range(60)),
        Result(ResultCode.OK, 0),
        Result(ResultCode.MISS),
    ]
    sizes = [int(server.ask("DBSIZE")[1:]) for server in cluster.servers]
    assert sum(sizes) == 61
    assert min(sizes) > 5
    assert {result.code for result in store.delete(KEYS, DEADLINE_S).result()} == {ResultCode.OK}
    assert isinstance(store, ValkeyStore)
    assert store.connections == 3


def slot_command(cluster: Cluster, server: ValkeyServer, slot: int, *words: str) -> None:
    answer = server.ask("CLUSTER", "SETSLOT", str(slot), *words)
    assert answer.startswith("+OK"), answer


def test_a_slot_on_its_way_is_asked_for_at_both_ends_and_found_when_it_has_moved(
    cluster: Cluster, opened: list[KVStore]
) -> None:
    store = open_store(cluster.url)
    opened.append(store)
    assert put(store) == [ResultCode.OK] * 60
    number = next(number for number, key in enumerate(KEYS) if hash_slot(key.encode()) < cluster.bounds[1])
    key, slot = KEYS[number], hash_slot(KEYS[number].encode())
    source, target = cluster.servers[0], cluster.servers[1]
    slot_command(cluster, target, slot, "IMPORTING", cluster.identity(source))
    slot_command(cluster, source, slot, "MIGRATING", cluster.identity(target))
    assert get(store) == [ResultCode.OK] * 60
    moved = source.ask("MIGRATE", "127.0.0.1", str(target.port), key, "0", "5000")
    assert moved.startswith("+OK"), moved
    # Now the source sends everybody on with ASK, for gets, sizes, puts and deletes alike.
    assert get(store) == [ResultCode.OK] * 60
    assert put(store) == [ResultCode.EXISTS] * 60
    assert {result.code for result in store.exists(KEYS, DEADLINE_S).result()} == {ResultCode.OK}
    assert store.delete([key], DEADLINE_S).result() == [Result(ResultCode.OK)]
    assert store.exists([key], DEADLINE_S).result() == [Result(ResultCode.MISS)]
    assert store.put([PutOp(key, (page(number),))], DEADLINE_S).result() == [Result(ResultCode.OK, page(number).nbytes)]
    assert target.ask("EXISTS", key).startswith("-MOVED")  # it still is the source's
    # The target is told first: it takes a new epoch, which the others believe.
    for server in (target, source, cluster.servers[2]):
        slot_command(cluster, server, slot, "NODE", cluster.identity(target))
    # And now with MOVED.
    assert get(store) == [ResultCode.OK] * 60
    assert target.ask("EXISTS", key).startswith(":1")


def test_a_store_that_believes_an_old_map_finds_everything(cluster: Cluster, opened: list[KVStore]) -> None:
    store = open_store(cluster.url)
    opened.append(store)
    assert put(store) == [ResultCode.OK] * 60
    assert isinstance(store, ValkeyStore)
    topology = store._topology  # pyright: ignore[reportPrivateUsage] - what no server would tell us
    first = topology.node(KEYS[0].encode())
    topology.replace([(0, 16383, first)])
    assert {result.code for result in store.exists(KEYS, DEADLINE_S).result()} == {ResultCode.OK}
    topology.replace([(0, 16383, first)])
    assert get(store) == [ResultCode.OK] * 60


def test_a_cluster_is_recognised_by_who_may_not_ask_for_facts(
    cluster: Cluster, opened: list[KVStore], tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("a password")
    rights = ["~*", "+get", "+set", "+strlen", "+exists", "+unlink", "+cluster|slots", "+asking"]
    for server in cluster.servers:
        assert server.ask("ACL", "SETUSER", "kv", "on", ">a password", *rights).startswith("+OK")
    store = open_store(f"{cluster.url}?user=kv&password_file={tmp_path}/password")
    opened.append(store)
    assert put(store) == [ResultCode.OK] * 60
    assert {result.code for result in store.exists(KEYS, DEADLINE_S).result()} == {ResultCode.OK}
    assert isinstance(store, ValkeyStore)
    assert store.connections == 3


@pytest.mark.slow
def test_one_server_that_is_gone_takes_its_own_keys_only(
    tmp_path_factory: pytest.TempPathFactory, opened: list[KVStore]
) -> None:
    with Cluster(tmp_path_factory.mktemp("failing")) as cluster:
        for server in cluster.servers:
            assert server.ask("CONFIG", "SET", "cluster-require-full-coverage", "no").startswith("+OK")
        store = open_store(cluster.url)
        opened.append(store)
        assert put(store) == [ResultCode.OK] * 60
        gone = range(cluster.bounds[1], cluster.bounds[2])
        cluster.servers[1].kill()
        expected = [ResultCode.UNAVAILABLE if hash_slot(key.encode()) in gone else ResultCode.OK for key in KEYS]
        assert get(store) == expected
        assert [result.code for result in store.exists(KEYS, DEADLINE_S).result()] == expected
        cluster.servers[1].start()
        wait_until(lambda: set(put(store)) <= {ResultCode.OK, ResultCode.EXISTS})
        assert get(store) == [ResultCode.OK] * 60
