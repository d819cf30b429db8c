"""Measures how fast the store on LMCache's `lm://` server moves pages, against a bare socket to the same server.

    python -m benchmarks.lmcache_bench [--page-bytes N]... [--total-bytes N] [--rounds N]

It starts a server of its own on loopback, in LMCache's environment. One round is one pass over all pages by every side,
in random order; the floor is a bare client in that round: of two, one request at a time and several under way, the one
that is faster over all rounds. They send the same headers, `sendmsg` and `recv_into` the same buffers, and ask EXIST
once behind their puts, because a put has no answer; they do nothing else: no deadline, no record of a size, no check.
The server runs with MALLOC_ARENA_MAX=1: it has a thread for each connection, and with an arena for each thread of which
some give their memory back after every round, one side or another would pay twice as much for its puts. All sides move
the same pages, and every value that was read is compared once.
"""

import argparse
import os
import platform
import random
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.ratios import median_interval
from benchmarks.sides import OurStore, Side, in_turns
from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal
from kvparams_connectors.arena import Arena
from kvparams_connectors.store import PutOp, ResultCode, open_store
from kvparams_connectors.stores.lmcache.store import LMCacheStore
from kvparams_connectors.stores.lmcache.wire import LMCacheNames
from tests.support.lmcache_process import lmcache_environment, lmcache_python
from tests.support.processes import Processes, free_ports

__all__ = ["main"]

_DEADLINE_S: Final = 60.0
_BATCH_BYTES: Final = 8 << 20
_START_S: Final = 60.0
_PREFIX: Final = "bench"
_REQUEST: Final = struct.Struct("=9i150s")
_REPLY: Final = struct.Struct("=9i")
_PUT, _GET, _EXIST, _HEALTH = 1, 2, 3, 5


class Bare:
    """A bare socket."""

    def __init__(self, port: int, window: int) -> None:
        """Connects to the server.

        Args:
            window: how many gets may be under way.
        """
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._window = window
        self._reply = memoryview(bytearray(_REPLY.size))

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for key, page in zip(keys, pages, strict=True):
            self._send([_request(_PUT, _name(key), page.nbytes), page])
            if self._window == 1 and self._exist(_name(key)) != 200:
                sys.exit("a bare put failed")
        if self._window > 1 and self._exist(_name(keys[-1])) != 200:
            sys.exit("a bare put failed")

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        sent = 0
        for number, page in enumerate(pages):
            parts: list[bytes | memoryview] = []
            while sent < len(keys) and sent - number < self._window:
                parts.append(_request(_GET, _name(keys[sent])))
                sent += 1
            self._send(parts)
            code, nbytes, *_ = self._answer()
            if code != 200 or nbytes != page.nbytes:
                sys.exit(f"a bare get failed: {code}, {nbytes}")
            self._receive(page)

    def bury(self, names: Sequence[bytes]) -> None:
        """Overwrite values by empty ones, which frees their memory."""
        self._send([_request(_PUT, name) for name in names])
        self._exist(names[-1])

    def ask(self, names: Sequence[bytes]) -> int:
        """Returns how many of them are stored, in one round trip."""
        self._send([b"".join([_request(_EXIST, name) for name in names])])
        answers = memoryview(bytearray(_REPLY.size * len(names)))
        self._receive(answers)
        return sum(numbers[0] == 200 for numbers in _REPLY.iter_unpack(answers))

    def healthy(self) -> bool:
        self._send([_request(_HEALTH, _name("health"))])
        return self._answer()[0] == 200

    def close(self) -> None:
        self._socket.close()

    def _exist(self, name: bytes) -> int:
        self._send([_request(_EXIST, name)])
        return self._answer()[0]

    def _answer(self) -> tuple[int, ...]:
        self._receive(self._reply)
        return _REPLY.unpack(self._reply)

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            sent = self._socket.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def _receive(self, target: memoryview) -> None:
        done = 0
        while done < target.nbytes:
            received = self._socket.recv_into(target[done:], 0, socket.MSG_WAITALL)
            if not received:
                sys.exit("the server closed the connection")
            done += received


def _name(key: str) -> bytes:
    return f"bare@1@0@{blake2b(key.encode(), digest_size=32).hexdigest()}@uint8".encode().ljust(150)


def _request(command: int, name: bytes, nbytes: int = 0) -> bytes:
    return _REQUEST.pack(command, nbytes, 4, 6, 0, nbytes, 0, 0, 0, name)


