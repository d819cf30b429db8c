"""Offload or peer to peer: the same requests, KV by way of a store or straight from the engine that made it.

    python -m benchmarks.offload_or_peer [--way WAY]... [--prompts N] [--tokens N]... [--json FILE]

For each way there are two prefill and two decode reference engines and a proxy, real processes, with the way's own
servers; all are up at the same time. One request after the other is sent to every way, in an order drawn anew, each
with a prompt that nobody has seen; what the processes of a way use is counted while it has the request. Ratios are to
the first way, request by request. The one rule: every answer of every way is the same text, and every prompt's KV was
loaded by a decode engine; otherwise the run fails.

The model is tiny, so prefill is quick and KV small (1.5 KB a token): what differs between the ways is a larger share of
the time to the first token than with a real model, and the bytes are fewer.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import httpx

from benchmarks.latency import percentile
from benchmarks.processes import tree_usage
from benchmarks.ratios import median_interval
from benchmarks.sides import processor
from demo.client import ask_stream, new_client, scrape
from demo.processes import Processes, Server
from demo.stores import start_store

__all__ = ["WAYS", "main"]

WAYS: Final = {
    "valkey": "valkey",
    "file": "file",
    "mooncake": "mooncake",
    "peer-tcp": "peer://127.0.0.1?size=256MiB&lease=5",
    "peer-mooncake": "peer://127.0.0.1?size=256MiB&lease=5&transport=mooncake",
}
"""By name: a kind of store that the demo starts, or a URL for the engines."""

_SETTLE_S: Final = 0.05
"""What goes on behind an answer, such as saving its KV, is still counted."""
_WARM_UPS: Final = 3
_ANSWER_TOKENS: Final = 8
_LOADED: Final = "reference_engine:kv_bytes_loaded_total"
_SAVED: Final = "reference_engine:kv_bytes_saved_total"
_MEMORY_DISK: Final = Path("/dev/shm")


class _Recorded(Processes):
    """Processes that remember what was started."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.started: list[Server] = []

    def start(self, name: str, *command: str, port: int) -> Server:
        server = super().start(name, *command, port=port)
        self.started.append(server)
        return server


@dataclass(slots=True)
class Figures:
    """What was measured of one way."""

    ttft_s: list[float] = field(default_factory=list[float])
    """Of each request."""
    cpu_engines_s: float = 0.0
    """User and system time of the engines, in all."""
    cpu_store_s: float = 0.0
    """Of the store's own servers."""
    cpu_proxy_s: float = 0.0
    bytes_saved: float = 0.0
    bytes_loaded: float = 0.0


class Fleet:
    """The engines of one way, and its servers."""

    def __init__(self, name: str, processes: _Recorded, directory: Path) -> None:
        self.name = name
        self.figures = Figures()
        way = WAYS[name]
        self._url = way if "://" in way else start_store(way, processes, directory)
        self._store = list(processes.started)
        self._prefill = [processes.engine(f"p{at}", "prefill", self._url) for at in range(2)]
        self._decode = [processes.engine(f"d{at}", "decode", self._url) for at in range(2)]
        self.proxy = processes.proxy(self._prefill, self._decode)
        self._processes = processes

    def wait_ready(self) -> None:
        """Raises ProcessError if one of them does not start."""
        self._processes.wait_ready(*self._prefill, *self._decode, self.proxy)

    async def ask(self, client: httpx.AsyncClient, prompt: str, *, counts: bool) -> str:
        """Send one request and measure it; the text of the answer."""
        before, loaded = self._usage(), await self._sum(client, self._decode, _LOADED)
        saved = await self._sum(client, [*self._prefill, *self._decode], _SAVED)
        count = {"max_tokens": _ANSWER_TOKENS, "min_tokens": _ANSWER_TOKENS}
        body: dict[str, object] = {"prompt": prompt, "temperature": 0, "seed": 1, **count}
        reply = await ask_stream(client, self.proxy.url, "/v1/completions", body)
        await asyncio.sleep(_SETTLE_S)
        after = self._usage()
        loaded = await self._sum(client, self._decode, _LOADED) - loaded
        if not loaded or not reply.ttft_s:
            sys.exit(f"{self.name}: no decode engine loaded the KV of a prompt, or nothing was answered")
        if counts:
            figures = self.figures
            figures.ttft_s.append(reply.ttft_s)
            figures.cpu_store_s += after[0] - before[0]
            figures.cpu_engines_s += after[1] - before[1]
            figures.cpu_proxy_s += after[2] - before[2]
            figures.bytes_loaded += loaded
            figures.bytes_saved += await self._sum(client, [*self._prefill, *self._decode], _SAVED) - saved
        return reply.text

    def _usage(self) -> tuple[float, float, float]:
        """CPU seconds so far: of the store's servers, the engines, the proxy."""

        def of(servers: Sequence[Server]) -> float:
            return sum(tree_usage(server.process.pid).cpu_s for server in servers)

        return of(self._store), of([*self._prefill, *self._decode]), of([self.proxy])

    @staticmethod
    async def _sum(client: httpx.AsyncClient, servers: Sequence[Server], name: str) -> float:
        return sum([(await scrape(client, server.url))[name] for server in servers])


