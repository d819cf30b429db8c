"""Tests the Valkey store on real servers: the conformance suite, its URLs, and its own features."""

import logging
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import trustme

from kvparams_connectors.conformance import Floors, Opener, StoreConformance
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.valkey.server_facts import (
    ServerFacts,
    TLSFiles,
    advice_from_facts,
    find_primary,
    parse_facts,
    tls_context,
)
from kvparams_connectors.stores.valkey.store import ValkeyStore
from kvparams_connectors.stores.valkey.topology import ValkeyNode
from tests.support.connectors.steps import DEADLINE_S, found, value
from tests.support.connectors.valkey_relay import Relay
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.processes import free_ports
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    # With many samples and few values Valkey's choice of the oldest one is exact.
    folder = tmp_path_factory.mktemp("valkey")
    with ValkeyServer(folder, "--maxmemory-samples", "64", max_memory="12mb") as started:
        yield started


@pytest.fixture
def empty(server: ValkeyServer) -> ValkeyServer:
    assert server.ask("FLUSHALL", "SYNC").startswith("+OK")  # without SYNC the room is free some time later
    return server


class TestValkeyStore(StoreConformance):
    at_least = Floors(put=0.01, get=0.01)

    @pytest.fixture(params=[pytest.param("tcp", marks=pytest.mark.slow), "unix-three-threads"])
    def opener(self, request: pytest.FixtureRequest, empty: ValkeyServer, opened: list[KVStore]) -> Opener:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind: str = request.param
        url = empty.url if kind == "tcp" else f"{empty.unix_url}?threads=3&prefix=p"

        def open_one() -> KVStore:
            opened.append(open_store(url))
            return opened[-1]

        return open_one

    def test_what_was_used_two_seconds_later_stays(self, store: KVStore, empty: ValkeyServer) -> None:
        """The head is used two seconds later than the tail: what Valkey's clock can tell apart."""
        size = store.capabilities.max_value_bytes // 5
        keys = [f"page-{number}" for number in range(6)]
        store.put([PutOp(key, (value(size),)) for key in keys], DEADLINE_S).result()
        prefix = "" if empty.ask("EXISTS", keys[0]).startswith(":1") else "p:"
        wait_until(lambda: int(empty.ask("OBJECT", "IDLETIME", prefix + keys[0])[1:]) >= 2)
        target = memoryview(bytearray(size))
        store.exists(keys[:1], DEADLINE_S).result()
        store.get([GetOp(keys[1], (target,))], DEADLINE_S).result()
        store.put([PutOp(keys[2], (target,))], DEADLINE_S).result()
        assert store.put([PutOp("pressure", (value(size * 5 // 2),))], DEADLINE_S).result()[0].code is ResultCode.OK
        present = found(store, *keys)
        assert present[:3] == [ResultCode.OK] * 3
        assert ResultCode.MISS in present[3:]


def test_a_lookup_of_a_thousand_keys_is_one_round_trip(empty: ValkeyServer, opened: list[KVStore]) -> None:
    keys = [f"{number:064x}" for number in range(1000)]
    with Relay(empty.port, delay_s=0.2) as relay:
        store = open_store(relay.url)
        opened.append(store)
        puts = [PutOp(key, (value(number % 3),)) for number, key in enumerate(keys[:700])]
        near = open_store(empty.url)
        opened.append(near)
        assert {result.code for result in near.put(puts[1::3], DEADLINE_S).result()} == {ResultCode.OK}
        found(store, "connected")
        before = relay.round_trips
        there = found(store, *keys)
        assert there == [ResultCode.OK if number in range(1, 700, 3) else ResultCode.MISS for number in range(1000)]
        assert relay.round_trips == before + 1
        near.put([PutOp("empty", ())], DEADLINE_S).result()
        assert found(store, "empty", "missing") == [ResultCode.OK, ResultCode.MISS]
        assert relay.round_trips == before + 3  # the control: an empty value is asked about a second time
        store.close()


def test_empty_values_among_missing_ones_are_found(empty: ValkeyServer, opened: list[KVStore]) -> None:
    store = open_store(empty.url)
    opened.append(store)
    keys = [f"key-{number}" for number in range(300)]
    ops = [PutOp(key, (value(number % 3),)) for number, key in enumerate(keys[:200])]
    assert {result.code for result in store.put(ops, DEADLINE_S).result()} == {ResultCode.OK}
    assert store.exists(keys, DEADLINE_S).result() == [
        Result(ResultCode.OK, number % 3) if number < 200 else Result(ResultCode.MISS) for number in range(300)
    ]


@pytest.mark.slow
@pytest.mark.alone
def test_the_fastest_of_200_lookups_of_a_thousand_keys_takes_less_than_three_milliseconds(
    empty: ValkeyServer, opened: list[KVStore]
) -> None:
    """What the client and the server cost over a unix socket. A busy machine only adds to it, so the fastest counts
    here; the median is what `kvparams store bench` measures on a quiet one."""
    store = open_store(empty.unix_url)
    opened.append(store)
    keys = [f"{number:064x}" for number in range(1000)]
    store.put([PutOp(key, (value(100),)) for key in keys[:900]], DEADLINE_S).result()
    times: list[float] = []
    for _ in range(200):
        start = time.perf_counter()
        store.exists(keys, DEADLINE_S).result()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.003, f"median {median(times)}"


def test_values_go_by_themselves_when_they_have_a_time_to_live(empty: ValkeyServer, opened: list[KVStore]) -> None:
    store = open_store(f"{empty.url}?ttl=1")
    opened.append(store)
    assert store.put([PutOp("key", (value(5000),)), PutOp("empty", ())], DEADLINE_S).result()[0].code is ResultCode.OK
    assert found(store, "key", "empty") == [ResultCode.OK, ResultCode.OK]
    assert 0 < int(empty.ask("PTTL", "key")[1:]) <= 1000
    wait_until(lambda: found(store, "key", "empty") == [ResultCode.MISS, ResultCode.MISS])


def test_deployments_with_prefixes_do_not_meet(empty: ValkeyServer, opened: list[KVStore]) -> None:
    one, other, none = stores = [open_store(empty.url + more) for more in ("?prefix=one", "?prefix=other", "")]
    opened += stores
    one.put([PutOp("key", (value(10),))], DEADLINE_S).result()
    assert [found(store, "key") for store in (one, other, none)] == [
        [ResultCode.OK],
        [ResultCode.MISS],
        [ResultCode.MISS],
    ]
    assert other.delete(["key"], DEADLINE_S).result() == [Result(ResultCode.MISS)]
    assert empty.ask("EXISTS", "one:key").startswith(":1")


def test_a_value_that_does_not_fit_is_thrown_away_and_the_rest_of_the_batch_arrives(
    empty: ValkeyServer, opened: list[KVStore]
) -> None:
    store = open_store(empty.url)
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
    assert isinstance(store, ValkeyStore)
    assert store.connections == 1


def test_connections_are_used_again(empty: ValkeyServer, opened: list[KVStore]) -> None:
    store = open_store(f"{empty.url}?threads=2")
    opened.append(store)
    assert isinstance(store, ValkeyStore)
    for number in range(50):
        store.put([PutOp(f"key-{number}", (value(1000),))], DEADLINE_S).result()
        found(store, f"key-{number}")
    assert 1 <= store.connections <= 2


def test_something_else_under_a_key_of_ours_is_corrupt(empty: ValkeyServer, opened: list[KVStore]) -> None:
    store = open_store(empty.url)
    opened.append(store)
    empty.ask("LPUSH", "key", "no value")
    store.put([PutOp("other", (value(10),))], DEADLINE_S).result()
    target = memoryview(bytearray(10))
    assert store.get([GetOp("key", (target,))], DEADLINE_S).result() == [Result(ResultCode.CORRUPT)]
    assert found(store, "key", "other") == [ResultCode.CORRUPT, ResultCode.OK]


def test_a_buffer_that_was_released_spoils_its_own_operation_only(empty: ValkeyServer, opened: list[KVStore]) -> None:
    store = open_store(empty.url)
    opened.append(store)
    assert isinstance(store, ValkeyStore)
    gone, good = memoryview(bytearray(10)), value(10)
    ops = [PutOp("a", (good,)), PutOp("b", (gone,)), PutOp("c", (good,))]
    gone_ops = [GetOp("a", (memoryview(bytearray(10)),)), GetOp("a", (gone,))]
    gone.release()
    # As the lane calls it: the buffers were whole when the batch was submitted.
    assert [result.code for result in store.put_blocking(ops, time.monotonic() + DEADLINE_S)] == [
        ResultCode.OK,
        ResultCode.INVALID,
        ResultCode.OK,
    ]
    assert [result.code for result in store.get_blocking(gone_ops, time.monotonic() + DEADLINE_S)] == [
        ResultCode.OK,
        ResultCode.INVALID,
    ]


def test_with_tls_the_servers_name_and_certificate_are_checked(tmp_path: Path, opened: list[KVStore]) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in certificate.cert_chain_pems:
        part.write_to_path(tmp_path / "cert.pem", append=True)
    wrong = authority.issue_cert("elsewhere.example")
    wrong.private_key_and_cert_chain_pem.write_to_path(tmp_path / "wrong.pem")
    (tls_port,) = free_ports(1)
    tls = ["--tls-port", str(tls_port), "--tls-ca-cert-file", str(tmp_path / "ca.pem")]
    pair = ["--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem")]
    url = f"valkeys://127.0.0.1:{tls_port}?ca={tmp_path}/ca.pem"
    with ValkeyServer(tmp_path / "server", *tls, *pair):
        store = open_store(f"{url}&cert={tmp_path}/cert.pem&key={tmp_path}/key.pem")
        opened.append(store)
        pages = [value(900_000, seed) for seed in range(4)]
        puts = [PutOp(f"key-{number}", (page[:7], page[7:])) for number, page in enumerate(pages)]
        assert [result.code for result in store.put(puts, DEADLINE_S).result()] == [ResultCode.OK] * 4
        targets = [memoryview(bytearray(900_000)) for _ in pages]
        gets = [GetOp(f"key-{number}", (target,)) for number, target in enumerate(targets)]
        assert [result.code for result in store.get(gets, DEADLINE_S).result()] == [ResultCode.OK] * 4
        assert targets == pages
        assert isinstance(store, ValkeyStore)
        assert store.connections == 1
        store.close()
        with pytest.raises(StoreError):  # tls-auth-clients is yes: no certificate of ours
            open_store(url)
        with pytest.raises(StoreError):  # signed by somebody else
            open_store(f"{url.replace('ca.pem', 'other.pem')}&cert={tmp_path}/cert.pem&key={tmp_path}/key.pem")
    pair = ["--tls-cert-file", str(tmp_path / "wrong.pem"), "--tls-key-file", str(tmp_path / "wrong.pem")]
    with ValkeyServer(tmp_path / "named", *tls, *pair), pytest.raises(StoreError):  # made out to another host
        open_store(f"{url}&cert={tmp_path}/cert.pem&key={tmp_path}/key.pem")


def test_who_may_not_is_refused_when_it_opens_and_denied_later(tmp_path: Path, opened: list[KVStore]) -> None:
    (tmp_path / "right").write_text("a long password\n")
    (tmp_path / "wrong").write_text("another one\n")
    acl = ["--user", "default", "off", "--user", "kv", "on", ">a long password", "~kv:*"]
    acl += ["+get", "+set", "+strlen", "+exists", "+unlink"]  # what `open_url` says is enough
    reader = ["--user", "reader", "on", ">a long password", "~kv:*", "+@read", "+ping", "+info"]
    with ValkeyServer(tmp_path / "server", *acl, *reader) as server:
        settings = f"prefix=kv&password_file={tmp_path}/right"
        store = open_store(f"{server.url}?user=kv&{settings}")
        outside = open_store(f"{server.url}?user=kv&prefix=elsewhere&password_file={tmp_path}/right")
        only_reads = open_store(f"{server.unix_url}?user=reader&{settings}")
        opened += [store, outside, only_reads]
        page = value(100_000)
        target = memoryview(bytearray(100_000))
        assert store.put([PutOp("key", (page,))], DEADLINE_S).result() == [Result(ResultCode.OK, 100_000)]
        assert only_reads.get([GetOp("key", (target,))], DEADLINE_S).result() == [Result(ResultCode.OK, 100_000)]
        assert target == page
        assert found(store, "key", "none") == [ResultCode.OK, ResultCode.MISS]
        assert store.delete(["none"], DEADLINE_S).result() == [Result(ResultCode.MISS)]
        for forbidden in (only_reads, outside):
            assert forbidden.put([PutOp("new", (page,))], DEADLINE_S).result() == [Result(ResultCode.DENIED)]
        assert found(outside, "key", "other") == [ResultCode.DENIED, ResultCode.DENIED]
        for url in (
            f"{server.url}?user=kv&prefix=kv&password_file={tmp_path}/wrong",
            f"{server.url}?user=nobody&prefix=kv&password_file={tmp_path}/right",
            server.url,
        ):
            with pytest.raises(StoreError, match="refuses") as refused:
                open_store(url)
            assert "password" not in str(refused.value).replace("password_file", "").replace("username-password", "")
        assert "a long password" not in repr(vars(store))


@pytest.mark.parametrize(
    "url",
    [
        "valkey:",
        "valkey://",
        "valkey://host:0",
        "valkey://host:65536",
        "valkey://host:many",
        "valkey://user@host",
        "valkey://user:secret@host",
        "valkey://host/1",
        "valkey://host?size=1GiB",
        "valkey://host?ca=/x",
        "valkey://host?ttl=0",
        "valkey://host?ttl=1.5",
        "valkey://host?threads=0",
        "valkey://host?connect_ms=500",
        "valkey://host?prefix=",
        "valkey://host?prefix=a%7Bb",
        "valkey://host?password=secret",
        "valkey://host?user=me",
        "valkey://host?password_file=/nowhere/at/all",
        "valkeys:///path/to.sock",
        "valkeys://host?ca=/nowhere/at/all",
        "valkeys://host?key=/nowhere/at/all",
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(StoreError) as refused:
        open_store(url)
    assert "cannot be used: Error" not in str(refused.value)


def test_a_server_that_is_not_there_is_said_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(StoreError, match="cannot be used"):
        open_store(f"valkey://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(StoreError, match="cannot be used"):
        open_store("valkey:///nowhere/at.sock")
    assert time.monotonic() - start < 2


def test_settings_of_a_server_that_will_hurt_are_warned_of(
    server: ValkeyServer, opened: list[KVStore], caplog: pytest.LogCaptureFixture
) -> None:
    info = {"valkey_version": "8.0.1", "maxmemory": 100, "maxmemory_policy": "allkeys-lru", "role": "master"}

    def bad(facts: ServerFacts, *, ttl: bool) -> str:
        found = [advice for advice in advice_from_facts(facts, ttl=ttl) if advice.level != "ok"]
        assert all(advice.action for advice in found)
        return " ".join(advice.finding for advice in found)

    assert bad(parse_facts(info, {}), ttl=False) == ""
    assert "noeviction" in bad(parse_facts({**info, "maxmemory_policy": "noeviction"}, {}), ttl=True)
    assert "volatile" in bad(parse_facts({**info, "maxmemory_policy": "volatile-lru"}, {}), ttl=False)
    assert bad(parse_facts({**info, "maxmemory_policy": "volatile-lru"}, {}), ttl=True) == ""
    assert "maxmemory" in bad(parse_facts({**info, "maxmemory": 0}, {}), ttl=True)
    assert "without a known primary" in bad(parse_facts({**info, "role": "slave"}, {}), ttl=True)
    known = {**info, "role": "slave", "master_host": "10.0.0.1", "master_port": 6379}
    assert "switches to its primary, 10.0.0.1:6379" in bad(parse_facts(known, {}), ttl=True)
    assert bad(parse_facts({**known, "cluster_enabled": 1}, {}), ttl=True) == ""  # it says itself whom to ask
    assert "INFO" in bad(ServerFacts(), ttl=False)
    assert parse_facts(info, {"proto-max-bulk-len": "50"}).max_value_bytes == 50
    with caplog.at_level(logging.WARNING):
        opened.append(open_store(server.url))
        assert caplog.records == []
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        try:
            opened.append(open_store(server.url))
        finally:
            server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert "noeviction" in caplog.text


A, B, C, D = (ValkeyNode(f"10.0.0.{number}", 6379) for number in range(1, 5))


def test_the_primary_is_found_among_those_that_are_known_and_those_that_they_name() -> None:
    one = ServerFacts(version="8.0.1")
    said = {A: replace(one, replica=True, primary=B), B: replace(one, replicas=(A,)), C: one, D: ServerFacts()}
    asked: list[ValkeyNode] = []

    def ask(node: ValkeyNode) -> ServerFacts | None:
        asked.append(node)
        return said.get(node)

    assert find_primary([A, C], ask) == (B, said[B])  # it is believed who its primary is before another is asked
    assert find_primary([D, C], ask) == (C, one)  # D may not be asked for INFO
    del said[B]
    assert find_primary([A, D], ask) is None
    assert asked == [A, B, D, C, A, B, D]
    for start, end in ((A, B), (B, A)):  # two that name each other
        said[start] = replace(one, replica=True, primary=end)
    assert find_primary([A], ask) is None
    chain = {
        ValkeyNode("h", port): replace(one, replica=True, primary=ValkeyNode("h", port + 1)) for port in range(1, 100)
    }
    assert find_primary([ValkeyNode("h", 1)], chain.get) is None  # it does not go on for ever


def test_replicas_are_those_that_info_lists() -> None:
    info: dict[str, object] = {"connected_slaves": 3, "slave0": {"ip": "10.0.0.1", "port": 6379, "state": "online"}}
    info |= {"slave1": "odd", "slave2": {"ip": "", "port": 0}}
    assert parse_facts(info, {}).replicas == (A,)


def test_the_context_for_tls_checks_names() -> None:
    context = tls_context(TLSFiles())
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
