"""How fast a store moves pages, against the copying of the same bytes by one core in the same run.

    python -m benchmarks.store_bench [--store URL]... [--page-bytes N] [--pages N] [--batch N] [--pairs N]

One pair is one pass over a working set by plain memcpy and one by the store, in random order; what is reported is the
median of the pairs' ratios and its bootstrap interval. The one rule: both sides are warm and move equally many bytes
between memory that does not fit into a cache; the store does everything that it does in use, eviction included.
"""

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.ratios import Interval, median_interval
from kvparams.keys import Rectangle
from kvparams.pages import HEADER_BYTES, PageIdentity, seal, verify
from kvparams_connectors.arena import Arena
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import Code, GetOp, KVStore, PutOp, Results, open_store

__all__ = ["main"]

_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    what: str
    gb_per_s: Interval
    of_memcpy: Interval


class Bench:
    """A working set, twice in memory, and a store."""

    def __init__(self, store: KVStore, *, page_bytes: int, pages: int, batch: int) -> None:
        arena = Arena(2 * pages * (page_bytes + 64), page_bytes)
        slots = [slot.view for _ in range(2 * pages) if (slot := arena.lease()) is not None]
        store.register(arena)
        self.sources, self.targets = slots[:pages], slots[pages:]
        for number, source in enumerate(self.sources):
            source[:] = random.Random(number).randbytes(page_bytes)
        self._floor = [np.full(pages * page_bytes, number, dtype=np.uint8) for number in (1, 2)]
        self._store = store
        self._batch = batch
        self._round = 0
        part = Rectangle(0, 1, 0, 1)
        self._identities = [
            PageIdentity(b"n" * 32, number.to_bytes(32, "little"), 1, part, page_bytes - HEADER_BYTES)
            for number in range(pages)
        ]
        self.seal()

    def memcpy(self) -> None:
        """The floor: the whole working set in one call of one core. That is faster than page by page."""
        np.copyto(self._floor[1], self._floor[0])

    def seal(self) -> None:
        """Headers and checksums of all pages."""
        for source, identity in zip(self.sources, self._identities, strict=True):
            seal(source, identity)

    def verify(self) -> None:
        """What a connector checks before it uses a page."""
        if any(verify(target, identity) for target, identity in zip(self.targets, self._identities, strict=True)):
            sys.exit("a page came back wrong")

    def put(self) -> None:
        """All pages under new keys; the oldest ones are evicted for them."""
        self._round += 1
        size = self._batch
        ops = [PutOp(f"{self._round}.{number}", (source,)) for number, source in enumerate(self.sources)]
        self._wait([self._store.put(ops[at : at + size], _DEADLINE_S) for at in range(0, len(ops), size)])

    def get(self) -> None:
        """All pages of the last put."""
        size = self._batch
        ops = [GetOp(f"{self._round}.{number}", (target,)) for number, target in enumerate(self.targets)]
        self._wait([self._store.get(ops[at : at + size], _DEADLINE_S) for at in range(0, len(ops), size)])

    def seal_and_put(self) -> None:
        """As a save does."""
        self.seal()
        self.put()

    def get_and_verify(self) -> None:
        """As a load does."""
        self.get()
        self.verify()

    @staticmethod
    def _wait(jobs: Sequence[Job[Results]]) -> None:
        if any(result.code is not Code.OK for job in jobs for result in job.result()):
            sys.exit("the store failed")


def measure(bench: Bench, name: str, *, pairs: int, nbytes: int) -> list[Line]:
    """Every way to use the store, paired with memcpy."""
    ways = {"put": bench.put, "get": bench.get, "seal + put": bench.seal_and_put, "get + verify": bench.get_and_verify}
    for _ in range(4):  # touch everything on both sides, and fill the store
        bench.put()
        bench.memcpy()
        bench.get_and_verify()
    speeds: dict[str, list[float]] = {what: [] for what in ways}
    ratios: dict[str, list[float]] = {what: [] for what in ways}
    order = random.Random(1)
    for _ in range(pairs):
        for what, way in ways.items():
            passes = [bench.memcpy, way]
            order.shuffle(passes)
            seconds = {one: _seconds(one) for one in passes}
            speeds[what].append(nbytes / seconds[way] / 1e9)
            ratios[what].append(seconds[bench.memcpy] / seconds[way])
    return [Line(f"{name} {what}", median_interval(speeds[what]), median_interval(ratios[what])) for what in ways]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_bench", description=__doc__)
    parser.add_argument("--store", action="append", metavar="URL", help="default: memory, and a file on /dev/shm")
    parser.add_argument("--page-bytes", type=int, default=1 << 20)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="pages per operation (default 16)")
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args(argv)
    nbytes = arguments.pages * arguments.page_bytes
    print(
        f"machine: {_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"
    )
    print(f"command: python -m benchmarks.store_bench {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    print(f"working set: {arguments.pages} pages of {arguments.page_bytes} bytes, {arguments.batch} per operation\n")
    print(f"{'':28} {'GB/s (median)':>24}   {'of memcpy in the same pair':>26}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        # Three times the working set: two rounds and a bit stay, so every put evicts.
        size = 3 * nbytes
        for url in arguments.store or [f"memory:?size={size}", f"file://{directory}/store?size={size}"]:
            store = open_store(url)
            bench = Bench(store, page_bytes=arguments.page_bytes, pages=arguments.pages, batch=arguments.batch)
            for line in measure(bench, url.partition(":")[0], pairs=arguments.pairs, nbytes=nbytes):
                print(f"{line.what:28} {line.gb_per_s!s:>24}   {line.of_memcpy!s:>26}")
            store.close()
    return 0


def _processor() -> str:
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
