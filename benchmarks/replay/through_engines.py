"""A part of a trace through the real proxy and real reference engines, policies beside each other.

    python -m benchmarks.replay.through_engines [TRACE] [--requests 600] [--first 0] [--load 0.7] [--blocks 1000]
        [--store peer|file] [--policy NAME]... [--results FOLDER]

Each policy has a fleet of its own: `kvparams proxy` before four reference engines for prefill and two for decode, all
real processes, with finite caches. All fleets are up at once. The trace is cut into parts of 100 requests; each part is
put to every fleet, one after the other, in an order drawn anew for each part, so that the noise of a moment hits
neighbours alike; caches stay as they are from part to part. Scaled down (`scaled.py`): a block of 512 tokens is one of
16, and arrivals are so many times as fast that by the model round robin keeps the prefill engines `--load` busy; an
engine sleeps for what its pace says, so two cores carry three fleets.

With `--store peer`, decode engines fetch from the prefill engine that computed, and a prompt's prefix is worth
something only where it was computed. With `--store file` all engines share one store, as large as all caches, and what
another one has computed is fetched.

A figure is reported only if every prompt was computed or found once, by the engines' own count, in prefill and again in
decode.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Final, cast

import uvloop

from benchmarks.replay.__main__ import SAMPLE
from benchmarks.replay.arrivals import arrive
from benchmarks.replay.beliefs import BySelf
from benchmarks.replay.engines_report import Part, Said, table, write_plot
from benchmarks.replay.model import replay
from benchmarks.replay.ours import Ours
from benchmarks.replay.parts import speed_for
from benchmarks.replay.scaled import TOKENS, Fleet, Scale, Store, body, scaled
from benchmarks.replay.trace import BLOCK, Request, load
from benchmarks.sides import processor
from demo.client import new_client
from demo.processes import ProcessError, Processes
from kvparams.instances import RoundRobin
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams.routing.policies.least_load import LeastLoad

__all__ = ["POLICIES", "main", "measure", "modelled"]

POLICIES: Final = {"round_robin": RoundRobin, "least_load": LeastLoad, "cache_aware": CacheAware}
_PART: Final = 100
_WARM_UPS: Final = (1, 16, 31)
"""Blocks of prompts, for each engine, before anything is counted: whatever is made at the first request has been made
then, and who asks for the pace of engines has seen it. Nothing of them comes again."""
_BELIEVED: Final = 1 << 15
"""Blocks that the proxy takes a cache to hold at first."""
_APART_S: Final = 60.0
"""In the model, enough for all that waits to be done before the next part."""
_OWN: Final = 1 << 40
"""Blocks that no trace has."""


class WrongCount(Exception):
    """Answers were wrong, or engines did not count each prompt once."""


def modelled(trace: Sequence[Request], speed: float, scale: Scale, policy: str, part: int = _PART) -> Said:
    """Returns the model's predictions for the same parts."""
    world = scale.world
    apart = [one._replace(at=one.at + number // part * _APART_S * speed) for number, one in enumerate(trace)]
    outcome = replay(apart, speed, world, Ours(world, POLICIES[policy], lambda: BySelf(_BELIEVED)))
    return Said(policy, outcome.mean_s, outcome.quantile_s(0.99), 1.0 - outcome.computed / outcome.asked)


async def _one(fleet: Fleet, number: int, trace: Sequence[Request], speed: float) -> Part:
    """A part of the trace put to one fleet.

    Raises:
        WrongCount: not all of it was answered, or counted.
    """
    async with new_client() as client:
        prefill_before, decode_before = await fleet.counted(client)
        tally = await arrive(trace, speed, fleet.port, body, stream=True)
        prefill, decode = await fleet.counted(client)
    prefill, decode = prefill.since(prefill_before), decode.since(decode_before)
    asked = TOKENS * sum(len(one.blocks) for one in trace)
    if tally.errors or prefill.asked != asked or decode.asked != asked:
        found = f"prefill counted {prefill.asked:.0f}, decode {decode.asked:.0f} of {asked} tokens"
        raise WrongCount(f"{fleet.policy}, part {number}: {dict(tally.errors)}, {found}")
    again = decode.computed - len(trace)  # but for the last token of each, which is always computed
    return Part(fleet.policy, number, tally.ttft_s.tolist(), asked, prefill.local, prefill.fetched, again)


async def _warm_up(fleet: Fleet) -> None:
    counts = [count for count in _WARM_UPS for _ in fleet.prefill]
    blocks = [[_OWN + 1000 * number + at for at in range(count)] for number, count in enumerate(counts)]
    first = [Request(0.2 * at, len(one) * BLOCK, 1, one, at) for at, one in enumerate(blocks)]
    await arrive(first, 1.0, fleet.port, body, stream=True)


def measure(
    trace: Sequence[Request], speed: float, scale: Scale, policies: Sequence[str], folder: Path, part: int = _PART
) -> Iterator[Part]:
    """Every part under every policy; `folder` takes stores and logs.

    Raises:
        ProcessError: something does not start.
        WrongCount: not everything was answered, or counted once.
    """
    die = Random(1)
    with ExitStack() as stack:
        fleets: list[Fleet] = []
        for policy in policies:
            (own := folder / policy).mkdir()
            fleets.append(Fleet(policy, scale, stack.enter_context(Processes(own)), own))
        for fleet in fleets:
            fleet.wait_ready()
        for fleet in fleets:
            uvloop.run(_warm_up(fleet))
        for number, begin in enumerate(range(0, len(trace), part)):
            for fleet in die.sample(fleets, len(fleets)):
                yield uvloop.run(_one(fleet, number, trace[begin : begin + part], speed))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table; write every figure and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", default=SAMPLE, help="JSON lines; default: the sample here")
    parser.add_argument("--requests", type=int, default=600, help="so many of it (default: 600)")
    parser.add_argument("--first", type=int, default=0, help="after leaving out so many (default: 0)")
    parser.add_argument("--load", type=float, default=0.7, help="how busy round robin keeps prefill (default: 0.7)")
    parser.add_argument("--blocks", type=int, default=1000, help="of each prefill engine's cache (default: 1000)")
    parser.add_argument("--tokens-per-s", type=int, default=1280, help="that one computes (default: 1280)")
    parser.add_argument("--prefill", type=int, default=4, help="engines for prefill (default: 4)")
    parser.add_argument("--decode", type=int, default=2, help="engines for decode (default: 2)")
    parser.add_argument("--store", choices=("peer", "file"), default="peer", help="how KV travels (default: peer)")
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="default: all")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder for rows and picture")
    given = parser.parse_args(argv)
    store = cast("Store", given.store)
    scale = Scale(given.prefill, given.decode, given.blocks, given.tokens_per_s, store)
    policies: list[str] = given.policy or list(POLICIES)
    try:
        trace = scaled(load(given.trace)[given.first : given.first + given.requests])
    except (OSError, ValueError) as error:
        print(f"through_engines: {error}", file=sys.stderr)
        return 2
    trace = [one._replace(at=one.at - trace[0].at) for one in trace]
    speed = speed_for(trace, replace(scale.world, store=None), given.load)
    print(f"machine: {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}; load {_load()}")
    arguments = sys.argv[1:] if argv is None else argv
    print(f"command: python -m benchmarks.replay.through_engines {' '.join(arguments)}".rstrip())
    rate = (len(trace) - 1) / trace[-1].at * speed
    print(f"{len(trace)} requests, {rate:.1f} a second, {speed:.1f} times as fast as the trace\n", flush=True)
    said = [modelled(trace, speed, scale, policy) for policy in policies]
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    parts: list[Part] = []
    try:
        with tempfile.TemporaryDirectory(dir=memory, prefix="kvparams-bench-") as folder:
            for each in measure(trace, speed, scale, policies, Path(folder)):
                parts.append(each)
                print(f"part {each.number}, {each.policy}: {1000 * each.mean_s:.0f} ms", file=sys.stderr, flush=True)
    except (ProcessError, WrongCount) as error:
        print(f"through_engines: {error}", file=sys.stderr)
        return 1
    print(table(parts, said))
    print(f"\nload of the machine at the end: {_load()}")
    given.results.mkdir(parents=True, exist_ok=True)
    name = given.results / f"replay-engines-{store}"
    found = {"parts": [asdict(each) for each in parts], "model": [asdict(each) for each in said]}
    name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    write_plot(parts, policies, name.with_suffix(".png"))
    return 0


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
