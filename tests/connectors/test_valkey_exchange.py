"""In which order a batch is worked off, against a server that follows a script."""

import socket
import threading
import time
from pathlib import Path

from kvparams_connectors.conformance.toy_engine import WAIT_S
from kvparams_connectors.store import Code, GetOp, Result
from kvparams_connectors.stores.valkey.exchange import run_batch
from kvparams_connectors.stores.valkey.pool import Access, Pool
from kvparams_connectors.stores.valkey.requests import GetRequest
from kvparams_connectors.stores.valkey.topology import Node, Topology

BIG = 4 << 20
"""Of these one is under way at a time."""


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
        node = Node("", 0, path)
        pool = Pool(Access(WAIT_S))
        requests = [GetRequest(op.key.encode(), op) for op in ops]
        batch = run_batch(pool, Topology(node), requests, time.monotonic() + WAIT_S)
        assert batch.results == [Result(Code.OK, BIG)] * len(ops)
        assert in_time == [True] * len(ops)
        pool.close()
        server.join(WAIT_S)
