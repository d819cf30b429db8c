"""Measures the limit of Valkey on this machine: bare clients that do the work of a store and a connector.

    python -m benchmarks.valkey_limit [--transport tcp|unix]... [--page-bytes N]... [--total-bytes N] [--rounds N]

It starts a valkey-server of its own on loopback. The floor is a bare socket. Beside it the same socket with a checksum
of each page (what a store with sealed pages cannot do without), and with pages copied out of an engine's blocks and
checked, or checked and copied back to them (what a connector cannot do without), in one thread and in two: as few lines
as can be, without deadlines, keys of content, reports or leases. Beside those the store and the connector. For each
side the processor time of the client and of the server is shown, which says what two cores can do at best. All sides
move the same bytes, and every value that was read is compared once.
"""

import argparse
import os
import platform
import queue
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import torch
import valkey
from xxhash import xxh3_64_intdigest

from benchmarks.lmcache_compare import Connector
from benchmarks.ratios import median_interval
from benchmarks.sides import OurStore, processor
from kvparams.keys import Geometry, KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal
from kvparams_connectors.arena import Arena
from kvparams_connectors.store import open_store
from kvparams_connectors.transfer.cache_layouts import CACHE_LAYOUTS, CacheSpec
from kvparams_connectors.transfer.layout import PagedKVLayout
from tests.support.processes import Processes, free_ports

__all__ = ["main"]

_BATCH_BYTES: Final = 8 << 20
_SHAPE: Final = Geometry(layers=16, kv_heads=4, k_dim=128, v_dim=128)
_TOKEN_BYTES: Final = _SHAPE.layers * _SHAPE.kv_heads * (_SHAPE.k_dim + _SHAPE.v_dim) * 2
_BLOCK: Final = 8
_WARM_UPS: Final = 2
Work = Callable[[int, memoryview], None]


