"""Measures the proxy alone: CPU per request, memory, and added latency, with stub engines and no peer.

Every figure has its floor beside it. Three subjects take turns within each round, so that they meet the same noise:
`direct` (a stub engine asked without any proxy), `floor` (a relay of the two legs that does nothing else) and `proxy`
(`kvparams proxy` as shipped). What the stub engines counted must agree with what was asked, or it fails.

    python benchmarks/proxy_bench.py [--rounds 5] [--scenarios ns-s-64,st-s-64]        # make bench-proxy

CPU per request comes from a closed loop, added latency from an open loop at half the proxy's capacity. A table on
stdout; JSON and a plot in the results folder.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks import floor_relay
from benchmarks.load_process import Ask, LoadError, closed, open_at
from benchmarks.proxy_plot import write_plot
from benchmarks.proxy_report import ClosedRow, OpenRow, Results, table
from benchmarks.scenarios import SCENARIOS, Scenario
from tests.support import stub_engine
from tests.support.processes import Processes, StartError, free_ports, http_get, tree_usage

__all__ = ["main"]

_PREFILL_ENGINES = _DECODE_ENGINES = 2
_LIMIT_S = 30.0
_WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class _Subject:
    """Somebody to ask."""

    name: Literal["direct", "floor", "proxy"]
    port: int
    pid: int | None
    """None: it has no process beside the engines'."""


class _Bench:
    """The stub engines and the subjects, running."""

    def __init__(self, processes: Processes, bodies: Path) -> None:
        ports = free_ports(_PREFILL_ENGINES + _DECODE_ENGINES + 2)
        prefill, decode = ports[:_PREFILL_ENGINES], ports[_PREFILL_ENGINES:-2]
        floor, proxy = ports[-2:]
        self._bodies = bodies
        self._stub_url = _url(prefill[0])
        roles = [*_options("--prefill", prefill), *_options("--decode", decode)]
        processes.start("stub", [sys.executable, stub_engine.__file__, *roles], ready=[self._stub_url + "/health"])
        floor_command = [sys.executable, floor_relay.__file__, "--port", str(floor), *roles]
        urls = [*_options("--prefill", map(_url, prefill)), *_options("--decode", map(_url, decode))]
        kvparams = str(Path(sys.executable).with_name("kvparams"))
        proxy_command = [kvparams, "proxy", "--port", str(proxy), *urls, "--connector", "nixl"]
        self.subjects = (
            _Subject("direct", decode[0], None),
            _Subject("floor", floor, processes.start("floor", floor_command, ready=[_url(floor) + "/health"])),
            _Subject("proxy", proxy, processes.start("proxy", proxy_command, ready=[_url(proxy) + "/health"])),
        )

    def ask(self, scenario: Scenario) -> Ask:
        """Returns the scenario's request, with its body in a file."""
        body = self._bodies / f"{scenario.name}.json"
        if not body.exists():
            body.write_bytes(scenario.body)
        return Ask(body, events=scenario.events)

    def closed(self, subject: _Subject, scenario: Scenario, share: float) -> ClosedRow:
        """Runs one round of the closed loop with `share` of the scenario's requests."""
        self._prepare(scenario)
        before = tree_usage(subject.pid) if subject.pid else None
        report = closed(
            subject.port,
            self.ask(scenario),
            concurrency=scenario.concurrency,
            requests=max(scenario.concurrency, int(scenario.requests * share)),
            limit_s=_LIMIT_S,
            ramp_s=0.6 if scenario.itl_ms else 0.0,
        )
        after = tree_usage(subject.pid) if subject.pid else None
        self._check(subject, report.requests)
        cpu_us = (after.cpu_s - before.cpu_s) / report.requests * 1e6 if before and after else None
        return ClosedRow(scenario.name, subject.name, cpu_us, after.rss_mb if after else None, report.right_per_s)

    def open(
        self, subject: _Subject, scenario: Scenario, *, rate_per_s: float, duration_s: float, seed: int
    ) -> OpenRow:
        """Runs one round of the open loop; the same seed asks every subject at the same moments."""
        self._prepare(scenario)
        ask = self.ask(scenario)
        report = open_at(
            subject.port, ask, rate_per_s=rate_per_s, duration_s=duration_s, warm_up_s=_WARM_UP_S, seed=seed
        )
        self._check(subject, report.requests)
        if report.e2e is None or report.ttft is None or report.lag is None:
            raise LoadError(f"{subject.name}, {scenario.name}: nothing was timed")
        return OpenRow(
            scenario=scenario.name,
            subject=subject.name,
            rate_per_s=rate_per_s,
            e2e_p50_ms=report.e2e.p50,
            e2e_p99_ms=report.e2e.p99,
            ttft_p50_ms=report.ttft.p50,
            ttft_p99_ms=report.ttft.p99,
            lag_p99_ms=report.lag.p99,
        )

    def _prepare(self, scenario: Scenario) -> None:
        http_get(f"{self._stub_url}/set?itl_ms={scenario.itl_ms}")
        http_get(f"{self._stub_url}/reset")

    def _check(self, subject: _Subject, requests: int) -> None:
        """Checks that the engines saw both legs of every request, both with KV params."""
        counters = json.loads(http_get(f"{self._stub_url}/stats")[1]).values()
        names = ("requests", "prefill", "decode_with_kv", "aborted", "live")
        seen = {name: sum(each[name] for each in counters) for name in names}
        legs = requests if subject.pid else 0
        wanted = dict(zip(names, (requests + legs, legs, legs, 0, 0), strict=True))
        if seen != wanted:
            raise LoadError(f"{subject.name}: the engines counted {seen}, it should have been {wanted}")


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _options(name: str, values: "Sequence[object] | map[str]") -> list[str]:
    return [text for value in values for text in (name, str(value))]


