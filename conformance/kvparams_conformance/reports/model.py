"""Holds a report: what was tested, and one line for each check."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvparams_conformance.checks import CheckResult, Verdict
from kvparams_conformance.requirements import Specification

__all__ = ["Line", "Report", "make_report"]

_VERDICTS: Final[tuple[Verdict, ...]] = ("pass", "fail", "choice", "skip", "error")


@dataclass(frozen=True, slots=True)
class Line:
    """The verdict on one check, with its evidence."""

    id: str
    requirement: str
    verdict: Verdict
    message: str
    """What was seen instead of what is expected; empty if the check has passed."""
    sends: str
    expects: str
    sent: str
    seen: str
    seconds: float
    link: str


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run."""

    subject: str
    target: str
    """The command or the URL of what was tested."""
    profiles: tuple[str, ...]
    version: str
    seconds: float
    lines: tuple[Line, ...]

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Returns how many checks have each verdict."""
        return {verdict: sum(line.verdict == verdict for line in self.lines) for verdict in _VERDICTS}

    @property
    def exit_status(self) -> int:
        """Returns 0 if the program conforms, 1 if it does not, 2 if a check could not be judged or there was none."""
        if self.counts["fail"]:
            return 1
        return 2 if self.counts["error"] or not self.counts["pass"] else 0

    def as_json(self) -> dict[str, Any]:
        """Returns the report as an object for JSON."""
        made = {"format": 1, "subject": self.subject, "target": self.target, "profiles": list(self.profiles)}
        counts = {**self.counts}
        return {
            **made,
            "version": self.version,
            "seconds": round(self.seconds, 3),
            "counts": counts,
            "conforms": self.exit_status == 0,
            "checks": [{**asdict(line), "seconds": round(line.seconds, 3)} for line in self.lines],
        }


def make_report(
    subject: str,
    target: str,
    profiles: Sequence[str],
    results: Sequence[CheckResult],
    specification: Specification,
    seconds: float,
) -> Report:
    """Returns the report of a run."""
    lines = [
        Line(
            id=result.check.id,
            requirement=result.check.requirement,
            verdict=result.verdict,
            message=result.message,
            sends=result.check.sends,
            expects=result.check.expects,
            sent=result.sent,
            seen=result.seen,
            seconds=result.seconds,
            link=specification.link(result.check.requirement),
        )
        for result in results
    ]
    lines.sort(key=lambda line: tuple(map(int, line.requirement.split("."))))
    return Report(subject, target, tuple(profiles), specification.version, seconds, tuple(lines))