class Blocks:
    """An engine's cache, as large as all pages, in the order of a shuffled block table."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self._tokens = page_bytes // _TOKEN_BYTES
        blocks = count * self._tokens // _BLOCK
        form = next(one for one in CACHE_LAYOUTS if one.name == "kv_first_nhd")
        cache = torch.randint(0, 2**15, [_SHAPE.layers, 2, blocks, _BLOCK, 4, 128], dtype=torch.int16)
        spec = CacheSpec(_BLOCK, _SHAPE.kv_heads, _SHAPE.k_dim, _SHAPE.v_dim, "bfloat16")
        self._layout = PagedKVLayout.from_engine(list(cache.view(torch.bfloat16)), spec, form=form)
        self._table = random.Random(1).sample(range(blocks), blocks)

    def gather(self, number: int, page: memoryview) -> None:
        self._layout.gather(self._table, number * self._tokens, self._tokens, page)

    def scatter(self, number: int, page: memoryview) -> None:
        whole = range(number * self._tokens, (number + 1) * self._tokens)
        self._layout.scatter(self._table, whole.start, self._tokens, page, whole)


class Bare:
    """A bare socket that does something with each page before it is sent, and after it has come."""

    def __init__(self, transport: str, place: str | int, before: Work, after: Work, *, two: bool = False) -> None:
        """Connects to the server.

        Args:
            two: `before` and `after` are done in a second thread.
        """
        if transport == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(place))
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(place)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._before, self._after, self._two = before, after, two
        self._scratch = bytearray(512)

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        for number in self._prepared(pages):
            if number:
                self._ok()
            key, page = keys[number].encode(), pages[number]
            head = b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, page.nbytes)
            self._send([head, page, b"\r\n$2\r\nNX\r\n"])
        self._ok()

    def _prepared(self, pages: Sequence[memoryview]) -> Iterable[int]:
        if not self._two:
            for number, page in enumerate(pages):
                self._before(number, page)
                yield number
            return
        ready: queue.SimpleQueue[int] = queue.SimpleQueue()

        def prepare() -> None:
            for number, page in enumerate(pages):
                self._before(number, page)
                ready.put(number)

        thread = threading.Thread(target=prepare)
        thread.start()
        for _ in pages:
            yield ready.get()
        thread.join()

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        there: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        def finish() -> None:
            while (number := there.get()) is not None:
                self._after(number, pages[number])

        thread = threading.Thread(target=finish)
        if self._two:
            thread.start()
        self._ask(keys[0])
        for number, page in enumerate(pages):
            if number + 1 < len(keys):
                self._ask(keys[number + 1])
            self._value(page)
            if self._two:
                there.put(number)
            else:
                self._after(number, page)
        if self._two:
            there.put(None)
            thread.join()

    def _ask(self, key: str) -> None:
        self._send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key.encode())])

    def _value(self, page: memoryview) -> None:
        head = b"$%d\r\n" % page.nbytes
        if self._exactly(len(head)) != head:
            sys.exit("a bare get failed")
        if self._socket.recv_into(page, 0, socket.MSG_WAITALL) != page.nbytes or self._exactly(2) != b"\r\n":
            sys.exit("a bare get was cut off")

    def _ok(self) -> None:
        if self._exactly(5) != b"+OK\r\n":
            sys.exit("a bare put failed")

    def _exactly(self, count: int) -> bytes:
        self._socket.recv_into(memoryview(self._scratch)[:count], 0, socket.MSG_WAITALL)
        return bytes(self._scratch[:count])

    def _send(self, parts: list[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            sent = self._socket.sendmsg(left)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]


def measure(transport: str, place: str | int, server: int, *, page_bytes: int, total_bytes: int, rounds: int) -> None:
    """Print one block of the table.

    Args:
        server: its process.
    """
    count = max(2, total_bytes // page_bytes)
    slot_bytes = HEADER_BYTES + page_bytes
    arena = Arena(2 * count * (slot_bytes + 64), slot_bytes)
    slots = [slot.view for slot in arena.lease_many(2 * count, 2 * count)]
    sources, targets = slots[:count], slots[count:]
    part = KVShard(0, 1, 0, 1)
    identities = [
        PageIdentity(b"n" * 32, number.to_bytes(32, "little"), 1, part, page_bytes) for number in range(count)
    ]
    blocks = Blocks(page_bytes, count)

    def nothing(_number: int, _page: memoryview) -> None:
        pass

    def check(_number: int, page: memoryview) -> None:
        xxh3_64_intdigest(page[HEADER_BYTES:])

    def gather(number: int, page: memoryview) -> None:
        blocks.gather(number, page[HEADER_BYTES:])
        check(number, page)

    def scatter(number: int, page: memoryview) -> None:
        check(number, page)
        blocks.scatter(number, page[HEADER_BYTES:])

    for number, source in enumerate(sources):
        blocks.gather(number, source[HEADER_BYTES:])
        seal(source, identities[number])
    url = f"valkey://{place}" if transport == "unix" else f"valkey://127.0.0.1:{place}"
    payloads = {"put": [page[HEADER_BYTES:] for page in sources], "get": [page[HEADER_BYTES:] for page in targets]}
    connector = Connector(open_store(url), payloads["put"])
    sides: dict[str, Bare | OurStore | Connector] = {
        "bare": Bare(transport, place, nothing, nothing),
        "bare + checksum": Bare(transport, place, check, check),
        "bare + blocks + checksum": Bare(transport, place, gather, scatter),
        "the same, two threads": Bare(transport, place, gather, scatter, two=True),
        "store, seal + verify": OurStore(open_store(url), _BATCH_BYTES, identities),
        "connector": connector,
    }
    cleaner = cast("Any", valkey.Valkey(host="127.0.0.1", port=0 if transport == "unix" else int(place)))
    if transport == "unix":
        cleaner = cast("Any", valkey.Valkey(unix_socket_path=str(place)))
    spent: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    order = random.Random(1)
    for turn in range(_WARM_UPS + rounds):
        names = list(sides)
        order.shuffle(names)
        for name in names:
            side, keys = sides[name], [f"{turn}.{number}" for number in range(count)]
            for target in targets if not turn else ():
                target[:] = bytes(target.nbytes)
            for way, whole in (("put", sources), ("get", targets)):
                pages = payloads[way] if name == "connector" else whole
                before = time.perf_counter(), time.process_time(), _busy_s(server)
                (side.put if way == "put" else side.get)(keys, pages)
                after = time.perf_counter(), time.process_time(), _busy_s(server)
                if turn >= _WARM_UPS:
                    now = after[0] - before[0], after[1] - before[1], after[2] - before[2]
                    spent.setdefault((way, name), []).append(now)
            if not turn and name != "connector" and targets != sources:
                sys.exit(f"{name}: what was read is not what was put")
            cleaner.unlink(*(connector.plan(keys[0]).keys if name == "connector" else keys))
    connector.close()
    for way, name in [(way, name) for way in ("put", "get") for name in sides]:
        figures = spent[way, name]
        floor = [wall for wall, _, _ in spent[way, "bare"]]
        speed = median_interval([count * page_bytes / wall / 1e9 for wall, _, _ in figures])
        ratio = median_interval([bare / wall for bare, (wall, _, _) in zip(floor, figures, strict=True)])
        client, busy = (median(one[at] for one in figures) / count / page_bytes * 1e9 for at in (1, 2))
        print(
            f"{transport:5} {page_bytes >> 10:6} KiB  {way}  {name:26} {speed!s:>20}  {ratio!s:>20}  "
            f"{client:.3f} + {busy:.3f}",
            flush=True,
        )


def _busy_s(process: int) -> float:
    """Processor time of a process's first thread."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.valkey_limit", description=__doc__)
    parser.add_argument("--transport", action="append", choices=("tcp", "unix"), help="default: both")
    parser.add_argument("--page-bytes", type=int, action="append", help="default: 256 KiB, 1 MiB and 4 MiB")
    parser.add_argument("--total-bytes", type=int, default=64 << 20, help="of all pages together (default 64 MiB)")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    print(f"machine: {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"command: python -m benchmarks.valkey_limit {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        (port,) = free_ports(1)
        path = f"{folder}/v.sock"
        server = processes.start(
            "valkey",
            [
                *("valkey-server", "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", path, "--save", ""),
                *("--appendonly", "no", "--dir", folder, "--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru"),
            ],
        )
        give_up = time.monotonic() + 20
        while not Path(path).exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        if not Path(path).exists():
            raise SystemExit(f"valkey-server does not listen after 20 s ({folder}); is it installed? `make servers`")
        print(f"\n{'':50} {'GB/s':>20}  {'of bare':>20}  CPU ns/B, client + server")
        for transport in arguments.transport or ("tcp", "unix"):
            for page_bytes in arguments.page_bytes or (256 << 10, 1 << 20, 4 << 20):
                measure(
                    transport,
                    path if transport == "unix" else port,
                    server,
                    page_bytes=page_bytes,
                    total_bytes=arguments.total_bytes,
                    rounds=arguments.rounds,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
