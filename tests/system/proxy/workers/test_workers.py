"""Tests `kvparams proxy --workers` under load: workers are killed, replaced and shut down."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.proxy.load import Connection, Load, loaded
from tests.support.proxy.metrics import metric_becomes
from tests.support.proxy.served import Served, serving
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

CLIENTS = 12


def workers_of(served: Served) -> list[int]:
    """Returns the process ids of the workers, the oldest first."""
    pid = served.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def counters(text: str) -> dict[str, float]:
    """Returns all series that may only grow."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type in ("counter", "histogram"):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


class Scraper:
    """Reads the metrics again and again, from whichever worker answers."""

    def __init__(self) -> None:
        self.times = 0
        self.backwards: list[str] = []
        """Series that became less, or went."""
        self.last: dict[str, float] = {}

    async def scrape(self, port: int) -> None:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            got = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert got.status_code == 200
        found = counters(got.text)
        self.backwards += [name for name, value in self.last.items() if found.get(name, -1.0) < value]
        self.last = found
        self.times += 1

    async def run(self, port: int) -> None:
        while True:
            with suppress(httpx.TransportError):  # the worker that was asked was killed
                await self.scrape(port)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def scraping(port: int) -> AsyncGenerator[Scraper]:
    scraper = Scraper()
    task = asyncio.create_task(scraper.run(port))
    try:
        yield scraper
        assert not task.done()
    finally:
        task.cancel()
    await scraper.scrape(port)


async def lost_by(connection: Connection) -> str | None:
    """Sends a request on a connection that was idle. Returns the worker of the connection if no answer comes."""
    try:
        await connection.ask()
    except (ConnectionError, asyncio.IncompleteReadError):
        return connection.worker
    return None


async def answered(load: Load, scraper: Scraper) -> None:
    """Waits until 100 more requests have been answered and the metrics have been read twice more."""
    answers, times = load.answers + 100, scraper.times + 2
    await until(lambda: load.answers >= answers and scraper.times >= times, 20)


async def test_four_workers_are_one_proxy(stub: StubEngines, tmp_path: Path) -> None:
    """They share the connections, one exposition and one log; the port is theirs alone."""
    log, token = tmp_path / "log", tmp_path / "token"
    token.write_text("token")
    flags = ("--workers", "4", "--log-requests", str(log), "--admin-token-file", str(token))
    async with serving(stub, *flags) as served:
        connections = [await Connection.open(served.port) for _ in range(64)]
        for connection in connections:
            connection.send()
        answers = [await connection.receive() for connection in connections]
        shares = [sum(answer.worker == name for answer in answers) for name in {answer.worker for answer in answers}]
        assert len(shares) == 4, shares
        assert min(shares) >= 3, shares  # less has a chance of one in 100,000
        scraper = Scraper()
        await scraper.scrape(served.port)
        assert scraper.last["kvparams_proxy_requests_total{outcome=ok}"] == 64
        assert await served.metric("kvparams_proxy_workers") == 4
        assert await served.metric('kvparams_proxy_instances{role="prefill",state="ready"}') == 2
        assert await served.metric("kvparams_proxy_client_connections ") >= 64
        await until(lambda: log.read_bytes().count(b"\n") == 64)
        assert {json.loads(line)["outcome"] for line in log.read_text().splitlines()} == {"ok"}
        headers = {"authorization": "Bearer token"}
        assert len((await served.client.get("/admin/instances", headers=headers)).json()["data"]) == 4
        drained = await served.client.post("/admin/instances/prefill-0/drain", headers=headers)
        assert drained.status_code == 200
        async with asyncio.timeout(10):
            drained_in_a_row = 0
            while drained_in_a_row < 16:  # each over a connection of its own, to whichever worker
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as other:
                    shown = await other.get("/admin/instances/prefill-0", headers=headers)
                drained_in_a_row = drained_in_a_row + 1 if shown.json()["draining"] else 0
        engines = [f"--{engine.role}={engine.url}" for engine in stub.engines]
        again = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvparams", "proxy", *engines, "--port", str(served.port), "--workers", "2"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await again.communicate()
        assert again.returncode == 1
        assert re.fullmatch(rb"kvparams proxy: cannot listen on 127.0.0.1:\d+ \(.*in use.*\); .*\n", said), said
        # The control of a reload: a worker that only drains closes the connections of clients that are idle.
        os.kill(workers_of(served)[0], signal.SIGTERM)
        restarts = "kvparams_proxy_worker_restarts_total"
        await metric_becomes(served, restarts, lambda value: value >= 1)
        lost = [worker for worker in [await lost_by(connection) for connection in connections] if worker is not None]
        assert len(lost) >= 3
        assert len(set(lost)) == 1
        for connection in connections:
            connection.close()


