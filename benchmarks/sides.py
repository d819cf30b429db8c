"""Several clients of one server, measured in turns, and the machine they are measured on.

In every round each side moves the same pages, in an order of its own, so that the noise of a moment hits neighbours
alike.
"""

import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from kvparams.pages import PageIdentity, PageRefusal, seal, unsealed_header, verify
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results
from kvparams_connectors.transfer.incremental_sealer import IncrementalSealer
from kvparams_connectors.transfer.incremental_verifier import IncrementalVerifier

__all__ = ["Checks", "OurStore", "Seconds", "Side", "batches", "in_turns", "processor", "put_of"]

_SEED: Final = 1
_DEADLINE_S: Final = 60.0
Way = Literal["put", "get"]
Seconds = dict[Way, dict[str, list[float]]]
"""For each way and side, how long each round took."""


def put_of(key: str, page: memoryview, identity: PageIdentity | None) -> PutOp:
    """A page on its way into a store; with an identity it is sealed right before, as a connector does it."""
    if identity is None:
        return PutOp(key, (page,))
    departure = IncrementalSealer(page, lambda checksum: seal(page, identity, payload_checksum=checksum))
    header = unsealed_header(identity)
    return PutOp(key, (page,), departure.finish, departure.advance, departure.finish_copied, header)


class Checks:
    """Verification of pages that are read, as a connector does it: when they arrive, if the store says so."""

    def __init__(self, pages: Sequence[memoryview], identities: Sequence[PageIdentity]) -> None:
        self._pages = pages
        self._identities = identities
        self._arrivals: dict[int, IncrementalVerifier] = {}

    def get(self, number: int, key: str) -> GetOp:
        """The question for a page."""
        page, identity = self._pages[number], self._identities[number]

        def judge(nbytes: int, payload_checksum: int | None) -> PageRefusal | None:
            return verify(page[:nbytes], identity, payload_checksum=payload_checksum)

        arrival = self._arrivals[number] = IncrementalVerifier(page, judge)
        return GetOp(key, (page,), arrival.on_complete, arrival.on_progress, arrival.on_checksum, caller_verifies=True)

    def finish(self, numbers: Iterable[int]) -> None:
        """Verify those of which nothing was said.

        Raises:
            SystemExit: a page is not what it should be.
        """
        for number in numbers:
            seen = self._arrivals.pop(number).verified
            if seen is None or seen[0] != self._pages[number].nbytes:
                seen = 0, verify(self._pages[number], self._identities[number])
            if seen[1] is not None:
                sys.exit("a page came back wrong")


class Side(Protocol):
    """A client of the server."""

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        """Store all pages under keys that are not there."""
        ...

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        """Read all values into the pages."""
        ...


class OurStore:
    """The store, in batches."""

    def __init__(self, store: KVStore, batch_bytes: int, identities: Sequence[PageIdentity] = ()) -> None:
        """Prepares a store for measurements.

        Args:
            batch_bytes: what is put or read in one job.
            identities: if there are any, pages are sealed before they are put and verified when they are read, as a
                connector does: each page right before it goes, and when it arrives, if the store says so.
        """
        self._store = store
        self._batch_bytes = batch_bytes
        self._identities = identities

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        jobs: list[Job[Results]] = []
        for batch in batches(pages, self._batch_bytes):
            jobs.append(self._store.put([self._put(number, keys, pages) for number in batch], _DEADLINE_S))
        for job in jobs:
            self._check(job)

    def _put(self, number: int, keys: Sequence[str], pages: Sequence[memoryview]) -> PutOp:
        return put_of(keys[number], pages[number], self._identities[number] if self._identities else None)

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        checks = Checks(pages, self._identities) if self._identities else None
        jobs: list[tuple[range, Job[Results]]] = []
        for batch in batches(pages, self._batch_bytes):
            ops = [
                GetOp(keys[number], (pages[number],)) if checks is None else checks.get(number, keys[number])
                for number in batch
            ]
            jobs.append((batch, self._store.get(ops, _DEADLINE_S)))
        for batch, job in jobs:
            self._check(job)
            if checks is not None:
                checks.finish(batch)

    def close(self) -> None:
        self._store.close()

    @staticmethod
    def _check(job: Job[Results]) -> None:
        if any(result.code is not ResultCode.OK for result in job.result()):
            sys.exit(f"the store failed: {job.result()}")


def batches(pages: Sequence[memoryview], batch_bytes: int) -> list[range]:
    """Indexes of pages that are moved together; all pages have one size."""
    size = max(1, batch_bytes // pages[0].nbytes)
    return [range(at, min(at + size, len(pages))) for at in range(0, len(pages), size)]


def in_turns(
    sides: Mapping[str, Side],
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    *,
    rounds: int,
    warm_ups: int,
    clean: Callable[[Sequence[str]], None],
) -> Seconds:
    """Have every side put `sources` and get them into `targets`, so many times.

    Args:
        sides: by name.
        sources: pages to put.
        targets: pages to get into; in the first round what is in them is compared.
        rounds: that count.
        warm_ups: rounds before these, at least one.
        clean: removes these keys from the server.

    Raises:
        SystemExit: what a side has read is not what it has put.
    """
    seconds: Seconds = {"put": {name: [] for name in sides}, "get": {name: [] for name in sides}}
    order = random.Random(_SEED)
    for turn in range(warm_ups + rounds):
        names = list(sides)
        order.shuffle(names)
        for name in names:
            keys = [f"{turn}.{number}" for number in range(len(sources))]
            put_s = _seconds(sides[name].put, keys, sources)
            if not turn:  # what the side before has read is not this one's
                for target in targets:
                    target.cast("B")[:] = bytes(target.nbytes)
            get_s = _seconds(sides[name].get, keys, targets)
            if not turn and targets != sources:
                sys.exit(f"{name}: what was read is not what was put")
            if turn >= warm_ups:
                seconds["put"][name].append(put_s)
                seconds["get"][name].append(get_s)
            clean(keys)
    return seconds


def processor() -> str:
    """Returns the name of the machine's processor."""
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


def _seconds(
    work: Callable[[Sequence[str], Sequence[memoryview]], None], keys: Sequence[str], pages: Sequence[memoryview]
) -> float:
    start = time.perf_counter()
    work(keys, pages)
    return time.perf_counter() - start
