"""The suite as a pytest plugin: `pytest -p kvparams_connectors.conformance --kvstore=pkg.mod:factory`.

Without `--kvstore` it changes nothing at all, so that it may stand in a project's own options.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, cast

import pytest

from kvparams_connectors.conformance.helpers import Floors
from kvparams_connectors.conformance.performance import SPEED
from kvparams_connectors.store import KVStore, open_store

__all__ = [
    "Factory",
    "NamedStore",
    "load_named_store",
    "pytest_addoption",
    "pytest_configure",
    "pytest_terminal_summary",
]

Factory = Callable[[Path], KVStore]
"""Opens the store under test. The folder is empty, and each test has its own: the same folder is the same store (if it
is shared, or persistent), another folder is another one. A store on a server may use its path as a namespace."""

_OPTION: Final = "--kvstore"
_LEVELS: Final = {
    "TestBytes": "1 bytes",
    "TestIntegrity": "2 integrity",
    "TestConcurrencyAndFaults": "3 concurrency and faults",
    "TestEngineOrder": "4 engine order",
    "TestPerformance": "5 performance",
}


@dataclass(frozen=True, slots=True)
class NamedStore:
    """Describes what `--kvstore` names."""

    factory: Factory
    floors: Floors
    """The factory's attribute `floors`; without one, speed is only reported."""


def load_named_store(config: pytest.Config) -> NamedStore:
    """Import what the command line names; the folder in which pytest was called counts.

    Raises:
        pytest.UsageError: it cannot be imported, or is nothing that could be called.
    """
    text = cast("str | None", config.getoption(_OPTION))
    if text is not None and "://" in text:
        return NamedStore(_factory_of_url(text), Floors())
    module, colon, name = (text or "").partition(":")
    if not (module and colon and name):
        raise pytest.UsageError(f"{_OPTION}={text}: write package.module:factory")
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"{_OPTION}={text}: {error}") from error
    if not callable(factory):
        raise pytest.UsageError(f"{_OPTION}={text}: it cannot be called")
    floors: object = getattr(factory, "floors", Floors())
    if not isinstance(floors, Floors):
        raise pytest.UsageError(f"{_OPTION}={text}: its `floors` are no Floors(put=0.01, get=0.01)")
    return NamedStore(cast("Factory", factory), floors)


def _factory_of_url(url: str) -> Factory:
    """Returns a factory that opens a URL. `{folder}` in it stands for a test's own folder, `{name}` for a name of it.

    A test needs an empty store. A URL without either is opened as it is, which suits stores of one process.
    """

    def factory(folder: Path) -> KVStore:
        name = sha256(str(folder).encode()).hexdigest()[:16]
        return open_store(url.replace("{folder}", str(folder)).replace("{name}", name))

    return factory


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the store."""
    parser.getgroup("kvparams").addoption(
        _OPTION,
        metavar="PKG.MOD:FACTORY|URL",
        help="run the conformance suite of kvparams on this store; in a URL, {folder} is an empty folder",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With a store and without paths, the suite is what is collected."""
    if config.getoption(_OPTION) is None:
        return
    load_named_store(config)
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(Path(__file__).with_name("suite.py"))]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints one line for each level, and the measured speed."""
    if config.getoption(_OPTION) is None:
        return
    stats = cast("Mapping[str, list[object]]", terminalreporter.stats)
    counts: dict[str, dict[str, int]] = {}
    speed: list[str] = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, []):
            if not isinstance(report, pytest.TestReport):
                continue
            parts = report.nodeid.split("::")
            level = _LEVELS.get(parts[1] if len(parts) > 2 else "")
            if level is not None:
                found = counts.setdefault(level, {})
                found[outcome] = found.get(outcome, 0) + 1
            speed += [str(text) for name, text in report.user_properties if name == SPEED]
    terminalreporter.section("conformance of the store")
    for level in sorted(counts):
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts[level].items())
        terminalreporter.line(f"level {level}: {said}")
    for text in dict.fromkeys(speed):
        terminalreporter.line(text)
