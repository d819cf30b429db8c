"""Runs `kvparams proxy` as a process in front of the stub engines, and measures what it holds."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from demo.client import NO_CERTIFICATES
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

__all__ = ["Served", "serving"]


@dataclass
class Served:
    """The running process."""

    process: asyncio.subprocess.Process
    port: int
    client: httpx.AsyncClient

    def rss_mib(self) -> float:
        """What it holds of memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def descriptors(self) -> int:
        """How many files it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def metric(self, name: str) -> float:
        """Returns the sum of the series whose line in /metrics begins so."""
        text = (await self.client.get("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    async def output(self) -> str:
        """Waits for its end; what it wrote."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            text = (await self.process.stdout.read()).decode()
            await self.process.wait()
        return text


@asynccontextmanager
async def serving(
    stub: StubEngines, *flags: str, files: int | None = None, direct: bool = True
) -> AsyncGenerator[Served]:
    """Starts it; `files` is how many it may have open. Without `direct`, every answer goes through ASGI."""
    engines = [f"--{engine.role}={engine.url}" for engine in stub.engines]
    module = ("kvparams", "proxy") if direct else ("tests.support.proxy.plain_asgi",)
    command: Sequence[str] = (sys.executable, "-m", *module, *engines, "--port", "0", "--startup-check", "off", *flags)
    if files is not None:
        command = ("prlimit", f"--nofile={files}:{files}", *command)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while not (found := re.search(rb"http://127\.0\.0\.1:(\d+), engines", await process.stdout.readline())):
                assert process.returncode is None
        port = int(found[1])
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=NO_CERTIFICATES) as client:

            async def is_healthy() -> bool:
                return (await client.get("/health")).status_code == 200

            await until(is_healthy, 30.0, pause_s=0.02)
            yield Served(process, port, client)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        if process.stdout is not None:
            async with asyncio.timeout(10):
                await process.stdout.read()  # its workers end, too
