"""A store that goes wrong on purpose, wrapped around one that works.

It goes wrong exactly where it is told to, so that a test can say what must follow.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvparams_connectors.jobs import Job
from kvparams_connectors.store import BlockingStore, Capabilities, GetOp, KVStore, PutOp, Result, ResultCode, Results

if TYPE_CHECKING:
    from kvparams_connectors.arena import Arena

__all__ = ["Fault", "FaultyStore", "Operation"]

_LATEST_S: Final = 30.0
"""A late operation goes on after this, should nobody open the gate; and so long the store within may take, whatever the
deadline of the operation says: what goes wrong is said, and no busy machine adds to it."""

Operation = Literal["put", "get", "exists", "delete"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes what goes wrong with one key of one operation."""

    kind: Literal["flip", "truncate", "swap", "reorder", "drop", "fail", "delay", "late", "after"]
    """
    flip: one bit of what is read or stored is another one.
    truncate: the end of what is read or stored is missing; a put says that it stored everything.
    swap: get, the value of another key is read.
    reorder: get, the values of those keys of the batch that have this fault arrive in each other's buffers.
    drop: it is not done, and reported as done: a put stores nothing, a get leaves the buffers as they were, a delete
        deletes nothing; exists says MISS.
    fail: the result is `code`; a put or delete was done nevertheless.
    delay: the batch begins `seconds` later.
    late: the batch waits for `FaultyStore.gate`, whatever its deadline says: it completes when nobody waits any more.
    after: get, a bit in the buffers changes when the job has long been settled, with the store's next operation."""
    at: int = 0
    """flip, after: which bit. truncate: after how many bytes."""
    key: str = ""
    """swap: whose value."""
    code: ResultCode = ResultCode.UNAVAILABLE
    seconds: float = 0.0
    """delay: how long."""
    announced: bool = False
    """get: the value's arrival is announced (`GetOp.on_complete`) when it has come whole, before it goes wrong."""


