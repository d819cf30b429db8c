"""Tests peers that die, stop, restart, lie or are cut off: no wrong byte, no hang, no leftover pin."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from demo.processes import free_port
from kvparams_connectors.store import GetOp, KVStore, Result, ResultCode
from kvparams_connectors.stores.guard.store import GuardedStore
from kvparams_connectors.stores.peer.channel import PeerChannel
from kvparams_connectors.stores.peer.handshake import connect_handshake
from kvparams_connectors.stores.peer.store import PeerStore
from kvparams_connectors.stores.peer.wire import (
    REPLY_HEAD,
    PeerOperation,
    PeerStatus,
    encode_found,
)
from tests.support.connectors.peer_process import PeerProcess, a_peer, page
from tests.support.connectors.peer_steps import SIZE, WAIT_S, Liar, get, lies, names, peer, put, reader_of, request
from tests.support.connectors.valkey_relay import Relay
from tests.support.waiting import wait_until

URL = "peer://127.0.0.1?size=32MiB"


@pytest.fixture(scope="module")
def kept() -> Iterator[list[PeerProcess]]:
    processes: list[PeerProcess] = []
    yield processes
    for process in processes:
        process.kill()


@pytest.fixture
def owner(kept: list[PeerProcess]) -> PeerProcess:
    return a_peer(kept, URL)


def told(opened: list[KVStore], address: str, seeds: Sequence[int] = range(64), **settings: str | float) -> PeerStore:
    store = peer(opened, "127.0.0.1:0", **settings)
    store.hint_location(names(seeds), address)
    return store


def recovers(store: KVStore, seeds: Sequence[int]) -> None:
    """It is read from there again, once it has been left alone long enough."""
    wait_until(lambda: set(get(store, seeds)) == {ResultCode.OK}, WAIT_S)


def test_a_peer_that_is_killed_costs_nothing_and_its_pages_are_gone(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(4), SIZE)
    store = told(opened, owner.address)
    assert get(store, range(4)) == [ResultCode.OK] * 4
    owner.kill()
    start = time.monotonic()
    assert get(store, range(4)) == [ResultCode.MISS] * 4
    assert (store.statistics.values_lost, store.statistics.places_resting) == (4, 1)
    assert get(store, range(4)) == [ResultCode.MISS] * 4
    assert (store.statistics.values_lost, store.statistics.connections) == (8, 1 + 1)
    assert time.monotonic() - start < 1


def test_a_peer_that_was_restarted_has_nothing_of_what_was(opened: list[KVStore]) -> None:
    with PeerProcess(f"peer://127.0.0.1:{free_port()}?size=32MiB") as owner:
        owner.put(range(4), SIZE)
        store = told(opened, owner.address)
        assert get(store, range(4)) == [ResultCode.OK] * 4
        owner.restart()
        assert get(store, range(4)) == [ResultCode.MISS] * 4
        owner.put([1], SIZE)
        store.hint_location(names(range(4)), owner.address)
        recovers(store, [1])
        assert get(store, [0, 1]) == [ResultCode.MISS, ResultCode.OK]


def test_a_stopped_peer_costs_its_deadline_once(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(4), SIZE)
    store = told(opened, owner.address)
    assert get(store, range(2)) == [ResultCode.OK] * 2
    owner.stop()
    start = time.monotonic()
    assert get(store, range(4), deadline_s=0.5) == [ResultCode.MISS] * 4
    assert 0.3 < time.monotonic() - start < 1.5
    assert store.statistics.values_lost == 4
    start = time.monotonic()
    assert get(store, range(4), deadline_s=0.5) == [ResultCode.MISS] * 4
    assert put(store, [50]) == [ResultCode.OK]
    assert time.monotonic() - start < 0.4
    owner.go_on()
    recovers(store, range(4))


def test_a_stopped_peer_keeps_nobody_from_the_others(opened: list[KVStore], owner: PeerProcess) -> None:
    with PeerProcess(URL) as other:
        owner.put(range(4), SIZE)
        other.put(range(10, 14), SIZE)
        store = told(opened, owner.address, threads=2)
        store.hint_location(names(range(10, 14)), other.address)
        assert get(store, [0, 1, 10, 11]) == [ResultCode.OK] * 4
        owner.stop()
        stuck = store.get([GetOp("key-0", (memoryview(bytearray(SIZE)),))], 2.0)
        assert get(store, range(10, 14), deadline_s=0.9) == [ResultCode.OK] * 4
        assert put(store, [30]) == [ResultCode.OK]
        assert get(store, [30]) == [ResultCode.OK]
        assert not stuck.done()
        owner.go_on()
        assert stuck.result()[0].code is ResultCode.OK


@pytest.mark.parametrize("threads", [1, *(pytest.param(more, marks=pytest.mark.slow) for more in (2, 4))])
def test_one_batch_over_a_stopped_peer_loses_nothing_else(
    opened: list[KVStore], owner: PeerProcess, threads: int
) -> None:
    with PeerProcess(URL) as other:
        owner.put(range(4), SIZE)
        other.put(range(10, 14), SIZE)
        store = told(opened, owner.address, threads=threads)
        store.hint_location(names(range(10, 14)), other.address)
        put(store, [50])
        owner.stop()
        start = time.monotonic()
        assert get(store, [0, 50, 10], deadline_s=1.0) == [ResultCode.MISS, ResultCode.OK, ResultCode.OK]
        assert time.monotonic() - start < 1.5
        owner.go_on()
        wait_until(lambda: store.statistics.places_resting == 0)
        owner.stop()
        found = store.exists(names([0, 50, 10]), 1.0).result()
        assert [result.code for result in found] == [ResultCode.MISS, ResultCode.OK, ResultCode.OK]
        owner.go_on()


def test_more_batches_than_threads_wait_for_no_peer_beyond_their_time(
    opened: list[KVStore], owner: PeerProcess
) -> None:
    """Those that nobody has begun to ask for are a MISS in time, and nobody writes into their buffers later."""
    with PeerProcess(URL) as other:
        owner.put([0], SIZE)
        other.put(range(10, 14), SIZE)
        store = told(opened, owner.address, threads=1)
        store.hint_location(names(range(10, 14)), other.address)
        owner.stop()
        first = store.get([GetOp("key-0", (memoryview(bytearray(SIZE)),))], 5.0)  # the one thread is at it for a second
        targets = [memoryview(bytearray(b"\xa5" * SIZE)) for _ in range(4)]
        jobs = [store.get([GetOp(f"key-{10 + at}", (target,))], 0.5) for at, target in enumerate(targets)]
        for job in jobs:
            assert [result.code for result in job.result()] == [ResultCode.MISS]
            assert time.monotonic() < job.deadline + 0.5
            assert job.wait_settled(0.2)
        assert not first.done()
        assert [result.code for result in first.result()] == [ResultCode.MISS]
        assert get(store, range(10, 14)) == [ResultCode.OK] * 4
        assert all(target == b"\xa5" * SIZE for target in targets)
        owner.go_on()


def test_a_peer_that_says_nothing_is_not_waited_for_until_the_deadline(
    opened: list[KVStore], owner: PeerProcess
) -> None:
    owner.put(range(4), SIZE)
    store = told(opened, owner.address, connect_s=0.3)
    assert get(store, range(4)) == [ResultCode.OK] * 4
    owner.stop()
    start = time.monotonic()
    assert get(store, range(4)) == [ResultCode.MISS] * 4
    assert 0.2 < time.monotonic() - start < 2.0
    owner.go_on()


def test_what_came_whole_and_in_time_counts(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(4), SIZE)
    with Relay(int(owner.address.rpartition(":")[2])) as relay:
        store = told(opened, f"127.0.0.1:{relay.port}")
        go_on, said = threading.Event(), [0]

        def stall(data: bytes) -> bytes:
            said[0] += len(data)
            if said[0] > 3 * SIZE + SIZE // 2:
                go_on.wait(WAIT_S)
            return data

        relay.change = stall
        found = get(store, range(4), deadline_s=1.0)
        go_on.set()
        assert found[0] is ResultCode.OK
        assert found[-1] is ResultCode.MISS


@pytest.mark.parametrize("deadline_s", [pytest.param(WAIT_S, marks=pytest.mark.slow), 0.2])
def test_a_guard_stays_closed_whatever_becomes_of_peers(
    opened: list[KVStore], owner: PeerProcess, deadline_s: float
) -> None:
    """Dead ones, and one that is stopped: what is here and at others is there all the time."""
    with PeerProcess(URL) as other:
        owner.put(range(30), SIZE)
        other.put([40], SIZE)
        inner = told(opened, owner.address, range(30))
        inner.hint_location(names([40]), other.address)
        guarded = GuardedStore(inner, name="peer")
        opened.append(guarded)
        put(guarded, [50])
        owner.stop()
        for number in range(6, 12):
            assert get(guarded, [number], deadline_s=deadline_s) == [ResultCode.MISS]
        for number in range(6):
            guarded.hint_location(names([60 + number]), f"127.0.0.1:{free_port()}")
            assert get(guarded, [60 + number], deadline_s=deadline_s) == [ResultCode.MISS]
            assert get(guarded, [number], deadline_s=deadline_s) == [ResultCode.MISS]
            assert get(guarded, [50, 40]) == [ResultCode.OK] * 2
            assert put(guarded, [number + 100]) == [ResultCode.OK]
        assert (guarded.statistics.opened, guarded.statistics.refused) == (0, 0)
        owner.go_on()


@pytest.mark.parametrize("after", [0, 10, 75, 110, 5_000, 250_000])
def test_a_connection_may_be_reset_anywhere(opened: list[KVStore], owner: PeerProcess, after: int) -> None:
    owner.put(range(4), SIZE)
    with Relay(int(owner.address.rpartition(":")[2])) as relay:
        store = told(opened, f"127.0.0.1:{relay.port}")
        relay.cut_after = after
        found = get(store, range(4))
        whole = found.count(ResultCode.OK)  # a reset takes along what had come and was not received yet
        assert whole <= after // SIZE
        assert found == [ResultCode.OK] * whole + [ResultCode.MISS] * (4 - whole)
        assert store.statistics.values_lost == 4 - whole
        assert get(store, range(4)) == [ResultCode.MISS] * 4  # it is left alone for a while
        assert get(told(opened, f"127.0.0.1:{relay.port}"), range(4)) == [ResultCode.OK] * 4
    wait_until(lambda: owner.pins() == 0)


def test_a_trickling_peer_is_given_up_at_the_deadline(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(4), SIZE)
    with Relay(int(owner.address.rpartition(":")[2])) as relay:
        store = told(opened, f"127.0.0.1:{relay.port}")
        assert get(store, [0]) == [ResultCode.OK]
        relay.trickle_s = 0.001
        start = time.monotonic()
        assert get(store, range(4), deadline_s=0.5) == [ResultCode.MISS] * 4
        assert time.monotonic() - start < 1.5
        assert store.statistics.values_lost == 4
        relay.trickle_s = 0


def test_buffers_are_left_alone_once_the_job_is_settled(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(8), 2 << 20)
    store = told(opened, owner.address)
    for deadline_s in (0.0005, 0.001, 0.002, 0.004, 0.008):
        targets = [memoryview(bytearray(2 << 20)) for _ in range(8)]
        job = store.get([GetOp(f"key-{at}", (target,)) for at, target in enumerate(targets)], deadline_s)
        job.result()
        assert job.wait_settled(WAIT_S)
        for target in targets:
            target[:] = b"\xa5" * (2 << 20)
        get(store, range(8), 2 << 20)
        assert all(target == b"\xa5" * (2 << 20) for target in targets)
    wait_until(lambda: owner.pins() == 0)


# ---- liars


def says(words: bytes) -> Callable[[PeerChannel, list[str]], None]:
    return lambda channel, keys: channel.send_parts([words])


TWO = encode_found([Result(ResultCode.OK, SIZE), Result(ResultCode.OK, SIZE)])


@pytest.mark.parametrize(
    "answer",
    [
        lies(encode_found([Result(ResultCode.OK, SIZE + 1), Result(ResultCode.OK, SIZE)]), bytes(2 * SIZE + 1)),
        lies(encode_found([Result(ResultCode.OK, 1 << 62), Result(ResultCode.OK, SIZE)]), bytes(2 * SIZE)),
        lies(encode_found([Result(ResultCode.OK, SIZE)]), bytes(SIZE)),
        lies(TWO + b"x", bytes(2 * SIZE)),
        lies(TWO, bytes(2 * SIZE), count=3),
        lies(b"\xff" * 18, bytes(2 * SIZE)),
        lies(b"", status=PeerStatus.UNABLE, count=0),
        lies(b"", status=7, count=0),
        says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        says(REPLY_HEAD.pack(0, 2, 0xFFFFFFFF)),
    ],
)
def test_a_peer_that_lies_is_believed_nothing(
    opened: list[KVStore], answer: Callable[[PeerChannel, list[str]], None]
) -> None:
    with Liar(answer) as liar:
        store = told(opened, liar.address)
        memory = memoryview(bytearray(b"\xa5" * (4 * SIZE)))
        targets = [memory[SIZE : 2 * SIZE], memory[2 * SIZE : 3 * SIZE]]
        results = store.get([GetOp(f"key-{at}", (target,)) for at, target in enumerate(targets)], WAIT_S).result()
        assert [result.code for result in results] == [ResultCode.MISS] * 2
        assert (store.statistics.values_lost, store.statistics.places_resting) == (2, 1)
        assert memory[:SIZE] == memory[3 * SIZE :] == b"\xa5" * SIZE


def test_what_a_peer_says_beyond_its_answer_is_nobodys_page(opened: list[KVStore]) -> None:
    """The connection is not used again, so that the next answer is not taken from what was left over."""
    with Liar(lies(TWO, bytes(page(0, SIZE)), bytes(page(1, SIZE)), TWO)) as liar:
        store = told(opened, liar.address)
        assert get(store, range(2)) == [ResultCode.OK] * 2
        assert get(store, range(2)) == [ResultCode.OK] * 2
        assert store.statistics.connections == 2


def test_something_else_that_listens_there_is_no_peer(opened: list[KVStore]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u7\r\n".ljust(100))
                sock.settimeout(5)
                with suppress(OSError):
                    sock.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        store = told(opened, f"127.0.0.1:{listener.getsockname()[1]}")
        assert get(store, [0]) == [ResultCode.MISS]
        assert (store.statistics.values_lost, store.statistics.places_resting) == (1, 1)
        thread.join(WAIT_S)


# ---- readers that misbehave


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n".ljust(60), b"KVPR\1\0" + bytes(48) + b"\xff" * 100, b"K"])
def test_nonsense_ends_a_connection_and_nothing_else(opened: list[KVStore], owner: PeerProcess, said: bytes) -> None:
    owner.put([1], SIZE)
    stranger = reader_of(owner)
    stranger.send_parts([said])
    stranger.hang_up()
    stranger.close()
    assert get(told(opened, owner.address), [1]) == [ResultCode.OK]


def test_a_reader_that_does_not_read_is_cut_off_and_pins_nothing(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(12), 2 << 20)
    slow = reader_of(owner)
    connect_handshake(slow, b"")
    slow.send_parts([request(PeerOperation.GET, range(12), 300)])
    wait_until(lambda: owner.pins() > 0)  # it is being sent: far more than sockets take
    wait_until(lambda: owner.pins() == 0)
    with pytest.raises(OSError):  # noqa: PT011 - reset, or an end
        slow.read(30 << 20)
    slow.close()


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_cut_off_whatever_time_it_wants(
    opened: list[KVStore], owner: PeerProcess
) -> None:
    owner.put(range(12), 2 << 20)
    slow = reader_of(owner)
    connect_handshake(slow, b"")
    slow.send_parts([request(PeerOperation.GET, range(12), 3_600_000)])
    wait_until(lambda: owner.pins() > 0)
    wait_until(lambda: owner.pins() == 0, 6.0)
    slow.close()


def test_so_many_readers_and_no_more(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put([1], SIZE)
    crowd = [reader_of(owner) for _ in range(128)]
    for channel in crowd:
        connect_handshake(channel, b"")
    wait_until(lambda: owner.readers() == 128)
    assert get(told(opened, owner.address), [1]) == [ResultCode.MISS]
    for channel in crowd:
        channel.close()
    wait_until(lambda: owner.readers() == 0)
    assert get(told(opened, owner.address), [1]) == [ResultCode.OK]


@pytest.mark.slow
def test_who_says_nothing_takes_no_readers_place(opened: list[KVStore], owner: PeerProcess) -> None:
    """The oldest of them goes for everybody who is new."""
    owner.put([1], SIZE)
    crowd = [reader_of(owner) for _ in range(300)]
    assert get(told(opened, owner.address), [1]) == [ResultCode.OK]
    with pytest.raises(OSError):  # noqa: PT011 - reset, or an end
        crowd[0].read(1)
    assert owner.readers() <= 1
    for channel in crowd:
        channel.close()


def test_a_thread_that_cannot_start_costs_one_reader(opened: list[KVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    owner = peer(opened)
    assert owner.address is not None
    put(owner, [1])
    start = threading.Thread.start
    refused: list[str] = []

    def no_more(thread: threading.Thread) -> None:
        if thread.name == "kvparams-peer-reader" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    assert get(told(opened, owner.address), [1]) == [ResultCode.MISS]
    assert get(told(opened, owner.address), [1]) == [ResultCode.OK]
    assert (len(refused), owner.statistics.readers_refused) == (1, 1)


def test_strangers_fill_no_log(opened: list[KVStore], caplog: pytest.LogCaptureFixture) -> None:
    owner = peer(opened)
    assert owner.address is not None
    host, _, port = owner.address.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), WAIT_S) as sock:
            sock.sendall(b"KVPR\1\0" + bytes(48) + b"\xff" * 12)
            with suppress(OSError):
                while sock.recv(100):
                    pass
    wait_until(lambda: owner.statistics.readers_refused == 20)
    assert sum("does not speak as it should" in one.message for one in caplog.records) == 1


def test_connections_of_the_dead_are_closed(opened: list[KVStore]) -> None:
    store = peer(opened, "127.0.0.1:0")
    owners = [peer(opened) for _ in range(3)]
    for number, owner in enumerate(owners):
        put(owner, [number])
        store.hint_location(names([number]), str(owner.address))
        assert get(store, [number]) == [ResultCode.OK]
        owner.close()
    states = store._sources._states  # pyright: ignore[reportPrivateUsage]
    assert [len(state.idle) for state in states.values()] == [0, 0, 1]


def test_an_owner_that_closes_in_the_middle_pins_nothing(opened: list[KVStore]) -> None:
    for _ in range(10):
        owner, reader = peer(opened, size="32MiB"), peer(opened, "127.0.0.1:0")
        assert owner.address is not None
        put(owner, range(8), 2 << 20)
        reader.hint_location(names(range(8)), owner.address)
        targets = [memoryview(bytearray(2 << 20)) for _ in range(8)]
        job = reader.get([GetOp(f"key-{at}", (target,)) for at, target in enumerate(targets)], WAIT_S)
        owner.close()
        results = job.result()
        assert {result.code for result in results} <= {ResultCode.MISS, ResultCode.OK}
        for at, (target, result) in enumerate(zip(targets, results, strict=True)):
            assert result.code is not ResultCode.OK or target == page(at, 2 << 20)


# ---- many at a time, and for long


@pytest.mark.slow
def test_readers_while_pages_come_and_go(opened: list[KVStore]) -> None:
    """Nothing is leased, there is room for a third: what is read is whole and right, or not there."""
    owner = peer(opened, size="2MiB")
    assert owner.address is not None
    over = threading.Event()
    failures: list[BaseException] = []
    hits = [0, 0, 0]

    def write(first: int) -> None:
        seed = first
        while not over.is_set():
            seed = (seed * 5 + 3) % 64
            put(owner, [seed])
            if seed % 7 == 0:
                owner.delete(names([seed]), WAIT_S).result()

    def read(at: int) -> None:
        reader = peer(opened, "127.0.0.1:0")
        try:
            while not over.is_set():
                reader.hint_location(names(range(64)), str(owner.address))
                for first in range(0, 64, 8):
                    hits[at] += get(reader, range(first, first + 8)).count(ResultCode.OK)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=write, args=(1,)), threading.Thread(target=write, args=(2,))]
    threads += [threading.Thread(target=read, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    over.wait(2.0)
    over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    assert min(hits) > 0


def test_a_number_too_large_for_memory_is_never_allocated(owner: PeerProcess) -> None:
    stranger = reader_of(owner)
    connect_handshake(stranger, b"")
    stranger.send_parts([struct.pack("!BxHII", PeerOperation.GET, 65_535, 0xFFFFFFFF, 1000)])
    with pytest.raises(OSError):  # noqa: PT011
        stranger.read(1)
    stranger.close()
