"""A store that goes wrong on purpose, wrapped around one that works.

The one rule: it goes wrong exactly where it is told to, so that a test can say what must follow.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvparams_connectors.store import Capabilities, Code, GetOp, KVStore, LaneStore, PutOp, Result, Results

__all__ = ["Fault", "FaultyStore"]

_LATEST_S: Final = 30.0
"""A late operation goes on after this, should nobody open the gate."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one key of one operation."""

    kind: Literal["flip", "truncate", "swap", "fail", "late"]
    """flip: one bit of what is read. truncate: the end is missing. swap: another key's value is read. fail: the result
    is `code`. late: the operation waits for `FaultyStore.gate`, whatever its deadline says."""
    at: int = 0
    """flip: which bit. truncate: after how many bytes."""
    key: str = ""
    """swap: whose value."""
    code: Code = Code.UNAVAILABLE


Operation = Literal["put", "get", "exists", "delete"]


class FaultyStore(LaneStore):
    """`inner`, with faults."""

    def __init__(self, inner: KVStore, judge: Callable[[Operation, str], Fault | None], *, threads: int = 1) -> None:
        """Args:
        inner: stays the caller's.
        judge: is asked for every key of every operation.
        threads: how many batches are worked on at a time; a late one keeps its thread.
        """
        self._inner = inner
        self._judge = judge
        self.gate: Final = threading.Event()
        """Late operations wait for this."""
        super().__init__("faulty", threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put_now(self, ops: Sequence[PutOp], deadline: float) -> Results:
        faults = self._faults("put", [op.key for op in ops])
        return _failed(faults, self._inner.put(ops).result())

    def get_now(self, ops: Sequence[GetOp], deadline: float) -> Results:
        faults = self._faults("get", [op.key for op in ops])
        swapped = [
            GetOp(fault.key, op.buffers) if fault is not None and fault.kind == "swap" else op
            for op, fault in zip(ops, faults, strict=True)
        ]
        results = self._inner.get(swapped).result()
        for index, (op, fault) in enumerate(zip(ops, faults, strict=True)):
            if fault is not None and fault.kind == "flip":
                _flip(op.buffers, fault.at)
            elif fault is not None and fault.kind == "truncate":
                results[index] = Result(results[index].code, min(results[index].nbytes, fault.at))
        return _failed(faults, results)

    def exists_now(self, keys: Sequence[str], deadline: float) -> Results:
        return _failed(self._faults("exists", keys), self._inner.exists(keys).result())

    def delete_now(self, keys: Sequence[str], deadline: float) -> Results:
        return _failed(self._faults("delete", keys), self._inner.delete(keys).result())

    def release(self) -> None:
        """Nothing is held."""

    def _faults(self, operation: Operation, keys: Sequence[str]) -> list[Fault | None]:
        faults = [self._judge(operation, key) for key in keys]
        if any(fault is not None and fault.kind == "late" for fault in faults):
            self.gate.wait(_LATEST_S)
        return faults


def _failed(faults: Sequence[Fault | None], results: Results) -> Results:
    return [
        Result(fault.code) if fault is not None and fault.kind == "fail" else result
        for fault, result in zip(faults, results, strict=True)
    ]


def _flip(buffers: Sequence[memoryview], bit: int) -> None:
    at = bit // 8
    for buffer in buffers:
        if at < buffer.nbytes:
            buffer.cast("B")[at] ^= 1 << bit % 8
            return
        at -= buffer.nbytes
