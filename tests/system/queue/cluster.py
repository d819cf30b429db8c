"""Runs prefill and decode with a broker in between as real processes, hits engines and sidecars, and restarts them.

A process that was hit is started again by its own name and port. No process that was not started here is hit.
"""

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

import httpx

from demo.processes import Processes, Server, free_port
from tests.support.waiting import until
from tests.system.queue.rabbitmq import RabbitMQ

__all__ = ["Cluster", "Node"]

What = Literal["engine", "sidecar"]
_BACK_S: Final = 240.0
"""A machine that is full takes minutes."""


@dataclass(slots=True)
class Node:
    """An engine and its sidecar."""

    name: str
    role: str
    more: tuple[str, ...]
    """Arguments of the engine."""
    engine_port: int = field(default_factory=free_port)
    port: int = field(default_factory=free_port)
    engine: Server | None = None
    sidecar: Server | None = None


class Cluster:
    """Make it with `running`."""

    def __init__(self, processes: Processes, broker: RabbitMQ, store: str, pool: str, room: int) -> None:
        self.processes: Final = processes
        """Starts what is started."""
        self.broker = broker
        self._store = store
        self._pool = pool
        self._room = room
        self.prefill: list[Node] = []
        self.decode: list[Node] = []

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        logs: Path,
        broker: RabbitMQ,
        store: str,
        *,
        prefill: int = 1,
        decode: Sequence[Sequence[str]] = ((), ()),
        room: int = 8,
        flags: Sequence[str] = (),
        pool: str = "pool",
    ) -> "AsyncGenerator[Cluster]":
        """Start all of it, ready.

        Args:
            logs: for what they say.
            broker: what stands between.
            store: what engines share.
            prefill: how many prefill nodes.
            decode: of each decode node the further arguments of its engine.
            room: of each decode node.
            flags: arguments of the prefill nodes' sidecars.
            pool: the name of the queues.
        """
        with Processes(logs) as processes:
            cluster = cls(processes, broker, store, pool, room)
            for number in range(prefill):
                cluster.prefill.append(Node(f"p{number}", "prefill", ()))
            for number, more in enumerate(decode):
                cluster.decode.append(Node(f"d{number}", "decode", tuple(more)))
            for node in (*cluster.prefill, *cluster.decode):
                cluster.start(node, "engine")
                cluster.start(node, "sidecar", *(flags if node.role == "prefill" else ()))
            await asyncio.gather(*(cluster.ready(node) for node in (*cluster.prefill, *cluster.decode)))
            yield cluster

    def start(self, node: Node, what: What, *flags: str) -> None:
        """Start one of its processes."""
        if what == "engine":
            command = ["reference_engine", "--id", node.name, "--role", node.role, "--port", str(node.engine_port)]
            command += ["--store", self._store, *node.more]
            node.engine = self._run(node.name, command, node.engine_port)
            return
        command = ["kvparams", "sidecar", "--role", node.role, "--port", str(node.port), "--connector", "store"]
        command += ["--engine", f"{node.name}=http://127.0.0.1:{node.engine_port}", "--log-requests", "off"]
        command += ["--broker", str(self._url()), "--pool", self._pool, "--probe", "0.5", *flags]
        command += ["--decode-requests", str(self._room)] if node.role == "decode" else []
        node.sidecar = self._run(f"{node.name}-sidecar", command, node.port)

    def direct(self, port: int) -> Server:
        """Another sidecar beside the first prefill engine, with the same decode engines and no broker."""
        node = self.prefill[0]
        command = ["kvparams", "sidecar", "--role", "prefill", "--port", str(port), "--connector", "store"]
        command += ["--engine", f"{node.name}=http://127.0.0.1:{node.engine_port}", "--log-requests", "off"]
        for each in self.decode:
            command += ["--decode", f"{each.name}=http://127.0.0.1:{each.engine_port}"]
        return self._run("direct", command, port)

    async def hit(self, node: Node, what: What) -> None:
        """kill -9, and start it again; done when it answers."""
        server = node.engine if what == "engine" else node.sidecar
        assert server is not None
        server.process.send_signal(signal.SIGKILL)
        await until(lambda: server.process.poll() is not None)
        self.start(node, what)
        await self.ready(node)

    async def ready(self, node: Node) -> None:
        """Wait until both answer."""
        async with asyncio.timeout(_BACK_S), httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
            for server in (node.engine, node.sidecar):
                assert server is not None
                await until(partial(_is_healthy, client, server), _BACK_S, pause_s=0.05)

    async def counts(self, node: Node) -> dict[str, float]:
        """A decode node's metrics."""
        assert node.sidecar is not None
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            text = (await client.get(f"{node.sidecar.url}/metrics")).text
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def storm(self, every_s: float, over: asyncio.Event, dice: random.Random) -> int:
        """Hit decode nodes again and again, one each time; how often."""
        hits, pending = 0, set[asyncio.Task[None]]()
        free = set(range(len(self.decode)))
        while not over.is_set():
            if len(free) > 1:  # somebody stays
                number = dice.choice(sorted(free))
                free.discard(number)
                what: What = "engine" if dice.random() < 0.3 else "sidecar"
                task = asyncio.create_task(self.hit(self.decode[number], what))
                pending.add(task)
                task.add_done_callback(lambda _, number=number: free.add(number))
                hits += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), every_s)
        await asyncio.gather(*pending)
        return hits

    def _url(self) -> Path:
        path = self.broker.folder / "url"
        if not path.exists():
            path.write_text(self.broker.url)
            path.chmod(0o600)
        return path

    def _run(self, name: str, command: Sequence[str], port: int) -> Server:
        return self.processes.start(f"{name}-{time.monotonic_ns():x}", sys.executable, "-m", *command, port=port)


async def _is_healthy(client: httpx.AsyncClient, server: Server) -> bool:
    with suppress(httpx.HTTPError):
        if (await client.get(f"{server.url}/health")).status_code == 200:
            return True
    assert server.process.poll() is None, server.tail()
    return False
