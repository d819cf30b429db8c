"""A conversation that changes engine: its KV fetched from the store, against staying and against computing it again.

    .venv-vllm/bin/python -m benchmarks.vllm_moving [--rounds 20] [--store URL] [--json FILE]

Two vLLM engines with prefix caches of their own, a store, and our proxy. A conversation is two turns; the
second has all of the first, its answer and 40 tokens more, and what is measured is the time to its first token, through
the proxy. Who answers is the proxy's decision (round robin over both engines, or one engine alone), whether the KV is
fetched or computed is the engine's, by what it has seen of the store (`recompute_tokens_per_s` is measured first). In a
round each way has its turn with prompts of its own, in an order that changes:

- stays: both turns on one engine, whose own cache has the first.
- changes: the second turn on the other engine, which fetches the first from the store.
- computed: the same, but the second turn has another salt, so that nothing of it is found anywhere.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import httpx

from benchmarks.ratios import Interval, median_interval
from benchmarks.vllm_bench import body_of, in_rounds, timed
from demo.processes import Processes, Server
from tests.vllm.engines import counters, start_engine, transfer_config
from tests.vllm.tiny_model import make_model

__all__ = ["Turn", "main", "turn"]

_HISTORIES: Final = (400, 800, 1600)
_ANSWER: Final = 8
_MORE: Final = 40
_READY_S: Final = 600.0
_WAYS: Final = ("stays", "changes", "computed")


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer."""

    seconds: float
    """To its first token."""
    token_ids: list[int]
    prefill: str
    """Who computed or fetched the prompt."""


def turn(client: httpx.Client, url: str, prompt: Sequence[int], salt: str) -> Turn:
    """Ask for a stream."""
    body = {**body_of(prompt, _ANSWER, salt), "stream": True, "return_token_ids": True}
    first, ids = 0.0, list[int]()
    start = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                first = first or time.perf_counter() - start
                ids += choice.get("token_ids") or ()
    assert len(ids) == _ANSWER, ids
    return Turn(first, ids, response.headers["x-kvparams-prefill"])


class _Conversations:
    """Second turns, by three ways."""

    def __init__(self, client: httpx.Client, alone: Server, both: Server) -> None:
        """`alone` is a proxy before one engine, `both` one before two."""
        self._client, self._alone, self._both = client, alone, both
        self._chance = random.Random(1)
        self._number = 0

    def _ids(self, count: int) -> list[int]:
        return [self._chance.randrange(300, 2000) for _ in range(count)]

    def side(self, way: str, history: int) -> Callable[[int], float]:
        """For `in_rounds`."""
        return lambda _: self.second(way, history)

    def second(self, way: str, history: int) -> float:
        """Seconds to the first token of a second turn after `history` tokens."""
        self._number += 1
        salt = f"conversation {self._number}"
        url = (self._alone if way == "stays" else self._both).url
        prompt = self._ids(history)
        first = turn(self._client, url, prompt, salt)
        again = [*prompt, *first.token_ids, *self._ids(_MORE)]
        second = turn(self._client, url, again, f"{salt}, again" if way == "computed" else salt)
        moved = first.prefill != second.prefill
        assert moved == (way != "stays"), f"{way}: {first.prefill}, then {second.prefill}"
        return second.seconds


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
            start_engine(processes, name, model, transfer=transfer_config(store, engine_id=name, extra=extra))
            for name in ("A", "B")
        ]
        processes.wait_ready(*engines, within_s=_READY_S)
        decoding = [replace(engine, name=f"{engine.name}-decode") for engine in engines]
        alone = processes.proxy(engines[:1], decoding[:1])
        both = processes.proxy(engines, decoding)
        processes.wait_ready(alone, both)
        told: dict[str, object] = {"computed_tokens_per_s": speed}
        with httpx.Client(timeout=120) as client:
            conversations = _Conversations(client, alone, both)
            for history in _HISTORIES:
                sides = {way: conversations.side(way, history) for way in _WAYS}
                in_rounds(2, sides)
                told[str(history)] = _report(history, in_rounds(rounds, sides))
        seen = [counters(engine) for engine in engines]
    for name in ("loads", "loads_skipped", "loads_short", "tokens_loaded", "promises_broken"):
        told[name] = sum(each[f"vllm:kvparams_{name}_total"] for each in seen)
    print({name: told[name] for name in list(told)[-5:]})
    return told


def _report(history: int, found: dict[str, list[float]]) -> dict[str, object]:
    def ratio(name: str, other: str) -> Interval:
        return median_interval([a / b for a, b in zip(found[name], found[other], strict=True)])

    middle = {way: statistics.median(found[way]) * 1e3 for way in _WAYS}
    to_computed, to_stays = ratio("changes", "computed"), ratio("changes", "stays")
    print(
        f"first token after {history} tokens: stays {middle['stays']:.1f} ms, changes {middle['changes']:.1f} ms, "
        f"computed {middle['computed']:.1f} ms; changes / computed {to_computed}, changes / stays {to_stays}"
    )
    return {"ms": middle, "changes/computed": asdict(to_computed), "changes/stays": asdict(to_stays)}


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
