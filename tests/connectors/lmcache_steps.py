"""What the tests of the store on `lm://` servers do again and again.

The one rule: whoever reads a value compares it.
"""

import re
import socket
import struct
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

from kvparams_connectors.store import Code, GetOp, KVStore, PutOp
from kvparams_connectors.stores.lmcache.wire import Kind
from tests.connectors.lmcache_server import PUT, BareClient, LMCacheServer
from tests.connectors.valkey_server import wait_until

__all__ = ["DEADLINE_S", "SIZE", "break_off", "delete", "exists", "get", "page", "put", "resident_mib", "sockets"]

DEADLINE_S: Final = 20.0
SIZE: Final = 400_000


def page(seed: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray(Random(seed).randbytes(size)))


def put(store: KVStore, numbers: range, deadline_s: float = DEADLINE_S) -> list[Code]:
    ops = [PutOp(f"key-{number}", (page(number),)) for number in numbers]
    return [result.code for result in store.put(ops, deadline_s).result()]


def get(store: KVStore, numbers: range, deadline_s: float = DEADLINE_S) -> list[Code]:
    """The codes; what was read is right, or this fails."""
    targets = [memoryview(bytearray(SIZE)) for _ in numbers]
    ops = [GetOp(f"key-{number}", (target,)) for number, target in zip(numbers, targets, strict=True)]
    job = store.get(ops, deadline_s)
    results = job.result()
    for number, target, result in zip(numbers, targets, results, strict=True):
        if result.code is Code.OK:
            assert (result.nbytes, target) == (SIZE, page(number)), f"key-{number}"
    assert job.wait_settled(DEADLINE_S)
    return [result.code for result in results]


def exists(store: KVStore, numbers: range) -> list[Code]:
    return [result.code for result in store.exists([f"key-{number}" for number in numbers], DEADLINE_S).result()]


def delete(store: KVStore, numbers: range) -> list[Code]:
    return [result.code for result in store.delete([f"key-{number}" for number in numbers], DEADLINE_S).result()]


def break_off(server: LMCacheServer, name: bytes, content: bytes, nbytes: int, *, reset: bool) -> None:
    """A put of `nbytes` that ends after `content`, in a close or a reset; returns when the server has noticed it."""
    before = sockets(server.pid)
    with BareClient(server.port) as client, BareClient(server.port) as other:
        mark = name.replace(b"@uint8", b"%x@uint8" % Random(nbytes).getrandbits(32))[:150]
        client.put(mark, b"")
        client.send(PUT, name, nbytes, (Kind.VALUE, nbytes, 0, 0))
        client.socket.sendall(content)
        wait_until(lambda: other.exist(mark) == 200)  # it has come as far as the value
        if reset:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            client.socket.shutdown(socket.SHUT_WR)
            assert client.socket.recv(1) == b""  # it has closed its side
    wait_until(lambda: sockets(server.pid) <= before)  # a reset has no answer


def sockets(pid: int) -> int:
    """How many a process has open."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += link.readlink().name.startswith("socket:")
    return found


def resident_mib(pid: int) -> float:
    (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) / 1024
