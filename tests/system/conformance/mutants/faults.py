"""Describes single-fault mutants of a proxy, and runs the conformance kit on one."""

import asyncio
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvparams_conformance.checks import Result, select_checks
from kvparams_conformance.proxy_checks import proxy_checks
from kvparams_conformance.proxy_runs import carrier_of, write_signing_keys
from kvparams_conformance.runner import run_proxy_checks
from kvparams_conformance.site import Under

__all__ = ["ENGINES", "MOST_OTHERS", "Mutant", "caught_by", "copy_with_fault", "judge", "run_profile"]

MOST_OTHERS: Final = 3
"""A fault is caught by the check for its requirement, and by no more others than this."""
ENGINES: Final = "--prefill {prefill0} --prefill {prefill1} --decode {decode0} --decode {decode1}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: texts of one file, each replaced by another."""

    check: str
    """The check that has to fail."""
    fault: str
    file: str
    changes: tuple[tuple[str, str], ...]
    profile: str = "store-proxy"
    options: str = ""

    @property
    def name(self) -> str:
        """Returns a name for the report of the tests."""
        return f"{self.check} {self.fault}"


def copy_with_fault(mutant: Mutant, source: Path, target: Path) -> None:
    """Copies a folder, and puts the fault into it.

    Raises:
        ValueError: a text that shall be replaced is not there exactly once.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / mutant.file
    text = path.read_text()
    for before, after in mutant.changes:
        if text.count(before) != 1:
            raise ValueError(f"{mutant.name}: {before!r} stands {text.count(before)} times in {mutant.file}")
        text = text.replace(before, after)
    path.unlink()
    path.write_text(text)


def run_profile(profile: str, command: str, folder: Path) -> list[Result]:
    """Returns the verdicts of all checks of a profile on a proxy."""
    under = Under(carrier_of(profile), command=command, keys=write_signing_keys(folder / "signing-keys.json"))
    checks = select_checks(proxy_checks(), (profile,), ())
    return asyncio.run(run_proxy_checks(checks, under))


def caught_by(results: Iterable[Result]) -> list[str]:
    """Returns the checks that a program does not pass."""
    return [result.check.id for result in results if result.verdict not in ("pass", "skip")]


def judge(mutant: Mutant, caught: list[str]) -> str:
    """Returns what is wrong with how a mutant was caught; empty if nothing is."""
    if mutant.check not in caught:
        return f"{mutant.name}: not caught by its check; by {caught or 'none'}"
    others = [check for check in caught if check != mutant.check]
    return "" if len(others) <= MOST_OTHERS else f"{mutant.name}: caught by {len(others)} others: {others}"
