"""Tests the Valkey store while its server is killed, stopped, full or cut off: no read is wrong, and no call hangs."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvparams_connectors.advice import advice_from_store
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.stores.valkey.requests import PutRequest
from kvparams_connectors.stores.valkey.store import ValkeyStore
from tests.support.connectors.steps import DEADLINE_S, SIZE, get, in_thread, page, put
from tests.support.connectors.valkey_relay import Relay
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import wait_until

LOST = {ResultCode.UNAVAILABLE, ResultCode.TIMEOUT}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "server") as started:
        yield started


def test_a_server_that_is_killed_and_comes_back_is_used_again(server: ValkeyServer, opened: list[KVStore]) -> None:
    store = open_store(server.url)
    opened.append(store)
    assert put(store, range(4)) == [ResultCode.OK] * 4
    server.kill()
    assert set(get(store, range(4))) == {ResultCode.UNAVAILABLE}
    assert set(put(store, range(4))) == {ResultCode.UNAVAILABLE}
    server.start()
    assert get(store, range(4)) == [ResultCode.MISS] * 4
    assert put(store, range(4)) == [ResultCode.OK] * 4
    assert get(store, range(4)) == [ResultCode.OK] * 4


@pytest.mark.parametrize("unix", [False, True])
def test_a_server_may_be_killed_in_the_middle_of_batches(
    server: ValkeyServer, opened: list[KVStore], unix: bool
) -> None:
    store = open_store(f"{server.unix_url if unix else server.url}?threads=2")
    opened.append(store)
    seen: set[ResultCode] = set()
    over = threading.Event()
    failures: list[AssertionError] = []

    def work() -> None:
        try:
            while not over.is_set():
                seen.update(put(store, range(30)))
                seen.update(get(store, range(30)))
        except AssertionError as error:
            failures.append(error)

    threads = [in_thread(work) for _ in range(2)]
    for _ in range(4):
        wait_until(lambda: ResultCode.OK in seen)
        server.kill()
        wait_until(lambda: bool(seen & LOST))
        server.start()
        seen.clear()
    wait_until(lambda: ResultCode.OK in seen)
    over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert failures == []
    assert seen <= {ResultCode.OK, ResultCode.EXISTS, ResultCode.MISS, *LOST}
    assert put(store, range(3, 4)) in ([ResultCode.OK], [ResultCode.EXISTS])


@pytest.mark.parametrize("unix", [False, True])
def test_a_stopped_server_costs_no_more_than_the_deadline(
    server: ValkeyServer, opened: list[KVStore], unix: bool
) -> None:
    store = open_store(f"{server.unix_url if unix else server.url}?threads=2")
    opened.append(store)
    put(store, range(3))
    assert isinstance(store, ValkeyStore)
    server.stop()
    try:
        for work in (
            lambda: put(store, range(10, 40), 0.2),
            lambda: get(store, range(3), 0.2),
            lambda: [result.code for result in store.exists(["key-0"], 0.2).result()],
            lambda: [result.code for result in store.delete(["key-0"], 0.2).result()],
        ):
            start = time.monotonic()
            assert set(work()) == {ResultCode.TIMEOUT}
            assert 0.2 <= time.monotonic() - start < 1.0
        # The buffers are given back soon after: what holds them is closed, not waited for.
        job = store.get([GetOp("key-0", (memoryview(bytearray(SIZE)),))], 0.2)
        assert job.wait_settled(1.0)
    finally:
        server.go_on()
    assert get(store, range(3))[1:] == [ResultCode.OK] * 2  # late answers to what was abandoned are nobody's


def test_a_full_server_says_so_and_keeps_what_it_has(tmp_path: Path, opened: list[KVStore]) -> None:
    with ValkeyServer(tmp_path / "full", max_memory="8mb", policy="noeviction") as server:
        store = open_store(server.url)
        opened.append(store)
        codes = put(store, range(40))
        kept = codes.count(ResultCode.OK)
        assert 8 < kept < 25
        assert codes[:kept] == [ResultCode.OK] * kept
        assert set(codes[kept:]) <= {ResultCode.FULL, ResultCode.OK}
        assert ResultCode.FULL in codes
        assert get(store, range(kept)) == [ResultCode.OK] * kept
        # Full, and there already: it exists. (The server itself answers OOM to both.)
        assert put(store, range(2)) == [ResultCode.EXISTS] * 2
        assert store.put([PutOp("huge", (page(0, 5_000_000),))], DEADLINE_S).result() == [Result(ResultCode.TOO_LARGE)]


def test_values_may_be_evicted_between_lookup_and_get(tmp_path: Path, opened: list[KVStore]) -> None:
    with ValkeyServer(tmp_path / "small", max_memory="8mb") as server:
        store, other = open_store(server.url), open_store(server.url)
        opened.extend([store, other])
        over = threading.Event()

        def press() -> None:
            number = 1000
            while not over.is_set():
                put(other, range(number, number + 4))
                number += 4

        lost = 0
        thread = in_thread(press)
        try:
            for turn in range(15):
                numbers = range(turn * 4, turn * 4 + 4)
                put(store, numbers)
                keys = [f"key-{number}" for number in numbers]
                there = [result.code for result in store.exists(keys, DEADLINE_S).result()]
                for before, after in zip(there, get(store, numbers), strict=True):
                    assert after in (ResultCode.OK, ResultCode.MISS)
                    lost += (before, after) == (ResultCode.OK, ResultCode.MISS)
        finally:
            over.set()
            thread.join(DEADLINE_S)
        # The control, without luck: a value that is gone after it was found is a miss.
        put(store, range(1))
        assert store.exists(["key-0"], DEADLINE_S).result()[0].code is ResultCode.OK
        server.ask("UNLINK", "key-0")
        assert get(store, range(1)) == [ResultCode.MISS]


def test_a_reader_during_a_write_sees_all_or_nothing(server: ValkeyServer, opened: list[KVStore]) -> None:
    """Also when the writer is cut off in the middle of its value."""
    store, reader = open_store(server.url), open_store(server.url)
    opened.extend([store, reader])
    seen: list[ResultCode] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.extend(get(reader, range(8)))

    thread = in_thread(read)
    for _ in range(10):
        put(store, range(8), 0.002)
        put(store, range(8))
        store.delete([f"key-{number}" for number in range(8)], DEADLINE_S).result()
    over.set()
    thread.join(DEADLINE_S)
    assert set(seen) <= {ResultCode.OK, ResultCode.MISS}
    assert seen


def test_a_reset_in_the_middle_of_a_value_is_no_value(server: ValkeyServer, opened: list[KVStore]) -> None:
    near = open_store(server.url)
    opened.append(near)
    put(near, range(6))
    with Relay(server.port) as relay:
        store = open_store(relay.url)
        opened.append(store)
        cuts = 0
        for cut_after in (0, 1, 5, 10, SIZE // 2, SIZE + 9, SIZE + 10, SIZE + 11, SIZE + 12, 3 * SIZE, 5 * SIZE + 70):
            relay.cut_after = cut_after
            codes = get(store, range(6))
            whole = codes.count(ResultCode.OK)
            assert codes == [ResultCode.OK] * whole + [ResultCode.UNAVAILABLE] * (6 - whole)
            # $400000\r\n, the value, \r\n; the reset also overtakes what the relay's kernel has not sent yet.
            assert whole <= cut_after // (SIZE + 11)
            cuts += 1
            relay.cut_after = None
            assert get(store, range(6)) == [ResultCode.OK] * 6
        assert isinstance(store, ValkeyStore)
        assert store.connections == cuts + 1
        store.close()


def test_a_server_that_trickles_costs_no_more_than_the_deadline(server: ValkeyServer, opened: list[KVStore]) -> None:
    """Every wait of the socket is short; together they end in time all the same."""
    near = open_store(server.url)
    opened.append(near)
    put(near, range(2))
    with Relay(server.port) as relay:
        store = open_store(relay.url)
        opened.append(store)
        assert get(store, range(2)) == [ResultCode.OK] * 2
        relay.trickle_s = 0.005
        start = time.monotonic()
        job = store.get([GetOp("key-0", (memoryview(bytearray(SIZE)),))], 0.3)
        assert job.result() == [Result(ResultCode.TIMEOUT)]
        assert job.wait_settled(1.0)
        assert time.monotonic() - start < 1.0
        relay.trickle_s = 0.0
        assert get(store, range(2)) == [ResultCode.OK] * 2
        store.close()


def test_a_stream_that_is_no_protocol_any_more_is_left(
    server: ValkeyServer, opened: list[KVStore], caplog: pytest.LogCaptureFixture
) -> None:
    near = open_store(server.url)
    opened.append(near)
    put(near, range(2))
    with Relay(server.port) as relay:
        store = open_store(relay.url)
        opened.append(store)
        relay.change = lambda data: data.replace(b"$400000", b"$399990")
        assert get(store, range(2)) == [ResultCode.UNAVAILABLE] * 2
        assert "does not speak as it should" in caplog.text
        relay.change = lambda data: data
        assert get(store, range(2)) == [ResultCode.OK] * 2
        store.close()


def test_an_idle_connection_that_the_server_has_closed_is_not_used(server: ValkeyServer, opened: list[KVStore]) -> None:
    store = open_store(server.url)
    opened.append(store)
    for _ in range(3):
        assert set(put(store, range(3))) <= {ResultCode.OK, ResultCode.EXISTS}
        assert server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").startswith(":")
    assert isinstance(store, ValkeyStore)
    assert store.connections == 3


# ---- outside a cluster: replicas, and those that take the place of their primary


@pytest.fixture
def replica(tmp_path: Path, server: ValkeyServer) -> Iterator[ValkeyServer]:
    server.ask("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    with ValkeyServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(server.port)) as started:
        wait_until(lambda: "master_link_status:up" in started.ask("INFO", "replication"))
        wait_until(lambda: "state=online" in server.ask("INFO", "replication"))
        yield started


def promote(replica: ValkeyServer, primary: ValkeyServer | None = None) -> None:
    """The replica is a primary now, and what was one is its replica."""
    assert replica.ask("REPLICAOF", "NO", "ONE").startswith("+OK")
    if primary is not None:
        assert primary.ask("REPLICAOF", "127.0.0.1", str(replica.port)).startswith("+OK")
        wait_until(lambda: "master_link_status:up" in primary.ask("INFO", "replication"))


def test_a_replica_is_read_and_its_primary_is_written(
    server: ValkeyServer, replica: ValkeyServer, opened: list[KVStore]
) -> None:
    store, other = open_store(server.url), open_store(replica.url)
    opened += [store, other]
    put(store, range(2))
    wait_until(lambda: get(other, range(2)) == [ResultCode.OK] * 2)
    [advice] = advice_from_store(other)
    assert (advice.level, f"127.0.0.1:{server.port}" in advice.finding) == ("warning", True)
    assert put(other, range(5, 6)) == [ResultCode.OK]
    assert get(store, range(5, 6)) == [ResultCode.OK]
    assert [one.action for one in advice_from_store(other) if one.level == "warning"] == [
        f"name 127.0.0.1:{server.port}"
    ]


def test_a_replica_whose_primary_is_away_says_that_it_cannot_be_written_to(
    server: ValkeyServer, replica: ValkeyServer, opened: list[KVStore], caplog: pytest.LogCaptureFixture
) -> None:
    other = open_store(replica.url)
    opened.append(other)
    server.kill()
    assert put(other, range(1)) == [ResultCode.UNAVAILABLE]
    assert f"127.0.0.1:{replica.port} cannot be written to" in caplog.text
    assert get(other, range(1)) == [ResultCode.MISS]  # it is read all the same


def test_a_primary_that_was_made_a_replica_is_left_for_the_new_one(
    server: ValkeyServer, replica: ValkeyServer, opened: list[KVStore]
) -> None:
    store = open_store(server.url)
    opened.append(store)
    assert put(store, range(3)) == [ResultCode.OK] * 3
    wait_until(lambda: replica.ask("DBSIZE").startswith(":3"))
    promote(replica, server)
    assert put(store, range(6)) == [ResultCode.EXISTS] * 3 + [ResultCode.OK] * 3
    assert get(store, range(6)) == [ResultCode.OK] * 6
    assert isinstance(store, ValkeyStore)
    assert replica.ask("DBSIZE").startswith(":6")
    server.kill()
    assert put(store, range(7)) == [ResultCode.EXISTS] * 6 + [ResultCode.OK]


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_replica_that_takes_the_place_of_a_dead_primary_is_used(
    server: ValkeyServer, replica: ValkeyServer, opened: list[KVStore], end: str
) -> None:
    store = open_store(server.url)
    opened.append(store)
    assert put(store, range(3)) == [ResultCode.OK] * 3
    wait_until(lambda: replica.ask("DBSIZE").startswith(":3"))
    server.kill() if end == "killed" else server.stop()
    found = {result.code for result in store.exists(["key-0"], 0.3).result()}
    assert found <= LOST  # the control: it is a replica still, and nobody's primary
    promote(replica)
    wait_until(lambda: {result.code for result in store.exists(["key-0"], 1.0).result()} == {ResultCode.OK})
    assert put(store, range(6)) == [ResultCode.EXISTS] * 3 + [ResultCode.OK] * 3
    assert get(store, range(6)) == [ResultCode.OK] * 6


def test_the_next_value_is_finished_while_the_server_is_busy(server: ValkeyServer, opened: list[KVStore]) -> None:
    """Three of which two may be under way: no answer comes, and the third has been told that it goes."""
    answers = threading.Event()
    called: list[int] = []
    with Relay(server.port) as relay:
        store = open_store(relay.url)
        opened.append(store)

        def hold(data: bytes) -> bytes:
            answers.wait(DEADLINE_S)
            return data

        relay.change = hold
        pages = [page(number, 1 << 20) for number in range(3)]
        ops = [PutOp(f"key-{number}", (one,), partial(called.append, number)) for number, one in enumerate(pages)]
        job = store.put(ops, 2 * DEADLINE_S)
        wait_until(lambda: called == [0, 1, 2])
        assert not job.done()
        answers.set()
        assert job.result() == [Result(ResultCode.OK, 1 << 20)] * 3
    assert called == [0, 1, 2]


def test_a_value_that_is_sent_on_to_another_server_is_finished_once() -> None:
    called: list[str] = []

    def nearing() -> bool:
        assert not called
        return True

    request = PutRequest(b"key", PutOp("key", (page(1),), partial(called.append, "key"), nearing), 0)
    assert request.on_idle()
    assert bytes(request.parts(asking=False)[1]) == bytes(request.parts(asking=True)[1])
    assert called == ["key"]
    assert not request.on_idle(), "what has gone once is looked at no more"
