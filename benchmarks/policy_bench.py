"""Measures the CPU per request of `kvparams proxy` under a policy, beside round robin, with prompts of 8,000 token ids.

Both proxies stand before the same stub engines and are asked in turns, so noise hits neighbours alike; the figure is
the median of the ratios of single rounds. The first 73 % of a prompt are everybody's, and engines report them as
cached; the rest is its own. So blocks are found, stored and, when there is no more room, forgotten. With `--cold`
engines report nothing as cached: then each leg corrects what is believed. Bar: `cache_aware` at most twice round robin.

    python -m benchmarks.policy_bench [--policy cache_aware] [--rounds 7] [--requests 1000] [--cold]
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.load_process import Ask, LoadError, closed
from tests.support import stub_engine
from tests.support.processes import Processes, StartError, free_ports, http_get, tree_usage

__all__ = ["main"]

_TOKENS: Final = 8000
_SHARED: Final = 0.73
_CONCURRENCY: Final = 64
_LIMIT_S: Final = 60.0


def _body(number: int) -> bytes:
    """Returns the body of a round, whose number and the counter behind it are one of the ids."""
    ids = list(map(str, random.Random("policy").choices(range(1000, 128_000), k=_TOKENS)))
    ids[int(_TOKENS * _SHARED)] = f"{2 + number % 40}@@@@@@@@"
    return b'{"model":"stub","max_tokens":16,"temperature":0.0,"prompt":[%b]}' % ",".join(ids).encode()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU per request of a policy, beside round robin.")
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=1000, help="of each proxy in a round")
    parser.add_argument("--cold", action="store_true", help="engines find nothing in their caches")
    arguments = parser.parse_args(argv)
    policies: list[str] = ["round_robin", arguments.policy]
    cost: dict[str, list[float]] = {policy: [] for policy in policies}
    try:
        with tempfile.TemporaryDirectory() as temporary, Processes(Path(temporary)) as processes:
            body = Path(temporary) / "body.json"
            ports = free_ports(6)
            engines = [f"http://127.0.0.1:{port}" for port in ports[:4]]
            roles = ("--prefill", "--prefill", "--decode", "--decode")
            stubs = [text for role, port in zip(roles, ports[:4], strict=True) for text in (role, str(port))]
            if not arguments.cold:
                cached = int(_SHARED * len(_body(0)) / 4)  # the stub takes four bytes for a token
                stubs += ["--cached-tokens", str(cached)]
            ready = [engines[0] + "/health"]
            processes.start("stub", [sys.executable, stub_engine.__file__, *stubs], ready=ready)
            urls = [text for role, url in zip(roles, engines, strict=True) for text in (role, url)]
            kvparams = str(Path(sys.executable).with_name("kvparams"))
            pids: dict[str, int] = {}
            for policy, port in zip(policies, ports[4:], strict=True):
                command = [kvparams, "proxy", "--port", str(port), *urls, "--connector", "nixl", "--policy", policy]
                pids[policy] = processes.start(policy, command, ready=[f"http://127.0.0.1:{port}/health"])
            for number in range(-1, arguments.rounds):
                body.write_bytes(_body(number))
                for policy, port in zip(policies, ports[4:], strict=True):
                    before = tree_usage(pids[policy])
                    report = closed(
                        port,
                        Ask(body, events=None),
                        concurrency=_CONCURRENCY,
                        requests=arguments.requests,
                        limit_s=_LIMIT_S,
                        ramp_s=0.0,
                    )
                    spent_s = tree_usage(pids[policy]).cpu_s - before.cpu_s
                    if number >= 0:  # the first round warms up
                        cost[policy].append(spent_s / report.requests * 1e6)
            seen = http_get(f"http://127.0.0.1:{ports[5]}/metrics")[1]
    except (StartError, LoadError) as error:
        print(f"policy_bench: {error}", file=sys.stderr)
        return 1
    ratio = statistics.median(
        other / base for base, other in zip(cost["round_robin"], cost[arguments.policy], strict=True)
    )
    medians = {policy: round(statistics.median(each)) for policy, each in cost.items()}
    print(json.dumps({"us per request": medians, "ratio": round(ratio, 3)}))
    print("\n".join(line for line in str(seen).split("\\n") if line.startswith("kvparams_proxy_prefix_cache_")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
