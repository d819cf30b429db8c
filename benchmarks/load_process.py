"""Runs the load generator as a process of its own, so that whoever directs a measurement does not disturb it.

A run with a single wrong answer is no measurement.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import open_loop
from benchmarks.open_loop import Report

__all__ = ["Ask", "LoadError", "closed", "open_at"]


class LoadError(Exception):
    """The generator failed, or an answer was wrong."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An `Ask` says what is asked, and of which server."""

    body: Path
    path: str = "/v1/completions"
    events: int | None = None
    """Events of each stream, `[DONE]` included; None: answers are whole."""
    stream: bool = False
    """Whether answers are streams of which only the end is checked: some engines put waiting tokens into one event."""


def closed(port: int, ask: Ask, *, concurrency: int, requests: int, limit_s: float, ramp_s: float = 0.0) -> Report:
    """A closed loop. Raises LoadError."""
    options = ["--concurrency", concurrency, "--requests", requests, "--limit", limit_s, "--ramp", ramp_s]
    return _run(port, ask, [str(option) for option in options], 3 * limit_s + 30)


def open_at(port: int, ask: Ask, *, rate_per_s: float, duration_s: float, warm_up_s: float, seed: int) -> Report:
    """An open loop of Poisson arrivals. Raises LoadError."""
    options = ["--rate", rate_per_s, "--duration", duration_s, "--warm-up", warm_up_s, "--seed", seed]
    return _run(port, ask, [str(option) for option in options], duration_s + warm_up_s + 60)


def _run(port: int, ask: Ask, options: Sequence[str], timeout_s: float) -> Report:
    command = [sys.executable, open_loop.__file__, "--port", str(port), "--path", ask.path, "--body", str(ask.body)]
    if ask.events is not None:
        command += ["--stream", "--events", str(ask.events)]
    elif ask.stream:
        command += ["--stream"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=timeout_s)
    if not done.stdout.startswith("{"):
        raise LoadError(f"the load generator failed with status {done.returncode}: {done.stderr[-2000:]}")
    report = Report.from_json(done.stdout)
    if report.errors or report.e2e is None:
        raise LoadError(f"port {port}, {ask.body.name}: wrong answers among {report.requests}: {report.errors}")
    return report
