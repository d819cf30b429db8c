"""Measures what the live page costs the proxy: CPU per request with ten viewers beside none, and CPU without requests.

    python -m benchmarks.ui_bench            500 stub engines, 24 rounds of both sides, 3 minutes
    python -m benchmarks.ui_bench --browser  the time of Chromium's main thread as well

The engines' metrics are as long as vLLM's, since what the page shows is read from them. The exit status is 1 if a
request costs over 3 % more, or the page alone over 1 % of a core, or its main thread over half a core.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from benchmarks.load_process import Ask, closed
from benchmarks.ratios import median_interval
from tests.support.processes import Processes, free_ports, http_get, tree_usage
from tests.support.proxy.browser import Chromium, Watched, browsing
from tests.support.waiting import wait_until

__all__ = ["main"]

_ENGINES: Final = 500
_VIEWERS: Final = 10
_CONCURRENCY: Final = 48
_RATE: Final = 2000.0
_ROUND_S: Final = 2.5
_IDLE_S: Final = 8.0
_BROWSER_S: Final = 10.0
_TOKEN: Final = "viewer-token"
_BARS: Final = (1.03, 0.01, 0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--browser", action="store_true")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory, Processes(Path(directory)) as processes:
        port, pid = _start(processes, Path(directory), asked.policy)
        alone = [_idle_share(pid), 0.0]
        with _viewers(port, _VIEWERS):
            alone[1] = _idle_share(pid)
        alone[0] = min(alone[0], _idle_share(pid))
        ratios = [_round(port, pid, Path(directory), number) for number in range(asked.rounds)]
        ratio = median_interval(ratios)
        page = max(0.0, alone[1] - alone[0])
        print(f"{_ENGINES} engines, {_VIEWERS} viewers, policy {asked.policy}, {os.cpu_count()} cores")
        told = f"at {_RATE:,.0f} requests/s: {ratio} (bar {_BARS[0]})"
        print(f"CPU per request with viewers beside without, {told}")
        print(f"CPU of the page without requests: {100 * page:.2f} % of a core (bar {100 * _BARS[1]:.0f} %)")
        thread = asyncio.run(_main_thread(port, Path(directory))) if asked.browser else 0.0
        if asked.browser:
            print(f"main thread of the browser under load: {100 * thread:.0f} % of a core (bar {100 * _BARS[2]:.0f} %)")
    return int(ratio.median > _BARS[0] or page > _BARS[1] or thread > _BARS[2])


def _start(processes: Processes, directory: Path, policy: str) -> tuple[int, int]:
    """Starts engines and the proxy. Returns the port and the process id of the proxy."""
    ports = free_ports(_ENGINES + 1)
    halves = ports[: _ENGINES // 2], ports[_ENGINES // 2 : _ENGINES]
    flags = [
        flag
        for role, half in zip(("--prefill", "--decode"), halves, strict=True)
        for each in half
        for flag in (role, str(each))
    ]
    health = f"http://127.0.0.1:{ports[0]}/health"
    metrics = directory / "metrics.txt"
    metrics.write_text(_metrics())
    processes.start(
        "engines",
        [sys.executable, "tests/support/stub_engine.py", "--metrics", str(metrics), *flags],
        ready=[health],
        environment={"PYTHONPATH": ":".join(sys.path)},
    )
    token = directory / "token"
    token.write_text(_TOKEN)
    token.chmod(0o600)
    port = ports[-1]
    engines = [
        f"--{role}=http://127.0.0.1:{each}"
        for role, half in zip(("prefill", "decode"), halves, strict=True)
        for each in half
    ]
    command = [
        sys.executable,
        "-m",
        "kvparams",
        "proxy",
        *engines,
        "--port",
        str(port),
        "--viewer-token-file",
        str(token),
        "--log-requests",
        "off",
        "--policy",
        policy,
        "--connector",
        "nixl",
    ]
    if policy == "cache_aware":
        command += ["--tokenizer", "bytes"]
    pid = processes.start("proxy", command, ready=[f"http://127.0.0.1:{port}/health"], ready_s=60.0)
    wait_until(
        lambda: json.loads(http_get(f"http://127.0.0.1:{port}/health")[1])["roles"]["decode"]["ready"] == _ENGINES // 2,
        60.0,
    )
    return port, pid


def _metrics() -> str:
    """Returns metrics of the length of vLLM 0.32's, which are mostly histograms; some 60 KB."""
    labels = 'engine="0",model_name="meta-llama/Llama-3.1-8B"'
    lines: list[str] = []
    for number in range(28):
        name = f"vllm:histogram_{number}_seconds"
        lines += [f"# HELP {name} A histogram of something that takes seconds.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{{labels},le="{edge / 4}"}} {edge * 1000}.0' for edge in range(20)]
    for name, value in (
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0.5),
        ("nixl_bytes_transferred_sum", 1 << 30),
    ):
        lines.append(f"vllm:{name}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


@contextmanager
def _viewers(port: int, number: int) -> Generator[None]:
    """Keeps so many viewers who read everything."""
    stop, ready = Event(), Event()

    async def view() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /ui/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {_TOKEN}\r\n\r\n".encode())
        assert b" 200 " in await reader.readline()
        while await reader.read(1 << 20):
            ready.set()

    async def run() -> None:
        tasks = [asyncio.create_task(view()) for _ in range(number)]
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()

    thread = Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _idle_share(pid: int) -> float:
    """Returns the share of a core that the proxy uses without requests."""
    before, began_s = tree_usage(pid).cpu_s, time.monotonic()
    time.sleep(_IDLE_S)
    return (tree_usage(pid).cpu_s - before) / (time.monotonic() - began_s)


def _ask(directory: Path) -> Ask:
    body = directory / "body.json"
    body.write_text(json.dumps({"model": "stub", "prompt": "@@@@@@@@ who is there? " * 20, "max_tokens": 4}))
    return Ask(body)


def _round(port: int, pid: int, directory: Path, number: int) -> float:
    """Returns how many times more CPU a request costs with viewers, at `_RATE` requests per second.

    The page costs the same each second, so on a machine that is too busy for this rate a request would seem to cost
    more. Which side is first alternates.
    """
    found: dict[bool, tuple[float, float]] = {}
    for is_viewed in (number % 2 == 0, number % 2 != 0):
        if is_viewed:
            with _viewers(port, _VIEWERS):
                found[True] = _cost(port, pid, directory)
        else:
            found[False] = _cost(port, pid, directory)
    (viewed_s, per_s), (alone_s, _) = found[True], found[False]
    return 1.0 + (viewed_s - alone_s) * per_s / (_RATE * alone_s)


def _cost(port: int, pid: int, directory: Path) -> tuple[float, float]:
    """Returns the CPU seconds of the proxy for each request, and the requests per second."""
    before = tree_usage(pid).cpu_s
    report = closed(port, _ask(directory), concurrency=_CONCURRENCY, requests=1_000_000, limit_s=_ROUND_S)
    return (tree_usage(pid).cpu_s - before) / report.right, report.right_per_s


async def _main_thread(port: int, directory: Path) -> float:
    """Returns the share of a core that the page's main thread uses while requests run."""
    profile = directory / "chromium"
    profile.mkdir()
    with closing(Chromium(profile)) as chromium:
        async with browsing(chromium, width=1920, height=1080) as watched:
            return await _watch_page(watched, port, directory)


async def _watch_page(watched: Watched, port: int, directory: Path) -> float:
    await watched.open(port, _TOKEN)
    session: Any = await watched.page.context.new_cdp_session(watched.page)
    await session.send("Performance.enable")
    load = asyncio.create_task(asyncio.to_thread(_cost, port, os.getpid(), directory))
    shares: list[float] = []
    before: dict[str, float] | None = None
    for _ in range(3):
        values = await session.send("Performance.getMetrics")
        now = {each["name"]: each["value"] for each in values["metrics"]}
        if before is not None:
            shares.append((now["TaskDuration"] - before["TaskDuration"]) / (now["Timestamp"] - before["Timestamp"]))
        before = now
        await asyncio.sleep(_BROWSER_S / 4)
    await load
    return statistics.median(shares)


if __name__ == "__main__":
    sys.exit(main())
