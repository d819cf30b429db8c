"""Tests how soon an engine hears that its client has left, and that KV that no engine will fetch is released.

Stub engines and clients share this process and its clock; the proxy is a process of its own. The dialect is NIXL: a
prefill answer is KV held until a decode leg of that very transfer has ended, be it answered or aborted.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.processes import Processes, Server, free_port
from tests.support.stub_connection import Delays, Engine
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until
from tests.system.chaos.cluster import Usage, usage
from tests.system.chaos.ways import WAYS, Way

AT_ONCE = 20
ROOM = 2 * AT_ONCE
"""Decode legs that run at a time, on both engines together; whoever comes then waits between the legs."""
HEARS = {"prefill": "prefill lost", "between": "release", "decode": "decode lost", "stream": "decode lost"}
"""Of whoever leaves in this phase an engine hears, by this."""
TRIED = [
    pytest.param(way, id=way.name, marks=() if way is WAYS[0] else pytest.mark.soak)
    for way in WAYS
    if not (way.inside or way.queued) and way.connector == "store"
]
"""What a stub engine can play; its dialect is another one."""
ENDLESS_MS = 100_000.0
P99_MS = 50, 500
"""The bar, which a soak run judges; and on a machine that does other things meanwhile."""


class Ledger:
    """What the stub engines hear: a `tests.support.stub_connection.Observer`. Requests are known by their `user`."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        """Transfers whose KV waits for a decode leg."""
        self.claimed: list[str] = []
        """Transfers that a leg was sent for, in order."""
        self.at: dict[tuple[str, str], float] = {}
        """What has happened to a request, and when on the clock of `time.perf_counter`."""
        self._running: dict[int, tuple[str, str, str]] = {}

    def began(self, engine: Engine, serial: int, body: bytes) -> None:
        document = json.loads(body)
        params: dict[str, Any] = document.get("kv_transfer_params", {})
        user = document["user"]
        kind = "release" if params else "decode"
        if "kvparams" in params:
            kind = engine.role
        transfer = params.get("remote_request_id") or ""
        if transfer:
            self.claimed.append(transfer)
        self._running[serial] = user, kind, transfer
        self.at[user, kind] = time.perf_counter()

    def ended(self, engine: Engine, serial: int, *, lost: bool) -> None:
        user, kind, transfer = self._running.pop(serial)
        self.at[user, f"{kind} lost" if lost else f"{kind} ended"] = time.perf_counter()
        if kind != "prefill":
            self.held.discard(transfer)
        elif not lost:
            self.held.add(f"cmpl-{serial:016x}-0")

    async def heard(self, user: str, what: str) -> float:
        """Wait, bounded, until it has happened; when that was."""
        await until(lambda: (user, what) in self.at, pause_s=0.001)
        return self.at[user, what]


class Rig:
    """The proxy between clients and stub engines."""

    def __init__(self, stub: StubEngines, ledger: Ledger, proxy: Server, seed: int) -> None:
        self.stub, self.ledger, self.proxy = stub, ledger, proxy
        self.draw = random.Random(seed)
        self.number = 0
        self._port = int(proxy.url.rpartition(":")[2])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    def request(self, tokens: int) -> tuple[str, bytes]:
        """A new one, and how it is known."""
        self.number += 1
        user = f"u{self.number}"
        body = {"prompt": "x" * self.draw.randrange(300, 4000), "user": user, "max_tokens": tokens, "stream": True}
        raw = json.dumps(body).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        return user, head % len(raw) + raw

    async def leave(self, phase: str) -> float | None:
        """Ask, leave in this phase, and wait until an engine hears of it; how long that took, in seconds."""
        user, raw = self.request(2 if phase == "end" else 10_000)
        reader, writer = await self.connect()
        writer.write(raw[: self.draw.randrange(len(raw))] if phase == "body" else raw)
        if phase == "end":
            await reader.readuntil(b"[DONE]\n\n")
        elif phase == "stream":
            await reader.readuntil(b"data: ")
        elif phase != "body":
            await self.ledger.heard(user, "prefill ended" if phase == "between" else phase)
        if phase != "end":
            await asyncio.sleep(0.005 + 0.02 * self.draw.random())
        left = time.perf_counter()
        writer.transport.abort()
        return await self.ledger.heard(user, HEARS[phase]) - left if phase in HEARS else None

    async def phase(self, phase: str, count: int) -> list[float]:
        """So many clients leave in this phase; what it took engines to hear of each."""
        delays = self.stub.delays
        delays.prefill_ms = ENDLESS_MS if phase == "prefill" else 2.0
        delays.ttft_ms = ENDLESS_MS if phase in ("between", "decode") else 2.0
        delays.itl_ms = 20.0
        blockers = await self.block() if phase == "between" else []
        delays.ttft_ms = 2.0 if phase == "between" else delays.ttft_ms
        found: list[float] = []
        for start in range(0, count, AT_ONCE):
            some = min(AT_ONCE, count - start)
            seen = await asyncio.gather(*(self.leave(phase) for _ in range(some)))
            found += [one for one in seen if one is not None]
        for writer in blockers:
            writer.transport.abort()
        await self.settled()
        return found

    async def block(self) -> list[asyncio.StreamWriter]:
        """Take all the room there is for decode legs."""
        writers: list[asyncio.StreamWriter] = []
        for _ in range(ROOM):
            user, raw = self.request(10)
            _, writer = await self.connect()
            writer.write(raw)
            await self.ledger.heard(user, "decode")
            writers.append(writer)
        return writers

    async def settled(self) -> None:
        """Nothing is live, nothing is held: within two seconds."""
        await until(lambda: not self.live and not self.ledger.held, 2.0)

    @property
    def live(self) -> int:
        return sum(engine.counters.live for engine in self.stub.engines)

    async def metrics(self) -> dict[str, float]:
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"{self.proxy.url}/metrics")).text
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


def phases(way: Way) -> list[str]:
    """Those that there are."""
    none = {"prefill", "between"} if "prefill" not in way.states else {"between"} if way.room_first else set[str]()
    return [phase for phase in ("body", "prefill", "between", "decode", "stream", "end") if phase not in none]


@asynccontextmanager
async def rig(logs: Path, way: Way) -> AsyncGenerator[Rig]:
    ledger = Ledger()
    many = {role: [0] * (1 if role == way.beside else 2) for role in ("prefill", "decode")}
    async with await StubEngines.start(prefill=many["prefill"], decode=many["decode"], delays=Delays()) as stub:
        last = way.roles[-1]
        command = [sys.executable, "-m", "kvparams", "proxy" if way.beside is None else "sidecar", *way.flags]
        command += [f"--{last}-requests", str(ROOM // len(many["decode"]))]
        if way.beside is not None:
            command += ["--role", way.beside]
        for engine in stub.engines:
            engine.observer = ledger
            role = engine.role if engine.role in way.roles else last
            command += ["--engine" if role == way.beside else f"--{role}", engine.url]
        port = free_port()
        with Processes(logs) as processes:
            proxy = processes.start("proxy", *command, "--port", str(port), port=port)
            await asyncio.to_thread(processes.wait_ready, proxy)
            yield Rig(stub, ledger, proxy, 5)
            await asyncio.to_thread(processes.stop, proxy)


def milliseconds(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {name: round(1e3 * times[int(part * (len(times) - 1))], 2) for name, part in (("p50", 0.5), ("p99", 0.99))}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", TRIED)
async def test_engines_hear_at_once_that_a_client_has_left(
    tmp_path: Path, way: Way, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    found: dict[str, list[float]] = {phase: [] for phase in phases(way)}
    each = effort(40, 200)
    turns = effort(3, 30 if way is WAYS[0] else -(-10_000 // (each * len(found))))
    async with rig(tmp_path, way) as running:
        held: list[Usage] = []
        for _ in range(turns):
            for phase in found:
                found[phase] += await running.phase(phase, each)
            held.append(usage(running.proxy))
        seen = await running.metrics()
        claimed = running.ledger.claimed
        blockers = turns * ROOM if "between" in found else 0
    times: dict[str, Any] = {phase: milliseconds(some) for phase, some in found.items() if some}
    together = milliseconds([one for some in found.values() for one in some])
    count = turns * each * len(found)
    record(
        {
            "left": count,
            "heard_ms": times,
            "all_ms": together,
            "released": seen["kvparams_proxy_transfers_released_total"],
            "orphaned": seen["kvparams_proxy_transfers_orphaned_total"],
            "rss_kib": [one.rss_kib for one in held],
            "descriptors": [one.descriptors for one in held],
        }
    )
    assert times.keys() == found.keys() & HEARS.keys()
    assert together["p99"] < effort(P99_MS[1], P99_MS[0]), times
    assert len(claimed) == len(set(claimed))  # no transfer is claimed twice
    assert seen["kvparams_proxy_transfers_released_total"] == len(found.get("between", ()))
    assert seen["kvparams_proxy_transfers_orphaned_total"] == 0
    assert seen['kvparams_proxy_requests_total{outcome="ok"}'] == turns * each
    assert seen['kvparams_proxy_requests_total{outcome="gone"}'] == len(times) * turns * each + blockers
    # Closed connections leave cycles, which the collector comes to in time: memory grows at first and then no more.
    assert held[-1].rss_kib - held[0].rss_kib < 16_384
    if turns > 20:
        assert held[-1].rss_kib - held[2 * turns // 3].rss_kib < 2048
    assert held[-1].descriptors <= held[0].descriptors + AT_ONCE  # connections kept for the next request
