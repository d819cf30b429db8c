"""Provides stores that break one promise each, and some that break none, for `test_conformance_faults.py`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvparams.pages import HEADER_BYTES, complete_header
from kvparams_connectors.conformance import Fault, FaultyStore, Operation
from kvparams_connectors.store import Capabilities, GetOp, KVStore, PutOp, Result, ResultCode, Results
from kvparams_connectors.stores.memory.store import MemoryStore

Judge = Callable[[Operation, str], Fault | None]


def memory() -> MemoryStore:
    return MemoryStore(4 << 20, unit_bytes=4096)


def when(wanted: Operation, fault: Fault, key: str | None = None) -> Judge:
    """The fault in one operation, and only for one key if one is said."""
    return lambda operation, found: fault if operation == wanted and key in (None, found) else None


class Wrapped(FaultyStore):
    """Wrong in a way of its own."""

    def __init__(self) -> None:
        self.inner = memory()
        super().__init__(self.inner, lambda operation, key: None)


class Overwriting(Wrapped):
    """The last value of a key stays."""

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        self.inner.delete([op.key for op in ops]).result()
        return super().put_blocking(ops, deadline)


class Scribbling(Wrapped):
    """Fills the buffers to their end, also those that turn out to be too small."""

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        for op in ops:
            for buffer in op.buffers:
                buffer.cast("B")[:] = bytes(buffer.nbytes)
        return super().get_blocking(ops, deadline)


class Hasty(Wrapped):
    """Says that values have arrived before they have."""

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        for op in ops:
            if op.on_complete is not None:
                op.on_complete(op.buffers[0].nbytes)
        return super().get_blocking(ops, deadline)


class Foretelling(Wrapped):
    """Says how much of a value has come before it has."""

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        for op in ops:
            if op.on_progress is not None:
                op.on_progress(0)
                op.on_progress(10)
        return super().get_blocking(ops, deadline)


class Forgetful(Wrapped):
    """Takes values as they are before the caller has finished them."""

    calls_before_read = True

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        return super().put_blocking([PutOp(op.key, op.buffers) for op in ops], deadline)


class Insistent(Wrapped):
    """Has the caller finish each value twice."""

    calls_before_read = True

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        for op in ops:
            op.resolve_before_read()
        return super().put_blocking(ops, deadline)


class Miscounting(Wrapped):
    """Completes pages with a checksum of other bytes."""

    calls_before_read = True

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        return super().put_blocking([self._completed(op) for op in ops], deadline)

    @staticmethod
    def _completed(op: PutOp) -> PutOp:
        if op.page_header is None:
            return op
        header = op.buffers[0][:HEADER_BYTES]
        header[:] = op.page_header
        complete_header(header, 1)
        return PutOp(op.key, op.buffers)


class Silent(Wrapped):
    """Looks whether values are there, not how large they are."""

    def __init__(self, *, said: bool) -> None:
        super().__init__()
        self.said = said

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, reports_sizes=not self.said)

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        found = super().exists_blocking(keys, deadline)
        return [Result(ResultCode.OK, has_size=False) if one.code is ResultCode.OK else one for one in found]


class Raising(Wrapped):
    """One missing key takes the whole batch with it."""

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        results = super().get_blocking(ops, deadline)
        missing = any(result.code is ResultCode.MISS for result in results)
        return [Result(ResultCode.UNAVAILABLE)] * len(ops) if missing else results


class NeverEvicting(Wrapped):
    """Says FULL where it could make room."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        self.used += sum(buffer.nbytes for op in ops for buffer in op.buffers)
        if self.used > 3 << 20:
            return [Result(ResultCode.FULL)] * len(ops)
        return super().put_blocking(ops, deadline)


class Immortal(Wrapped):
    """Answers after it was closed."""

    def close(self) -> None:
        """Nothing."""


def faulty(judge: Judge) -> Callable[[Path], KVStore]:
    return lambda _: FaultyStore(memory(), judge)


STORES: dict[str, Callable[[Path], KVStore]] = {
    "good": faulty(lambda operation, key: None),
    "flips what is read": faulty(when("get", Fault("flip", at=1))),
    "flips what is stored": faulty(when("put", Fault("flip", at=1))),
    "reads too little": faulty(when("get", Fault("truncate", at=4000))),
    "stores too little": faulty(when("put", Fault("truncate", at=4000))),
    "mixes up a batch": faulty(when("get", Fault("reorder"))),
    "stores nothing": faulty(when("put", Fault("drop"))),
    "reads nothing": faulty(when("get", Fault("drop"))),
    "deletes nothing": faulty(when("delete", Fault("drop"))),
    "finds nothing": faulty(when("exists", Fault("drop"))),
    "tells wrong sizes": faulty(when("exists", Fault("truncate", at=100))),
    "tells no sizes": lambda _: Silent(said=False),
    "tells no sizes and says so": lambda _: Silent(said=True),
    "fails to read one key": faulty(when("get", Fault("fail", code=ResultCode.INTERNAL), "key-3")),
    "writes after it has settled": faulty(when("get", Fault("after", at=1))),
    "keeps the last value": lambda _: Overwriting(),
    "writes beside the value": lambda _: Scribbling(),
    "fails a batch for one key": lambda _: Raising(),
    "stores what is not finished": lambda _: Forgetful(),
    "has values finished twice": lambda _: Insistent(),
    "completes pages wrongly": lambda _: Miscounting(),
    "announces what is not there": lambda _: Hasty(),
    "announces parts that are not there": lambda _: Foretelling(),
    "announces and then fails": faulty(when("get", Fault("fail", announced=True), "small")),
    "announces and then changes": faulty(when("get", Fault("flip", at=1, announced=True), "small")),
    "does not evict": lambda _: NeverEvicting(),
    "answers when it is closed": lambda _: Immortal(),
}
