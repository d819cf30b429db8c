"""Any store behaves as a dict with a capacity, under any sequence of operations."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings

from kvparams_connectors.conformance.model import StoreMachine
from kvparams_connectors.store import KVStore
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


BUDGET = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestMemoryStore = MemoryMachine.TestCase
TestMemoryStore.settings = BUDGET
TestFileStore = FileMachine.TestCase
TestFileStore.settings = BUDGET