class FaultyStore(BlockingStore):
    """`inner`, with faults."""

    def __init__(self, inner: KVStore, judge: Callable[[Operation, str], Fault | None], *, threads: int = 1) -> None:
        """Wraps a store.

        Args:
            inner: the store that answers; the caller closes it.
            judge: returns the fault of one key of one operation, or None for no fault. It is called for every key.
            threads: the number of batches that are worked on at a time; a late batch keeps its thread.
        """
        self._inner = inner
        self._judge = judge
        self.gate: Final = threading.Event()
        """Late operations wait for this."""
        self._never = threading.Event()
        self._touching: list[tuple[Sequence[memoryview], int]] = []
        """Buffers that are not ours any more, and which bit to change in them."""
        super().__init__("faulty", threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        return self._inner.capabilities

    def register(self, arena: "Arena") -> None:
        """Passes on which memory most buffers come from."""
        self._inner.register(arena)

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Stores values; see `BlockingStore`."""
        faults = self._faults("put", [op.key for op in ops])
        done = [index for index, fault in enumerate(faults) if fault is None or fault.kind != "drop"]
        results = [Result(ResultCode.OK, _nbytes(op.buffers)) for op in ops]
        for index, result in zip(
            done,
            _done(self._inner.put([_damaged(ops[index], faults[index]) for index in done], _LATEST_S)),
            strict=True,
        ):
            results[index] = result
            fault = faults[index]
            if result.code is ResultCode.OK and fault is not None and fault.kind == "truncate":
                results[index] = Result(ResultCode.OK, _nbytes(ops[index].buffers))
        return _failed(faults, results)

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Reads values; see `BlockingStore`."""
        faults = self._faults("get", [op.key for op in ops])
        # Without `arrived`: what is changed below would have been looked at before.
        asked = [GetOp(op.key, op.buffers) for op in ops]
        moving = [index for index, fault in enumerate(faults) if fault is not None and fault.kind == "reorder"]
        for index, other in zip(moving, moving[1:] + moving[:1], strict=True):
            asked[index] = GetOp(ops[other].key, ops[index].buffers)
        results: list[Result] = [Result(ResultCode.INTERNAL)] * len(ops)
        for index, fault in enumerate(faults):
            if fault is not None and fault.kind == "swap":
                asked[index] = GetOp(fault.key, ops[index].buffers)
            elif fault is not None and fault.kind == "drop":
                asked[index] = GetOp(
                    ops[index].key, [memoryview(bytearray(buffer.nbytes)) for buffer in ops[index].buffers]
                )
        results = _done(self._inner.get(asked, _LATEST_S))
        for index, (op, fault) in enumerate(zip(ops, faults, strict=True)):
            if fault is None or results[index].code is not ResultCode.OK:
                continue
            if fault.announced and op.on_complete is not None:
                op.on_complete(results[index].nbytes)
            if fault.kind == "flip":
                _flip(op.buffers, fault.at)
            elif fault.kind == "truncate":
                results[index] = Result(ResultCode.OK, min(results[index].nbytes, fault.at))
            elif fault.kind == "after":
                self._touching.append((op.buffers, fault.at))
        return _failed(faults, results)

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Looks keys up; see `BlockingStore`."""
        faults = self._faults("exists", keys)
        results = _done(self._inner.exists(keys, _LATEST_S))
        for index, fault in enumerate(faults):
            if fault is not None and fault.kind == "drop":
                results[index] = Result(ResultCode.MISS)
            elif fault is not None and fault.kind == "truncate":
                results[index] = results[index]._replace(nbytes=min(results[index].nbytes, fault.at))
        return _failed(faults, results)

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Deletes keys; see `BlockingStore`."""
        faults = self._faults("delete", keys)
        kept = [fault is not None and fault.kind == "drop" for fault in faults]
        there = _done(self._inner.exists(keys, _LATEST_S))
        gone = iter(
            _done(self._inner.delete([key for key, keep in zip(keys, kept, strict=True) if not keep], _LATEST_S))
        )
        results = [Result(found.code) if keep else next(gone) for found, keep in zip(there, kept, strict=True)]
        return _failed(faults, results)

    def release(self) -> None:
        """Does nothing, because no buffer is held."""

    def _faults(self, operation: Operation, keys: Sequence[str]) -> list[Fault | None]:
        while self._touching:
            _flip(*self._touching.pop())
        faults = [self._judge(operation, key) for key in keys]
        if any(fault is not None and fault.kind == "late" for fault in faults):
            self.gate.wait(_LATEST_S)
        self._never.wait(max((fault.seconds for fault in faults if fault is not None), default=0.0))
        return faults


def _done(job: Job[Results]) -> Results:
    """Its result, when it touches no buffer any more: the buffers are the caller's again when we have ended."""
    results = job.result()
    job.wait_settled(_LATEST_S)
    return results


def _failed(faults: Sequence[Fault | None], results: Results) -> Results:
    return [
        Result(fault.code) if fault is not None and fault.kind == "fail" else result
        for fault, result in zip(faults, results, strict=True)
    ]


def _damaged(op: PutOp, fault: Fault | None) -> PutOp:
    """Returns what is stored in place of `op`."""
    if fault is None or fault.kind not in ("flip", "truncate"):
        return op
    content = bytearray(b"".join(buffer.cast("B") for buffer in op.buffers))
    if fault.kind == "truncate":
        del content[fault.at :]
    else:
        _flip([memoryview(content)], fault.at)
    return PutOp(op.key, (memoryview(content),))


def _nbytes(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _flip(buffers: Sequence[memoryview], bit: int) -> None:
    at = bit // 8
    for buffer in buffers:
        if at < buffer.nbytes:
            buffer.cast("B")[at] ^= 1 << bit % 8
            return
        at -= buffer.nbytes
