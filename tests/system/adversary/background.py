"""Runs normal traffic in a process: two stub engines with a model of their own, and a client at a steady pace.

Its stdin has the proxy's port on the first line, and an empty line to end it. Its stdout has the engines' URLs, then
the delays.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from demo.client import NO_CERTIFICATES
from tests.support.stub_engine import StubEngines

__all__ = ["Background", "background"]

PER_S = 20
BODY = {"model": "calm", "prompt": "x", "max_tokens": 4}


@dataclass
class Background:
    """The running process."""

    process: asyncio.subprocess.Process
    flags: tuple[str, ...]
    """Name its engines, for the proxy."""

    async def begin(self, port: int) -> None:
        """Starts to ask the proxy on this port."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % port)
        await self.process.stdin.drain()

    async def end(self) -> list[float]:
        """Stops asking; how long each request took, in seconds.

        Raises:
            AssertionError: one was not answered 200.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        async with asyncio.timeout(30):
            told = json.loads(await self.process.stdout.readline())
        assert told["bad"] == [], told["bad"][:10]
        return told["delays"]


@asynccontextmanager
async def background() -> AsyncGenerator[Background]:
    """Starts it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.system.adversary.background", stdin=pipe, stdout=pipe, limit=1 << 22
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            prefill, decode = (await process.stdout.readline()).decode().split()
        yield Background(process, (f"--prefill=calm-prefill={prefill}", f"--decode=calm-decode={decode}"))
    finally:
        process.kill()
        await process.wait()


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _ask(port: int, over: asyncio.Event) -> dict[str, list[float] | list[str]]:
    delays: list[float] = []
    bad: list[str] = []
    asked: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(timeout=20, trust_env=False, verify=NO_CERTIFICATES) as client:

        async def one() -> None:
            began = time.perf_counter()
            try:
                got = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY)
                if got.status_code != 200:
                    bad.append(got.text[:200])
            except httpx.HTTPError as error:
                bad.append(repr(error))
            delays.append(time.perf_counter() - began)

        while not over.is_set():
            task = asyncio.create_task(one())
            asked.add(task)
            task.add_done_callback(asked.discard)
            await asyncio.sleep(1 / PER_S)
        await asyncio.gather(*asked)
    return {"delays": delays, "bad": bad}


async def _serve() -> None:
    async with await StubEngines.start(prefill=[0], decode=[0], model="calm") as stub:
        sys.stdout.write(" ".join(engine.url for engine in stub.engines) + "\n")
        sys.stdout.flush()
        lines = await _lines()
        while port := (await lines.readline()).strip():
            over = asyncio.Event()
            asking = asyncio.create_task(_ask(int(port), over))
            await lines.readline()
            over.set()
            sys.stdout.write(json.dumps(await asking) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve())
