"""Chooses where a store lives during these tests."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def store() -> Iterator[Path]:
    """The path of a store's file: in memory, where there is such a place."""
    shm = Path("/dev/shm")
    with TemporaryDirectory(prefix="kvparams-chaos-", dir=shm if shm.is_dir() else None) as folder:
        yield Path(folder) / "kv"
