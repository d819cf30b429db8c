"""Tests a replica that is killed while it streams: its clients ask another replica again, by the same request ids.

The engines are real processes that compute, behind relays that record the legs that they are sent.
"""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from demo.client import new_client
from demo.processes import Processes, Server, free_port
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import until

TOKENS = 40
PATHS = ("/v1/completions", "/v1/chat/completions")


class Answer(NamedTuple):
    """A client's view of a stream."""

    text: str
    is_whole: bool
    request_id: str


class Legs:
    """The transfers that engines were told of, by phase."""

    def __init__(self) -> None:
        self.seen = Counter[tuple[str, str]]()

    def record(self, raw: bytes) -> bool:
        """Records the leg in a request, if there is one. Returns whether the request is complete."""
        head, found, body = raw.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if not found or len(body) < (0 if length is None else int(length[1])):
            return False
        if body:
            document = json.loads(body)["kv_transfer_params"]["kvparams"]
            self.seen[document["phase"], document["transfer"]["id"]] += 1
        return True

    def ids(self, phase: str) -> set[str]:
        return {id for seen, id in self.seen if seen == phase}


@pytest.fixture
def share(tmp_path: Path) -> Iterator[str]:
    """Where the replicas meet."""
    with ValkeyServer(tmp_path / "valkey") as server:
        yield server.url + "?prefix=site"


@asynccontextmanager
async def recorded(server: Server, legs: Legs) -> AsyncGenerator[str]:
    """A URL that leads to an engine; `legs` hears every request."""
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, asks: bool) -> None:
        kept = b""
        with suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                kept += piece if asks else b""
                if kept and legs.record(kept):
                    kept = b""
                writer.write(piece)
        writer.transport.abort()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        await asyncio.gather(carry(reader, back, asks=True), carry(there, writer, asks=False))

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(relay(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Site(NamedTuple):
    """Two replicas in front of the same engines, and an engine alone that says what is right."""

    single: Server
    engines: list[Server]
    replicas: list[Server]
    legs: Legs


@asynccontextmanager
async def site(folder: Path, share: str) -> AsyncGenerator[Site]:
    """Starts everything; at the end nothing of it is left."""
    keys, legs, store = folder / "keys.json", Legs(), f"file://{folder / 'kv'}?size=64MiB"
    create_keyring(keys, SigningKeyring([SigningKey.new(int(time.time()) - 60)]))
    with Processes(folder) as processes:
        single = processes.engine("single")
        slow = ("--step-ms", "20")
        engines = [processes.engine("p0", "prefill", store)]
        engines += [processes.engine(f"d{number}", "decode", store, *slow) for number in range(2)]
        await asyncio.to_thread(processes.wait_ready, single, *engines)
        async with AsyncExitStack() as relays:
            urls = [await relays.enter_async_context(recorded(engine, legs)) for engine in engines]
            command = [sys.executable, "-m", "kvparams", "proxy", "--connector", "store", "--continuation"]
            command += ["--startup-check", "off"]
            command += ["--prefill", urls[0], "--decode", urls[1], "--decode", urls[2]]
            command += ["--share", share, "--share-keys", str(keys)]
            ports = [free_port() for _ in range(2)]
            replicas = [processes.start("proxy", *command, "--port", str(port), port=port) for port in ports]
            await asyncio.to_thread(processes.wait_ready, *replicas)
            yield Site(single, engines, replicas, legs)
            await asyncio.to_thread(processes.stop, *replicas)


def body(number: int, path: str) -> dict[str, Any]:
    prompt = f"Request number {number} tells a story of its own. " * 5
    asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    if path == PATHS[0]:
        return {"prompt": prompt, **asked}
    return {"messages": [{"role": "user", "content": prompt}], **asked}


async def ask(
    client: httpx.AsyncClient, server: Server, number: int, begun: Callable[[], object] = lambda: None
) -> Answer:
    """Asks for a stream; `begun` is called when some of its text is there."""
    path = PATHS[number % 2]
    text, whole, pieces, id = "", False, 0, ""
    headers = {"x-request-id": f"client-{number}"}
    with suppress(httpx.TransportError):
        async with client.stream("POST", server.url + path, json=body(number, path), headers=headers) as got:
            assert got.status_code == 200, (await got.aread()).decode()
            id = got.headers.get("x-request-id", "")
            async for line in got.aiter_lines():
                data = line.removeprefix("data: ")
                whole = whole or data == "[DONE]"
                if not data or whole:
                    continue
                (choice,) = json.loads(data)["choices"]
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                pieces += 1
                if pieces == 3:
                    begun()
    return Answer(text, whole, id)


async def metrics(client: httpx.AsyncClient, server: Server, *names: str) -> float:
    """The sum of these metrics."""
    lines = (await client.get(server.url + "/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


async def settle(client: httpx.AsyncClient, found: Site, replica: Server) -> None:
    """Waits until no engine computes or keeps anything, and the replica has nothing in flight."""

    async def is_idle() -> bool:
        busy = [
            await metrics(client, each, "reference_engine:requests_in_flight", "reference_engine:kv_blocks_in_use")
            for each in found.engines
        ]
        return not any(busy) and not await metrics(client, replica, "kvparams_proxy_in_flight")

    await until(is_idle, 20.0, pause_s=0.05)


@pytest.mark.parametrize("retry", ["after the kill", "before the kill"])
async def test_a_client_of_a_killed_replica_gets_its_whole_answer_from_another(
    tmp_path: Path, share: str, retry: str
) -> None:
    numbers = range(8)
    async with site(tmp_path, share) as found, new_client() as client:
        first, second = found.replicas
        right = [await ask(client, found.single, number) for number in numbers]
        assert all(each.is_whole for each in right)
        assert len({each.text for each in right}) == len(right)
        running = asyncio.Semaphore(0)
        streams = [
            asyncio.create_task(ask(client, found.replicas[number % 4 // 2], number, running.release))
            for number in numbers
        ]
        async with asyncio.timeout(30):
            for _ in numbers:
                await running.acquire()
        lost = [number for number in numbers if number % 4 < 2]
        retries: list[asyncio.Task[Answer]] = []
        if retry == "before the kill":  # the client has lost patience, and its first request still runs
            retries = [asyncio.create_task(ask(client, second, number, running.release)) for number in lost]
            async with asyncio.timeout(30):
                for _ in lost:
                    await running.acquire()
        assert not any(each.done() for each in streams[:2])
        os.kill(first.process.pid, signal.SIGKILL)
        if not retries:
            retries = [asyncio.create_task(ask(client, second, number)) for number in lost]
        ended, again = await asyncio.gather(*streams), await asyncio.gather(*retries)
        for number, (got, want) in enumerate(zip(ended, right, strict=True)):
            if number in lost:  # the control: it was killed in the middle
                assert not got.is_whole
                assert want.text.startswith(got.text)
                assert 0 < len(got.text) < len(want.text)
            else:
                assert (got.text, got.is_whole) == (want.text, True)
        assert [(each.text, each.is_whole) for each in again] == [(right[number].text, True) for number in lost]
        assert [each.request_id for each in again] == [f"client-{number}" for number in lost]
        await settle(client, found, second)
    legs = len(numbers) + len(lost)
    assert len(found.legs.ids("prefill")) == len(found.legs.ids("decode")) == legs
    assert set(found.legs.seen.values()) == {1}  # no transfer was claimed twice
