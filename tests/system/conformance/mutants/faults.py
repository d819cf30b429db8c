"""Makes single-fault mutants of a proxy, and runs the conformance kit on them."""

import asyncio
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvparams_conformance.checks import CheckResult, select_checks
from kvparams_conformance.proxy_checks import proxy_checks
from kvparams_conformance.proxy_runs import carrier_of, write_signing_keys
from kvparams_conformance.runner import run_proxy_checks
from kvparams_conformance.site import Under

__all__ = ["MOST_OTHERS", "Mutant", "caught_by", "copy_with_fault", "judge", "read_mutants", "run_profile"]

MOST_OTHERS: Final = 3
"""A fault is caught by the check for its requirement, and by no more others than this."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: texts of one file, each replaced by another."""

    check: str
    """The check that has to fail."""
    fault: str
    file: str
    changes: tuple[tuple[str, str], ...]
    run: str = "store"
    """How the proxy is run: a name of `runs.RUNS`."""

    @property
    def name(self) -> str:
        """Returns a name for the report of the tests."""
        return f"{self.check} {self.fault}"


def read_mutants(name: str) -> list[Mutant]:
    """Returns the mutants of a file in this folder."""
    content: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / name).read_text("utf-8"))
    return [
        Mutant(
            one["check"],
            one["fault"],
            one["file"],
            tuple((before, after) for before, after in one["changes"]),
            one.get("run", "store"),
        )
        for one in content["mutants"]
    ]


def copy_with_fault(mutant: Mutant, sources: Iterable[Path], target: Path) -> None:
    """Copies folders into another one, and puts the fault into the copy.

    Raises:
        ValueError: a text that shall be replaced is not there exactly once.
    """
    for source in sources:
        shutil.copytree(source, target / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / mutant.file
    text = path.read_text("utf-8")
    for before, after in mutant.changes:
        if text.count(before) != 1:
            raise ValueError(f"{mutant.name}: {before!r} stands {text.count(before)} times in {mutant.file}")
        text = text.replace(before, after)
    path.write_text(text, "utf-8")


def run_profile(profile: str, command: str, folder: Path) -> list[CheckResult]:
    """Returns the verdicts of all checks of a profile on a proxy."""
    keys = write_signing_keys(folder / "signing-keys.json")
    under = Under(carrier_of(profile), command=command, keys=keys, start_s=60.0)  # nothing of a mutant is compiled yet
    checks = select_checks(proxy_checks(), (profile,), ())
    return asyncio.run(run_proxy_checks(checks, under))


def caught_by(results: Iterable[CheckResult]) -> list[str]:
    """Returns the checks that a program does not pass; one that could not be judged has caught nothing."""
    return [result.check.id for result in results if result.verdict in ("fail", "choice")]


def judge(mutant: Mutant, caught: list[str]) -> str:
    """Returns what is wrong with how a mutant was caught; empty if nothing is."""
    if mutant.check not in caught:
        return f"not caught by its check, but by {caught or 'none'}"
    others = [check for check in caught if check != mutant.check]
    return "" if len(others) <= MOST_OTHERS else f"caught by {len(others)} other checks: {others}"
