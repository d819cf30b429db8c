"""Runs the load generator (`native/load_generator.c`), so that whoever directs a measurement does not disturb it.

`closed` keeps a number of requests in flight: it finds capacities and CPU per request. `open_at` sends requests when
they are due, whether or not the server keeps up, and a request's clock starts when it is due. A closed loop stops
asking while the server stalls and so hides the stall from the percentiles.
"""

import json
import subprocess
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.latency import Arrivals, Spread, arrival_offsets
from benchmarks.native_build import compiled

__all__ = ["Ask", "LoadError", "Report", "closed", "load_command", "open_at", "read_report"]


class LoadError(Exception):
    """The generator failed, or an answer was wrong."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An `Ask` says what is asked, and which answers are right."""

    body: Path
    """The first `@@@@@@@@` in it is replaced by a counter of eight digits, so that no two prompts are the same."""
    path: str = "/v1/completions"
    events: int | None = None
    """Events of each stream, `[DONE]` included; None: answers are whole."""
    stream: bool = False
    """Whether answers are streams of which only the end is checked: some engines put waiting tokens into one event."""
    header: str = ""
    """One further line of the request's head, such as `authorization: Bearer ...`."""


@dataclass(frozen=True, slots=True)
class Report:
    """A `Report` holds the result of one run."""

    requests: int
    right: int
    errors: dict[str, int]
    wall_s: float
    cpu_s: float
    """What the generator itself used."""
    connections: int
    e2e: Spread | None
    ttft: Spread | None
    itl: Spread | None
    lag: Spread | None
    """How late the generator sent; if this is not small beside `e2e`, the generator was the bottleneck."""

    @property
    def right_per_s(self) -> float:
        """Right answers per second."""
        return self.right / self.wall_s


def closed(
    port: int,
    ask: Ask,
    *,
    concurrency: int,
    requests: int,
    limit_s: float,
    ramp_s: float = 0.0,
    first_serial: int = 0,
    strict: bool = True,
) -> Report:
    """Keeps `concurrency` requests in flight, until enough are done or `limit_s` is over.

    Args:
        port: of the server, on the loopback interface.
        ask: the request.
        concurrency: requests in flight.
        requests: how many.
        limit_s: after this no further request is sent; what is in flight is waited for, at most another `limit_s`.
        ramp_s: the first requests are spread over this time, so that paced streams do not run in step.
        first_serial: where the counter in the body starts.
        strict: a wrong answer is a LoadError.

    Raises:
        LoadError: the generator failed, or an answer was wrong.
        StartError: the generator cannot be compiled.
    """
    options = ["--concurrency", concurrency, "--requests", requests, "--limit", limit_s, "--ramp", ramp_s]
    command = load_command(port, ask, [*options, "--first-serial", first_serial])
    return _run(command, b"", 3 * limit_s + 30, strict)


def open_at(
    port: int,
    ask: Ask,
    *,
    rate_per_s: float,
    duration_s: float,
    warm_up_s: float = 0.0,
    seed: int = 1,
    arrivals: Arrivals = "poisson",
    drain_s: float = 10.0,
    strict: bool = True,
) -> Report:
    """Sends requests at the times of a Poisson process, or evenly spaced.

    Args:
        port: as for `closed`.
        ask: as for `closed`.
        rate_per_s: arrivals per second.
        duration_s: of the run, after the warm-up.
        warm_up_s: arrivals before this are sent and checked, but not timed.
        seed: one seed gives one sequence of arrivals.
        arrivals: their distribution.
        drain_s: how long to wait after the last arrival for what is still unanswered.
        strict: as for `closed`.

    Raises:
        LoadError, StartError: as for `closed`.
        ValueError: the plan has no arrival, or too many.
    """
    offsets = arrival_offsets(arrivals, rate_per_s=rate_per_s, duration_s=warm_up_s + duration_s, seed=seed)
    if not offsets:
        raise ValueError(f"no arrival in {duration_s} s at {rate_per_s}/s: ask for more")
    untimed = sum(offset < warm_up_s for offset in offsets)
    command = load_command(port, ask, ["--arrivals", len(offsets), "--warm-up", untimed, "--drain", drain_s])
    return _run(command, offsets.tobytes(), duration_s + warm_up_s + drain_s + 30, strict)


def load_command(port: int, ask: Ask, options: Sequence[object]) -> list[str]:
    """Returns the command of the generator. Raises StartError if it cannot be compiled."""
    command = [str(compiled("load_generator")), str(port), ask.path, str(ask.body)]
    if ask.events is not None:
        command += ["--events", str(ask.events)]
    elif ask.stream:
        command += ["--stream", "1"]
    if ask.header:
        command += ["--header", ask.header]
    return [*command, *map(str, options)]


def read_report(output: bytes) -> Report:
    """Reads what the generator has written: a line of JSON, then times in seconds."""
    line, _, times = output.partition(b"\n")
    document = json.loads(line)
    values = array("d", times)
    spreads: list[Spread | None] = []
    start = 0
    for size in document["sizes"]:
        spreads.append(Spread.of_seconds(values[start : start + size]))
        start += size
    e2e, ttft, itl, lag = spreads
    names = ("requests", "right", "errors", "wall_s", "cpu_s", "connections")
    return Report(**{name: document[name] for name in names}, e2e=e2e, ttft=ttft, itl=itl, lag=lag)


def _run(command: Sequence[str], arrivals: bytes, timeout_s: float, strict: bool) -> Report:
    done = subprocess.run(command, input=arrivals, capture_output=True, check=False, timeout=timeout_s)
    if not done.stdout.startswith(b"{"):
        problem = done.stderr.decode(errors="replace")[-2000:]
        raise LoadError(f"the load generator failed with status {done.returncode}: {problem}")
    report = read_report(done.stdout)
    if strict and (report.errors or report.e2e is None):
        raise LoadError(f"port {command[1]}, {command[3]}: wrong answers among {report.requests}: {report.errors}")
    return report
