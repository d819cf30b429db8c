"""Tests the order in which a batch is processed, against a server that follows a script."""

import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal, verify
from kvparams_connectors.conformance.toy_engine import WAIT_S
from kvparams_connectors.store import GetOp, PutOp, Result, ResultCode
from kvparams_connectors.stores.valkey import connection_pool
from kvparams_connectors.stores.valkey.connection_pool import ValkeyAccess, ValkeyConnectionPool
from kvparams_connectors.stores.valkey.pipeline import run_batch
from kvparams_connectors.stores.valkey.requests import GetRequest, PutRequest
from kvparams_connectors.stores.valkey.topology import ClusterTopology, ValkeyNode
from kvparams_connectors.transfer.incremental_sealer import IncrementalSealer

BIG = 4 << 20
"""Of these one is under way at a time."""


@pytest.fixture
def python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps native code away, which looks at values in an order of its own."""
    monkeypatch.setattr(connection_pool, "NATIVE", None)


@pytest.mark.usefixtures("python_code")
def test_the_next_value_is_looked_at_while_one_is_sent(tmp_path: Path) -> None:
    """The server reads nothing until all of the next one was looked at, but for what it does not wait for; a buffer
    that is released meanwhile spoils its own operation only."""
    path = str(tmp_path / "socket")
    looked = [threading.Event() for _ in range(3)]
    said: list[str] = []
    pages = [memoryview(bytearray(BIG)) for _ in range(3)]

    def nearing(number: int) -> bool:
        said.append(f"near {number}")
        if said.count(f"near {number}") < 3:
            return True
        looked[number].set()
        if number == 2:
            pages[2].release()
            raise ValueError("released")
        return False

    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            for following in looked[1:]:
                following.wait(WAIT_S)
                left = BIG
                while left > 0 and (came := peer.recv(1 << 20)):
                    left -= len(came)
                left += len(b"*4\r\n$3\r\nSET\r\n$5\r\nkey-0\r\n$4194304\r\n\r\n$2\r\nNX\r\n")
                while left > 0 and (came := peer.recv(left)):
                    left -= len(came)
                peer.sendall(b"+OK\r\n")

    def going(number: int) -> None:
        said.append(f"go {number}")
        pages[number][:1]  # raises where it was released

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        server = threading.Thread(target=serve)
        server.start()
        ops = [
            PutOp(f"key-{number}", (page,), partial(going, number), partial(nearing, number))
            for number, page in enumerate(pages)
        ]
        pool = ValkeyConnectionPool(ValkeyAccess(WAIT_S))
        requests = [PutRequest(op.key.encode(), op, 0) for op in ops]
        batch = run_batch(pool, ClusterTopology(ValkeyNode("", 0, path)), requests, time.monotonic() + WAIT_S)
        assert [result.code for result in batch.results] == [ResultCode.OK, ResultCode.OK, ResultCode.INVALID]
        near = [[f"near {number}"] * 3 for number in range(3)]
        assert said == ["go 0", *near[1], "go 1", *near[2], "go 2"]
        pool.close()
        server.join(WAIT_S)


def test_a_page_that_was_half_looked_at_when_its_connection_died_is_stored_right_the_next_time(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    pages = [memoryview(bytearray(BIG)) for _ in range(2)]
    identities = [PageIdentity(b"n" * 32, bytes([n]) * 32, 1, KVShard(0, 1, 0, 1), BIG - HEADER_BYTES) for n in (1, 2)]
    half, whole = threading.Event(), list[bytes]()

    def departure(number: int) -> PutOp:
        page, identity = pages[number], identities[number]
        page[HEADER_BYTES:] = bytes([65 + number]) * identity.payload_bytes
        leaving = IncrementalSealer(page, lambda checksum: seal(page, identity, payload_checksum=checksum))

        def nearing() -> bool:
            more = leaving.advance()
            if number == 1:
                half.set()
            return more

        return PutOp(f"key-{number}", (page,), leaving.finish, nearing)

    def serve() -> None:
        peer, _ = listening.accept()
        half.wait(WAIT_S)
        peer.close()  # in the middle of the first value
        peer, _ = listening.accept()
        with peer:
            for number in range(2):
                head = b"*4\r\n$3\r\nSET\r\n$5\r\nkey-%d\r\n$%d\r\n" % (number, BIG)
                told = bytearray()
                while len(told) < len(head) + BIG + len(b"\r\n$2\r\nNX\r\n"):
                    came = peer.recv(1 << 20)
                    assert came, "the client has gone"
                    told += came
                whole.append(bytes(told[len(head) : len(head) + BIG]))
                peer.sendall(b"+OK\r\n")

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        server = threading.Thread(target=serve)
        server.start()
        pool, topology = ValkeyConnectionPool(ValkeyAccess(WAIT_S)), ClusterTopology(ValkeyNode("", 0, path))
        requests = [PutRequest(op.key.encode(), op, 0) for op in map(departure, range(2))]
        first = run_batch(pool, topology, requests, time.monotonic() + WAIT_S)
        assert [result.code for result in first.results] == [ResultCode.UNAVAILABLE] * 2
        second = run_batch(pool, topology, requests, time.monotonic() + WAIT_S)
        assert [result.code for result in second.results] == [ResultCode.OK] * 2
        pool.close()
        server.join(WAIT_S)
    assert [verify(memoryview(page), one) for page, one in zip(whole, identities, strict=True)] == [None, None]


@pytest.mark.usefixtures("python_code")
def test_the_next_value_is_asked_for_before_one_is_looked_at(tmp_path: Path) -> None:
    """So that the server has something to do while we compute a checksum."""
    path = str(tmp_path / "socket")
    asked = [threading.Event() for _ in range(3)]

    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            for number, event in enumerate(asked):
                question = b""
                while not question.endswith(b"key-%d\r\n" % number):
                    question += peer.recv(100)
                event.set()
                peer.sendall(b"$%d\r\n%b\r\n" % (BIG, bytes([number]) * BIG))

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        server = threading.Thread(target=serve)
        server.start()
        targets = [memoryview(bytearray(BIG)) for _ in asked]
        in_time: list[bool] = []

        def looking(number: int, nbytes: int) -> None:
            assert nbytes == BIG
            assert targets[number] == bytes([number]) * BIG
            in_time.append(number + 1 == len(asked) or asked[number + 1].wait(1.0))

        ops = [
            GetOp(f"key-{number}", (target,), lambda nbytes, number=number: looking(number, nbytes))
            for number, target in enumerate(targets)
        ]
        node = ValkeyNode("", 0, path)
        pool = ValkeyConnectionPool(ValkeyAccess(WAIT_S))
        requests = [GetRequest(op.key.encode(), op) for op in ops]
        batch = run_batch(pool, ClusterTopology(node), requests, time.monotonic() + WAIT_S)
        assert batch.results == [Result(ResultCode.OK, BIG)] * len(ops)
        assert in_time == [True] * len(ops)
        pool.close()
        server.join(WAIT_S)
