"""Our connector inside a real vLLM: time to first token on a hit, cost where nothing is found, time in our hooks.

    .venv-vllm/bin/python -m benchmarks.vllm_bench [--rounds 20] [--json FILE]

On a CPU with a tiny model: ratios mean something, seconds do not. Each comparison is made within a round and in turns:

- hit: a prompt of 1,500 tokens whose prefix is stored, on an engine whose own cache is off, with our connector, against
  the same prompt with another salt, which is found nowhere and computed.
- miss: completions of random prompts, all computed, on an engine with our connector (a consumer, so that nothing is
  stored, and again as a cache that stores all) against one without.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import httpx

from benchmarks.ratios import Interval, median_interval
from demo.processes import Processes
from tests.vllm.engines import counters, start_engine, transfer_config
from tests.vllm.tiny_model import make_model

__all__ = ["main"]

_PREFIX_TOKENS: Final = 1500
_READY_S: Final = 400.0


def _timed(client: httpx.Client, url: str, prompt: Sequence[int], tokens: int, salt: str | None = None) -> float:
    """Seconds of one request; with one token, the time to the first."""
    body: dict[str, object] = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
    body["ignore_eos"] = True
    if salt is not None:
        body["cache_salt"] = salt
    start = time.perf_counter()
    response = client.post(f"{url}/v1/completions", json=body)
    seconds = time.perf_counter() - start
    response.raise_for_status()
    return seconds


def _in_turns(rounds: int, one: Callable[[int], float], other: Callable[[int], float]) -> tuple[Interval, float, float]:
    """The ratio of `one` to `other`, and the median seconds of each; who is first changes from round to round."""
    ratios: list[float] = []
    ones: list[float] = []
    others: list[float] = []
    for number in range(rounds):
        first, second = (one, other) if number % 2 else (other, one)
        a, b = first(number), second(number)
        mine, theirs = (a, b) if number % 2 else (b, a)
        ones.append(mine)
        others.append(theirs)
        ratios.append(mine / theirs)
    return median_interval(ratios), statistics.median(ones), statistics.median(others)


def _hit(folder: Path, model: Path, rounds: int) -> dict[str, object]:
    chance = random.Random(1)
    shared = [chance.randrange(300, 2000) for _ in range(_PREFIX_TOKENS)]
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, Processes(folder) as processes:
        store = f"file://{memory}/kv?size=512MiB"
        engine = start_engine(
            processes, "hit", model, "--no-enable-prefix-caching", transfer=transfer_config(store), cache_bytes=64 << 20
        )
        processes.wait_ready(engine, within_s=_READY_S)
        with httpx.Client(timeout=120) as client:

            def stored(number: int) -> float:
                return _timed(client, engine.url, [*shared, 300 + number], 1, "shared")

            def computed(number: int) -> float:
                return _timed(client, engine.url, [*shared, 300 + number], 1, f"own {number} {time.monotonic_ns()}")

            for number in range(3):
                stored(number)
                computed(number)
            before = counters(engine)
            ratio, hit_s, miss_s = _in_turns(rounds, stored, computed)
            after = counters(engine)
        loaded = after["vllm:kvparams_tokens_loaded_total"] - before["vllm:kvparams_tokens_loaded_total"]
        found = {"ratio": asdict(ratio), "hit_s": hit_s, "computed_s": miss_s, "tokens_loaded": loaded}
    print(
        f"first token of {_PREFIX_TOKENS} stored tokens / computed: {ratio} ({hit_s * 1e3:.1f} / {miss_s * 1e3:.1f} ms)"
    )
    return found


def _miss(folder: Path, model: Path, rounds: int, role: str) -> dict[str, object]:
    chance = random.Random(2)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, Processes(folder) as processes:
        store = f"file://{memory}/kv?size=512MiB"
        ours = start_engine(processes, f"ours-{role}", model, transfer=transfer_config(store, role=role), core=0)
        bare = start_engine(processes, "bare", model, core=0)
        processes.wait_ready(ours, bare, within_s=_READY_S)
        with httpx.Client(timeout=120) as client:

            def run(url: str) -> float:
                """Eight requests, one after the other: 200 tokens in, 16 out."""
                total = 0.0
                for _ in range(8):
                    total += _timed(client, url, [chance.randrange(300, 2000) for _ in range(200)], 16)
                return total

            run(ours.url)
            run(bare.url)
            ratio, ours_s, bare_s = _in_turns(rounds, lambda _: run(ours.url), lambda _: run(bare.url))
        saved = counters(ours)["vllm:kvparams_pages_saved_total"]
    print(f"nothing found, {role}: with the connector / without: {ratio} ({ours_s * 1e3:.0f} / {bare_s * 1e3:.0f} ms)")
    return {"ratio": asdict(ratio), "ours_s": ours_s, "bare_s": bare_s, "pages_saved": saved}


def main() -> None:
    """Run all, print the ratios, and write them down if told where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append one line of JSON to this file")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        seen = {
            "hit": _hit(folder, model, told.rounds),
            "miss_consumer": _miss(folder, model, told.rounds, "kv_consumer"),
            "miss_both": _miss(folder, model, told.rounds, "kv_both"),
        }
    if told.json is not None:
        with told.json.open("a") as file:
            file.write(json.dumps({"day": time.strftime("%Y-%m-%d"), "rounds": told.rounds, **seen}) + "\n")


if __name__ == "__main__":
    main()
