"""Tests the store on an `lm://` server that is killed, stopped or cut off: no read is wrong, and no call hangs."""

import struct
import subprocess
import sys
import threading
import time

import pytest

from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.stores.lmcache.store import LMCacheStore
from kvparams_connectors.stores.lmcache.wire import LMCacheEntryKind, LMCacheNames
from tests.support.connectors.lmcache_server import BareClient, LMCacheServer
from tests.support.connectors.lmcache_steps import break_off, delete, exists, resident_mib, sockets
from tests.support.connectors.steps import DEADLINE_S, SIZE, get, in_thread, put
from tests.support.connectors.valkey_relay import Relay
from tests.support.waiting import wait_until

HUGE = 250 << 20
LOST = {ResultCode.UNAVAILABLE, ResultCode.TIMEOUT}


def through(relay: Relay, prefix: str, opened: list[KVStore]) -> LMCacheStore:
    made = open_store(f"lmcache://127.0.0.1:{relay.port}?prefix={prefix}")
    opened.append(made)
    assert isinstance(made, LMCacheStore)
    return made


# ---- a network that gets worse


def test_a_put_that_is_not_confirmed_is_not_ok(
    server: LMCacheServer, prefix: str, store: LMCacheStore, opened: list[KVStore]
) -> None:
    with Relay(server.port) as relay:
        far = through(relay, prefix, opened)
        relay.cut_after = 36  # the answer to "is it there?" comes through, the confirmation does not
        assert put(far, range(1)) == [ResultCode.UNAVAILABLE]
        far.close()
    assert exists(store, range(1)) == [ResultCode.OK]  # the control: it was stored


def test_a_confirmation_of_something_else_is_not_ok(server: LMCacheServer, prefix: str, opened: list[KVStore]) -> None:
    """The server says that nothing stands there, as one would that has no room."""
    missing = struct.pack("=9i", 400, 0, 1, 2, 0, 0, 0, 0, 0)
    with Relay(server.port) as relay:
        far = through(relay, prefix, opened)
        relay.change = lambda data: missing * (len(data) // 36)
        assert put(far, range(2)) == [ResultCode.UNAVAILABLE] * 2
        far.close()


def test_a_reset_in_the_middle_of_a_value_is_no_value(
    server: LMCacheServer, prefix: str, store: LMCacheStore, opened: list[KVStore]
) -> None:
    """A connection that is lost is made once more; what is cut twice is UNAVAILABLE."""
    put(store, range(4))
    with Relay(server.port) as relay:
        far = through(relay, prefix, opened)
        for cut_after in (0, 1, 35, 36, 37, SIZE // 2, SIZE + 35, SIZE + 36, SIZE + 37, 3 * SIZE):
            relay.cut_after = cut_after
            assert get(far, range(4)) == [ResultCode.OK] * 4
            assert relay.cut_after is None
        assert exists(store, range(4)) == [ResultCode.OK] * 4  # no cut was taken for remains
        always = [0]

        def every_time(data: bytes) -> bytes:
            relay.cut_after = always[0]
            return data

        relay.change = every_time
        for cut in (0, 20, 36, 1000):
            always[0] = cut
            assert set(get(far, range(4))) <= {ResultCode.UNAVAILABLE, ResultCode.MISS}
        relay.change = lambda data: data
        relay.cut_after = None
        far.close()


def test_a_server_that_trickles_costs_no_more_than_the_deadline(
    server: LMCacheServer, prefix: str, store: LMCacheStore, opened: list[KVStore]
) -> None:
    put(store, range(2))
    with Relay(server.port) as relay:
        far = through(relay, prefix, opened)
        assert get(far, range(2)) == [ResultCode.OK] * 2
        relay.trickle_s = 0.005
        start = time.monotonic()
        job = far.get([GetOp("key-0", (memoryview(bytearray(SIZE)),))], 0.3)
        assert job.result() == [Result(ResultCode.TIMEOUT)]
        assert job.wait_settled(1.0)
        assert time.monotonic() - start < 1.0
        relay.trickle_s = 0.0
        assert get(far, range(2)) == [ResultCode.OK] * 2
        far.close()


@pytest.mark.parametrize(
    "lie",
    [
        (200, -1, LMCacheEntryKind.VALUE, SIZE),
        (77, SIZE, LMCacheEntryKind.VALUE, SIZE),
        (200, 2**31 - 1, LMCacheEntryKind.VALUE, 2**31 - 1),
        (200, SIZE - 7, LMCacheEntryKind.VALUE, SIZE - 7),
        (200, SIZE + 1, LMCacheEntryKind.VALUE, SIZE),
    ],
)
def test_a_server_that_lies_about_lengths_hurts_nobody(
    server: LMCacheServer, prefix: str, store: LMCacheStore, opened: list[KVStore], lie: tuple[int, int, int, int]
) -> None:
    """Nothing is written beside the buffers, nothing waits past its deadline, and nothing but a shorter value is
    believed: that is what pages have checksums for."""
    put(store, range(2))
    code, nbytes, kind, size = lie
    true = struct.pack("=6i", 200, SIZE, 4, 6, LMCacheEntryKind.VALUE, SIZE)
    with Relay(server.port) as relay:
        far = through(relay, prefix, opened)

        def change(data: bytes) -> bytes:
            at = data.find(true)
            return (
                data
                if at < 0
                else data[:at] + struct.pack("=9i", code, nbytes, 4, 6, kind, size, 0, 0, 0) + data[at + 36 :]
            )

        relay.change = change
        memory = bytearray(b"\xa5" * (SIZE + 2000))
        target = memoryview(memory)[1000 : 1000 + SIZE]
        start = time.monotonic()
        job = far.get([GetOp("key-0", (target,)), GetOp("key-1", (memoryview(bytearray(SIZE)),))], 1.0)
        found = [result.code for result in job.result()]
        assert time.monotonic() - start < 2.0
        assert job.wait_settled(1.0)
        if found[0] is ResultCode.OK:
            assert job.result()[0].nbytes == SIZE - 7
        assert found[1] is not ResultCode.OK
        assert set(memory[:1000] + memory[1000 + SIZE :]) == {0xA5}
        relay.change = lambda data: data
        assert get(far, range(2)) == [ResultCode.OK] * 2
        far.close()


# ---- a server that stops and goes


def test_a_stopped_server_costs_no_more_than_the_deadline(server: LMCacheServer, store: LMCacheStore) -> None:
    put(store, range(3))
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
    assert get(store, range(1, 3)) == [ResultCode.OK] * 2  # late answers to what was abandoned are nobody's


def test_a_put_that_is_abandoned_in_the_middle_leaves_no_remains(
    server: LMCacheServer, prefix: str, store: LMCacheStore
) -> None:
    before = resident_mib(server.pid)
    job = store.put([PutOp("key", (memoryview(bytearray(HUGE)),))], 0.5)
    try:
        wait_until(lambda: resident_mib(server.pid) > before + 16, pause_s=0.001)
        server.stop()
        assert job.result() == [Result(ResultCode.TIMEOUT)]
        assert job.wait_settled(1.0)
    finally:
        server.go_on()
    assert leaves_nothing(server, LMCacheNames(prefix).value("key"))
    assert put(store, range(1)) == [ResultCode.OK]


WRITER = """
import sys
from kvparams_connectors.store import PutOp, open_store
open_store(sys.argv[1]).put([PutOp("key", (memoryview(bytearray(int(sys.argv[2]))),))], 60.0).result()
"""


def test_a_writer_that_is_killed_in_the_middle_of_a_value_leaves_no_remains(server: LMCacheServer, prefix: str) -> None:
    before = resident_mib(server.pid)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, f"{server.url}?prefix={prefix}", str(HUGE)])
    try:
        wait_until(lambda: resident_mib(server.pid) > before + 16, pause_s=0.001)
        server.stop()
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait(DEADLINE_S)
        server.go_on()
    assert leaves_nothing(server, LMCacheNames(prefix).value("key"))


