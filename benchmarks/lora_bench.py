"""Compares routing by LoRA adapter with routing that is blind to adapters: adapters loaded, time to first token.

20 adapters on 4 simulated engines with room for 6 (`benchmarks/replay`); the policies are the proxy's own. "one worker
per adapter" is Dynamo's rule (issue 15018). Bar: at most half the loads of the blind policy, time to first token no
worse.

    python -m benchmarks.lora_bench [--requests 4000] [--load 0.5 0.7 0.85] [--load-seconds 0.1 0.5 1.5]
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.replay.adapters import run_adapters

__all__ = ["main"]

_HEAD = "| prompts | busy | one load s | router | loads | mean s | p99 s | busiest engine |"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_bench", description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.7, 0.85], help="without loading adapters")
    parser.add_argument("--load-seconds", type=float, nargs="+", default=[0.1, 0.5, 1.5], help="of one adapter")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    print(_HEAD + "\n" + "|---" * 8 + "|")
    for shared in (True, False):
        for load in given.load:
            for load_s in given.load_seconds:
                runs = run_adapters(
                    shared_prompts=shared, load=load, load_s=load_s, number=given.requests, seed=given.seed
                )
                for run in runs:
                    print(
                        f"| {'a system prompt each' if shared else 'all different'} | {load:.0%} | {load_s:g} "
                        f"| {run.router} | {run.loads} | {run.mean_s:.3f} | {run.p99_s:.2f} | {run.busiest:.0%} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
