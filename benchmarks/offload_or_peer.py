"""Offload or peer to peer: the same requests, KV by way of a store or straight from the engine that made it.

    python -m benchmarks.offload_or_peer [--way WAY]... [--prompts N] [--tokens N]... [--json FILE]

For each way there are two prefill and three decode reference engines and a proxy, real processes, with the way's own
servers; all are up at the same time. Each prompt is sent three times to every way, one request after the other, the
ways in an order drawn anew each time; what the processes of a way use is counted while it has the request. Instances
take turns, so that each time another decode engine has to load the KV, and the three differ in prefill:

    first      nobody has seen the prompt: it is computed
    elsewhere  the other prefill engine has: a store gives it back, peers compute it again
    again      this prefill engine has it still: what is left is one token, and moving the KV

So `again` is how long moving takes, `elsewhere` what a store saves. Ratios are to the first way: of times request by
request, of CPU time round by round. Every answer of every way is the same text, and every time a decode engine loaded
KV; otherwise the run fails.

The model is tiny, so its KV is small (1.5 KB a token).
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from benchmarks.latency import percentile
from benchmarks.ratios import Interval, median_interval
from benchmarks.sides import processor
from demo.client import ask_stream, new_client, scrape
from demo.processes import Processes, Server
from demo.stores import start_store
from tests.support.processes import tree_usage

__all__ = ["KINDS", "WAYS", "Row", "main", "summed", "table"]

Kind = Literal["first", "elsewhere", "again"]
KINDS: Final[tuple[Kind, ...]] = ("first", "elsewhere", "again")

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
_WARM_UPS: Final = 1
_PREFILL: Final = 2
_DECODE: Final = 3
_TIMES: Final = 3
"""A prompt is sent; no decode engine sees it twice."""
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


@dataclass(frozen=True, slots=True)
class Row:
    """A `Row` holds the measurements of one request."""

    round: int
    tokens: int
    kind: Kind
    ttft_s: float
    cpu_store_s: float
    """User and system time of the store's own servers."""
    cpu_engines_s: float
    cpu_proxy_s: float
    bytes_saved: float
    bytes_loaded: float


@dataclass(frozen=True, slots=True)
class Used:
    """A `Used` holds the resources that the processes of a way have used so far."""

    cpu_store_s: float
    cpu_engines_s: float
    cpu_proxy_s: float
    bytes_saved: float
    bytes_loaded: float
    loaded_by_decode: float


class Fleet:
    """The engines of one way, and its servers."""

    def __init__(self, name: str, processes: _Recorded, directory: Path) -> None:
        self.name = name
        self.rows: list[Row] = []
        way = WAYS[name]
        self._url = way if "://" in way else start_store(way, processes, directory)
        self._store = list(processes.started)
        self._prefill = [processes.engine(f"p{at}", "prefill", self._url) for at in range(_PREFILL)]
        self._decode = [processes.engine(f"d{at}", "decode", self._url) for at in range(_DECODE)]
        self.proxy = processes.proxy(self._prefill, self._decode)
        self._processes = processes
        self._seen: tuple[str, set[str]] = ("", set())

    def wait_ready(self) -> None:
        """Raises ProcessError if one of them does not start."""
        self._processes.wait_ready(*self._prefill, *self._decode, self.proxy)

    async def ask(self, client: httpx.AsyncClient, prompt: str, number: int) -> str:
        """Send one request and measure it, in round `number`; the text of the answer."""
        before = await self._used(client)
        count = {"max_tokens": _ANSWER_TOKENS, "min_tokens": _ANSWER_TOKENS}
        body: dict[str, object] = {"prompt": prompt, "temperature": 0, "seed": 1, **count}
        reply = await ask_stream(client, self.proxy.url, "/v1/completions", body)
        await asyncio.sleep(_SETTLE_S)
        after = await self._used(client)
        if after.loaded_by_decode <= before.loaded_by_decode or not reply.ttft_s:
            sys.exit(f"{self.name}: no decode engine loaded the KV of a prompt, or nothing was answered")
        if number >= 0:
            self.rows.append(
                Row(
                    number,
                    len(prompt),
                    self._kind(prompt, reply.headers["x-kvparams-prefill"]),
                    reply.ttft_s,
                    after.cpu_store_s - before.cpu_store_s,
                    after.cpu_engines_s - before.cpu_engines_s,
                    after.cpu_proxy_s - before.cpu_proxy_s,
                    after.bytes_saved - before.bytes_saved,
                    after.bytes_loaded - before.bytes_loaded,
                )
            )
        return reply.text

    def _kind(self, prompt: str, engine: str) -> Kind:
        """Returns the kind of a request, by the engines that have seen this prompt before."""
        if self._seen[0] != prompt:
            self._seen = (prompt, set())
        seen = self._seen[1]
        kind: Kind = "first" if not seen else "again" if engine in seen else "elsewhere"
        seen.add(engine)
        return kind

    async def _used(self, client: httpx.AsyncClient) -> Used:
        def cpu_s(servers: Sequence[Server]) -> float:
            return sum(tree_usage(server.process.pid).cpu_s for server in servers)

        engines = [*self._prefill, *self._decode]
        cpu = cpu_s(self._store), cpu_s(engines), cpu_s([self.proxy])
        counts = await asyncio.gather(*(scrape(client, server.url) for server in engines))
        loaded = [one[_LOADED] for one in counts]
        return Used(*cpu, sum(one[_SAVED] for one in counts), sum(loaded), sum(loaded[_PREFILL:]))


def prompt_of(seed: float, tokens: int) -> str:
    """Text that nobody has seen; a character is a token."""
    draw = random.Random(seed)
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz     ", k=tokens))


