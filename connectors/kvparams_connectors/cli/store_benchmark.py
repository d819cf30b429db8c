"""Measures how fast a store moves sealed pages, beside memory and a bare socket, all in turns in one run.

Every pass moves the same bytes, from and into memory that was touched before, and every page that is read is verified;
a store that loses pages is not measured but said to be.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from secrets import token_hex
from statistics import median
from typing import Final

from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal, verify
from kvparams_connectors.arena import Arena
from kvparams_connectors.cli.loopback_peer import LoopbackPeer
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode
from kvparams_connectors.store_url import StoreError

__all__ = ["KEY_PREFIX", "BenchmarkPlan", "BenchmarkResult", "format_size", "measure_lookup_s", "run_benchmark"]

KEY_PREFIX: Final = "kvparams-bench"
"""How the keys begin that are put here, and deleted again."""

_PATIENCE_S: Final = 5.0
"""For an operation, beside the time that its bytes take."""
_SLOWEST: Final = 50e6
"""Bytes a second: a store that is slower has stopped, or is of no use."""
_LOOKUP: Final = 1000
_PART: Final = KVShard(0, 1, 0, 1)


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """Describes what is measured once."""

    page_bytes: int
    """Header included."""
    threads: int
    """So many callers at a time, each with pages of its own."""
    pages: int
    """Of each caller."""
    batch: int
    """Pages per operation."""
    rounds: int

    @property
    def deadline_s(self) -> float:
        """Returns the deadline of each operation, which tells a stopped server from a slow one."""
        return _PATIENCE_S + self.batch * self.page_bytes / _SLOWEST


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Medians over the rounds, in GB/s (1e9 bytes a second)."""

    plan: BenchmarkPlan
    put: float
    get: float
    memory: float
    """Copying the same pages, one after the other, by one core."""
    socket_put: float
    socket_get: float
    """The same pages through a bare TCP connection of this machine, one after the other."""
    put_of_socket: float
    get_of_socket: float
    put_of_memory: float
    get_of_memory: float
    """Medians of the ratios round by round, which a machine that is busy now and then hardly changes."""


class _BenchmarkCaller:
    """A `_BenchmarkCaller` holds the pages of one thread."""

    def __init__(self, store: KVStore, plan: BenchmarkPlan, number: int, slots: Sequence[memoryview]) -> None:
        self._store, self._plan, self._number = store, plan, number
        self.sources, self.targets = slots[: plan.pages], slots[plan.pages :]
        self._identities = [
            PageIdentity(
                bytes(32), (number << 32 | page).to_bytes(32, "little"), 1, _PART, plan.page_bytes - HEADER_BYTES
            )
            for page in range(plan.pages)
        ]
        for page, source in enumerate(self.sources):
            source[:] = Random(page).randbytes(plan.page_bytes)
        self.keys: list[str] = []

    def new_keys(self) -> None:
        name = f"{KEY_PREFIX}-{token_hex(8)}"
        self.keys = [f"{name}.{self._number}.{page}" for page in range(self._plan.pages)]

    def put(self) -> None:
        for at in range(0, len(self.keys), self._plan.batch):
            here = slice(at, at + self._plan.batch)
            for source, identity in zip(self.sources[here], self._identities[here], strict=True):
                seal(source, identity)
            ops = [PutOp(key, (source,)) for key, source in zip(self.keys[here], self.sources[here], strict=True)]
            _all_ok("put", [result.code for result in self._store.put(ops, self._plan.deadline_s).result()])

    def get(self) -> None:
        for at in range(0, len(self.keys), self._plan.batch):
            here = slice(at, at + self._plan.batch)
            ops = [GetOp(key, (target,)) for key, target in zip(self.keys[here], self.targets[here], strict=True)]
            _all_ok("get", [result.code for result in self._store.get(ops, self._plan.deadline_s).result()])
            for target, identity in zip(self.targets[here], self._identities[here], strict=True):
                refusal = verify(target, identity)
                if refusal is not None:
                    raise StoreError(f"a page came back damaged: {refusal.message}; do not use this store")

    def delete(self) -> None:
        with suppress(StoreError):
            self._store.delete(self.keys, _PATIENCE_S).result()


