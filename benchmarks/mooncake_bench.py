"""Measures how fast the Mooncake store moves pages, against the bare client library on the same cluster.

    python -m benchmarks.mooncake_bench [--page-bytes N]... [--total-bytes N] [--rounds N] [--also SETTINGS]...

It starts a master and an owner of its own on loopback. One round is one pass over all pages by every side, in random
order; the floor is the fastest of three bare clients in that round: `batch_put_from` and `batch_get_into` on one
registered arena, all pages in one call, in batches, and in batches from two threads; nothing is checked there. All
sides move the same pages, and every value that was read is compared once.
"""

import argparse
import importlib
import os
import platform
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ratios import median_interval
from benchmarks.sides import OurStore, Side, batches, in_turns
from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal
from kvparams_connectors.arena import Arena
from kvparams_connectors.store import PutOp, ResultCode, open_store
from tests.support.processes import Processes, free_ports

__all__ = ["main"]

_DEADLINE_S = 60.0
_BATCH_BYTES = 8 << 20
_OWNER_BYTES = 2 << 30


class Bare:
    """The client library."""

    def __init__(self, native: Any, batch_bytes: int, threads: int) -> None:
        self._native = native
        self._batch_bytes = batch_bytes
        self._pool = ThreadPoolExecutor(threads)

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        answers = self._each(self._native.batch_put_from, keys, pages)
        if any(answers):
            sys.exit(f"a bare put failed: {answers}")

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        answers = self._each(self._native.batch_get_into, keys, pages)
        if set(answers) != {pages[0].nbytes}:
            sys.exit(f"a bare get failed: {answers}")

    def _each(
        self,
        call: Callable[[list[str], list[int], list[int]], list[int]],
        keys: Sequence[str],
        pages: Sequence[memoryview],
    ) -> list[int]:
        addresses = [_address(page) for page in pages]
        sizes = [page.nbytes for page in pages]

        def work(batch: range) -> list[int]:
            part = slice(batch.start, batch.stop)
            return call(list(keys[part]), addresses[part], sizes[part])

        found = self._pool.map(work, batches(pages, self._batch_bytes))
        return [answer for answers in found for answer in answers]


def measure(master: str, *, page_bytes: int, total_bytes: int, rounds: int, also: Sequence[str] = ()) -> None:
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
    store = open_store(f"mooncake://{master}?prefix=bench:")
    store.register(arena)
    native = _bare(master)
    if native.register_buffer(_address(arena.memory), arena.memory.nbytes):
        sys.exit("the arena was not registered")
    sides: dict[str, Side] = {
        "bare, one call": Bare(native, total_bytes, 1),
        "bare, batches": Bare(native, _BATCH_BYTES, 1),
        "bare, two threads": Bare(native, _BATCH_BYTES, 2),
        "store, one job": OurStore(store, total_bytes),
        "store, batches": OurStore(store, _BATCH_BYTES),
        "store, seal + verify": OurStore(store, _BATCH_BYTES, identities),
        "one job, seal + verify": OurStore(store, total_bytes, identities),
    }
    floors = list(sides)[:3]
    others = [open_store(f"mooncake://{master}?prefix=bench:&{settings}") for settings in also]
    for settings, other in zip(also, others, strict=True):
        other.register(arena)
        sides[f"{settings}, batches"] = OurStore(other, _BATCH_BYTES)
        sides[f"{settings}, seal + verify"] = OurStore(other, _BATCH_BYTES, identities)

    def clean(keys: Sequence[str]) -> None:
        native.batch_remove([*keys, *(f"bench:{key}" for key in keys)], True)

    seconds = in_turns(sides, sources, targets, rounds=rounds, warm_ups=2, clean=clean)
    for one in (store, *others):
        one.close()
    native.close()
    for way, figures in seconds.items():
        floor = [min(spent) for spent in zip(*(figures[name] for name in floors), strict=True)]
        for name, spent in figures.items():
            speed = median_interval([count * page_bytes / one / 1e9 for one in spent])
            ratio = median_interval([bare / one for bare, one in zip(floor, spent, strict=True)])
            print(f"{page_bytes >> 10:6} KiB  {way}  {name:22} {speed!s:>20}  {ratio!s:>20}", flush=True)


def lookups(master: str, rounds: int) -> None:
    """Print how long it takes to look up 1,000 pages: all there, half of them, none."""
    store = open_store(f"mooncake://{master}?prefix=lookup:")
    native = _bare(master)
    keys = [f"{number:064x}" for number in range(1000)]
    store.put([PutOp(key, (memoryview(bytes(100)),)) for key in keys], _DEADLINE_S).result()
    for there in (1000, 500, 0):
        store.delete(keys[there:], _DEADLINE_S).result()
        spent: list[float] = []
        bare: list[float] = []
        for _ in range(rounds):
            start = time.perf_counter()
            found = store.exists(keys, _DEADLINE_S).result()
            spent.append(1000 * (time.perf_counter() - start))
            if sum(result.code is ResultCode.OK for result in found) != there:
                sys.exit("a lookup found other pages")
            start = time.perf_counter()
            native.batch_is_exist([f"lookup:{key}" for key in keys])
            bare.append(1000 * (time.perf_counter() - start))
        print(
            f"lookup of 1,000 pages, {there} there, ms: {median_interval(spent)}, at best {min(spent):.2f}; "
            f"bare: {median_interval(bare)}"
        )
    store.close()
    native.close()


def _bare(master: str) -> Any:
    native: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    if native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
        sys.exit("the client library was not set up")
    return native


def _address(page: memoryview) -> int:
    return int(np.frombuffer(page, dtype=np.uint8).ctypes.data)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mooncake_bench", description=__doc__)
    parser.add_argument("--page-bytes", type=int, action="append", help="default: 256 KiB, 1 MiB and 4 MiB")
    parser.add_argument("--total-bytes", type=int, default=64 << 20, help="of all pages together (default 64 MiB)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--also", action="append", default=[], metavar="SETTINGS", help="and stores with these settings: replicas=2"
    )
    arguments = parser.parse_args(argv)
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(f"command: python -m benchmarks.mooncake_bench {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        port, metrics = free_ports(2)
        master = f"127.0.0.1:{port}"
        binary = Path(sysconfig.get_path("scripts")) / "mooncake_master"
        processes.start(
            "master",
            [
                str(binary),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
                "--logtostderr",
            ],
            ready=[f"http://127.0.0.1:{metrics}/health"],
        )
        module = "kvparams_connectors.stores.mooncake.owner"
        owner = [sys.executable, "-m", module, "--master", master, "--size", str(_OWNER_BYTES)]
        processes.start("owner", owner)
        _await(Path(folder) / "owner.log")
        print(f"\n{'':40} {'GB/s':>20}  {'of the floor':>20}")
        for page_bytes in arguments.page_bytes or (256 << 10, 1 << 20, 4 << 20):
            measure(
                master,
                page_bytes=page_bytes,
                total_bytes=arguments.total_bytes,
                rounds=arguments.rounds,
                also=arguments.also,
            )
        print()
        lookups(master, 200)
    return 0


def _await(log: Path) -> None:
    give_up = time.monotonic() + 30
    while b"ready\n" not in log.read_bytes():
        if time.monotonic() > give_up:
            sys.exit(f"the owner did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
