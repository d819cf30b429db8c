"""A conversation whose engine is busy: the proxy and the store decide whether it moves, against staying and computing.

    .venv-vllm/bin/python -m benchmarks.vllm_moving [--rounds 20] [--store URL] [--json FILE]

Two vLLM engines with prefix caches of their own, a store, and our proxy with `cache_aware`. A conversation is two
turns; the second has all of the first, its answer and 40 tokens more, and what is measured is the time to its first
token, through the proxy. Just before it somebody else asks 1,500 tokens, through the same proxy, of a model that only
the engine of the first turn serves: it is busy. Where the second turn goes is then the proxy's decision, by
what it expects of both; whether KV is fetched or computed there is the engine's, by what it has seen of the store
(`recompute_tokens_per_s` is measured first). In a round each way has its turn with prompts of its own, in an order that
changes:

- decided: before both engines, the proxy may send the second turn where it wants.
- stays: a proxy before one engine alone.
- computed: before both, but the second turn has another salt: nothing of it is found anywhere.

`idle` is the same with nobody else: what is decided then is to stay.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx

from benchmarks.ratios import Interval, median_interval
from benchmarks.vllm_bench import Rounds, body_of, in_rounds, timed
from demo.processes import Processes, Server, free_port
from tests.interop.vllm.engines import counters, start_engine, transfer_config
from tests.interop.vllm.tiny_model import make_model

__all__ = ["Turn", "main", "streamed", "turn"]

_HISTORIES: Final = (400, 800, 1600)
_ANSWER: Final = 8
_MORE: Final = 40
_BUSY: Final = 1500
_BEFORE_S: Final = 0.01
"""So much earlier the other one is sent."""
_WARM_UP: Final = 5
"""Rounds in which the proxy learns how fast engines are, and the store."""
_READY_S: Final = 600.0
_WAYS: Final = ("decided", "stays", "computed")


@dataclass(frozen=True, slots=True)
class Turn:
    """A `Turn` is the answer to one turn."""

    seconds: float
    """To its first token."""
    token_ids: list[int]
    engine: str


async def streamed(
    client: httpx.AsyncClient, url: str, body: dict[str, object], answer: int
) -> tuple[float, list[int], httpx.Headers]:
    """Ask for a stream of so many tokens: seconds to the first, all of them, and the head."""
    body = {**body, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}  # an engine that answers itself says there what it had cached
    first, ids = 0.0, list[int]()
    start = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    first = first or time.perf_counter() - start
                    ids += choice.get("token_ids") or ()
    assert len(ids) == answer, ids
    return first, ids, response.headers


async def turn(client: httpx.AsyncClient, url: str, prompt: Sequence[int], salt: str, model: str = "tiny") -> Turn:
    """Ask for a stream."""
    first, ids, head = await streamed(client, url, {**body_of(prompt, _ANSWER, salt), "model": model}, _ANSWER)
    return Turn(first, ids, head["x-kvparams-aggregated"])


class _Conversations:
    """Second turns, by three ways."""

    def __init__(self, alone: Server, both: Server) -> None:
        """`alone` is a proxy before one engine, `both` one before two."""
        self._alone, self._both = alone, both
        self._chance = random.Random(1)
        self._number = 0
        self.moved: dict[str, list[bool]] = {}
        """By way, whether the second turn went elsewhere."""

    def sides(self, history: int, *, busy: bool) -> Mapping[str, Callable[[int], float]]:
        """Returns the sides for `in_rounds`."""
        self.moved = {way: [] for way in _WAYS}
        return {way: lambda _, way=way: asyncio.run(self._second(way, history, busy=busy)) for way in _WAYS}

    async def _second(self, way: str, history: int, *, busy: bool) -> float:
        """Seconds to the first token of a second turn after `history` tokens."""
        self._number += 1
        salt = f"conversation {self._number}"
        url = (self._alone if way == "stays" else self._both).url
        prompt = self._ids(history)
        async with httpx.AsyncClient(timeout=120) as client:
            first = await turn(client, url, prompt, salt)
            other = None
            if busy:
                other = asyncio.create_task(turn(client, url, self._ids(_BUSY), salt, _own(first.engine)))
                await asyncio.sleep(_BEFORE_S)
            again = [*prompt, *first.token_ids, *self._ids(_MORE)]
            second = await turn(client, url, again, f"{salt}, again" if way == "computed" else salt)
            if other is not None:
                assert (await other).engine == first.engine
        self.moved[way].append(first.engine != second.engine)
        return second.seconds

    def _ids(self, count: int) -> list[int]:
        return [self._chance.randrange(300, 2000) for _ in range(count)]


def _own(engine: str) -> str:
    """Returns the name of a model that only this engine serves."""
    return f"tiny-{engine}"


def _proxy(processes: Processes, *engines: Server) -> Server:
    """Before engines that share a store, which is said to it by their connector."""
    port = free_port()
    command = [sys.executable, "-m", "kvparams", "proxy", "--connector", "store", "--mode", "aggregated"]
    command += [part for engine in engines for part in ("--aggregated", f"{engine.name}={engine.url}")]
    command += ["--policy", "cache_aware", "--expose-route", "--log-requests", "off", "--port", str(port)]
    return processes.start(f"proxy-{len(engines)}", *command, port=port)


def _speed(processes: Processes, model: Path) -> float:
    """Prompt tokens that an engine computes in a second."""
    engine = start_engine(processes, "alone", model, "--no-enable-prefix-caching")
    processes.wait_ready(engine, within_s=_READY_S)
    chance = random.Random(2)
    with httpx.Client(timeout=120) as client:
        seconds = [
            timed(client, engine.url, body_of([chance.randrange(300, 2000) for _ in range(_HISTORIES[-1])], 1))
            for _ in range(7)
        ]
    processes.stop(engine)
    return _HISTORIES[-1] / statistics.median(seconds)


def _measure(folder: Path, store: str, rounds: int) -> dict[str, object]:
    model = make_model(folder / "model")
    with Processes(folder) as processes:
        speed = _speed(processes, model)
        extra = {"recompute_tokens_per_s": speed}
        engines = [
            start_engine(
                processes,
                name,
                model,
                *("--enable-prompt-tokens-details", "--served-model-name", "tiny", _own(name)),
                transfer=transfer_config(store, engine_id=name, extra=extra),
                core=core,
            )
            for core, name in enumerate(("A", "B"))
        ]
        processes.wait_ready(*engines, within_s=_READY_S)
        alone, both = _proxy(processes, engines[0]), _proxy(processes, *engines)
        processes.wait_ready(alone, both)
        told: dict[str, object] = {"computed_tokens_per_s": speed}
        conversations = _Conversations(alone, both)
        for history in _HISTORIES:
            for busy in (True, False):
                in_rounds(_WARM_UP, conversations.sides(history, busy=busy))
                found = in_rounds(rounds, conversations.sides(history, busy=busy))
                name = f"{history} tokens, {'busy' if busy else 'idle'}"
                told[name] = _report(name, found, conversations.moved["decided"])
        seen = [counters(engine) for engine in engines]
    for name in ("loads", "loads_skipped", "loads_short", "tokens_loaded", "promises_broken"):
        told[name] = sum(each[f"vllm:kvparams_{name}_total"] for each in seen)
    print({name: told[name] for name in list(told)[-5:]})
    return told


def _report(name: str, found: Rounds, moved: Sequence[bool]) -> dict[str, object]:
    def ratio(other: str) -> Interval:
        return median_interval([a / b for a, b in zip(found["decided"], found[other], strict=True)])

    middle = {way: statistics.median(found[way]) * 1e3 for way in _WAYS}
    to_stays, to_computed, share = ratio("stays"), ratio("computed"), statistics.mean(moved)
    print(
        f"first token after {name}: decided {middle['decided']:.1f} ms ({100 * share:.0f} % move), stays "
        f"{middle['stays']:.1f} ms, computed {middle['computed']:.1f} ms; decided / stays {to_stays}, decided / "
        f"computed {to_computed}"
    )
    return {"ms": middle, "moved": share, "to stays": asdict(to_stays), "to computed": asdict(to_computed)}


def main() -> None:
    """Run, print the ratios, and write them down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--store", help="the URL of a store that runs; default: a file in memory")
    parser.add_argument("--json", type=Path, help="append one line of JSON to this file")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        found = _measure(Path(name), told.store or f"file://{memory}/kv?size=1GiB", told.rounds)
    if told.json is not None:
        with told.json.open("a") as file:
            file.write(json.dumps({"day": time.strftime("%Y-%m-%d"), "rounds": told.rounds, **found}) + "\n")


if __name__ == "__main__":
    main()
