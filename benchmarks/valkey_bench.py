"""Measures how fast the Valkey store moves pages, against a bare socket and valkey-py to the same server.

    python -m benchmarks.valkey_bench [--transport tcp|unix]... [--page-bytes N]... [--total-bytes N] [--rounds N]
                                      [--also SETTINGS]...

It starts a valkey-server of its own on loopback. One round is one pass over all pages by every side, in random order;
the floor is a bare client in that round: of two, one request at a time and four under way, the one that is faster over
all rounds. They build the same commands, send with `sendmsg` and receive with `recv_into` the same buffers, and do
nothing else: no deadline, no check, no lane. valkey-py (with libvalkey) and valkey-glide, where it is installed, are
what the store could have used instead. A get of theirs includes a copy into the caller's buffer, except glide's, which
receives into one. All sides move the same pages, and every value that was read is compared once.
"""

import argparse
import importlib
import importlib.util
import os
import platform
import random
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import valkey

from benchmarks.ratios import median_interval
from benchmarks.sides import OurStore, in_turns
from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal
from kvparams_connectors.arena import Arena
from kvparams_connectors.store import PutOp, open_store
from tests.support.processes import Processes, free_ports

__all__ = ["main"]

_DEADLINE_S = 60.0
_BATCH_BYTES = 8 << 20


