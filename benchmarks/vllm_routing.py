"""Conversations over two real vLLM engines: hit ratio and time to first token, by cached prefixes against round robin.

    .venv-vllm/bin/python -m benchmarks.vllm_routing [--rounds 20] [--cache-mib 16] [--json FILE]

Two engines that publish KV events, and three proxies before them: round robin, `cache_aware` that learns from what
engines report (`self-correction`), and one that hears their events, too. In a round each proxy has its turn, in an
order that changes, with conversations of its own: eight at a time, six turns each, every one all of those before and 80
tokens more, as token ids; between two turns a user thinks. Nothing is reset: what was before has to make room. Each
engine answers what it has computed itself.

Of a turn of a proxy the mean and the median time to first token are told; the hit ratio is vLLM's own, of prompt
tokens: `vllm:prefix_cache_hits` by `vllm:prefix_cache_queries`.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Final

import httpx
import yaml

from benchmarks.ratios import Interval, median_interval
from benchmarks.vllm_bench import Rounds, body_of, in_rounds
from benchmarks.vllm_moving import streamed
from demo.processes import Processes, Server, free_port
from tests.interop.vllm.engines import counters, start_engine
from tests.interop.vllm.tiny_model import make_model

__all__ = ["main"]

_CONVERSATIONS: Final = 8
_TURNS: Final = 6
_FIRST: Final = 500
"""Tokens of a first turn."""
_MORE: Final = 80
_ANSWER: Final = 8
_THINKS_S: Final = 0.5
"""On average."""
_READY_S: Final = 600.0
_WARM_UP: Final = 3
_BASE: Final = "round robin"
_SIDES: Final[Mapping[str, tuple[str, bool]]] = {
    _BASE: ("round_robin", False),
    "self-correction": ("cache_aware", False),
    "events": ("cache_aware", True),
}
"""By name, the policy and whether events are heard."""


class _Engines:
    """Two, each of which answers alone."""

    def __init__(self, processes: Processes, folder: Path, model: Path, cache_bytes: int) -> None:
        self._processes, self._folder = processes, folder
        self._servers = [self._start(name, model, cache_bytes, core) for core, name in enumerate(("A", "B"))]
        processes.wait_ready(*self._servers, within_s=_READY_S)

    def proxy(self, name: str, policy: str, *, hears: bool) -> Server:
        """Starts a proxy before both engines."""
        entries: list[dict[str, str]] = []
        for engine in self._servers:
            heard = {"kv_events": self._at(engine.name, "said"), "kv_events_replay": self._at(engine.name, "again")}
            entries.append({"id": engine.name, "url": engine.url, "role": "aggregated", **(heard if hears else {})})
        fleet, port = self._folder / f"{policy}-{hears}.yaml", free_port()
        fleet.write_text(yaml.safe_dump({"instances": entries}))
        command = [sys.executable, "-m", "kvparams", "proxy", "--config", str(fleet), "--port", str(port)]
        command += ["--policy", policy, "--log-requests", "off", "--mode", "aggregated"]
        return self._processes.start(name.replace(" ", "-"), *command, port=port)

    def tokens(self) -> tuple[float, float]:
        """Returns the tokens of all prompts so far, and those found in caches."""
        seen = [counters(engine) for engine in self._servers]
        asked, found = (sum(each[f"vllm:prefix_cache_{what}_total"] for each in seen) for what in ("queries", "hits"))
        return asked, found

    def _at(self, name: str, what: str) -> str:
        return f"ipc://{self._folder}/{name}-{what}"

    def _start(self, name: str, model: Path, cache_bytes: int, core: int) -> Server:
        told: dict[str, object] = {"enable_kv_cache_events": True, "publisher": "zmq"}
        told |= {"endpoint": self._at(name, "said"), "replay_endpoint": self._at(name, "again")}
        return start_engine(
            self._processes,
            name,
            model,
            *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(told)),
            core=core,
            cache_bytes=cache_bytes,
        )


async def _first_token(client: httpx.AsyncClient, url: str, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Seconds until it is there, and the answer."""
    first, ids, _ = await streamed(client, url, body_of(prompt, _ANSWER), _ANSWER)
    return first, ids


async def _converse(client: httpx.AsyncClient, url: str, chance: random.Random, found: list[float]) -> None:
    prompt: list[int] = []
    for turn in range(_TURNS):
        await asyncio.sleep(chance.expovariate(1 / _THINKS_S))
        prompt += [chance.randrange(300, 2000) for _ in range(_MORE if turn else _FIRST)]
        seconds, answer = await _first_token(client, url, prompt)
        prompt += answer
        found.append(seconds)


async def _all(url: str, seeds: Sequence[str]) -> list[float]:
    """Returns the times to the first token of all turns of some conversations, held at once."""
    found: list[float] = []
    async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(_converse(client, url, random.Random(seed), found))
    return found


def _measure(folder: Path, rounds: int, cache_bytes: int) -> dict[str, object]:
    hits: Rounds = {name: [] for name in _SIDES}
    middle: Rounds = {name: [] for name in _SIDES}
    numbers = count()
    model = make_model(folder / "model")
    with Processes(folder) as processes:
        engines = _Engines(processes, folder, model, cache_bytes)
        proxies = {name: engines.proxy(name, policy, hears=hears) for name, (policy, hears) in _SIDES.items()}
        processes.wait_ready(*proxies.values())

        def side(name: str) -> Callable[[int], float]:
            def once(_: int) -> float:
                asked, found = engines.tokens()
                seeds = [str(next(numbers)) for _ in range(_CONVERSATIONS)]
                seconds = asyncio.run(_all(proxies[name].url, seeds))
                asked_then, found_then = engines.tokens()
                hits[name].append((found_then - found) / (asked_then - asked))
                middle[name].append(statistics.median(seconds))
                return statistics.mean(seconds)

            return once

        sides = {name: side(name) for name in _SIDES}
        in_rounds(_WARM_UP, sides)
        for each in (*hits.values(), *middle.values()):
            each.clear()
        mean = in_rounds(rounds, sides)
    return _report(mean, middle, hits)


def _report(mean: Rounds, middle: Rounds, hits: Rounds) -> dict[str, object]:
    told: dict[str, object] = {}
    for name in _SIDES:
        line: dict[str, object] = {}
        for what, found in (("mean s", mean), ("median s", middle), ("hit ratio", hits)):
            typical, ratio = statistics.median(found[name]), _ratio(found, name, _BASE)
            line[what] = {"of itself": typical, "to round robin": asdict(ratio)}
            print(f"{name}, {what}: {typical:.3f}, {ratio} of round robin's")
        told[name] = line
    told["events to self-correction"] = asdict(both := _ratio(mean, "events", "self-correction"))
    print(f"mean of events / self-correction: {both}")
    return told


def _ratio(found: Rounds, name: str, other: str) -> Interval:
    return median_interval([a / b for a, b in zip(found[name], found[other], strict=True)])


def main() -> None:
    """Run, print the ratios, and write them down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cache-mib", type=int, default=16, help="of an engine; 512 tokens each")
    parser.add_argument("--json", type=Path, help="append one line of JSON to this file")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        found = _measure(Path(name), told.rounds, told.cache_mib << 20)
    if told.json is not None:
        line = {"day": time.strftime("%Y-%m-%d"), "rounds": told.rounds, "MiB": told.cache_mib}
        with told.json.open("a") as file:
            file.write(json.dumps({**line, **found}) + "\n")


if __name__ == "__main__":
    main()
