"""Runs the tests that name a requirement in a copy of the repository in which the requirement is broken.

A mutant stands in a file of `mutants/`, one for each section of spec.md. The tests follow from the binding
(`tests.support.kvparams.requirement_binding`), so a mutant that survives means that no test which names a requirement
checks it.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.support.kvparams.spec_folder import ROOT

__all__ = [
    "MUTANTS",
    "Mutant",
    "MutantOutcome",
    "Outcome",
    "apply",
    "copy_sources",
    "judge_run",
    "nodes_of",
    "read_mutants",
    "run_tests",
]

MUTANTS: Final = Path(__file__).parent / "mutants"
_COPIED: Final = (
    "kvparams",
    "proxy",
    "connectors",
    "conformance",
    "examples",
    "benchmarks",
    "tests",
    "spec",
    "docs",
    "pyproject.toml",
)
_PACKAGES: Final = (".", "proxy", "connectors", "conformance", "examples")
"""Where `import` finds the packages of the copy, instead of those of the working tree."""
_LIMIT_S: Final = 300.0
"""For the tests of one requirement; the slowest take half a minute."""

Outcome = Literal["caught", "survived", "broken"]
"""Whether a named test failed, none did, or none could be run (a fault that breaks more than its requirement)."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A single fault that breaks one requirement."""

    requirement: str
    """Its number, for example `1.0#3.1`."""
    fault: str
    """What the code does wrong, in words."""
    file: str
    """Path from the repository's root."""
    before: str
    after: str

    @property
    def name(self) -> str:
        """Returns a name for the report of the tests."""
        return f"{self.requirement} {self.fault}"


@dataclass(frozen=True, slots=True)
class MutantOutcome:
    """What the named tests said of a mutant."""

    outcome: Outcome
    failed: tuple[str, ...]
    """The tests that failed."""
    output: str


def read_mutants(folder: Path = MUTANTS) -> list[Mutant]:
    """Returns all mutants, in the order of the requirements' sections."""
    return [
        Mutant(f"1.0#{one['requirement']}", one["fault"], one["file"], one["before"], one["after"])
        for path in sorted(folder.glob("*.toml"))
        for one in tomllib.loads(path.read_text("utf-8"))["mutant"]
    ]


def copy_sources(target: Path) -> Path:
    """Copies the repository, as far as tests use it, and returns the copy. The working tree is never changed."""
    ignored = shutil.ignore_patterns("node_modules", ".hypothesis", "*.jsonl")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy2(source, target / name)
    return target


@contextmanager
def apply(mutant: Mutant, copy: Path) -> Generator[None]:
    """Puts a fault into a copy of the repository, and takes it out again.

    Raises:
        ValueError: the text to replace is not in the file exactly once.
    """
    path = copy / mutant.file
    text = path.read_text("utf-8")
    if (count := text.count(mutant.before)) != 1:
        raise ValueError(f"{mutant.name}: the text to replace is {count} times in {mutant.file}, not once")
    times = path.stat()
    path.write_text(text.replace(mutant.before, mutant.after), "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that compiled files are those of before again


def run_tests(nodes: Sequence[str], copy: Path, *, stop_at_first: bool = True) -> MutantOutcome:
    """Runs tests of a copy of the repository, on its packages and without native code."""
    paths = [str(copy / package) for package in _PACKAGES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "KVPARAMS_NATIVE": "off"}
    for name in [name for name in environment if name.startswith(("PYTEST_", "COV_"))]:
        del environment[name]
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", *(["-x"] if stop_at_first else [])]
    command = [sys.executable, "-m", "pytest", *options, *nodes]
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout if isinstance(error.stdout, str) else (error.stdout or b"").decode(errors="replace")
        return MutantOutcome("broken", (), f"{said}\nnot done after {_LIMIT_S:.0f} s")
    return judge_run(run.returncode, run.stdout + run.stderr)


def judge_run(code: int, output: str) -> MutantOutcome:
    """Returns what pytest's exit status and report say.

    Only a test that fails has noticed a fault: one that cannot be collected or set up has not looked at it, and a
    mutant that is no program is no fault.
    """
    failed = tuple(re.findall(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE))
    if code == 0:
        return MutantOutcome("survived", (), output)
    is_program = re.search(r"\b(?:ImportError|ModuleNotFoundError|NameError|SyntaxError)\b", output) is None
    return MutantOutcome("caught" if code == 1 and failed and is_program else "broken", failed, output)


def nodes_of(requirements: Iterable[str], bound: dict[str, list[str]]) -> list[str]:
    """Returns the test nodes of several requirements, each once."""
    return list(dict.fromkeys(node for requirement in requirements for node in bound[requirement]))