class Raw:
    """A bare socket."""

    def __init__(self, transport: str, place: str | int, window: int) -> None:
        if transport == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(place))
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(place)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._window = window

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        sent = answered = 0
        answers = b""
        while answered < len(keys):
            parts: list[bytes | memoryview] = []
            while sent < len(keys) and sent - answered < self._window:
                key, page = keys[sent].encode(), pages[sent]
                head = b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, page.nbytes)
                parts += [head, page, b"\r\n$2\r\nNX\r\n"]
                sent += 1
            self._send(parts)
            while b"\r\n" not in answers:
                answers += self._socket.recv(512)
            answer, _, answers = answers.partition(b"\r\n")
            if answer != b"+OK":
                sys.exit(f"a bare put failed: {answer!r}")
            answered += 1

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        sent = 0
        scratch = bytearray(512)
        held = b""
        for number, page in enumerate(pages):
            parts: list[bytes | memoryview] = []
            while sent < len(keys) and sent - number < self._window:
                key = keys[sent].encode()
                parts.append(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                sent += 1
            self._send(parts)
            while b"\r\n" not in held:
                held += scratch[: self._socket.recv_into(scratch)]
            size, _, held = held.partition(b"\r\n")
            if size != b"$%d" % page.nbytes:
                sys.exit(f"a bare get failed: {size!r}")
            done = min(len(held), page.nbytes)
            page[:done], held = held[:done], held[done:]
            while done < page.nbytes:
                done += self._socket.recv_into(page[done:])
            while len(held) < 2:
                held += scratch[: self._socket.recv_into(scratch)]
            held = held[2:]

    def _send(self, parts: list[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            sent = self._socket.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def close(self) -> None:
        self._socket.close()


class Library:
    """valkey-py."""

    def __init__(self, transport: str, place: str | int) -> None:
        path, port = (str(place), 0) if transport == "unix" else (None, int(place))
        self._client = cast("Any", valkey.Valkey(host="127.0.0.1", port=port, unix_socket_path=path))

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for key, page in zip(keys, pages, strict=True):
            self._client.set(key, page, nx=True)

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for key, page in zip(keys, pages, strict=True):
            page[:] = self._client.get(key)

    def close(self) -> None:
        self._client.close()


class Glide:
    """valkey-glide-sync; it has no unix sockets."""

    def __init__(self, port: int) -> None:
        glide: Any = importlib.import_module("glide_sync")
        place = glide.NodeAddress("127.0.0.1", port)
        self._if_new = glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        self._client = glide.GlideClient.create(glide.GlideClientConfiguration([place], request_timeout=10_000))

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for key, page in zip(keys, pages, strict=True):
            self._client.set(key, page, conditional_set=self._if_new)

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for key, page in zip(keys, pages, strict=True):
            self._client.get(key, buffer=page)

    def close(self) -> None:
        self._client.close()


def measure(
    transport: str, place: str | int, *, page_bytes: int, total_bytes: int, rounds: int, also: Sequence[str] = ()
) -> None:
    """Print one block of the table.

    Args:
        also: settings of further stores, as in a URL.
    """
    count = max(2, total_bytes // page_bytes)
    arena = Arena(2 * count * (page_bytes + 64), page_bytes)
    slots = [slot.view for _ in range(2 * count) if (slot := arena.lease()) is not None]
    sources, targets = slots[:count], slots[count:]
    part = KVShard(0, 1, 0, 1)
    size = page_bytes - HEADER_BYTES
    identities = [PageIdentity(b"n" * 32, number.to_bytes(32, "little"), 1, part, size) for number in range(count)]
    for number, source in enumerate(sources):
        source[:] = random.Random(number).randbytes(page_bytes)
        seal(source, identities[number])
    url = f"valkey://{place}" if transport == "unix" else f"valkey://127.0.0.1:{place}"
    sides: dict[str, Raw | OurStore | Library | Glide] = {
        "raw, one at a time": Raw(transport, place, 1),
        "raw, four under way": Raw(transport, place, 4),
        "store": OurStore(open_store(url), _BATCH_BYTES),
        "store, one job": OurStore(open_store(url), sum(map(len, sources))),
        "store, seal + verify": OurStore(open_store(url), _BATCH_BYTES, identities),
        "store, one job, seal + verify": OurStore(open_store(url), sum(map(len, sources)), identities),
        "valkey-py": Library(transport, place),
    }
    for settings in also:
        sides[settings] = OurStore(open_store(f"{url}?{settings}"), _BATCH_BYTES)
        sides[f"{settings}, seal + verify"] = OurStore(open_store(f"{url}?{settings}"), _BATCH_BYTES, identities)
    if transport == "tcp" and importlib.util.find_spec("glide_sync") is not None:
        sides["valkey-glide"] = Glide(int(place))
    cleaner = cast("Any", valkey.Valkey(host="127.0.0.1", port=_port(transport, place), unix_socket_path=_path(place)))
    floors = list(sides)[:2]
    seconds = in_turns(sides, sources, targets, rounds=rounds, warm_ups=1, clean=lambda keys: cleaner.unlink(*keys))
    cleaner.close()
    for side in sides.values():
        side.close()
    for way, figures in seconds.items():
        floor = figures[min(floors, key=lambda name: median(figures[name]))]
        for name, spent in figures.items():
            speed = median_interval([count * page_bytes / one / 1e9 for one in spent])
            ratio = median_interval([bare / one for bare, one in zip(floor, spent, strict=True)])
            print(f"{transport:5} {page_bytes >> 10:6} KiB  {way}  {name:22} {speed!s:>20}  {ratio!s:>20}")


def _port(transport: str, place: str | int) -> int:
    return 0 if transport == "unix" else int(place)


def _path(place: str | int) -> str | None:
    return place if isinstance(place, str) else None


def lookups(url: str, rounds: int) -> None:
    """Print how long it takes to look up 1,000 pages, half of them there."""
    store = open_store(url)
    keys = [f"{number:064x}" for number in range(1000)]
    store.put([PutOp(key, (memoryview(bytes(100)),)) for key in keys[:500]], _DEADLINE_S).result()
    spent: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        store.exists(keys, _DEADLINE_S).result()
        spent.append(1000 * (time.perf_counter() - start))
    store.close()
    print(f"lookup of 1,000 pages over {url.partition(':')[0]}, ms: {median_interval(spent)}, at best {min(spent):.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.valkey_bench", description=__doc__)
    parser.add_argument("--transport", action="append", choices=("tcp", "unix"), help="default: both")
    parser.add_argument("--page-bytes", type=int, action="append", help="default: 256 KiB, 1 MiB and 4 MiB")
    parser.add_argument("--total-bytes", type=int, default=64 << 20, help="of all pages together (default 64 MiB)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--also", action="append", default=[], metavar="SETTINGS", help="and stores with these settings: threads=2"
    )
    arguments = parser.parse_args(argv)
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(f"command: python -m benchmarks.valkey_bench {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        (port,) = free_ports(1)
        path = f"{folder}/v.sock"
        processes.start(
            "valkey",
            [
                *("valkey-server", "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", path, "--save", ""),
                *("--appendonly", "no", "--dir", folder, "--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru"),
            ],
        )
        _await(path)
        places: dict[str, str | int] = {"tcp": port, "unix": path}
        print(f"\n{'':23}{'':22} {'GB/s':>20}  {'of the floor':>20}")
        for transport in arguments.transport or ("tcp", "unix"):
            for page_bytes in arguments.page_bytes or (256 << 10, 1 << 20, 4 << 20):
                measure(
                    transport,
                    places[transport],
                    page_bytes=page_bytes,
                    total_bytes=arguments.total_bytes,
                    rounds=arguments.rounds,
                    also=arguments.also,
                )
        print()
        for transport in arguments.transport or ("tcp", "unix"):
            lookups(f"valkey://{path}" if transport == "unix" else f"valkey://127.0.0.1:{port}", 200)
    return 0


def _await(path: str) -> None:
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(path) == 0:
                return
        time.sleep(0.05)
    sys.exit("valkey-server did not start")


if __name__ == "__main__":
    sys.exit(main())
