"""Any store behaves as a dict with a capacity, under any sequence of operations."""

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
from kvparams_connectors.store import Code, KVStore
from kvparams_connectors.stores.file import FileStore
from kvparams_connectors.stores.filemap import Shape
from kvparams_connectors.stores.memory import MemoryStore


class MemoryMachine(StoreMachine):
    def open_store(self) -> KVStore:
        return MemoryStore(16 * 4096, unit_bytes=4096)


class FileMachine(StoreMachine):
    def open_store(self) -> KVStore:
        self.directory = Path(tempfile.mkdtemp())
        size = next(size for size in range(4096, 1 << 20, 4096) if Shape.fitting(size, 4096).units == 16)
        return FileStore(self.directory / "store", size, unit_bytes=4096)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.directory)


class WrongByteMachine(MemoryMachine):
    def open_store(self) -> KVStore:
        faulty = Fault("flip", at=3)
        return FaultyStore(super().open_store(), lambda operation, key: faulty if operation == "get" else None)


class ForgetfulMachine(MemoryMachine):
    def open_store(self) -> KVStore:
        return FaultyStore(
            super().open_store(), lambda _, key: Fault("fail", code=Code.MISS) if key == "key-7" else None
        )


class GrudgingMachine(MemoryMachine):
    """A store with less room than it says: it evicts too early."""

    def open_store(self) -> KVStore:
        return MemoryStore(15 * 4096, unit_bytes=4096)


BUDGET = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestMemoryStore = MemoryMachine.TestCase
TestMemoryStore.settings = BUDGET
TestFileStore = FileMachine.TestCase
TestFileStore.settings = BUDGET


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (WrongByteMachine, r"get key-\d+: byte 0 of \d+: expected 0x.., got 0x.."),
        (ForgetfulMachine, r"key-7: expected OK, \d+ bytes; got MISS, 0 bytes"),
        (GrudgingMachine, r"key-\d+: expected OK, \d+ bytes; got (MISS|TOO_LARGE|FULL), 0 bytes"),
    ],
)
def test_a_store_that_breaks_the_law_does_not_pass_and_is_told_how(machine: type[StoreMachine], words: str) -> None:
    """The control: the machine has teeth."""
    budget = settings(BUDGET, phases=[Phase.generate], database=None, print_blob=False)
    with pytest.raises((AssertionError, ExceptionGroup)) as caught:
        run_state_machine_as_test(machine, settings=budget)
    assert re.search(words, "".join(format_exception(caught.value)))