def prompt_of(seed: int, tokens: int) -> str:
    """Text that nobody has seen; a character is a token."""
    draw = random.Random(seed)
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz     ", k=tokens))


async def measure(fleets: Sequence[Fleet], lengths: Sequence[int]) -> None:
    """Send a prompt of each length to every way, in turns."""
    order = random.Random(1)
    async with new_client() as client:
        for number, tokens in enumerate([*lengths[:_WARM_UPS], *lengths]):
            prompt = prompt_of(number, tokens)
            answers: dict[str, str] = {}
            for fleet in order.sample(fleets, len(fleets)):
                answers[fleet.name] = await fleet.ask(client, prompt, counts=number >= _WARM_UPS)
            if len(set(answers.values())) != 1:
                sys.exit(f"the ways do not agree: {answers}")


def table(fleets: Sequence[Fleet], lengths: Sequence[int]) -> None:
    """Print what was measured."""
    first = fleets[0].figures
    print(f"\n{'':14} {'TTFT ms p50':>12} {'p99':>8} {'x ' + fleets[0].name:>20}", end="")
    print(f"  {'saved MB':>9} {'loaded MB':>9} {'on the wire':>11}  {'CPU s: engines':>14} {'store':>6} {'proxy':>6}")
    for fleet in fleets:
        figures = fleet.figures
        ordered = sorted(figures.ttft_s)
        ratio = median_interval([one / base for one, base in zip(figures.ttft_s, first.ttft_s, strict=True)])
        wire = figures.bytes_loaded + (0 if fleet.name.startswith("peer") else figures.bytes_saved)
        print(
            f"{fleet.name:14} {1000 * percentile(ordered, 0.5):12.1f} {1000 * percentile(ordered, 0.99):8.1f} "
            f"{ratio!s:>20}  {figures.bytes_saved / 1e6:9.1f} {figures.bytes_loaded / 1e6:9.1f} {wire / 1e6:11.1f}  "
            f"{figures.cpu_engines_s:14.2f} {figures.cpu_store_s:6.2f} {figures.cpu_proxy_s:6.2f}"
        )
    for tokens in sorted(set(lengths)):
        at = [index for index, length in enumerate(lengths) if length == tokens]
        cells = [
            f"{fleet.name} {1000 * percentile(sorted(fleet.figures.ttft_s[index] for index in at), 0.5):.1f}"
            for fleet in fleets
        ]
        print(f"prompts of {tokens} tokens, TTFT ms p50: {', '.join(cells)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload_or_peer", description=__doc__)
    parser.add_argument("--way", action="append", choices=list(WAYS), help="default: all")
    parser.add_argument("--prompts", type=int, default=40, help="of each length (default 40)")
    parser.add_argument("--tokens", type=int, action="append", help="a prompt's length; default: 500, 1500 and 3500")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args(argv)
    names: list[str] = arguments.way or list(WAYS)
    tokens: list[int] = arguments.tokens or [500, 1500, 3500]
    lengths = tokens * arguments.prompts
    print(f"machine: {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"command: python -m benchmarks.offload_or_peer {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    base = _MEMORY_DISK if _MEMORY_DISK.is_dir() else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        fleets: list[Fleet] = []
        for name in names:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvparams-bench-", dir=base)))
            processes = stack.enter_context(_Recorded(directory))
            fleets.append(Fleet(name, processes, directory))
            fleets[-1].wait_ready()
        asyncio.run(measure(fleets, lengths))
    if arguments.json:
        found = {fleet.name: asdict(fleet.figures) for fleet in fleets}
        arguments.json.write_text(json.dumps({"lengths": lengths, "ways": found}, indent=1))
    table(fleets, lengths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