def _progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _measure(bench: _Bench, scenarios: Sequence[Scenario], *, rounds: int, share: float, open_s: float) -> Results:
    results = Results()
    for scenario in scenarios:  # warm connections, code paths and allocators
        for subject in bench.subjects:
            bench.closed(subject, scenario, share / 10)
    for number in range(1, rounds + 1):
        for scenario in scenarios:
            for subject in bench.subjects:
                row = bench.closed(subject, scenario, share)
                results.closed.append(row)
                cost = f"{row.cpu_us:.0f} us/request" if row.cpu_us is not None else "no process of its own"
                _progress(f"round {number}/{rounds} closed {scenario.name} {subject.name}: {cost}")
    for number in range(1, rounds + 1):
        for scenario in scenarios:
            capacity = [
                row.right_per_s for row in results.closed if (row.scenario, row.subject) == (scenario.name, "proxy")
            ]
            rate_per_s = statistics.median(capacity) / 2
            for subject in bench.subjects:
                row = bench.open(subject, scenario, rate_per_s=rate_per_s, duration_s=open_s, seed=number)
                results.open.append(row)
                _progress(
                    f"round {number}/{rounds} open {scenario.name} {subject.name} at {rate_per_s:.0f}/s: "
                    f"p50 {row.e2e_p50_ms:.2f} ms, p99 {row.e2e_p99_ms:.2f} ms"
                )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write JSON and plot."""
    parser = argparse.ArgumentParser(description="CPU, memory and added latency of the proxy, with stub engines.")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of each scenario's requests in the closed loop")
    parser.add_argument("--open-seconds", type=float, default=3.0, help="of each open-loop run")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args(argv)
    names: list[str] = arguments.scenarios.split(",")
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenarios {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    results_directory: Path = arguments.results
    results_directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as temporary, Processes(Path(temporary)) as processes:
            bench = _Bench(processes, Path(temporary))
            results = _measure(
                bench,
                [SCENARIOS[name] for name in names],
                rounds=arguments.rounds,
                share=arguments.share,
                open_s=arguments.open_seconds,
            )
    except (StartError, LoadError) as error:
        print(f"proxy_bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("proxy_bench: interrupted; every process it started is gone", file=sys.stderr)
        return 130
    rows = results.summary()
    print(table(rows))
    document = {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "summary": [asdict(row) for row in rows],
        **asdict(results),
    }
    (results_directory / "proxy.json").write_text(json.dumps(document, indent=1) + "\n")
    write_plot(rows, results_directory / "proxy.png")
    print(f"\nwritten: {results_directory / 'proxy.json'} and proxy.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
