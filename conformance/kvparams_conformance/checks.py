"""Registers checks: small functions, each with the requirement that it checks, what it sends and what it expects."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Check", "CheckFailed", "CheckResult", "Checks", "NotJudged", "Verdict", "expect", "select_checks"]

Verdict = Literal["pass", "fail", "choice", "skip", "error"]
"""`choice`: the program does something else where the protocol lets it. `error`: the check could not be judged."""


class CheckFailed(Exception):
    """The program under test breaks the requirement. The message says what was seen."""


class NotJudged(Exception):
    """The check does not apply to this program, or what it needs is not there."""


@dataclass(frozen=True, slots=True)
class Check:
    """A `Check` tests one requirement."""

    requirement: str
    """The number in the specification, such as `12.1`."""
    name: str
    """What tells the checks of one requirement apart."""
    sends: str
    expects: str
    profiles: tuple[str, ...]
    run: Callable[[Any], Awaitable[None]]
    is_isolated: bool
    """Whether engines misbehave in it, so that other checks must not run beside it."""
    is_choice: bool
    """Whether the protocol recommends what is checked, and does not require it."""

    @property
    def id(self) -> str:
        """Returns the name by which `--only` selects the check."""
        return f"{self.requirement}/{self.name}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The verdict on one check."""

    check: Check
    verdict: Verdict
    message: str
    sent: str
    seen: str
    seconds: float


class Checks:
    """A collection of checks, in the order in which they were registered."""

    def __init__(self) -> None:
        self._found: dict[str, Check] = {}

    def add(
        self,
        requirement: str,
        name: str,
        *,
        sends: str,
        expects: str,
        profiles: tuple[str, ...],
        isolated: bool = False,
        choice: bool = False,
    ) -> Callable[[Callable[[Any], Awaitable[None]]], Callable[[Any], Awaitable[None]]]:
        """Returns a decorator that registers a check."""

        def register(function: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
            check = Check(requirement, name, sends, expects, profiles, function, isolated, choice)
            if check.id in self._found:
                raise ValueError(f"two checks are called {check.id}")
            self._found[check.id] = check
            return function

        return register

    def __iter__(self) -> Iterator[Check]:
        return iter(self._found.values())


def select_checks(checks: Iterable[Check], profiles: tuple[str, ...], only: tuple[str, ...]) -> list[Check]:
    """Returns the checks of some profiles; with `only`, those whose id is, or begins with, one of these."""
    return [
        check
        for check in checks
        if set(check.profiles) & set(profiles)
        and (not only or any(f"{check.id}/".startswith(f"{prefix}/") for prefix in only))
    ]


def expect(condition: object, message: str) -> None:
    """Fails the check unless the condition holds. `message` says what was seen instead."""
    if not condition:
        raise CheckFailed(message)
