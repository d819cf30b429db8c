"""Conversations on real reference engines: what prompts find in caches and how soon answers begin, by policy.

    python -m benchmarks.conversations_bench [--talks 5] [--turns 5] [--step-ms 20]

Two engines that compute prompts, first each by itself without a store (the proxy in plain mode), then as prefill
engines before one for decode over one `file` store, where what another one has computed is fetched. Each fleet is asked
under round robin and under `cache_aware`; all conversations are held side by side, each a turn after the other.

Shares are what the engines themselves count. Their model is tiny, so a first token waits for their steps of 512 tokens
(`--step-ms`), as it waits for computing elsewhere.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final, NamedTuple, cast

import httpx

from demo.client import ask_stream, new_client, scrape
from demo.processes import Processes, Server, free_port

__all__ = ["POLICIES", "Held", "hold", "main", "table"]

_FIRST: Final = 1200
"""Tokens of a conversation's first prompt."""
_MORE: Final = 400
"""Of each further turn."""
_SOURCES: Final = ("local_cache", "external_kv", "computed")
POLICIES: Final = ("round_robin", "cache_aware")


class Held(NamedTuple):
    """A `Held` is the result of all conversations with one fleet under one policy."""

    fleet: str
    policy: str
    ttft_ms: float
    """Mean, of all turns."""
    local: float
    """The share of prompt tokens that were in the engine's own cache."""
    fetched: float
    """... that came from the store."""


def _fleet(processes: Processes, store: str | None, policy: str, step_ms: int) -> tuple[Server, list[Server]]:
    """A proxy, and the engines behind it that compute prompts."""
    role = "both" if store is None else "prefill"
    steps = ("--step-ms", str(step_ms))
    engines = [processes.engine(f"p{number}", role, store, *steps) for number in range(2)]
    more = ("--policy", policy, "--log-requests", "off", "--probe", "0.2")
    if store is None:
        port = free_port()
        urls = [text for each in engines for text in ("--aggregated", f"{each.name}={each.url}")]
        command = [sys.executable, "-m", "kvparams", "proxy", "--port", str(port), "--mode", "aggregated", *urls]
        proxy = processes.start("proxy", *command, *more, port=port)
        processes.wait_ready(*engines, proxy)
    else:
        decode = processes.engine("d0", "decode", store, *steps)
        proxy = processes.proxy(engines, [decode], *more)
        processes.wait_ready(*engines, decode, proxy)
    return proxy, engines


async def _talk(client: httpx.AsyncClient, proxy: Server, number: object, turns: int) -> list[float]:
    """Seconds to the first token of each turn."""
    said = Random(f"{number}").choices(range(32, 127), k=_FIRST + _MORE * turns)
    found: list[float] = []
    for turn in range(turns):
        prompt = said[: _FIRST + _MORE * turn]
        body: dict[str, object] = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        found.append((await ask_stream(client, proxy.url, "/v1/completions", body)).ttft_s)
    return found


async def _counted(client: httpx.AsyncClient, engines: Sequence[Server]) -> list[float]:
    """Prompt tokens of all of them by source."""
    seen = [await scrape(client, each.url) for each in engines]
    return [sum(one[f'reference_engine:prompt_tokens_total{{source="{name}"}}'] for one in seen) for name in _SOURCES]


async def _all(proxy: Server, engines: Sequence[Server], talks: int, turns: int) -> tuple[float, list[float]]:
    async with new_client() as client:
        for number in range(2 * len(engines)):  # whatever is made at the first request has been made then
            await _talk(client, proxy, f"first {number}", 1)
        before = await _counted(client, engines)
        taken = await asyncio.gather(*(_talk(client, proxy, number, turns) for number in range(talks)))
        after = await _counted(client, engines)
    return 1000 * fmean(s for one in taken for s in one), [a - b for a, b in zip(after, before, strict=True)]


def hold(folder: Path, talks: int, turns: int, step_ms: int, policies: Sequence[str] = POLICIES) -> list[Held]:
    """Runs all conversations with each fleet under each policy; `folder` takes stores and logs."""
    found: list[Held] = []
    for fleet, shared in (("no store", False), ("one store", True)):
        for policy in policies:
            store = f"file://{folder}/{policy}?size=512MiB" if shared else None
            with Processes(folder) as processes:
                proxy, engines = _fleet(processes, store, policy, step_ms)
                ttft_ms, (local, fetched, computed) = asyncio.run(_all(proxy, engines, talks, turns))
            asked = local + fetched + computed
            found.append(Held(fleet, policy, ttft_ms, local / asked, fetched / asked))
    return found


def table(found: Sequence[Held]) -> str:
    """Returns a Markdown table. Times stand beside those of the fleet's first row, and of the first row of all."""
    lines = [
        "| fleet | policy | first token, mean ms | beside round robin | beside no store | cached | fetched |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        base = next(each for each in found if each.fleet == one.fleet)
        lines.append(
            f"| {one.fleet} | {one.policy} | {one.ttft_ms:.0f} | {one.ttft_ms / base.ttft_ms:.2f} "
            f"| {one.ttft_ms / found[0].ttft_ms:.2f} | {one.local:.1%} | {one.fetched:.1%} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--talks", type=int, default=5, help="conversations (default: 5)")
    parser.add_argument("--turns", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--step-ms", type=int, default=20, help="an engine's step takes at least so long (default: 20)")
    given = parser.parse_args(argv)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="kvparams-bench-") as folder:
        talks, turns, step_ms = (cast("int", each) for each in (given.talks, given.turns, given.step_ms))
        print(table(hold(Path(folder), talks, turns, step_ms)))
    sizes = [_FIRST + _MORE * turn for turn in range(turns)]
    print(f"\nin the conversation's own earlier turns: {sum(sizes[:-1]) / sum(sizes):.1%} of all prompt tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
