"""Every way to coordinate prefill and decode: what clients see, and what stands between costs.

    python -m benchmarks.modes_bench [--requests N] [--at-once N] [--rounds N] [--broker URL] [--only NAME]...
    .venv-vllm/bin/python -m benchmarks.modes_bench --engine vllm --kvparams .venv/bin/kvparams [--broker URL] ...

Engines, proxies and sidecars are real processes, all up at the same time over one `file` store; each round sends the
same traffic to one way after the other, in an order drawn anew: streams of 32 tokens, prompts that nobody has seen. CPU
per request is of the proxy or the sidecars alone, engines not counted. A wrong answer ends the run.

The model is tiny, so what a first token waits for is mostly the engines' steps (`--step-ms`), and never bandwidth.
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
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, cast

from benchmarks.load_process import Ask, closed
from benchmarks.modes_engines import MODEL, Engines, reference, vllm
from benchmarks.sides import processor
from demo.client import ask, new_client
from demo.processes import Processes, Server, free_port
from tests.support.processes import tree_usage

__all__ = ["Row", "Way", "main", "table"]

_TOKENS: Final = 32
_LIMIT_S: Final = 300.0
_WARM: Final = 3
_TEXT: Final = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 6
_QUIET: Final = ("--log-requests", "off")


class Way(NamedTuple):
    """A `Way` is a way to coordinate prefill and decode."""

    name: str
    port: int
    between: tuple[Server, ...]
    """What stands between client and engines."""


class Row(NamedTuple):
    """A `Row` holds the measurements of one way: medians over the rounds, in milliseconds."""

    name: str
    ttft: float
    ttft_p99: float
    itl_p99: float
    cpu: float | None
    """Of what stands between, for each request; None where that is in an engine's process or nothing."""


def _started(processes: Processes, kvparams: Sequence[str], engines: Engines, *arguments: str) -> Server:
    """A proxy or a sidecar; `@NAME` is the URL of an engine. Engines meet in the store only if that is said."""
    port = free_port()
    real = [engines.servers[text[1:]].url if text.startswith("@") else text for text in arguments]
    connector = () if "--connector" in arguments else ("--connector", "store")
    return processes.start(arguments[0], *kvparams, *real, *connector, "--port", str(port), *_QUIET, port=port)


def _ways(processes: Processes, kvparams: Sequence[str], engines: Engines, broker: str | None) -> list[Way]:
    """Starts all ways that are measured, and returns them once they are ready."""
    both = ("--prefill", "@P", "--decode", "@D")
    found: dict[str, list[tuple[str, ...]]] = {
        "aggregated": [("proxy", "--mode", "aggregated", "--aggregated", "@A")],
        "prefill_then_decode": [("proxy", *both)],
        "prefill_then_decode, decode_first": [("proxy", "--mode", "prefill_then_decode,decode_first=true", *both)],
        f"concurrent_legs{engines.meeting_by}": [("proxy", "--mode", "concurrent_legs", *engines.meeting)],
        "conditional, above its bound": [("proxy", "--mode", "conditional,remote_tokens=64", *both)],
        "conditional, below it": [("proxy", "--mode", "conditional,remote_tokens=4096", *both)],
        "prefill_local_decode_remote": [("sidecar", "--role", "prefill", "--engine", "@P", "--decode", "@D")],
        "decode_local_prefill_remote": [("sidecar", "--role", "decode", "--engine", "@D", "--prefill", "@P")],
    }
    if broker is not None:
        pool = ("--broker", broker, "--pool", f"bench-{os.getpid()}")
        sides = (("prefill", "@P"), ("decode", "@D"))
        found["queue_mediated"] = [("sidecar", "--role", role, "--engine", url, *pool) for role, url in sides]
    ways = [Way("no proxy, one engine", _port(engines.servers["A"]), ())]
    for name, commands in found.items():
        between = tuple(_started(processes, kvparams, engines, *command) for command in commands)
        processes.wait_ready(*between[:1])
        ways.append(Way(name, _port(between[0]), between))
    return [*ways, *(Way(name, _port(server), ()) for name, server in engines.split.items())]


