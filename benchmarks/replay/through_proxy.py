"""A trace through the real proxy, beside what the model says of the same requests.

    python -m benchmarks.replay.through_proxy [TRACE] [--requests 1000] [--blocks 1000] [--load 0.7] [--faster 5]

`kvparams proxy` stands before stub engines, each of which computes one prompt after the other at the model's pace and
has a finite prefix cache of the model's kind; it reports what it found there and says nothing else. Only two things are
scaled down. Time: everything is so many times as fast. Tokens: a block of 512 is 64 of its own, the proxy's grain, and
costs what 512 do. Nobody tells the proxy either; it learns what a token takes.

Only ratios are compared: of the policy's mean time to first token and round robin's, here and there.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import uvloop

from benchmarks.replay.__main__ import SAMPLE
from benchmarks.replay.arrivals import arrive
from benchmarks.replay.beliefs import BySelf
from benchmarks.replay.cache import BlockCache
from benchmarks.replay.model import replay
from benchmarks.replay.ours import Ours
from benchmarks.replay.parts import speed_for
from benchmarks.replay.trace import BLOCK, Request, load
from benchmarks.replay.world import Cost, World
from kvparams.instances import RoundRobin
from kvparams.routing.policies.cache_aware import CacheAware
from tests.support.processes import Processes, StartError, free_ports
from tests.support.stub_answers import Ask
from tests.support.stub_engine import StubEngines

__all__ = ["Found", "main", "modelled", "through_proxy"]

_TOKENS: Final = 64
"""That stand for a block."""
_BELIEVED: Final = 1 << 15
"""Blocks that the proxy takes a cache to hold at first."""
_POLICIES: Final = {"round_robin": RoundRobin, "cache_aware": CacheAware}


@dataclass(frozen=True, slots=True)
class Found:
    """A `Found` holds the results of one policy."""

    mean_s: float
    """Time to first token, in the trace's seconds."""
    reused: float
    """The share of prompt tokens that were not computed."""


class _Worker:
    """A `tests.support.stub_connection.Work`: a prefill worker of the model."""

    def __init__(self, blocks: int, cost: Cost, faster: float) -> None:
        self._cache = BlockCache(blocks)
        self._cost = cost
        self._faster = faster
        self._until = 0.0
        self.computed = self.asked = 0
        """Tokens of the trace."""

    def begun(self, ask: Ask, body: bytes, now_s: float) -> tuple[Ask, float]:
        blocks: list[int] = json.loads(body)["prompt"][::_TOKENS]
        held = self._cache.match(blocks)
        self._cache.use(blocks)
        whole = len(blocks) * BLOCK
        new = max(1, whole - held * BLOCK)
        self.asked += whole
        self.computed += new
        self._until = max(now_s, self._until) + self._cost.seconds(new, whole) / self._faster
        tokens = len(blocks) * _TOKENS
        known = replace(ask, prompt_tokens=tokens, cached_tokens=min(held * _TOKENS, tokens - 1))
        return known, self._until - now_s


def modelled(trace: Sequence[Request], speed: float, world: World, policy: str) -> Found:
    """Returns the model's prediction, without events and with the proxy's estimate of the caches' size."""
    outcome = replay(trace, speed, world, Ours(world, _POLICIES[policy], lambda: BySelf(_BELIEVED)))
    return Found(outcome.mean_s, 1.0 - outcome.computed / outcome.asked)


async def through_proxy(
    trace: Sequence[Request], speed: float, world: World, policy: str, faster: float, logs: Path
) -> Found:
    """Replays the trace through the real proxy, and returns the same figures.

    Raises:
        StartError: the proxy does not start, or an answer was wrong.
    """
    stub = await StubEngines.start(prefill=[0] * world.workers, decode=[0, 0])
    async with stub:
        workers = [_Worker(world.blocks, world.cost, faster) for _ in range(world.workers)]
        urls: list[str] = []
        for number, engine in enumerate(stub.engines):
            urls += [f"--{engine.role}", engine.url]
            engine.work = workers[number] if engine.role == "prefill" else None
        (port,) = free_ports(1)
        command = [str(Path(sys.executable).with_name("kvparams")), "proxy", "--port", str(port), *urls]
        command += ["--connector", "nixl", "--policy", policy, "--log-requests", "off"]
        with Processes(logs) as processes:
            ready = [f"http://127.0.0.1:{port}/health"]
            await asyncio.to_thread(processes.start, f"proxy-{policy}", command, ready=ready)
            tally = await arrive(trace, speed * faster, port, _body)
    if tally.errors:
        raise StartError(f"{policy}: wrong answers: {dict(tally.errors)}")
    computed, asked = sum(each.computed for each in workers), sum(each.asked for each in workers)
    return Found(faster * fmean(tally.ttft_s), 1.0 - computed / asked)


def _body(request: Request) -> bytes:
    ids = ",".join(f"{block}," * (_TOKENS - 1) + str(block) for block in request.blocks)
    return b'{"model":"stub","max_tokens":1,"temperature":0.0,"prompt":[%b]}' % ids.encode()


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", default=SAMPLE, help="JSON lines; default: the sample here")
    parser.add_argument("--requests", type=int, default=1000, help="the first so many of it")
    parser.add_argument("--blocks", type=int, default=1000, help="of 512 tokens in each of eight caches")
    parser.add_argument("--load", type=float, default=0.7, help="how busy round robin keeps the workers")
    parser.add_argument("--faster", type=float, default=5.0, help="how many times as fast as the model")
    given = parser.parse_args(argv)
    world = World(given.blocks)
    trace = [each._replace(tokens=len(each.blocks) * BLOCK) for each in load(given.trace)[: given.requests]]
    speed = speed_for(trace, world, given.load)
    print("| | model: mean s | reused | real proxy: mean s | reused | real / model |\n|---|---|---|---|---|---|")
    model: list[Found] = []
    real: list[Found] = []
    try:
        with tempfile.TemporaryDirectory() as logs:
            for policy in _POLICIES:
                said = modelled(trace, speed, world, policy)
                seen = uvloop.run(through_proxy(trace, speed, world, policy, given.faster, Path(logs)))
                model.append(said)
                real.append(seen)
                print(
                    f"| {policy} | {said.mean_s:.2f} | {said.reused:.1%} | {seen.mean_s:.2f} | {seen.reused:.1%} "
                    f"| {seen.mean_s / said.mean_s:.2f} |",
                    flush=True,
                )
    except StartError as error:
        print(f"through_proxy: {error}", file=sys.stderr)
        return 1
    print(f"\ncache_aware / round_robin: model {model[1].mean_s / model[0].mean_s:.3f}, "
          f"real proxy {real[1].mean_s / real[0].mean_s:.3f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
