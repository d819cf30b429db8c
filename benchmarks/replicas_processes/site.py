"""Starts the processes of one run, a Valkey server and `kvparams proxy` replicas, before stub engines."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from benchmarks.replay.world import World
from benchmarks.replicas_processes.engines import ModelEngine, PrefillLog
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.processes import Processes, StartError, free_ports, http_get
from tests.support.stub_engine import Delays, StubEngines

__all__ = ["Site", "open_plain_site", "open_site"]

_KVPARAMS: Final = str(Path(sys.executable).with_name("kvparams"))
_DECODE_ENGINES: Final = 2
_INTERVAL_MS: Final = 20.0
"""Between the tokens of an answer."""
_MEET_S: Final = 15.0
_POLL_S: Final = 0.1


class Site:
    """The engines, the Valkey server and the replicas of one run."""

    def __init__(self, stub: StubEngines, processes: Processes, valkey: ValkeyServer, folder: Path) -> None:
        self.valkey = valkey
        self.delays = stub.delays
        self.ports: dict[int, int] = {}
        """Of the replicas that run."""
        self._pids: dict[int, int] = {}
        self._stub = stub
        self._processes = processes
        self._keys = folder / "keys.json"
        create_keyring(self._keys, SigningKeyring([SigningKey.new(int(time.time()) - 60)]))

    @property
    def legs(self) -> int:
        """The legs that run on all engines now, as the engines count."""
        return sum(engine.counters.live for engine in self._stub.engines)

    async def start_replica(self, number: int, *, is_sharing: bool) -> int:
        """Starts a proxy, and returns its port once it is healthy. Raises StartError."""
        (port,) = free_ports(1)
        command = [_KVPARAMS, "proxy", "--port", str(port), "--connector", "nixl", "--policy", "cache_aware"]
        command += ["--log-requests", "off"]
        for engine in self._stub.engines:
            command += [f"--{engine.role}", engine.url]
        if is_sharing:
            command += ["--share", self.valkey.url + "?prefix=bench", "--share-keys", str(self._keys)]
        ready = [f"http://127.0.0.1:{port}/health"]
        self._pids[number] = await asyncio.to_thread(
            self._processes.start, f"proxy-{number}", command, ready=ready, ready_s=60.0
        )
        self.ports[number] = port
        return port

    async def meet(self) -> None:
        """Waits until all replicas know each other. Raises StartError."""
        give_up_s = time.monotonic() + _MEET_S
        while await self.siblings_known() != [len(self.ports) - 1] * len(self.ports):
            if time.monotonic() > give_up_s:
                raise StartError("the proxies do not hear each other: does valkey-server run?")
            await asyncio.sleep(_POLL_S)

    async def siblings_known(self) -> list[int]:
        """Returns how many others each replica hears; -1 where it cannot reach the server."""
        urls = [f"http://127.0.0.1:{port}/health" for port in self.ports.values()]
        answers = await asyncio.gather(*(asyncio.to_thread(http_get, url) for url in urls))
        others = [json.loads(text)["other_proxies"] for _, text in answers]
        return [each["alive"] if each["reachable"] else -1 for each in others]

    def kill(self, number: int) -> None:
        """Ends a replica with SIGKILL."""
        os.kill(self._pids.pop(number), signal.SIGKILL)
        del self.ports[number]

    def memory_kib(self, number: int) -> int:
        """Returns the resident memory of a replica."""
        (kib,) = re.findall(
            r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{self._pids[number]}/status").read_text(), re.MULTILINE
        )
        return int(kib)

    async def load_seen(self, number: int) -> tuple[float, int]:
        """Returns the legs that a replica counts on all engines, its own and those of others, and its siblings."""
        names = ("in_flight", "exchange_in_flight", "exchange_siblings")
        own, others, siblings = await self.metrics(number, *names)
        return own + others, int(siblings)

    async def metrics(self, number: int, *names: str) -> list[float]:
        """Returns metrics of a replica, each the sum of all samples, by the ends of their names."""
        _, page = await asyncio.to_thread(http_get, f"http://127.0.0.1:{self.ports[number]}/metrics")
        text = page.decode()
        found = [re.findall(rf"^kvparams_proxy_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for name in names]
        return [sum(map(float, values)) for values in found]


@asynccontextmanager
async def open_plain_site(folder: Path) -> AsyncGenerator[Site]:
    """Starts two engines of each role that answer at once, and Valkey, and ends everything with the block."""
    stub = await StubEngines.start(prefill=[0, 0], decode=[0, 0], delays=Delays())
    async with stub:
        with ValkeyServer(folder / "valkey") as valkey, Processes(folder) as processes:
            yield Site(stub, processes, valkey, folder)


@asynccontextmanager
async def open_site(world: World, faster: float, folder: Path) -> AsyncGenerator[tuple[Site, PrefillLog]]:
    """Starts engines and Valkey, and ends everything with the block."""
    log = PrefillLog()
    delays = Delays(itl_ms=_INTERVAL_MS)
    stub = await StubEngines.start(prefill=[0] * world.workers, decode=[0] * _DECODE_ENGINES, delays=delays)
    async with stub:
        for number, engine in enumerate(stub.engines):
            if engine.role == "prefill":
                engine.work = ModelEngine(number, world.blocks, world.cost, faster, log)
        with ValkeyServer(folder / "valkey") as valkey, Processes(folder) as processes:
            yield Site(stub, processes, valkey, folder), log