def measure(port: int, *, page_bytes: int, total_bytes: int, rounds: int) -> None:
    """Print one block of the table."""
    count = max(2, total_bytes // page_bytes)
    arena = Arena(2 * count * (page_bytes + 64), page_bytes)
    slots = [slot.view for _ in range(2 * count) if (slot := arena.lease()) is not None]
    sources, targets = slots[:count], slots[count:]
    size = page_bytes - HEADER_BYTES
    part = KVShard(0, 1, 0, 1)
    identities = [PageIdentity(b"n" * 32, number.to_bytes(32, "little"), 1, part, size) for number in range(count)]
    for number, source in enumerate(sources):
        source[:] = random.Random(number).randbytes(page_bytes)
        seal(source, identities[number])
    url = f"lmcache://127.0.0.1:{port}?prefix={_PREFIX}"
    store, two = open_store(url), LMCacheStore(("127.0.0.1", port), prefix=_PREFIX, threads=2)
    bare = [Bare(port, window) for window in (1, 4)]
    sides: dict[str, Side] = {
        "bare, one at a time": bare[0],
        "bare, several under way": bare[1],
        "store, one job": OurStore(store, total_bytes),
        "store, batches": OurStore(store, _BATCH_BYTES),
        "store, seal + verify": OurStore(store, _BATCH_BYTES, identities),
        "store, two threads": OurStore(two, _BATCH_BYTES),
    }
    names = LMCacheNames(_PREFIX)

    def clean(keys: Sequence[str]) -> None:
        bare[0].bury([named(key) for key in keys for named in (_name, names.value, names.record)])

    seconds = in_turns(sides, sources, targets, rounds=rounds, warm_ups=2, clean=clean)
    for one in (store, two, *bare):
        one.close()
    for way, figures in seconds.items():
        floor = min(list(figures)[:2], key=lambda name: median(figures[name]))
        for name, spent in figures.items():
            speed = median_interval([count * page_bytes / one / 1e9 for one in spent])
            ratio = median_interval([least / one for least, one in zip(figures[floor], spent, strict=True)])
            print(f"{page_bytes >> 10:6} KiB  {way}  {name:24} {speed!s:>20}  {ratio!s:>20}", flush=True)


def lookups(port: int, rounds: int) -> None:
    """Print how long it takes to look up 1,000 pages: all there, half of them, none."""
    store = open_store(f"lmcache://127.0.0.1:{port}?prefix=lookup")
    bare = Bare(port, 1)
    names = LMCacheNames("lookup")
    keys = [f"{number:064x}" for number in range(1000)]
    store.put([PutOp(key, (memoryview(bytes(100)),)) for key in keys], _DEADLINE_S).result()
    for there in (1000, 500, 0):
        store.delete(keys[there:], _DEADLINE_S).result()
        spent: list[float] = []
        floor: list[float] = []
        for _ in range(rounds):
            start = time.perf_counter()
            found = store.exists(keys, _DEADLINE_S).result()
            spent.append(1000 * (time.perf_counter() - start))
            if sum(result.code is ResultCode.OK for result in found) != there:
                sys.exit("a lookup found other pages")
            start = time.perf_counter()
            bare.ask([names.record(key) for key in keys])
            floor.append(1000 * (time.perf_counter() - start))
        print(
            f"lookup of 1,000 pages, {there} there, ms: {median_interval(spent)}, at best {min(spent):.2f}; "
            f"bare EXIST, which says no sizes: {median_interval(floor)}"
        )
    store.close()
    bare.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lmcache_bench", description=__doc__)
    parser.add_argument("--page-bytes", type=int, action="append", help="default: 256 KiB, 1 MiB and 4 MiB")
    parser.add_argument("--total-bytes", type=int, default=64 << 20, help="of all pages together (default 64 MiB)")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(f"command: python -m benchmarks.lmcache_bench {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        (port,) = free_ports(1)
        command = [lmcache_python(), "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
        environment = {**lmcache_environment(), "MALLOC_ARENA_MAX": "1"}
        processes.start("lmcache_server", command, environment=environment)
        _await(port, Path(folder) / "lmcache_server.log")
        print(f"\n{'':42} {'GB/s':>20}  {'of the floor':>20}")
        for page_bytes in arguments.page_bytes or (256 << 10, 1 << 20, 4 << 20):
            measure(port, page_bytes=page_bytes, total_bytes=arguments.total_bytes, rounds=arguments.rounds)
        print()
        lookups(port, 100)
    return 0


def _await(port: int, log: Path) -> None:
    give_up = time.monotonic() + _START_S
    while True:
        try:
            bare = Bare(port, 1)
        except OSError:
            if time.monotonic() > give_up:
                sys.exit(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
            continue
        healthy = bare.healthy()
        bare.close()
        if healthy:
            return


if __name__ == "__main__":
    sys.exit(main())
