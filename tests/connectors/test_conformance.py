"""The conformance suite as the author of another store meets it: the example runs, failures and gaps are in words."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from kvparams_connectors import conformance

GOOD = """
from kvparams_connectors.stores.file import FileStore

def MyStore(folder, size_bytes):
    return FileStore(folder / "store", size_bytes, unit_bytes=4096)
"""
BAD = """
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.stores.memory import MemoryStore

def MyStore(folder, size_bytes):
    return FaultyStore(MemoryStore(size_bytes), lambda operation, key: Fault("flip") if operation == "get" else None)
"""


def run_example(folder: Path, store: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run the test file of the package's docstring on this store."""
    assert conformance.__doc__ is not None
    _, _, rest = conformance.__doc__.partition("test_my_store.py:\n")
    example, command, _ = rest.partition("    $ pytest test_my_store.py\n")
    assert command
    (folder / "test_my_store.py").write_text(dedent(example))
    (folder / "my_package.py").write_text(store)
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_my_store.py"]
    return subprocess.run(pytest_run, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    done = run_example(tmp_path, GOOD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_a_failure_shows_what_was_expected_and_what_came(tmp_path: Path) -> None:
    done = run_example(tmp_path, BAD, "-k", "comes_back and 255")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "assert (Result(code=" in done.stdout
    assert "At index 1 diff: " in done.stdout


@pytest.mark.parametrize(
    ("missing", "module"),
    [("pytest", "kvparams_connectors.conformance"), ("hypothesis", "kvparams_connectors.conformance.model")],
)
def test_a_package_that_the_suite_needs_is_named_with_its_extra(missing: str, module: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert last.endswith(f" needs {missing}: pip install 'kvparams[conformance]'")


def test_the_interface_of_a_store_needs_neither_numpy_nor_torch() -> None:
    code = "import sys; sys.modules['numpy'] = sys.modules['torch'] = None; import kvparams_connectors as k; k.KVStore"
    subprocess.run([sys.executable, "-c", code], timeout=100, check=True)
