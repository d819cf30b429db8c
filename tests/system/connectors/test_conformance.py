"""Tests the conformance suite as a store's author meets it: its example runs, and it reports failures in words."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from kvparams_connectors import conformance

GUIDE = Path(__file__).parents[3] / "connectors" / "STORES.md"
GOOD = """
from kvparams_connectors.stores.file.store import FileStore

def MyStore(folder, size_bytes):
    return FileStore(folder / "store", size_bytes, unit_bytes=4096)
"""
BAD = """
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.stores.memory.store import MemoryStore

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


def run_named(folder: Path, named: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """The suite on a store of somebody else's, from a folder that is not this repository's."""
    plugin = ["-p", "kvparams_connectors.conformance", f"--kvstore={named}"]
    pytest_run = [str(Path(sys.executable).with_name("pytest")), "-p", "no:cacheprovider", *plugin, *options]
    return subprocess.run(pytest_run, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def blocks_of_the_guide() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_store_in_the_guide_is_short_and_passes_every_level(tmp_path: Path) -> None:
    store, factory, *_ = blocks_of_the_guide()
    assert sum(1 for line in store.splitlines() if line.strip()) < 60
    assert "pytest -p kvparams_connectors.conformance --kvstore=my_store:factory" in GUIDE.read_text()
    (tmp_path / "my_store.py").write_text(f"{store}\n\n{factory}")
    done = run_named(tmp_path, "my_store:factory")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.partition("conformance of the store")[2]
    for level in ("1 bytes", "2 integrity", "3 concurrency and faults", "4 engine order", "5 performance"):
        assert re.search(rf"^level {level}: \d+ passed$", summary, re.MULTILINE), summary
    assert "of the speed of memory" in summary
    assert "skipped" not in done.stdout


def test_a_store_that_is_slower_than_it_says_fails_level_5_alone(tmp_path: Path) -> None:
    (tmp_path / "my_package.py").write_text(
        GOOD + "from kvparams_connectors.conformance import Floors\n"
        "def fast(folder): return MyStore(folder, 8 << 20)\nfast.floors = Floors(put=1000.0, get=1e-9)\n"
    )
    done = run_named(tmp_path, "my_package:fast", "-k", "TestPerformance or comes_back", "--tb=short")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"put: at best \d\.\d+ of the speed of memory in \d+ rounds; the store says at least 1000", done.stdout
    )
    assert "level 1 bytes: 11 passed" in done.stdout
    assert "level 5 performance: 1 failed" in done.stdout


@pytest.mark.parametrize(
    ("named", "words"),
    [
        pytest.param("nowhere", "write package.module:factory", marks=pytest.mark.slow),
        ("nowhere:factory", "No module named 'nowhere'"),
        pytest.param("json:nothing", "no attribute 'nothing'", marks=pytest.mark.slow),
        pytest.param("json:__name__", "cannot be called", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_cannot_be_found_is_one_line(tmp_path: Path, named: str, words: str) -> None:
    done = run_named(tmp_path, named)
    assert done.returncode == 4, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_store_the_plugin_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    run = [sys.executable, "-m", "pytest", "-p", "kvparams_connectors.conformance", "-p", "no:cacheprovider"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "1 passed" in done.stdout
    assert "conformance of the store" not in done.stdout


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
