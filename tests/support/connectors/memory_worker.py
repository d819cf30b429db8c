"""Uses one store for long in a process and reports the growth of its memory: `python memory_worker.py SETTINGS`.

SETTINGS is JSON: `url`, `operations`, and optionally `source` (the URL of a peer that is read from), `leak` (a control:
so many operations leak a page) or `waste` (a control: every operation allocates one). It compares every value that it
reads, and checks the result of every operation.
"""

import gc
import json
import os
import sys
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any, Final

from kvparams_connectors.arena import Arena
from kvparams_connectors.conformance import Fault, FaultyStore, Operation
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results, open_store

PAGE: Final = 256 << 10
BATCH: Final = 4
DEADLINE_S: Final = 60.0
PER_ROUND: Final = 5 * BATCH
"""Operations on one key each."""
_SAMPLES: Final = 10
_TRACED: Final = 40
"""Rounds in which allocations are traced, which takes its time."""
_KEYS: Final = 12
"""Batches of keys that are used by turns."""


class Spoiler:
    """The control: what goes wrong with memory; asked for every operation on a key."""

    def __init__(self, leak: int, *, waste: bool) -> None:
        self.leak, self.waste = leak, waste
        self.seen = 0
        self.kept: list[bytes] = []

    def __call__(self, operation: Operation, key: str) -> Fault | None:
        self.seen += 1
        page = b"\1" * PAGE if self.waste or (self.leak and self.seen % self.leak == 0) else b""
        if self.leak and page:
            self.kept.append(page)
        return None


class Rounds:
    """What is done again and again: put, look up, get into an arena and elsewhere, delete."""

    def __init__(self, store: KVStore, source: KVStore | None) -> None:
        self.store = store
        arena = Arena(4 * BATCH * PAGE, PAGE)
        store.register(arena)
        slots = [slot.view for _ in range(2 * BATCH) if (slot := arena.lease()) is not None]
        self.sources, self.targets = slots[:BATCH], slots[BATCH:]
        for number, view in enumerate(self.sources):
            view[:] = Random(number).randbytes(PAGE)
        self.elsewhere = [memoryview(bytearray(PAGE)) for _ in range(BATCH)]
        self.source = source
        self.theirs = [f"theirs-{at}" for at in range(BATCH)]
        if source is not None:
            self._fine("put", source.put(self._puts(self.theirs), DEADLINE_S).result())

    def run(self, count: int) -> None:
        for number in range(count):
            keys = [f"memory-{number % _KEYS}-{at}" for at in range(BATCH)]
            self._fine("put", self.store.put(self._puts(keys), DEADLINE_S).result())
            self._fine("exists", self.store.exists(keys, DEADLINE_S).result())
            self._read(keys, self.targets, checked=True)
            if self.source is not None:
                self.store.hint_location(self.theirs, str(self.source.address))
            self._read(keys if self.source is None else self.theirs, self.elsewhere, checked=False)
            self._fine("delete", self.store.delete(keys, DEADLINE_S).result())

    def _puts(self, keys: list[str]) -> list[PutOp]:
        return [PutOp(key, (source,)) for key, source in zip(keys, self.sources, strict=True)]

    def _gets(self, keys: list[str], targets: list[memoryview], *, checked: bool = False) -> list[GetOp]:
        return [GetOp(key, (target,), caller_verifies=checked) for key, target in zip(keys, targets, strict=True)]

    def _read(self, keys: list[str], targets: list[memoryview], *, checked: bool) -> None:
        for target in targets:
            target[:8] = bytes(8)
        self._fine("get", self.store.get(self._gets(keys, targets, checked=checked), DEADLINE_S).result())
        if targets != self.sources:
            raise AssertionError("what was read is not what was put")

    @staticmethod
    def _fine(what: str, results: Results) -> None:
        if any(result.code is not ResultCode.OK for result in results):
            raise AssertionError(f"{what}: {[result.code.name for result in results]}")


def resident() -> int:
    """Bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(settings: dict[str, Any]) -> dict[str, object]:
    """Use the store: first until all that is kept has been allocated, then traced, then for long."""
    store = inner = open_store(settings["url"])
    leak, waste = int(settings.get("leak", 0)), bool(settings.get("waste"))
    if leak or waste:
        store = FaultyStore(inner, Spoiler(leak, waste=waste))
    source = open_store(settings["source"]) if "source" in settings else None
    rounds = Rounds(store, source)
    count = settings["operations"] // PER_ROUND
    rounds.run(max(2 * _KEYS, count // 5))
    tracemalloc.start()
    rounds.run(2)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    rounds.run(_TRACED)
    allocated = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    rounds.run(_KEYS)
    sizes = [resident()]
    for _ in range(_SAMPLES):
        rounds.run(count // _SAMPLES)
        sizes.append(resident())
    for one in (store, inner, source):
        if one is not None:
            one.close()
    return {"allocated_at_most": allocated, "resident": sizes}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(json.loads(sys.argv[1]))) + "\n")
