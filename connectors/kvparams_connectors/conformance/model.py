"""The law of a bounded store, as a machine that tries random operations: it behaves like a dict with a capacity.

Only for stores that promise exactly this: least-recently-used eviction, and values that take whole units of one size.
Others are held to `StoreConformance` alone, which leaves eviction coarse. It needs hypothesis as well:
`pip install 'kvparams[conformance]'`.

    class MyMachine(StoreMachine):
        unit_bytes, units = 4096, 16

        def open_store(self) -> KVStore:
            return MyStore(size_bytes=16 * 4096, unit_bytes=4096)

    TestMyStore = MyMachine.TestCase

The model is exact. It says for every key whether it is there, so a store that loses a value too early, or keeps one
that it should have given up, fails as surely as one that returns a wrong byte.
"""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Final

from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results

try:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, rule
except ModuleNotFoundError as error:
    raise ImportError("StoreMachine needs hypothesis: pip install 'kvparams[conformance]'") from error

__all__ = ["StoreMachine"]

_KEYS: Final = st.sampled_from([f"key-{number}" for number in range(12)])
_BATCH: Final = st.lists(_KEYS, min_size=1, max_size=5, unique=True)
_DEADLINE_S: Final = 20.0


class StoreMachine(RuleBasedStateMachine):
    """A store with least-recently-used eviction in whole units, against a dict.

    A subclass says how the store is opened: `open_store`, `unit_bytes`, and `units` as its capacity.
    """

    unit_bytes: int = 4096
    units: int = 16

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open_store()
        self.model: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self.writings = 0

    def open_store(self) -> KVStore:
        """A new, empty store."""
        raise NotImplementedError("a subclass of StoreMachine says how its store is opened")

    def teardown(self) -> None:
        """Closes the store."""
        self.store.close()

    @rule(keys=_BATCH, sizes=st.lists(st.integers(0, 20 * 4096), min_size=5, max_size=5))
    def put(self, keys: list[str], sizes: list[int]) -> None:
        """Values of any size; each writing has other bytes, so that a stale value is seen as such."""
        self.writings += 1
        values = {key: Random(f"{key} {self.writings}").randbytes(size) for key, size in zip(keys, sizes, strict=False)}
        ops = [PutOp(key, (memoryview(value),)) for key, value in values.items()]
        expected = [self._put(key, value, set(keys[:at])) for at, (key, value) in enumerate(values.items())]
        self._touch(keys)
        _compare("put", keys, self.store.put(ops, _DEADLINE_S).result(), expected)

    @rule(keys=_BATCH)
    def get(self, keys: list[str]) -> None:
        """Checks that stored values come back whole."""
        targets = {key: memoryview(bytearray(20 * 4096)) for key in keys}
        results = self.store.get([GetOp(key, (target,)) for key, target in targets.items()], _DEADLINE_S).result()
        _compare("get", keys, results, [self._found(key) for key in keys])
        for key, result in zip(keys, results, strict=True):
            if result.code is ResultCode.OK:
                difference = _difference(bytes(targets[key][: result.nbytes]), self.model[key])
                assert difference is None, f"get {key}: {difference}"
        self._touch(keys)

    @rule(keys=_BATCH)
    def exists(self, keys: list[str]) -> None:
        """Sizes, and a use."""
        expected = [self._found(key) for key in keys]
        found = self.store.exists(keys, _DEADLINE_S).result()
        if not self.store.capabilities.reports_sizes:  # what it leaves out is not wrong
            expected = [
                want if have.has_size else Result(want.code, 0, has_size=False)
                for have, want in zip(found, expected, strict=True)
            ]
        _compare("exists", keys, found, expected)
        self._touch(keys)

    @rule(keys=_BATCH)
    def delete(self, keys: list[str]) -> None:
        """Gone is gone."""
        expected = [Result(ResultCode.OK if key in self.model else ResultCode.MISS) for key in keys]
        _compare("delete", keys, self.store.delete(keys, _DEADLINE_S).result(), expected)
        for key in keys:
            self.model.pop(key, None)

    def _found(self, key: str) -> Result:
        return Result(ResultCode.OK, len(self.model[key])) if key in self.model else Result(ResultCode.MISS)

    def _put(self, key: str, value: bytes, batch: set[str]) -> Result:
        """Returns the results that the store must give.

        `batch` has been put or found before in the same batch and is not evicted.
        """
        if key in self.model:
            return Result(ResultCode.EXISTS)
        if self._units(value) > self.units:
            return Result(ResultCode.TOO_LARGE)
        while self._used() + self._units(value) > self.units:
            victim = next((old for old in self.model if old not in batch), None)
            if victim is None:
                return Result(ResultCode.FULL)
            del self.model[victim]
        self.model[key] = value
        return Result(ResultCode.OK, len(value))

    def _touch(self, keys: list[str]) -> None:
        for key in reversed(keys):
            if key in self.model:
                self.model.move_to_end(key)

    def _used(self) -> int:
        return sum(self._units(value) for value in self.model.values())

    def _units(self, value: bytes) -> int:
        return max(1, -(-len(value) // self.unit_bytes))


def _compare(operation: str, keys: Sequence[str], got: Results, expected: Results) -> None:
    assert len(got) == len(expected), f"{operation}: expected {len(expected)} results, got {len(got)}"
    wrong = [
        f"{operation} {key}: expected {want.code.name}, {want.nbytes} bytes; got {have.code.name}, {have.nbytes} bytes"
        for key, have, want in zip(keys, got, expected, strict=True)
        if have != want
    ]
    assert not wrong, "\n".join(wrong)


def _difference(got: bytes, expected: bytes) -> str | None:
    """Returns where values of equal length differ first, if they do; a value may be too long to be shown."""
    if got == expected:
        return None
    at = next(at for at, (have, want) in enumerate(zip(got, expected, strict=True)) if have != want)
    return f"byte {at} of {len(expected)}: expected {expected[at]:#04x}, got {got[at]:#04x}"
