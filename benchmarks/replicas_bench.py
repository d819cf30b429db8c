"""Compares several proxies in front of one fleet with one proxy: time to first token, hits, and bytes of the exchange.

The proxies are real, engines and network are simulated (`benchmarks/replay`). "nothing" is the control:
proxies that share nothing. With "queue depths" they share nothing either, and read engines' metrics; KV events come
from engines, too.

    python -m benchmarks.replicas_bench [TRACE] [--kind agents] [--requests 4000] [--replicas 1 2 4 8]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.replay.generated import KINDS, generate
from benchmarks.replay.model import replay
from benchmarks.replay.parts import speed_for
from benchmarks.replay.replicas import Replicas, Sharing
from benchmarks.replay.trace import Request, load, spread
from benchmarks.replay.world import World

__all__ = ["main"]

_HEAD = "| trace | proxies | share | mean s | / one | p99 s | / one | hit ratio | / one | bytes a request |"


def _rows(name: str, trace: Sequence[Request], world: World, load: float, counts: Sequence[int]) -> None:
    speed = speed_for(trace, world, load)
    first: tuple[float, float, float] | None = None
    for count in counts:
        for sharing in get_args(Sharing) if count > 1 else ("nothing",):
            router = Replicas(world, count, sharing)
            outcome = replay(trace, speed, world, router)
            mean, p99 = outcome.mean_s, outcome.quantile_s(0.99)
            hits = 1 - outcome.computed / outcome.asked
            first = first or (mean, p99, hits)
            each = router.sent_bytes / len(trace)
            print(
                f"| {name} | {count} | {sharing} | {mean:.3f} | {mean / first[0]:.2f} "
                f"| {p99:.2f} | {p99 / first[1]:.2f} | {hits:.3f} | {hits / max(first[2], 1e-9):.3f} | {each:.0f} |",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas_bench", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines; default: generated traces")
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="of generated traces; default: all")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4000, help="of 512 tokens in each engine's cache")
    parser.add_argument("--load", type=float, default=0.95, help="how busy engines are under round robin")
    parser.add_argument("--rounded-times", action="store_true", help="requests of one time arrive at the same moment")
    given = parser.parse_args(argv)
    world = World(given.blocks, workers=given.engines)
    print(_HEAD + "\n" + "|---" * 10 + "|")
    if given.trace is not None:
        trace = load(given.trace)[: given.requests]
        if not given.rounded_times:
            trace = spread(trace)
        _rows(given.trace.stem, trace, world, given.load, given.replicas)
    else:
        for kind in given.kind or KINDS:
            _rows(kind, generate(kind, given.requests), world, given.load, given.replicas)
    return 0


if __name__ == "__main__":
    sys.exit(main())