async def test_a_killed_worker_loses_only_its_own_requests(stub: StubEngines, tmp_path: Path) -> None:
    stub.delays.ttft_ms = 10  # or starting processes would get no processor
    async with serving(stub, "--workers", "2", "--log-requests", str(tmp_path / "log")) as served:
        async with scraping(served.port) as scraper, loaded(served.port, CLIENTS) as load:
            await answered(load, scraper)
            before = set(load.workers)
            assert len(before) == 2
            shown = scraper.last["kvparams_proxy_requests_total{outcome=ok}"]
            os.kill(workers_of(served)[0], signal.SIGKILL)
            await answered(load, scraper)
            await answered(load, scraper)
            successor = await answering_worker(served.port, beside=before)
            await answered(load, scraper)
        assert successor not in before
        assert load.refused == 0
        assert set(load.statuses) == {200}
        assert 0 < len(load.lost) <= CLIENTS
        assert len({worker for worker in load.lost if worker is not None}) == 1
        assert scraper.backwards == []
        assert scraper.last["kvparams_proxy_requests_total{outcome=ok}"] > shown
        assert await served.metric("kvparams_proxy_workers") == 2
        assert await served.metric("kvparams_proxy_worker_restarts_total") == 1


@pytest.mark.slow
async def test_requests_wait_for_the_successors_of_killed_workers(stub: StubEngines, tmp_path: Path) -> None:
    """Both workers are stopped, so that connections wait in their queues, and are killed then."""
    async with serving(stub, "--workers", "2", "--log-requests", str(tmp_path / "log")) as served:
        workers = workers_of(served)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        connections = [await Connection.open(served.port) for _ in range(16)]
        for connection in connections:
            connection.send()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            answers = [await connection.receive() for connection in connections]
        assert [answer.status for answer in answers] == [200] * 16
        assert len({answer.worker for answer in answers}) == 2
        assert not set(workers) & set(workers_of(served))
        for connection in connections:
            connection.close()


async def test_a_reload_loses_no_request(stub: StubEngines, tmp_path: Path) -> None:
    stub.delays.ttft_ms = 10
    async with serving(stub, "--workers", "2", "--log-requests", str(tmp_path / "log")) as served:
        first = workers_of(served)
        idle = [await Connection.open(served.port) for _ in range(8)]
        for connection in idle:
            assert (await connection.ask()).status == 200
        async with scraping(served.port) as scraper, loaded(served.port, CLIENTS) as load:
            await answered(load, scraper)
            served.process.send_signal(signal.SIGHUP)
            await until(lambda: len(load.workers) == 4, 20)
            await answered(load, scraper)
            for connection in idle:  # a client that was idle all the time does not notice either
                answer = await connection.ask()
                assert (answer.status, answer.closes) == (200, True)
                connection.close()
            assert (await served.client.get("/health")).status_code == 200  # on the connection that it has had before
            await until(lambda: not set(first) & set(workers_of(served)), 20)
        assert (load.lost, load.refused) == ([], 0)
        assert set(load.statuses) == {200}
        assert scraper.backwards == []
        answers = load.answers + 2 * len(idle)
        assert scraper.last["kvparams_proxy_requests_total{outcome=ok}"] == answers
        assert await served.metric("kvparams_proxy_worker_restarts_total") == 0


async def answering_worker(port: int, beside: set[str]) -> str:
    """Connects until a worker answers that is none of these; its name."""
    async with asyncio.timeout(20):
        while True:
            connection = await Connection.open(port)
            worker = (await connection.ask()).worker
            connection.close()
            if worker not in beside:
                return worker


async def health(port: int) -> str:
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        got = await client.get(f"http://127.0.0.1:{port}/health")
    return f"{got.status_code} {got.json()['status']}"


@pytest.mark.slow
async def test_sigterm_loses_no_request(stub: StubEngines, tmp_path: Path) -> None:
    """Clients ask until `/health` says that the proxy drains, as behind a load balancer; a long answer runs on."""
    stub.delays.ttft_ms, stub.delays.itl_ms = 10, 100
    log = tmp_path / "log"
    async with serving(stub, "--workers", "2", "--drain-delay", "3", "--log-requests", str(log)) as served:
        stream = {"model": "stub", "prompt": "x", "max_tokens": 25, "stream": True}
        long = [asyncio.create_task(served.client.post("/v1/completions", json=stream)) for _ in range(6)]
        async with loaded(served.port, CLIENTS) as load:
            await until(lambda: load.answers >= 50)
            served.process.terminate()
            await until(lambda: load.closed > CLIENTS)
            said = [await health(served.port) for _ in range(8)]
            assert said == ["503 draining"] * 8  # whichever worker answers
        assert [(await each).text.count("[DONE]") for each in long] == [1] * 6
        await served.output()
        assert served.process.returncode == -signal.SIGTERM
        assert (load.lost, load.refused) == ([], 0)
        assert set(load.statuses) == {200}
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["outcome"] for line in lines] == ["ok"] * (load.answers + 6)


@pytest.mark.slow
async def test_nobody_outlives_a_killed_supervisor(stub: StubEngines, tmp_path: Path) -> None:
    async with serving(stub, "--workers", "3", "--log-requests", str(tmp_path / "log")) as served:
        workers = workers_of(served)
        assert len(workers) == 3
        os.kill(workers[0], signal.SIGSTOP)  # whatever a worker does
        served.process.kill()
        await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers))
