"""Tests a shutdown: the proxy announces it, loses no request within its grace period, and tells those that it cuts."""

import asyncio
import json
import os
import re
import signal
import sys
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvparams.instances import Role
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.server.app import create_app
from tests.support.proxy.fixtures import answer, instance
from tests.support.proxy.served import Served, serving
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until
from tests.system.proxy.config.test_signed import RESULT
from tests.system.proxy.test_legs import ANSWER

STREAM = {"model": "stub", "prompt": "x", "stream": True}


def raw(body: dict[str, Any], *, sent: int | None = None) -> bytes:
    text = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(text) + (text if sent is None else text[:sent])


class Asked:
    """A client that has asked for a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def begin(cls, served: Served, tokens: int) -> "Asked":
        """Asks, and waits for the first event."""
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(raw({**STREAM, "max_tokens": tokens}))
        async with asyncio.timeout(10):
            await reader.readuntil(b"data: ")
        return cls(reader, writer)

    async def rest(self) -> str:
        async with asyncio.timeout(30):
            text = (await self.reader.read()).decode()
        self.writer.close()
        return text


def logged(output: str) -> list[dict[str, Any]]:
    """Returns the lines about requests; the proxy's own log is among them."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line for line in lines if "outcome" in line]


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_streams_end_within_the_grace(stub: StubEngines, number: signal.Signals) -> None:
    """20 streams of three seconds; the listener has closed, `/health` says draining on a kept connection."""
    stub.delays.itl_ms = 30
    async with serving(stub) as served:
        streams = [await Asked.begin(served, 60) for _ in range(20)]
        served.process.send_signal(number)
        await until(lambda: refused(served.port))
        ends = await asyncio.gather(*(each.rest() for each in streams))
        assert all(text.count("data: [DONE]") == 1 and "error" not in text for text in ends)
        output = await served.output()
    assert served.process.returncode in (-signal.SIGTERM, 1, 130, -signal.SIGINT), output
    assert [line["outcome"] for line in logged(output)] == ["ok"] * 20


@pytest.mark.slow
async def test_health_says_draining_while_requests_are_still_taken(stub: StubEngines) -> None:
    stub.delays.itl_ms = 20
    async with serving(stub, "--drain-delay", "2") as served:
        served.process.terminate()

        async def is_draining() -> bool:
            return (await served.client.get("/health")).status_code == 503

        await until(is_draining)
        said = await served.client.get("/health")
        assert said.json() == {"status": "draining"}
        for _ in range(5):
            body = {"model": "stub", "prompt": "x", "max_tokens": 3}
            got = await served.client.post("/v1/completions", json=body)
            assert (got.status_code, got.headers["connection"]) == (200, "close")
        stream = await Asked.begin(served, 150)  # longer than what is left of the delay
        assert "data: [DONE]" in await stream.rest()
        with pytest.raises(httpx.ConnectError):
            await served.client.get("/health")
        output = await served.output()
    assert [line["outcome"] for line in logged(output)] == ["ok"] * 6


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
@pytest.mark.parametrize("how", ["the grace is over", "a second signal"])
async def test_what_is_cut_is_told_who_cut_it(stub: StubEngines, direct: bool, how: str) -> None:
    """A stream midway, a prompt that is computed, and a body and a head that have not arrived: each hears of it; whose
    head was there is logged."""
    stub.delays.itl_ms = 50
    grace = "1" if how == "the grace is over" else "60"
    async with serving(stub, "--grace", grace, direct=direct) as served:
        stream = await Asked.begin(served, 2000)
        stub.delays.prefill_ms = 30_000
        whole = await asyncio.open_connection("127.0.0.1", served.port)
        whole[1].write(raw({"model": "stub", "prompt": "x", "max_tokens": 2000}))
        half = await asyncio.open_connection("127.0.0.1", served.port)
        half[1].write(raw({"model": "stub", "prompt": "x", "max_tokens": 2}, sent=10))
        head = await asyncio.open_connection("127.0.0.1", served.port)
        head[1].write(raw({"model": "stub"})[:40])
        await until(lambda: sum(engine.counters.live for engine in stub.engines) >= 2)
        served.process.terminate()
        if how == "a second signal":
            await until(lambda: refused(served.port))  # it has begun to shut down
            served.process.terminate()
        text = await stream.rest()
        event = json.loads(re.findall(r"data: (\{.*\})", text)[-1])
        assert (event["error"]["code"], "shutting down" in event["error"]["message"]) == ("shutting_down", True)
        for reader, writer in (whole, half, head):
            async with asyncio.timeout(10):
                said = await reader.read()
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b'"shutting_down"' in said
            writer.close()
        output = await served.output()
        await until(lambda: not any(engine.counters.live for engine in stub.engines))
    lines = {(line["outcome"], line["error"]) for line in logged(output)}
    assert {("midway", "shutting_down"), ("failed", "shutting_down")} <= lines
    assert "decode engine" not in output, "no engine is blamed"
    assert "Traceback" not in output


@pytest.mark.slow
async def test_a_log_that_nobody_reads_stops_nobody(scripted: Any) -> None:
    """stderr is a pipe that is full: requests of which it should tell are answered all the same."""

    async def fails(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", status=b"500 Failed"))

    prefill, decode = await scripted(fails), await scripted(fails)
    command = (sys.executable, "-m", "kvparams", "proxy", "--prefill", prefill.url, "--decode", decode.url)
    flags = ("--port", "0", "--log-requests", "off", "--retries", "0", "--prefill-requests", "100")
    unread, full = os.pipe()
    process = await asyncio.create_subprocess_exec(*command, *flags, stdout=asyncio.subprocess.PIPE, stderr=full)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        url = line.split(": ")[1].split(",")[0]
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
            many = {"model": "stub", "prompt": "x", "max_tokens": 2}
            for _ in range(40):
                got = await asyncio.gather(*(client.post("/v1/completions", json=many) for _ in range(50)))
                assert {each.status_code for each in got} <= {502, 503}
            assert (await client.get("/health")).status_code in (200, 503)
        process.terminate()
        async with asyncio.timeout(10):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(unread)
        os.close(full)


async def test_kv_is_given_back_before_the_connections_close(scripted: Any) -> None:
    """A request is cut while decode fetches: the engine that is told to free its KV is heard out."""
    fetching = asyncio.Event()
    heard_out: list[bool] = []

    async def serve(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if prefill.heads[-1].startswith(b"POST /v1/kvparams "):
            await asyncio.sleep(0.1)  # what an engine may take
            heard_out.append(not reader.at_eof())
            writer.write(answer(b"{}"))
        else:
            asked = json.loads(body)["kv_transfer_params"]["kvparams"]
            result = RESULT | {name: asked[name] for name in ("request_id", "transfer")}
            writer.write(answer(json.dumps(ANSWER | {"kv_transfer_params": {"kvparams": result}}).encode()))

    async def fetches(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetching.set()
        await reader.read()

    prefill, decode = await scripted(serve), await scripted(fetches)
    engines = (instance(Role.PREFILL, prefill.url, "store-drop"), instance(Role.DECODE, decode.url, "store-drop"))
    app = create_app(Settings(engines, log_requests="off"))

    async with app.router.lifespan_context(app) as state:

        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": dict(state or {})}, receive, send)

        client = httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://proxy")
        asked = asyncio.create_task(client.post("/v1/completions", json={"model": "stub", "prompt": "x"}))
        async with asyncio.timeout(10):
            await fetching.wait()
    assert heard_out == [True]
    async with asyncio.timeout(10):
        assert (await asked).json()["error"]["code"] == "shutting_down"
    await client.aclose()
