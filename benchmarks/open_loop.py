"""A load generator: requests arrive when the plan says so, whether or not the server keeps up.

A request's clock starts at its *scheduled* arrival. A server that stalls is charged for every request that should have
been sent meanwhile. A closed loop (`--concurrency`), where the next request waits for the last answer, stops asking
while the server stalls and so hides it; it is here to find capacities and CPU per request.

    python benchmarks/open_loop.py --port 8000 --path /v1/completions --body body.json --rate 500 --duration 10
    python benchmarks/open_loop.py --port 8000 --path /v1/completions --body body.json --concurrency 64 --requests 5000

One JSON document on stdout; exit status 1 if any answer was wrong.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.arrival_clock import ArrivalClock
from benchmarks.latency import Arrivals, Spread, arrival_offsets
from benchmarks.load_client import Pool, Request, Tally, Target

__all__ = ["ClosedLoop", "OpenLoop", "Report", "run_closed_loop", "run_open_loop"]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A plan of arrivals."""

    rate_per_s: float
    duration_s: float
    warm_up_s: float = 0.0
    """Arrivals before this are sent and checked, but not timed."""
    arrivals: Arrivals = "poisson"
    seed: int = 1
    drain_s: float = 10.0
    """How long to wait after the last arrival for what is still unanswered."""
    first_serial: int = 0


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A `ClosedLoop` keeps a number of requests in flight, until enough are done or the time is over."""

    concurrency: int
    requests: int
    limit_s: float = 60.0
    ramp_s: float = 0.0
    """Spread the first requests over this time, so that paced streams do not run in step."""
    warm_up: int = 0
    """Requests that are sent and checked first, but not timed."""
    first_serial: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A `Report` holds the result of one run; times are milliseconds."""

    mode: str
    asked_per_s: float | None
    requests: int
    right: int
    errors: dict[str, int]
    wall_s: float
    right_per_s: float
    connections: int
    ttft: Spread | None
    itl: Spread | None
    e2e: Spread | None
    lag: Spread | None
    """How late the generator sent; if this is not small beside `e2e`, the generator was the bottleneck."""

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Read back what the command printed."""
        document = json.loads(text)
        for name in ("ttft", "itl", "e2e", "lag"):
            document[name] = None if document[name] is None else Spread(**document[name])
        return cls(**document)


def _report(mode: str, asked_per_s: float | None, requests: int, wall_s: float, tally: Tally) -> Report:
    return Report(
        mode=mode,
        asked_per_s=asked_per_s,
        requests=requests,
        right=tally.right,
        errors=dict(tally.errors),
        wall_s=wall_s,
        right_per_s=tally.right / wall_s,
        connections=tally.connections,
        ttft=Spread.of_seconds(tally.ttft_s),
        itl=Spread.of_seconds(tally.itl_s),
        e2e=Spread.of_seconds(tally.e2e_s),
        lag=Spread.of_seconds(tally.lag_s),
    )


async def run_open_loop(target: Target, plan: OpenLoop) -> Report:
    """Send every request at its time and wait for the answers, at most `drain_s` after the last."""
    loop = asyncio.get_running_loop()
    offsets = arrival_offsets(
        plan.arrivals, rate_per_s=plan.rate_per_s, duration_s=plan.warm_up_s + plan.duration_s, seed=plan.seed
    )
    if not offsets:
        raise ValueError(f"no arrival in {plan.duration_s} s at {plan.rate_per_s}/s: ask for more")
    finished = asyncio.Event()
    tally = Tally()
    sent = done = 0

    def on_done(_: Request) -> None:
        nonlocal done
        done += 1
        if done == len(offsets):
            finished.set()

    def send_due() -> None:
        nonlocal sent
        while sent < len(offsets):
            due_s = start_s + offsets[sent]
            if due_s > time.monotonic():
                clock.wake_at(due_s)
                return
            wire = target.request(plan.first_serial + sent)
            measured = offsets[sent] >= plan.warm_up_s
            sent += 1
            pool.send(Request(due_s, wire, measured))

    pool = Pool(target, tally, on_done)
    clock = ArrivalClock(loop, send_due)
    start_s = time.monotonic() + 0.01
    clock.wake_at(start_s)
    try:
        async with asyncio.timeout(0.01 + plan.warm_up_s + plan.duration_s + plan.drain_s):
            await finished.wait()
    except TimeoutError:
        pass  # what is unanswered becomes an error below
    finally:
        wall_s = time.monotonic() - start_s
        clock.close()
        await pool.close()
    return _report("open", plan.rate_per_s, len(offsets), wall_s, tally)


async def run_closed_loop(target: Target, plan: ClosedLoop) -> Report:
    """Keep `concurrency` requests in flight until `requests` are done or `limit_s` is over.

    What is in flight when the time is over is waited for, at most another `limit_s`.
    """
    loop = asyncio.get_running_loop()
    finished = asyncio.Event()
    tally = Tally()
    sent = done = 0
    end_s = time.monotonic() + plan.limit_s

    def send_next() -> None:
        nonlocal sent
        now_s = time.monotonic()
        if sent < plan.requests and now_s < end_s:
            wire = target.request(plan.first_serial + sent)
            sent += 1
            pool.send(Request(now_s, wire, sent > plan.warm_up))
        elif sent == done:
            finished.set()

    def on_done(_: Request) -> None:
        nonlocal done
        done += 1
        # Not from inside the answer's own callback: a server that answers at once would deepen the stack.
        loop.call_soon(send_next)

    pool = Pool(target, tally, on_done)
    start_s = time.monotonic()
    for index in range(min(plan.concurrency, plan.requests)):
        loop.call_later(plan.ramp_s * index / plan.concurrency, send_next)
    try:
        async with asyncio.timeout(plan.ramp_s + 2 * plan.limit_s):
            await finished.wait()
    except TimeoutError:
        pass
    finally:
        wall_s = time.monotonic() - start_s
        await pool.close()
    return _report("closed", None, sent, wall_s, tally)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Open-loop (or closed-loop) load on one port, every answer checked.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--body", type=Path, required=True, help="a file; its first @@@@@@@@ becomes a counter")
    parser.add_argument("--stream", action="store_true", help="answers are event streams that end with [DONE]")
    parser.add_argument("--events", type=int, help="events a stream must have, [DONE] included")
    parser.add_argument("--first-serial", type=int, default=0, help="where the counter in the body starts")
    parser.add_argument("--rate", type=float, help="open loop: arrivals per second")
    parser.add_argument("--duration", type=float, default=10.0, help="open loop: seconds, after the warm-up")
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds (open loop) or requests (closed loop)")
    parser.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson")
    parser.add_argument("--seed", type=int, default=1, help="of the Poisson process")
    parser.add_argument("--drain", type=float, default=10.0, help="open loop: seconds to wait for the last answers")
    parser.add_argument("--concurrency", type=int, help="closed loop: requests in flight")
    parser.add_argument("--requests", type=int, default=1000, help="closed loop: how many")
    parser.add_argument("--limit", type=float, default=60.0, help="closed loop: seconds")
    parser.add_argument("--ramp", type=float, default=0.0, help="closed loop: seconds over which it starts")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run once and print the report."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if (arguments.rate is None) == (arguments.concurrency is None):
        parser.error("give either --rate (open loop) or --concurrency (closed loop)")
    target = Target(
        port=arguments.port,
        path=arguments.path,
        body=cast("Path", arguments.body).read_bytes(),
        stream=arguments.stream,
        events=arguments.events,
    )
    gc.disable()  # one short run, and a collection in the middle of it would be measured as the server's
    if arguments.rate is not None:
        plan = OpenLoop(
            rate_per_s=arguments.rate,
            duration_s=arguments.duration,
            warm_up_s=arguments.warm_up,
            arrivals=arguments.arrivals,
            seed=arguments.seed,
            drain_s=arguments.drain,
            first_serial=arguments.first_serial,
        )
        report = uvloop.run(run_open_loop(target, plan))
    else:
        closed = ClosedLoop(
            concurrency=arguments.concurrency,
            requests=arguments.requests,
            limit_s=arguments.limit,
            ramp_s=arguments.ramp,
            warm_up=int(arguments.warm_up),
            first_serial=arguments.first_serial,
        )
        report = uvloop.run(run_closed_loop(target, closed))
    print(json.dumps(asdict(report)))
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