def _port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


async def _agree(ways: Sequence[Way], asked: dict[str, object]) -> None:
    """Checks that all ways answer the same. This also makes whatever is made at the first request."""
    body = {**asked, "prompt": _TEXT, "stream": False}
    async with new_client() as client:
        answers = {
            (await ask(client, f"http://127.0.0.1:{way.port}", "/v1/completions", body)).text
            for way in ways
            for _ in range(_WARM)
        }
    if len(answers) != 1:
        raise SystemExit(f"the ways do not answer alike: {answers}")


def _measured(way: Way, what: Ask, requests: int, at_once: int) -> Row:
    before = sum(tree_usage(server.process.pid).cpu_s for server in way.between)
    report = closed(way.port, what, concurrency=at_once, requests=requests, limit_s=_LIMIT_S)
    cpu_s = sum(tree_usage(server.process.pid).cpu_s for server in way.between) - before
    assert report.ttft is not None
    assert report.itl is not None
    cpu = 1000 * cpu_s / requests if way.between else None
    return Row(way.name, report.ttft.p50, report.ttft.p99, report.itl.p99, cpu)


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table."""
    lines = [
        "| way | first token p50, ms | p99 | between tokens p99, ms | CPU per request, ms |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cpu = "-" if row.cpu is None else f"{row.cpu:.2f}"
        lines.append(f"| {row.name} | {row.ttft:.1f} | {row.ttft_p99:.1f} | {row.itl_p99:.1f} | {cpu} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes_bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=200, help="of each way in each round (default: 200)")
    parser.add_argument("--at-once", type=int, default=4, help="how many at a time (default: 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=5, help="an engine's step takes at least so long (default: 5)")
    parser.add_argument("--broker", metavar="URL", help="a RabbitMQ, amqp://...: then queue_mediated is measured too")
    parser.add_argument("--only", action="append", metavar="NAME", help="this way alone; repeat it for more")
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference", help="(default: reference)")
    parser.add_argument("--kvparams", metavar="FILE", help="the command that is measured (default: this Python's)")
    arguments = parser.parse_args(argv)
    kvparams = [cast("str", arguments.kvparams)] if arguments.kvparams else [sys.executable, "-m", "kvparams"]
    real = arguments.engine == "vllm"
    requests, rounds = cast("int", arguments.requests), cast("int", arguments.rounds)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    asked: dict[str, object] = {"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    asked |= {"model": MODEL} if real else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory, prefix="kvparams-bench-")))
        body = folder / "body.json"
        body.write_text(json.dumps({**asked, "prompt": f"@@@@@@@@ {_TEXT}"}))
        what = Ask(body, stream=True) if real else Ask(body, events=_TOKENS + 1)
        processes = stack.enter_context(Processes(folder))
        store = f"file://{folder}/kv?size=512MiB"
        engines = (
            vllm(processes, folder, store) if real else reference(processes, store, cast("int", arguments.step_ms))
        )
        ways = _ways(processes, kvparams, engines, cast("str | None", arguments.broker))
        only = cast("list[str] | None", arguments.only)
        ways = [way for way in ways if only is None or way.name in only]
        asyncio.run(_agree(ways, asked))
        seen: dict[str, list[Row]] = {way.name: [] for way in ways}
        for _ in range(rounds):
            for way in random.sample(ways, len(ways)):
                seen[way.name].append(_measured(way, what, requests, cast("int", arguments.at_once)))
    print(f"{os.cpu_count()} cores, {processor()}, Python {platform.python_version()}; {rounds} rounds of {requests}\n")
    print(table([_middle(rows) for rows in seen.values()]))
    return 0


def _middle(rows: Sequence[Row]) -> Row:
    cpu = [row.cpu for row in rows if row.cpu is not None]
    return Row(
        rows[0].name,
        median(row.ttft for row in rows),
        median(row.ttft_p99 for row in rows),
        median(row.itl_p99 for row in rows),
        median(cpu) if cpu else None,
    )


if __name__ == "__main__":
    sys.exit(main())
