"""Measures the memory of several proxies that share a fleet while a million distinct prefixes pass through them.

    python -m benchmarks.replicas_memory                    30 minutes, 8 proxies
    python -m benchmarks.replicas_memory --minutes 2        to try it

Every prompt is new: token ids whose blocks no proxy has seen, dealt to the proxies in turn at an even rate. Each proxy
learns its own prompts and, through a real Valkey server, those of all others. Every sample is a line of JSON. The exit
status is 1 if a proxy takes more than 120 MB, or more in the last third of the run than in the middle one.
"""

import argparse
import array
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.load_client import Pool, Request, Tally, Target
from benchmarks.replicas_processes.site import Site, open_plain_site
from kvparams_proxy.fleet.prefix_cache_model import SHARED_BLOCK_TOKENS
from tests.support.processes import StartError

__all__ = ["main"]

_BLOCKS: Final = 16
"""Of a prompt, each of as many tokens as proxies that share count in."""
_SAMPLES: Final = 60
_MOST_MB: Final = 120.0
_GROWTH_MB: Final = 2.0
"""That a proxy may take more in the last third of the run than in the middle third."""
_LATEST_S: Final = 10.0
"""For the last answers."""
_KIB_PER_MB: Final = 1e6 / 1024


async def _load(site: Site, prompts: int, seconds: float) -> Tally:
    """Sends so many prompts in so many seconds."""
    tally, random_ids = Tally(), random.Random(1)
    all_answered = asyncio.Event()

    def answered(_: Request) -> None:
        if tally.right + tally.errors.total() == prompts:
            all_answered.set()

    pools = [Pool(Target(port, "/v1/completions", b""), tally, answered) for port in site.ports.values()]
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    try:
        for number in range(prompts):
            at_s = start_s + number * seconds / prompts
            await asyncio.sleep(at_s - loop.time())
            ids = array.array("I", random_ids.randbytes(4 * _BLOCKS * SHARED_BLOCK_TOKENS))
            body = json.dumps({"model": "stub", "max_tokens": 1, "prompt": [each % 100_000 for each in ids]}).encode()
            pool = pools[number % len(pools)]
            pool.send(Request(at_s, Target(pool.target.port, "/v1/completions", body).request(0), measured=True))
        with suppress(TimeoutError):  # what is unanswered then is an error that the pool counts
            async with asyncio.timeout(_LATEST_S):
                await all_answered.wait()
    finally:
        await asyncio.gather(*(pool.close() for pool in pools))
    return tally


async def _measure(given: argparse.Namespace, folder: Path) -> bool:
    """Runs the load beside the samples, and says whether memory stayed within its bars. Raises StartError."""
    prompts, seconds = given.prefixes // _BLOCKS, given.minutes * 60
    samples: list[dict[int, float]] = []
    async with open_plain_site(folder) as site:
        for number in range(given.replicas):
            await site.start_replica(number, is_sharing=True)
        await site.meet()
        print(f"{prompts} prompts in {seconds:.0f} s; a sample every {seconds / _SAMPLES:.0f} s", file=sys.stderr)
        load = asyncio.create_task(_load(site, prompts, seconds))
        began_s = time.monotonic()
        while not load.done():
            await asyncio.wait([load], timeout=seconds / _SAMPLES)
            memory = {number: site.memory_kib(number) / _KIB_PER_MB for number in site.ports}
            blocks = (await site.metrics(0, "prefix_cache_blocks"))[0]
            samples.append(memory)
            now_s = round(time.monotonic() - began_s)
            taken = [round(each, 1) for each in memory.values()]
            print(json.dumps({"s": now_s, "blocks": blocks, "mb": taken}), flush=True)
        tally = await load
    return _is_flat(samples, tally)


def _is_flat(samples: Sequence[dict[int, float]], tally: Tally) -> bool:
    third = len(samples) // 3
    most = max(max(each.values()) for each in samples)
    middle, last = (max(max(each.values()) for each in part) for part in (samples[third:-third], samples[-third:]))
    figures = {"most_mb": most, "middle_mb": middle, "last_mb": last}
    print(json.dumps({name: round(value, 1) for name, value in figures.items()} | {"errors": tally.errors}))
    return most <= _MOST_MB and last - middle <= _GROWTH_MB and not tally.errors


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (default: 30)")
    parser.add_argument("--replicas", type=int, default=8, help="proxies (default: 8)")
    parser.add_argument(
        "--prefixes", type=int, default=1_000_000, help="distinct prefixes, 16 a prompt (default: 10^6)"
    )
    given = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="kvparams-bench-") as folder:
            return 0 if uvloop.run(_measure(given, Path(folder))) else 1
    except KeyboardInterrupt:
        print("\nreplicas_memory: interrupted; everything that it started has ended", file=sys.stderr)
        return 130
    except StartError as error:
        print(f"replicas_memory: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
