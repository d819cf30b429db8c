"""Tests the oldest httptools and uvicorn that pyproject.toml allows; all other tests run with the newest ones."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.system.adversary.edge_cases import edge_cases
from tests.system.adversary.runner import SERVED, Arena
from tests.system.adversary.test_adversary import run

ROOT = Path(__file__).parents[3]
OLDEST = ROOT / ".cache" / "oldest"
NAMES = ("httptools", "uvicorn")


def search_path(*names: str) -> str:
    """Returns a PYTHONPATH with these releases in front of what this process has.

    Raises:
        AssertionError: they are not installed.
    """
    folders = [OLDEST / name for name in names]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    assert not missing, f"{', '.join(missing)}: not there; `make .cache/oldest/.ready` installs them"
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([] if before is None else [before])])


def lower_bounds() -> dict[str, str]:
    """Returns the lowest release of each that pyproject.toml allows."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [line for lines in extras.values() for line in lines if line.startswith(NAMES)]
    bounds = {(name, re.match(rf"{name}>=([0-9.]+)", line)) for line in wanted for name in NAMES if name in line}
    return {name: bound[1] for name, bound in bounds if bound is not None}


def parsers(pid: int) -> set[Path]:
    """Returns the files of httptools' parser that the process has loaded."""
    mapped = Path(f"/proc/{pid}/maps").read_text()
    return {Path(path) for path in re.findall(r"/\S*/httptools/parser/parser\S*\.so", mapped)}


def test_make_installs_the_lowest_releases_that_are_allowed() -> None:
    pinned = dict(re.findall(r"(httptools|uvicorn)==([0-9.]+)", (ROOT / "Makefile").read_text()))
    assert pinned.keys() == lower_bounds().keys() == set(NAMES)
    for name, bound in lower_bounds().items():
        assert f"{pinned[name]}.".startswith(f"{bound}."), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_there_is_what_make_installs(name: str) -> None:
    (found,) = distributions(path=[search_path(name).split(os.pathsep)[0]])
    assert f"{found.version}.".startswith(f"{lower_bounds()[name]}.")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), ("--plain-asgi",)], ids=["direct", "plain"])
async def test_the_edge_stands_it_with_the_oldest_parser(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = ("env", f"PYTHONPATH={search_path('httptools')}", *SERVED)
    async with Arena.running(tmp_path, command, flags) as arena:
        assert [parser.is_relative_to(OLDEST) for parser in parsers(arena.server.process.pid)] == [True]
        await run(arena, edge_cases())
        assert arena.unknown() == 0


@pytest.mark.slow
@pytest.mark.parametrize("names", [("httptools",), ("uvicorn",), NAMES], ids="+".join)
def test_the_middleware_stands_upgrades_with_the_oldest_server(names: tuple[str, ...]) -> None:
    """In an engine's own server it is uvicorn that reads requests."""
    environment = os.environ | {"PYTHONPATH": search_path(*names)}
    asked = f"import httptools, uvicorn; print({', '.join(f'{name}.__file__' for name in NAMES)})"
    told = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    used = [Path(path).is_relative_to(OLDEST) for path in told.stdout.split()]
    assert used == [name in names for name in NAMES]
    tests = ("tests/system/sidecar/test_middleware.py", "-k", "upgrade", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^[1-9]\d* passed", done.stdout, re.MULTILINE), done.stdout[-4000:]