def leaves_nothing(server: LMCacheServer, name: bytes) -> bool:
    """Whether the server keeps nothing of a put that was broken off; and the control, of one that was closed."""
    wait_until(lambda: sockets(server.pid) == 1)  # only the one it listens on: it is through with the others
    other = name.replace(b"@0@", b"@2@")
    break_off(server, other, bytes(1000), 5000, reset=False)
    with BareClient(server.port) as client:
        assert client.exist(other) == 200
        return client.exist(name) == 400


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_is_used_again(server: LMCacheServer, store: LMCacheStore) -> None:
    assert put(store, range(4)) == [ResultCode.OK] * 4
    server.kill()
    try:
        assert set(get(store, range(4))) == {ResultCode.UNAVAILABLE}
        assert set(put(store, range(4))) == {ResultCode.UNAVAILABLE}
        assert set(exists(store, range(4))) == set(delete(store, range(4))) == {ResultCode.UNAVAILABLE}
    finally:
        server.start()  # other tests use it too
    assert get(store, range(4)) == [ResultCode.MISS] * 4
    assert put(store, range(4)) == [ResultCode.OK] * 4
    assert get(store, range(4)) == [ResultCode.OK] * 4


# ---- several at a time


def test_a_reader_during_writes_and_deletes_sees_all_or_nothing(
    server: LMCacheServer, prefix: str, store: LMCacheStore, opened: list[KVStore]
) -> None:
    """Also when the writer is cut off in the middle of its value, and when two put and delete at the same time."""
    reader, second = (open_store(f"{server.url}?prefix={prefix}") for _ in range(2))
    opened.extend([reader, second])
    seen: list[ResultCode] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.extend(get(reader, range(8)))

    def also_write() -> None:
        while not over.is_set():
            put(second, range(8))
            delete(second, range(4, 8))

    threads = [in_thread(read), in_thread(also_write)]
    for _ in range(10):
        put(store, range(8), 0.002)
        put(store, range(8))
        delete(store, range(8))
    over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert set(seen) <= {ResultCode.OK, ResultCode.MISS}
    assert ResultCode.OK in seen
    # Whatever the races have left behind: who looks it up and reads it puts it right, and then it can be put.
    get(reader, range(8))
    put(store, range(8))
    assert get(reader, range(8)) == exists(reader, range(8)) == [ResultCode.OK] * 8
