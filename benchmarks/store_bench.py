"""Measures how fast a store moves pages, against the copying of the same bytes by one core in the same run.

    python -m benchmarks.store_bench [--store URL]... [--page-bytes N] [--pages N] [--batch N] [--rounds N]

One round is one pass over a working set by the store and one by each of two floors, in random order; what is reported
is the median of the rounds' ratios and its bootstrap interval. The floors: one memcpy of the whole working set, which
goes past the caches, and one memcpy per page, which is what moving pages can reach. All sides are warm and move equally
many bytes; the store does everything that it does in use, eviction included.
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
from benchmarks.sides import Checks, processor, put_of
from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal
from kvparams_connectors.arena import Arena
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results, open_store
from kvparams_connectors.stores.extents import SKEW

__all__ = ["main"]

_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Line:
    """A `Line` is a line of the table."""

    what: str
    gb_per_s: Interval
    of_whole: Interval
    """Of the speed of one memcpy of everything."""
    of_pages: Interval
    """Of the speed of one memcpy per page."""


class Bench:
    """A working set, twice in memory, and a store."""

    def __init__(self, store: KVStore, *, page_bytes: int, pages: int, batch: int) -> None:
        arena = Arena(2 * pages * (page_bytes + 64), page_bytes)
        slots = [slot.view for _ in range(2 * pages) if (slot := arena.lease()) is not None]
        store.register(arena)
        self.sources, self.targets = slots[:pages], slots[pages:]
        for number, source in enumerate(self.sources):
            source[:] = random.Random(number).randbytes(page_bytes)
        self._from = np.full(pages * page_bytes, 1, dtype=np.uint8)
        self._to = np.full(pages * page_bytes + SKEW, 2, dtype=np.uint8)[SKEW:]  # the best case for memcpy, see SKEW
        self._page_bytes = page_bytes
        self._store = store
        self._batch = batch
        self._round = 0
        part = KVShard(0, 1, 0, 1)
        self._identities = [
            PageIdentity(b"n" * 32, number.to_bytes(32, "little"), 1, part, page_bytes - HEADER_BYTES)
            for number in range(pages)
        ]
        self.seal()

    def memcpy(self) -> None:
        """The whole working set in one call."""
        np.copyto(self._to, self._from)

    def memcpy_pages(self) -> None:
        """Copies the same memory page by page."""
        for start in range(0, self._to.size, self._page_bytes):
            end = start + self._page_bytes
            np.copyto(self._to[start:end], self._from[start:end])

    def seal(self) -> None:
        """Headers and checksums of all pages."""
        for source, identity in zip(self.sources, self._identities, strict=True):
            seal(source, identity)

    def put(self, *, sealing: bool = False) -> None:
        """Puts all pages under new keys; the oldest values are evicted for them."""
        self._round += 1
        jobs: list[Job[Results]] = []
        for first in range(0, len(self.sources), self._batch):
            batch = range(first, min(first + self._batch, len(self.sources)))
            jobs.append(self._store.put([self._put(number, sealing=sealing) for number in batch], _DEADLINE_S))
        self._wait(jobs)

    def _put(self, number: int, *, sealing: bool) -> PutOp:
        identity = self._identities[number] if sealing else None
        return put_of(f"{self._round}.{number}", self.sources[number], identity)

    def get(self, *, verifying: bool = False) -> None:
        """Gets all pages of the last put."""
        checks = Checks(self.targets, self._identities)
        keys = [f"{self._round}.{number}" for number in range(len(self.targets))]
        ops = [
            checks.get(number, key) if verifying else GetOp(key, (target,))
            for number, (key, target) in enumerate(zip(keys, self.targets, strict=True))
        ]
        size = self._batch
        self._wait([self._store.get(ops[at : at + size], _DEADLINE_S) for at in range(0, len(ops), size)])
        if verifying:
            checks.finish(range(len(ops)))

    def seal_and_put(self) -> None:
        """Seals each page right before it is put, as a save from a device does."""
        self.put(sealing=True)

    def get_and_verify(self) -> None:
        """Verifies each page as a load does: when it arrives, if the store says so, else when all are there."""
        self.get(verifying=True)

    @staticmethod
    def _wait(jobs: Sequence[Job[Results]]) -> None:
        if any(result.code is not ResultCode.OK for job in jobs for result in job.result()):
            sys.exit("the store failed")


def measure(bench: Bench, name: str, *, rounds: int, nbytes: int) -> list[Line]:
    """Every way to use the store, beside memcpy."""
    ways = {"put": bench.put, "get": bench.get, "seal + put": bench.seal_and_put, "get + verify": bench.get_and_verify}
    for _ in range(4):  # touch everything on both sides, and fill the store
        bench.put()
        bench.memcpy()
        bench.memcpy_pages()
        bench.get_and_verify()
    speeds: dict[str, list[float]] = {what: [] for what in ways}
    of_whole: dict[str, list[float]] = {what: [] for what in ways}
    of_pages: dict[str, list[float]] = {what: [] for what in ways}
    order = random.Random(1)
    for _ in range(rounds):
        for what, way in ways.items():
            passes = [bench.memcpy, bench.memcpy_pages, way]
            order.shuffle(passes)
            seconds = {one: _seconds(one) for one in passes}
            speeds[what].append(nbytes / seconds[way] / 1e9)
            of_whole[what].append(seconds[bench.memcpy] / seconds[way])
            of_pages[what].append(seconds[bench.memcpy_pages] / seconds[way])
    return [
        Line(f"{name} {what}", *(median_interval(figures[what]) for figures in (speeds, of_whole, of_pages)))
        for what in ways
    ]


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
    parser.add_argument("--batch", type=int, default=4, help="pages per operation (default 4)")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    nbytes = arguments.pages * arguments.page_bytes
    print(f"machine: {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"command: python -m benchmarks.store_bench {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    print(f"working set: {arguments.pages} pages of {arguments.page_bytes} bytes, {arguments.batch} per operation\n")
    print(f"{'':20} {'GB/s':>22}  {'of one memcpy of all':>22}  {'of a memcpy per page':>22}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        size = 3 * nbytes // 2  # the last round stays and half of the one before, so every put evicts
        for url in arguments.store or [f"memory:?size={size}", f"file://{directory}/store?size={size}"]:
            store = open_store(url)
            bench = Bench(store, page_bytes=arguments.page_bytes, pages=arguments.pages, batch=arguments.batch)
            for line in measure(bench, url.partition(":")[0], rounds=arguments.rounds, nbytes=nbytes):
                print(f"{line.what:20} {line.gb_per_s!s:>22}  {line.of_whole!s:>22}  {line.of_pages!s:>22}")
            store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
