"""Leaves only the core tests where SGLang is not installed; `make test-sglang` installs it."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.interop.sglang.importing import import_sglang
from tests.support.connectors.valkey_server import ValkeyServer

_HERE = find_spec("sglang") is not None
collect_ignore_glob = [] if _HERE else ["test_sglang_*.py"]

_KEPT = import_sglang() if _HERE else []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "server") as started:
        yield started


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in memory for a store's file, where there is one."""
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="kvparams-test-") as folder:
        yield Path(folder)
