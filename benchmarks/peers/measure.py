"""Takes the rounds of one part: the routers of the part run side by side and are asked in turns.

The engines count what reaches them. A run whose counters do not show exactly the legs that its requests must have, or
in which a single answer is wrong, is a LoadError and not a figure.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Protocol, Self

from benchmarks.load_process import Ask, LoadError, Report, closed, open_at
from benchmarks.native_build import compiled
from benchmarks.peers.routers import Engines, Router
from benchmarks.scenarios import Scenario
from tests.support.processes import Processes, free_ports, http_get, tree_usage
from tests.support.waiting import wait_until

__all__ = ["DIRECT", "Bench", "Row", "closed_rounds", "open_rounds", "progress"]

DIRECT: Final = "direct"
"""An engine that is asked without any router."""
_ENGINES_OF_A_ROLE: Final = 2
_LIMIT_S: Final = 10.0
_SETTLE_S: Final = 5.0
_WARM_UP_S: Final = 0.3
_OPEN_S: Final = 1.5


@dataclass(frozen=True, slots=True)
class Row:
    """A `Row` is one router in one scenario and round."""

    part: str
    scenario: str
    router: str
    round: int
    loop: Literal["closed", "open"]
    requests: int
    per_s: float
    """Right answers per second (closed loop), or arrivals per second (open loop)."""
    cpu_us: float
    """User and system time of the router's whole process tree, microseconds per request."""
    rss_mb: float
    engine_us: float
    """CPU time of the stub engines, microseconds per request."""
    generator_us: float
    """CPU time of the load generator, microseconds per request."""
    p50_ms: float
    p99_ms: float
    lag_p99_ms: float
    """How late the generator sent."""


class Bench:
    """The stub engines and the routers of a part, running."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes = processes
        self._folder = folder
        ports = free_ports(2 * _ENGINES_OF_A_ROLE)
        self.engines = Engines(tuple(ports[:_ENGINES_OF_A_ROLE]), tuple(ports[_ENGINES_OF_A_ROLE:]))
        self._stub_url = f"http://127.0.0.1:{ports[0]}"
        command = [str(compiled("stub_engine")), *self.engines.ports]
        self._stub_pid = processes.start("stub", command, ready=[self._stub_url + "/health"])
        self._routers: dict[str, tuple[Router, int]] = {}
        self._serial = 0

    def start(self, routers: Sequence[Router]) -> Self:
        """Starts routers. Raises StartError with the end of a router's log."""
        for router in routers:
            progress(f"starting {router.name}")
            log_name = router.name.replace(" ", "-")
            pid = self._processes.start(log_name, router.command, ready=router.ready, environment=router.environment)
            self._routers[router.name] = router, pid
        return self

    def names(self, scenario: Scenario) -> list[str]:
        """Returns who can be asked this, the bare engine first."""
        routers = [router for router, _ in self._routers.values()]
        return [DIRECT, *(each.name for each in routers if each.takes_token_ids or scenario.prompt != "ids")]

    def closed(self, part: str, name: str, scenario: Scenario, number: int, share: float) -> Row:
        """Runs one round of the closed loop, with `share` of the scenario's requests."""
        requests = max(scenario.concurrency, int(scenario.requests * share))

        def load(port: int, ask: Ask) -> Report:
            return closed(
                port,
                ask,
                concurrency=scenario.concurrency,
                requests=requests,
                limit_s=_LIMIT_S,
                ramp_s=0.6 if scenario.itl_ms else 0.0,
                first_serial=self._next_serial(requests),
            )

        return self._take(part, name, scenario, number, "closed", load, None)

    def open(self, part: str, name: str, scenario: Scenario, number: int, rate_per_s: float) -> Row:
        """Runs one round of the open loop; everybody is asked at the same moments."""

        def load(port: int, ask: Ask) -> Report:
            return open_at(port, ask, rate_per_s=rate_per_s, duration_s=_OPEN_S, warm_up_s=_WARM_UP_S, seed=number + 1)

        return self._take(part, name, scenario, number, "open", load, rate_per_s)

    def _take(
        self,
        part: str,
        name: str,
        scenario: Scenario,
        number: int,
        loop: Literal["closed", "open"],
        load: "_Load",
        rate_per_s: float | None,
    ) -> Row:
        router, pid = self._routers.get(name, (None, None))
        body = self._folder / f"{scenario.name}.json"
        if not body.exists():
            body.write_bytes(scenario.body)
        header = router.header if router else ""
        ask = Ask(body, scenario.path, events=scenario.events, header=header)
        http_get(f"{self._stub_url}/set?itl_ms={scenario.itl_ms}&cached={scenario.shared}")
        http_get(f"{self._stub_url}/reset")
        before, engines_before = tree_usage(pid) if pid else None, tree_usage(self._stub_pid)
        try:
            report = load(router.port if router else self.engines.decode[0], ask)
        except LoadError as error:
            raise LoadError(f"{name}, {scenario.name}: {error}") from None
        after, engines_after = tree_usage(pid) if pid else None, tree_usage(self._stub_pid)
        self._check(name, router, report.requests)
        if report.e2e is None or report.lag is None:
            raise LoadError(f"{name}, {scenario.name}: nothing was timed")
        return Row(
            part=part,
            scenario=scenario.name,
            router=name,
            round=number,
            loop=loop,
            requests=report.requests,
            per_s=rate_per_s or report.right_per_s,
            cpu_us=(after.cpu_s - before.cpu_s) / report.requests * 1e6 if before and after else 0.0,
            rss_mb=after.rss_mb if after else 0.0,
            engine_us=(engines_after.cpu_s - engines_before.cpu_s) / report.requests * 1e6,
            generator_us=report.cpu_s / report.requests * 1e6,
            p50_ms=report.e2e.p50,
            p99_ms=report.e2e.p99,
            lag_p99_ms=report.lag.p99,
        )

    def _next_serial(self, requests: int) -> int:
        """Returns where a run's counter starts, so that no router sees a prompt twice."""
        self._serial += requests
        return self._serial - requests

    def _check(self, name: str, router: Router | None, requests: int) -> None:
        """Checks what the engines have counted. A prefill leg may end after the answer where both run at once."""
        legs = router.legs if router else "none"
        wanted = {
            "requests": requests * (1 if legs == "none" else 2),
            "prefill": 0,
            "decode_with_kv": 0,
            "bootstrap": 0,
        }
        if legs == "nixl":
            wanted |= {"prefill": requests, "decode_with_kv": requests}
        elif legs == "bootstrap":
            wanted["bootstrap"] = 2 * requests

        def counted() -> dict[str, int]:
            engines = json.loads(http_get(f"{self._stub_url}/stats")[1]).values()
            return {each: sum(engine[each] for engine in engines) for each in wanted}

        try:
            wait_until(lambda: counted() == wanted, _SETTLE_S)
        except TimeoutError:
            raise LoadError(f"{name}: the engines counted {counted()}; right would be {wanted}") from None