def run_benchmark(
    store: KVStore, floor: LoopbackPeer, plan: BenchmarkPlan, progress: Callable[[str], None]
) -> BenchmarkResult:
    """Put and get all pages of all callers, round by round.

    Raises:
        StoreError: the store did not take a page, or did not give it back.
    """
    arena = Arena(2 * plan.threads * plan.pages * (plan.page_bytes + 64), plan.page_bytes)
    store.register(arena)
    slots = [slot.view for _ in range(2 * plan.threads * plan.pages) if (slot := arena.lease()) is not None]
    share = 2 * plan.pages
    callers = [
        _BenchmarkCaller(store, plan, number, slots[number * share : (number + 1) * share])
        for number in range(plan.threads)
    ]
    sources = [source for caller in callers for source in caller.sources]
    targets = [target for caller in callers for target in caller.targets]
    seconds: dict[str, list[float]] = {}
    for turn in range(plan.rounds + 1):
        progress(f"{plan.page_bytes >> 10} KiB, {plan.threads} threads: round {turn} of {plan.rounds}")
        for caller in callers:
            caller.new_keys()
        passes: dict[str, Callable[[], None]] = {
            "memory": lambda: _copy(sources, targets),
            "socket_put": lambda: _each(floor.put, sources),
            "put": lambda: _together([caller.put for caller in callers]),
            "socket_get": lambda: _each(floor.get, targets),
            "get": lambda: _together([caller.get for caller in callers]),
        }
        try:
            for name, work in passes.items():
                start = time.perf_counter()
                work()
                if turn:  # the first round warms up
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
        finally:
            for caller in callers:
                caller.delete()
    nbytes = plan.page_bytes * plan.pages * plan.threads
    speed = {name: nbytes / median(found) / 1e9 for name, found in seconds.items()}

    def ratio(of: str, to: str) -> float:
        return median(floor_s / own_s for own_s, floor_s in zip(seconds[of], seconds[to], strict=True))

    return BenchmarkResult(
        plan,
        speed["put"],
        speed["get"],
        speed["memory"],
        speed["socket_put"],
        speed["socket_get"],
        ratio("put", "socket_put"),
        ratio("get", "socket_get"),
        ratio("put", "memory"),
        ratio("get", "memory"),
    )


def measure_lookup_s(store: KVStore, rounds: int = 5) -> float:
    """Seconds that it takes to ask for 1,000 keys at once: the median."""
    name = f"{KEY_PREFIX}-{token_hex(8)}"
    keys = [f"{name}.{number}" for number in range(_LOOKUP)]
    found: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        results = store.exists(keys, _PATIENCE_S).result()
        found.append(time.perf_counter() - start)
        if any(result.code is not ResultCode.MISS for result in results):
            code = next(result.code for result in results if result.code is not ResultCode.MISS)
            raise StoreError(f"a lookup of missing keys ended with {code.value}: {_hint(code)}")
    return median(found)


def format_size(nbytes: int) -> str:
    """`"256 KiB"`, `"1 MiB"`."""
    return f"{nbytes >> 20} MiB" if nbytes % (1 << 20) == 0 else f"{nbytes / 1024:g} KiB"


def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[:] = source


def _each(work: Callable[[memoryview], None], buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        work(buffer)


def _together(works: Sequence[Callable[[], None]]) -> None:
    """Do all of it at once; what one raises is raised."""
    if len(works) == 1:
        works[0]()
        return
    errors: list[StoreError] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _all_ok(what: str, codes: Sequence[ResultCode]) -> None:
    bad = next((code for code in codes if code is not ResultCode.OK), None)
    if bad is None:
        return
    raise StoreError(f"{what} ended with {bad.value}: {_hint(bad)}")


def _hint(code: ResultCode) -> str:
    return {
        ResultCode.FULL: "the store has no room: give it more, or use a smaller --working-set",
        ResultCode.MISS: "the store evicted pages meanwhile: give it more room, or use a smaller --working-set",
        ResultCode.TOO_LARGE: "the store does not accept pages of this size: use smaller --sizes",
        ResultCode.TIMEOUT: "the store has stopped, or is slower than 50 MB/s; run `kvparams doctor` on it",
    }.get(code, "run `kvparams doctor` on the store")