async def measure(fleets: Sequence[Fleet], lengths: Sequence[int], prompts: int) -> None:
    """Send new prompts to every way, in turns."""
    order = random.Random(1)
    async with new_client() as client:
        for number in range(-_WARM_UPS, prompts):
            for tokens in lengths if number >= 0 else lengths[:1]:
                prompt = prompt_of(order.random(), tokens)
                answers: set[str] = set()
                for _ in range(_TIMES):
                    for fleet in order.sample(fleets, len(fleets)):
                        answers.add(await fleet.ask(client, prompt, number))
                if len(answers) != 1:
                    sys.exit(f"the ways do not agree: {answers}")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: one kind of request by one way."""

    requests: int
    ttft_ms: Interval
    ttft_p99_ms: float
    ttft_ratio: Interval
    """To the first way, request by request."""
    saved_mb: float
    loaded_mb: float
    moved_mb: float
    """Between processes: a store's values twice, when they are saved and when they are loaded."""
    engines_ms: float
    """CPU time of a request."""
    store_ms: float
    proxy_ms: float
    cpu_ratio: Interval
    """Of all processes, to the first way, round by round."""


def summed(rows: Sequence[Row], base: Sequence[Row], *, peer: bool) -> Line:
    """Requests of one kind.

    Args:
        rows: of one way.
        base: of the first way, the same requests.
        peer: whether KV moves only when it is loaded.

    Raises:
        ValueError: they are not the same requests.
    """
    ours, theirs = ({(row.round, row.tokens): row for row in some} for some in (rows, base))
    if ours.keys() != theirs.keys():
        raise ValueError("not the same requests")
    count = len(rows)
    spent = [_by_round(some) for some in (rows, base)]
    saved, loaded = sum(row.bytes_saved for row in rows) / 1e6, sum(row.bytes_loaded for row in rows) / 1e6
    ordered = sorted(row.ttft_s for row in rows)
    return Line(
        count,
        median_interval([1000 * row.ttft_s for row in rows]),
        1000 * percentile(ordered, 0.99),
        median_interval([row.ttft_s / theirs[at].ttft_s for at, row in ours.items()]),
        saved,
        loaded,
        loaded if peer else saved + loaded,
        1000 * sum(row.cpu_engines_s for row in rows) / count,
        1000 * sum(row.cpu_store_s for row in rows) / count,
        1000 * sum(row.cpu_proxy_s for row in rows) / count,
        median_interval([spent[0][one] / base_s for one, base_s in spent[1].items() if base_s] or [math.nan]),
    )


def _by_round(rows: Sequence[Row]) -> dict[int, float]:
    """CPU seconds: the kernel counts hundredths, which is too coarse for one request."""
    found: dict[int, float] = {}
    for row in rows:
        cpu_s = row.cpu_engines_s + row.cpu_store_s + row.cpu_proxy_s
        found[row.round] = found.get(row.round, 0.0) + cpu_s
    return found


def table(rows_of: Mapping[str, Sequence[Row]]) -> None:
    """Print what was measured, of each kind of request apart."""
    first = next(iter(rows_of))
    for kind in KINDS:
        print(f"\n{kind:14} {'TTFT ms':>24} {'p99':>7} {'x ' + first:>18}", end="")
        print(
            f"  {'saved MB':>8} {'loaded':>7} {'moved':>7}  {'CPU ms: engines':>15} {'store':>6} {'proxy':>6} {'x':>18}"
        )
        base = [row for row in rows_of[first] if row.kind == kind]
        for name, rows in rows_of.items():
            line = summed([row for row in rows if row.kind == kind], base, peer=name.startswith("peer"))
            print(
                f"{name:14} {line.ttft_ms!s:>24} {line.ttft_p99_ms:7.0f} {line.ttft_ratio!s:>18}  {line.saved_mb:8.1f} "
                f"{line.loaded_mb:7.1f} {line.moved_mb:7.1f}  {line.engines_ms:15.0f} {line.store_ms:6.1f} "
                f"{line.proxy_ms:6.1f} {line.cpu_ratio!s:>18}"
            )
        for tokens in sorted({row.tokens for row in base}):
            cells = [
                f"{name} {1000 * percentile(sorted(row.ttft_s for row in rows if _is(row, kind, tokens)), 0.5):.1f}"
                for name, rows in rows_of.items()
            ]
            print(f"  prompts of {tokens} tokens, TTFT ms p50: {', '.join(cells)}")


def _is(row: Row, kind: Kind, tokens: int) -> bool:
    return row.kind == kind and row.tokens == tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload_or_peer", description=__doc__)
    parser.add_argument("--way", action="append", choices=list(WAYS), help="default: all")
    parser.add_argument("--prompts", type=int, default=12, help="of each length (default 12)")
    parser.add_argument("--tokens", type=int, action="append", help="a prompt's length; default: 300, 1000 and 2500")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args(argv)
    names: list[str] = arguments.way or list(WAYS)
    lengths: list[int] = arguments.tokens or [300, 1000, 2500]
    print(f"machine: {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"command: python -m benchmarks.offload_or_peer {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    base = _MEMORY_DISK if _MEMORY_DISK.is_dir() else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        fleets: list[Fleet] = []
        for name in names:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvparams-bench-", dir=base)))
            processes = stack.enter_context(_Recorded(directory))
            fleets.append(Fleet(name, processes, directory))
        for fleet in fleets:
            fleet.wait_ready()
        asyncio.run(measure(fleets, lengths, arguments.prompts))
    if arguments.json:
        found = {fleet.name: [asdict(row) for row in fleet.rows] for fleet in fleets}
        arguments.json.write_text(json.dumps(found, indent=1))
    table({fleet.name: fleet.rows for fleet in fleets})
    return 0


if __name__ == "__main__":
    sys.exit(main())
