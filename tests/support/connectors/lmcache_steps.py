"""Provides the steps that tests of the store on `lm://` servers share, besides `steps.py`.

It asks the kernel which memory and connections a client or a server holds.
"""

import re
import socket
import struct
from contextlib import suppress
from pathlib import Path
from random import Random

from kvparams_connectors.store import KVStore, ResultCode
from kvparams_connectors.stores.lmcache.wire import LMCacheEntryKind
from tests.support.connectors.lmcache_server import PUT, BareClient, LMCacheServer
from tests.support.connectors.steps import DEADLINE_S, codes, found
from tests.support.waiting import wait_until

__all__ = ["break_off", "delete", "exists", "resident_mib", "sockets"]


def exists(store: KVStore, numbers: range) -> list[ResultCode]:
    return found(store, *(f"key-{number}" for number in numbers))


def delete(store: KVStore, numbers: range) -> list[ResultCode]:
    return codes(store.delete([f"key-{number}" for number in numbers], DEADLINE_S).result())


def break_off(server: LMCacheServer, name: bytes, content: bytes, nbytes: int, *, reset: bool) -> None:
    """A put of `nbytes` that ends after `content`, in a close or a reset; returns when the server has noticed it."""
    before = sockets(server.pid)
    with BareClient(server.port) as client, BareClient(server.port) as other:
        mark = name.replace(b"@uint8", b"%x@uint8" % Random(nbytes).getrandbits(32))[:150]
        client.put(mark, b"")
        client.send(PUT, name, nbytes, (LMCacheEntryKind.VALUE, nbytes, 0, 0))
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