class _Load(Protocol):
    def __call__(self, port: int, ask: Ask) -> Report: ...


def progress(text: str) -> None:
    """Tells what happens, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _in_turn(names: Sequence[str], number: int) -> list[str]:
    """Returns all names, in an order that starts with another one each round."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def _warm(bench: Bench, part: str, scenarios: Sequence[Scenario], share: float) -> None:
    """Warms connections, code paths and allocators."""
    for scenario in scenarios:
        for name in bench.names(scenario):
            bench.closed(part, name, replace(scenario, itl_ms=0.0), 0, share / 10)


def closed_rounds(bench: Bench, part: str, scenarios: Sequence[Scenario], *, rounds: int, share: float) -> list[Row]:
    """Takes all rounds of the closed loop; of the bare engine, which costs no router anything, only the first."""
    _warm(bench, part, scenarios, share)
    rows: list[Row] = []
    for number in range(rounds):
        for scenario in scenarios:
            names = bench.names(scenario)
            names = names[1:] if number else names
            taken = [bench.closed(part, name, scenario, number, share) for name in _in_turn(names, number)]
            rows += taken
            told = ", ".join(f"{row.router} {row.cpu_us:.0f}" for row in taken if row.router != DIRECT)
            progress(f"{part}: round {number + 1}/{rounds}, {scenario.name}, us of CPU per request: {told}")
    return rows


def open_rounds(bench: Bench, part: str, scenarios: Sequence[Scenario], *, rounds: int, share: float) -> list[Row]:
    """Takes all rounds of the open loop, at half of what the slowest router can carry."""
    rows: list[Row] = []
    rates: dict[str, float] = {}
    for scenario in scenarios:
        capacities = {name: bench.closed(part, name, scenario, 0, share / 2).per_s for name in bench.names(scenario)}
        rates[scenario.name] = min(capacities.values()) / 2
        told = ", ".join(f"{name} {per_s:.0f}" for name, per_s in capacities.items())
        progress(f"{part}: {scenario.name}, requests per second at most: {told}")
    for number in range(rounds):
        for scenario in scenarios:
            rate, names = rates[scenario.name], bench.names(scenario)
            taken = [bench.open(part, name, scenario, number, rate) for name in _in_turn(names, number)]
            rows += taken
            told = ", ".join(f"{row.router} {row.p50_ms:.2f}/{row.p99_ms:.2f}" for row in taken)
            progress(f"{part}: round {number + 1}/{rounds}, {scenario.name} at {rate:.0f}/s, p50/p99 ms: {told}")
    return rows
