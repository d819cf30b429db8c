"""Tests that the traffic of the real proxy and real engines matches the spec's OpenAPI fragment."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from demo.processes import Processes, Server, free_port
from kvparams import KVTransferParams, Transfer, write
from tests.support.kvparams.openapi import faults, reading

EVENTS = "text/event-stream"


@dataclass
class Relay:
    """Hands on what the proxy and one engine say, and keeps it, by connection and direction."""

    engine: Server
    said: list[tuple[bytearray, bytearray]] = field(default_factory=list[tuple[bytearray, bytearray]])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = httpx.URL(self.engine.url).port
        behind = await asyncio.open_connection("127.0.0.1", port)
        asked, answered = bytearray(), bytearray()
        self.said.append((asked, answered))
        with suppress(ConnectionError):
            await asyncio.gather(_copy(reader, behind[1], asked), _copy(behind[0], writer, answered))

    def exchanges(self) -> Iterator[tuple["Message", "Message"]]:
        """Each request, and its answer."""
        for asked, answered in self.said:
            yield from zip(messages(asked), messages(answered), strict=False)  # the last may be on its way


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    try:
        while part := await reader.read(1 << 16):
            kept += part
            writer.write(part)
            await writer.drain()
    finally:
        writer.close()


@dataclass
class Message:
    """An HTTP/1.1 message."""

    first: list[str]
    headers: dict[str, str]
    body: bytes


def messages(raw: bytearray) -> Iterator[Message]:
    """The messages of one direction of a connection."""
    rest = bytes(raw)
    while b"\r\n\r\n" in rest:
        head, rest = rest.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines[1:])}
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(rest.split(b"\r\n", 1)[0], 16):
                start = rest.index(b"\r\n") + 2
                body, rest = body + rest[start : start + size], rest[start + size + 2 :]
            rest = rest[rest.index(b"\r\n") + 4 :]
        else:
            length = int(headers.get("content-length", "0"))
            body, rest = rest[:length], rest[length:]
        yield Message(lines[0].split(" "), headers, body)


def events(body: bytes) -> list[Any]:
    """The events of a stream; the last one is the end."""
    *found, end = (line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line)
    assert end == b"[DONE]"
    return [json.loads(one) for one in found]


def check_answer(path: str, method: str, answer: Message) -> None:
    """One answer of an engine, by what the fragment says of this operation."""
    status, media = answer.first[1], answer.headers["content-type"].partition(";")[0]
    if media == EVENTS:
        part = reading(path, method, status, EVENTS).removesuffix("/schema") + "/x-event"
        for event in events(answer.body):
            assert faults(part, event) == []
    else:
        assert faults(reading(path, method, status), json.loads(answer.body)) == []


@asynccontextmanager
async def relayed(processes: Processes, prefill: Server, decode: Server) -> AsyncGenerator[tuple[str, list[Relay]]]:
    """The URL of a proxy whose engines are reached through relays, and these."""
    relays = [Relay(prefill), Relay(decode)]
    ports = [free_port() for _ in relays]
    servers = [
        await asyncio.start_server(relay.serve, "127.0.0.1", port) for relay, port in zip(relays, ports, strict=True)
    ]
    reached = [replace(relay.engine, url=f"http://127.0.0.1:{port}") for relay, port in zip(relays, ports, strict=True)]
    proxy = processes.proxy([reached[0]], [reached[1]])
    try:
        await asyncio.to_thread(processes.wait_ready, proxy)
        yield proxy.url, relays
    finally:
        proxy.process.terminate()
        await asyncio.to_thread(proxy.process.wait, 20)
        for server in servers:
            server.close()


async def test_legs_and_answers_are_those_of_the_fragment(
    client: httpx.AsyncClient, processes: Processes, servers: dict[str, Server]
) -> None:
    """And the client's answers are the same without `kv_transfer_params`."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [*range(1, 70)], "max_tokens": 3, "cache_salt": "tenant-7"}),
        ("/v1/completions", {"prompt": "stream", "max_tokens": 3, "stream": True, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "chat"}], "max_tokens": 3}),
        ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}),
    ]
    async with relayed(processes, servers["prefill"], servers["decode"]) as (url, relays):
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
        for path, body in asked:
            answer = await client.post(url + path, json={"model": model, **body}, headers={"x-request-id": "r-1"})
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "r-1"), answer.text
            media = answer.headers["content-type"].partition(";")[0]
            told = events(answer.content) if media == EVENTS else [answer.json()]
            check_answer(path, "post", Message(["", "200"], dict(answer.headers), answer.content))
            assert all(one.get("kv_transfer_params") is None for one in told)
    seen: list[tuple[str, str]] = []
    for relay in relays:
        for request, answer in relay.exchanges():
            method, path = request.first[0].lower(), request.first[1]
            if path == "/metrics":  # how many requests wait there; the specification leaves that to engines
                continue
            if method == "post":
                sent = json.loads(request.body)
                assert faults(reading(path, method), sent) == []
                assert request.headers["x-request-id"] == answer.headers["x-request-id"] == "r-1"
                seen.append((path, sent["kv_transfer_params"]["kvparams"]["phase"]))
            check_answer(path, method, answer)
    legs = [(path, phase) for path, _ in asked for phase in ("prefill", "decode")]
    assert sorted(seen) == sorted(legs)


async def test_control_and_refusals_are_those_of_the_fragment(client: httpx.AsyncClient, prefill: str) -> None:
    release = KVTransferParams(
        request_id="r-2", transfer=Transfer(id="t-2", attempt=1), phase="release", mode="store", version="1.0"
    )
    body = {"kv_transfer_params": write(release)}
    assert faults(reading("/v1/kvparams", "post"), body) == []
    done = await client.post(f"{prefill}/v1/kvparams", json=body)
    assert (done.status_code, faults(reading("/v1/kvparams", "post", "200"), done.json())) == (200, [])
    model = (await client.get(f"{prefill}/v1/models")).json()["data"][0]["id"]
    broken = {"model": model, "prompt": "p", "max_tokens": 1, "kv_transfer_params": {"kvparams": {"version": "1.0"}}}
    assert faults(reading("/v1/completions", "post"), broken)
    refused = await client.post(f"{prefill}/v1/completions", json=broken)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert faults(reading("/v1/completions", "post", "400"), refused.json()) == []
