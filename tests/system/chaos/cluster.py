"""Runs a proxy and its engines as real processes: it hits, watches, and restarts them.

An engine that was hit comes back with its name, its port and its store, and no other state.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

import httpx

from demo.processes import Processes, Server, free_port
from tests.support.waiting import until
from tests.system.chaos.backings import Backing
from tests.system.chaos.faults import Fault
from tests.system.chaos.ways import WAYS, Way
from tests.system.queue.rabbitmq import RabbitMQ

__all__ = ["Cluster", "Hit", "Usage", "usage"]

PULLING: Final = ("--decode-timeout", "3", "--probe", "1")
"""Of those who pull work out of a queue."""
_BACK_S: Final = 60.0


class Usage(NamedTuple):
    """What a process holds."""

    rss_kib: int
    descriptors: int


class Hit(NamedTuple):
    """What was done to an engine, on the clock of `time.monotonic`."""

    who: str
    kind: str
    from_s: float
    until_s: float
    """When it answered again."""


@dataclass(slots=True)
class _Engine:
    name: str
    role: str
    port: int
    server: Server


class Cluster:
    """See the module. Make it with `running`."""

    def __init__(
        self,
        processes: Processes,
        store: Backing,
        way: Way,
        engines: int,
        extra: Sequence[str],
        flags: Sequence[str],
        room: int | None,
        broker: Path | None,
    ) -> None:
        self._processes = processes
        self._extra = tuple(extra)
        self._broker = broker
        self.way: Final = way
        """How they are coordinated."""
        self.store = store
        self.hits: list[Hit] = []
        self._ports = {f"{role}-{number}": free_port() for role in way.roles for number in range(engines)}
        self._engines: dict[str, _Engine] = {}
        for name, port in self._ports.items():
            role = name.partition("-")[0]
            self._engines[name] = _Engine(name, role, port, self._start(name, role, port))
        self._before: dict[str, Server] = {}
        """Proxies and sidecars: of sidecars, by the engine that each is beside."""
        last = () if room is None else (f"--{way.roles[-1]}-requests", str(room))
        if way.beside is None:
            before = [f"--{role}={name}=http://127.0.0.1:{port}" for role, name, port in self._of(*way.roles)]
            self._before["proxy"] = self._stand("proxy", *before, *flags, *last)
        elif not way.inside:
            for role, name, port in self._of(way.beside):
                there = ["--role", role, f"--engine={name}=http://127.0.0.1:{port}"]
                there += self._queue() or [f"--{o}={n}=http://127.0.0.1:{p}" for o, n, p in self._of(self._remote)]
                self._before[name] = self._stand("sidecar", *there, *flags, *(() if way.queued else last))
        self._pulling: list[Server] = []
        if way.queued:
            for role, name, port in self._of(self._remote):
                there = ["--role", role, f"--engine={name}=http://127.0.0.1:{port}", *self._queue()]
                self._pulling.append(self._stand("sidecar", *there, *PULLING, *last, named=False))

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        logs: Path,
        store: Backing,
        *,
        engines: int,
        way: Way = WAYS[0],
        extra: Sequence[str] = (),
        flags: Sequence[str] = (),
        room: int | None = None,
    ) -> "AsyncGenerator[Cluster]":
        """Start `engines` of each role and what stands before them, all ready; at the end nothing of them is left.

        Args:
            logs: a directory for what they write.
            store: what the engines share.
            engines: of each role.
            way: how they are coordinated.
            extra: arguments of every engine.
            flags: arguments of the proxy, or of the sidecars that clients talk to; in an engine's server it has none.
            room: so many answers at a time, at most, from one engine.
        """
        with ExitStack() as stack:
            broker: Path | None = None
            if way.queued:
                server = stack.enter_context(RabbitMQ(logs / "rabbitmq"))
                broker = server.folder / "url"
                broker.write_text(server.url)
                broker.chmod(0o600)
            processes = stack.enter_context(Processes(logs))
            cluster = cls(processes, store, way, engines, extra, flags, room, broker)
            try:
                await asyncio.to_thread(processes.wait_ready, *cluster.engines)
                await asyncio.to_thread(processes.wait_ready, *cluster.fronts.values(), *cluster._pulling)
                for name, url in cluster._ours().items():
                    await cluster._healthy(url, cluster.fronts[name])
                yield cluster
            finally:
                cluster.wake_all()

    def _of(self, *roles: str) -> list[tuple[str, str, int]]:
        """Role, name and port of the engines of these roles."""
        named = ((name.partition("-")[0], name, port) for name, port in self._ports.items())
        return [one for one in named if one[0] in roles]

    @property
    def _remote(self) -> str:
        return "decode" if self.way.beside == "prefill" else "prefill"

    def _queue(self) -> list[str]:
        return [] if self._broker is None else ["--broker", str(self._broker), "--pool", "chaos"]

    def _stand(self, what: str, *arguments: str, named: bool = True) -> Server:
        port = free_port()
        command = [sys.executable, "-m", "kvparams", what, "--connector", self.way.connector, "--port", str(port)]
        command += [*self.way.flags, "--expose-route"] if named else []
        return self._processes.start(what, *command, *arguments, port=port)

    @property
    def fronts(self) -> dict[str, Server]:
        """Whom clients may ask, as they are now: the proxy, or whatever is beside the engine of that name."""
        if not self.way.inside:
            return self._before
        return {name: self._engines[name].server for _, name, _ in self._of(cast("str", self.way.beside))}

    def _ours(self) -> dict[str, str]:
        """Where the proxy's own pages are, by front."""
        pages = "/kvparams" if self.way.inside else ""
        return {name: f"{server.url}{pages}" for name, server in self.fronts.items()}

    @property
    def engines(self) -> list[Server]:
        """As they are now."""
        return [engine.server for engine in self._engines.values()]

    def wake_all(self) -> None:
        """Nobody stays stopped, whatever the test did."""
        for engine in self._engines.values():
            with suppress(ProcessLookupError):
                os.kill(engine.server.process.pid, signal.SIGCONT)

    # faults

    async def suffer(self, fault: Fault) -> None:
        """Have it happen, and wait until it is over."""
        if fault.target == "store":
            await self.store.suffer(fault)
            return
        engine = self._engines[f"{fault.target}-{fault.number}"]
        from_s = time.monotonic()
        process = engine.server.process
        if fault.kind == "stop":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(fault.for_s)
            process.send_signal(signal.SIGCONT)
        else:
            process.send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            await until(lambda: process.poll() is not None, _BACK_S)
            engine.server = self._start(engine.name, engine.role, engine.port)
        await self._healthy(engine.server.url, engine.server)
        self.hits.append(Hit(engine.name, fault.kind, from_s, time.monotonic()))

    async def _healthy(self, url: str, server: Server) -> None:
        async def is_healthy() -> bool:
            with suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return True
            assert server.process.poll() is None, server.tail()
            return False

        async with httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
            await until(is_healthy, _BACK_S, pause_s=0.05)

    def _start(self, name: str, role: str, port: int) -> Server:
        does = role if role in ("prefill", "decode") else "both"
        command = [sys.executable, "-m", "reference_engine", "--id", name, "--role", does, "--port", str(port)]
        command += ["--store", self.store.url, *self._extra]
        if self.way.inside and role == self.way.beside:
            command += [f"--remote=http://127.0.0.1:{other}" for _, _, other in self._of(self._remote)]
        return self._processes.start(name, *command, port=port)

    # what is seen

    async def counted(self) -> dict[str, float]:
        """The metrics of all fronts together, by name with labels."""
        found: dict[str, float] = {}
        for url in self._ours().values():
            for name, value in (await _metrics(url)).items():
                found[name] = found.get(name, 0.0) + value
        return found

    async def engine_metrics(self) -> list[dict[str, float]]:
        """Of each engine."""
        return [await _metrics(server.url) for server in self.engines]

    async def busy(self) -> dict[str, float]:
        """What is in flight and in use, where that is not nothing."""
        found: dict[str, float] = {}
        for server, seen in zip(self.engines, await self.engine_metrics(), strict=True):
            for name in ("requests_in_flight", "kv_blocks_in_use"):
                found[f"{server.name} {name}"] = seen[f"reference_engine:{name}"]
        seen = await self.counted()
        found |= {name: value for name, value in seen.items() if name.startswith("kvparams_proxy_in_flight")}
        for number, server in enumerate(self._pulling):
            found[f"puller {number}"] = (await _metrics(server.url))["kvparams_queue_running"]
        return {name: value for name, value in found.items() if value}

    def usage(self) -> Usage:
        """What the fronts hold now, together; in an engine's server that is the engine's, too."""
        each = [usage(server) for server in self.fronts.values()]
        return Usage(sum(one.rss_kib for one in each), sum(one.descriptors for one in each))


async def _metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
        text = (await client.get(f"{url}/metrics")).text
    samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def usage(server: Server) -> Usage:
    """What a process holds now."""
    process = Path(f"/proc/{server.process.pid}")
    status = process.joinpath("status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return Usage(rss_kib, len(os.listdir(process / "fd")))
