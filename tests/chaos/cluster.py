"""A proxy and its engines as real processes: hit, watched, and brought back.

The one rule: an engine that was hit is itself again by its name, its port and its store, and by nothing else.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from demo.processes import Processes, Server, free_port

from .backings import Backing
from .faults import Fault

__all__ = ["Cluster", "Hit", "Usage", "usage"]

ROLES: Final = ("prefill", "decode")
_POLL_S: Final = 0.05
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
        engines: int,
        extra: Sequence[str],
        flags: Sequence[str],
        connector: str,
    ) -> None:
        self._processes = processes
        self._extra = tuple(extra)
        self.store = store
        self.hits: list[Hit] = []
        self._engines: dict[str, _Engine] = {}
        for role in ROLES:
            for number in range(engines):
                name, port = f"{role}-{number}", free_port()
                self._engines[name] = _Engine(name, role, port, self._start(name, role, port))
        command = [sys.executable, "-m", "kvparams", "proxy", "--connector", connector, "--expose-route"]
        for engine in self._engines.values():
            command += [f"--{engine.role}", f"{engine.name}=http://127.0.0.1:{engine.port}"]
        self.port = free_port()
        self.proxy = processes.start("proxy", *command, "--port", str(self.port), *flags, port=self.port)

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        logs: Path,
        store: Backing,
        *,
        engines: int,
        extra: Sequence[str] = (),
        flags: Sequence[str] = (),
        connector: str = "store",
    ) -> "AsyncGenerator[Cluster]":
        """Start `engines` of each role and the proxy, all ready; at the end nothing of them is left.

        Args:
            logs: a directory for what they write.
            store: what the engines share.
            engines: of each role.
            extra: arguments of every engine.
            flags: arguments of the proxy.
            connector: how the proxy speaks to the engines.
        """
        with Processes(logs) as processes:
            cluster = cls(processes, store, engines, extra, flags, connector)
            try:
                servers = [engine.server for engine in cluster._engines.values()]
                await asyncio.to_thread(processes.wait_ready, *servers, cluster.proxy)
                yield cluster
            finally:
                cluster.wake_all()

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
            while process.poll() is None:  # noqa: ASYNC110  a process says nothing when it has ended
                await asyncio.sleep(_POLL_S)
            engine.server = self._start(engine.name, engine.role, engine.port)
        await self._back(engine)
        self.hits.append(Hit(engine.name, fault.kind, from_s, time.monotonic()))

    async def _back(self, engine: _Engine) -> None:
        async with asyncio.timeout(_BACK_S), httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
            while True:
                with suppress(httpx.HTTPError):
                    if (await client.get(f"{engine.server.url}/health")).status_code == 200:
                        return
                assert engine.server.process.poll() is None, engine.server.tail()
                await asyncio.sleep(_POLL_S)

    def _start(self, name: str, role: str, port: int) -> Server:
        command = [sys.executable, "-m", "reference_engine", "--id", name, "--role", role, "--port", str(port)]
        command += ["--store", self.store.url, *self._extra]
        return self._processes.start(name, *command, port=port)

    # what is seen

    async def gauges(self, server: Server) -> dict[str, float]:
        """Its metrics, by name with labels."""
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            text = (await client.get(f"{server.url}/metrics")).text
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def busy(self) -> dict[str, float]:
        """What is in flight and in use, where that is not nothing."""
        found: dict[str, float] = {}
        for server in self.engines:
            seen = await self.gauges(server)
            for name in ("requests_in_flight", "kv_blocks_in_use"):
                found[f"{server.name} {name}"] = seen[f"reference_engine:{name}"]
        seen = await self.gauges(self.proxy)
        found |= {name: value for name, value in seen.items() if name.startswith("kvparams_proxy_in_flight")}
        return {name: value for name, value in found.items() if value}


def usage(server: Server) -> Usage:
    """What a process holds now."""
    process = Path(f"/proc/{server.process.pid}")
    status = process.joinpath("status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return Usage(rss_kib, len(os.listdir(process / "fd")))
