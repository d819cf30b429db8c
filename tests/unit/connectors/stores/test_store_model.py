"""Tests that any store behaves as a dict with a capacity and an order, under any sequence of operations."""

import re
import shutil
import tempfile
from pathlib import Path
from traceback import format_exception

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.model import StoreMachine
from kvparams_connectors.store import KVStore, Result, ResultCode
from kvparams_connectors.stores.file.file_map import FileGeometry
from kvparams_connectors.stores.file.store import FileStore
from kvparams_connectors.stores.memory.store import MemoryStore


class MemoryMachine(StoreMachine):
    """The model in two parts, in the plainest terms: `model` is new, then hot, in the order in which they go."""

    def __init__(self) -> None:
        super().__init__()
        self.hot: set[str] = set()
        self.born: dict[str, int] = {}
        self.clock = 0

    def open_store(self) -> KVStore:
        return MemoryStore(16 * 4096, unit_bytes=4096)

    def _put(self, key: str, value: bytes, batch: set[str]) -> Result:
        result = super()._put(key, value, batch)
        if result.code is ResultCode.OK:
            self.hot.discard(key)
            self.born.pop(key, None)
            self.clock += self._units(value)
            self._order()
        return result

    def _touch(self, keys: list[str]) -> None:
        self.hot &= set(self.model)
        wanted = [key for key in keys if key in self.model]
        later = [self.clock - self.born.get(key, self.clock) >= 1 or key in self.hot for key in wanted]
        for at, key in reversed(list(enumerate(wanted))):
            self.born.setdefault(key, self.clock)
            if any(later[at:]):
                self.hot.add(key)
            self.model.move_to_end(key)
        self._order()
        while sum(self._units(self.model[key]) for key in self.hot) > 4:
            self.hot.remove(next(key for key in self.model if key in self.hot))

    def _order(self) -> None:
        for key in [key for key in self.model if key in self.hot]:
            self.model.move_to_end(key)


class FileMachine(StoreMachine):
    def open_store(self) -> KVStore:
        self.directory = Path(tempfile.mkdtemp())
        size = next(size for size in range(4096, 1 << 20, 4096) if FileGeometry.fitting(size, 4096).units == 16)
        return FileStore(self.directory / "store", size, unit_bytes=4096)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.directory)


class LeastRecentlyUsedMachine(StoreMachine):
    """A store with another order than the model says."""

    def open_store(self) -> KVStore:
        return MemoryStore(16 * 4096, unit_bytes=4096)


class WrongByteMachine(MemoryMachine):
    def open_store(self) -> KVStore:
        faulty = Fault("flip", at=3)
        return FaultyStore(super().open_store(), lambda operation, key: faulty if operation == "get" else None)


class ForgetfulMachine(MemoryMachine):
    def open_store(self) -> KVStore:
        return FaultyStore(
            super().open_store(), lambda _, key: Fault("fail", code=ResultCode.MISS) if key == "key-7" else None
        )


class GrudgingMachine(MemoryMachine):
    """A store with less room than it says: it evicts too early."""

    def open_store(self) -> KVStore:
        return MemoryStore(15 * 4096, unit_bytes=4096)


BUDGET = settings(stateful_step_count=40)

TestMemoryStore = MemoryMachine.TestCase
TestMemoryStore.settings = BUDGET
TestFileStore = FileMachine.TestCase
TestFileStore.settings = BUDGET


@pytest.mark.parametrize(
    ("machine", "words", "examples"),
    [
        (WrongByteMachine, r"get key-\d+: byte 0 of \d+: expected 0x.., got 0x..", 60),
        (ForgetfulMachine, r"key-7: expected [A-Z_]+, \d+ bytes; got MISS, 0 bytes", 60),
        (LeastRecentlyUsedMachine, r"key-\d+: expected [A-Z_]+, \d+ bytes; got [A-Z_]+, \d+ bytes", 3000),
        (GrudgingMachine, r"key-\d+: expected [A-Z_]+, \d+ bytes; got [A-Z_]+, \d+ bytes", 60),
    ],
)
def test_a_store_that_breaks_the_law_does_not_pass_and_is_told_how(
    machine: type[StoreMachine], words: str, examples: int
) -> None:
    """The control: the machine has teeth."""
    budget = settings(BUDGET, max_examples=examples, phases=[Phase.generate], database=None, print_blob=False)
    with pytest.raises((AssertionError, ExceptionGroup)) as caught:
        run_state_machine_as_test(machine, settings=budget)
    assert re.search(words, "".join(format_exception(caught.value)))
