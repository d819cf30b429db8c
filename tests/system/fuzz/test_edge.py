"""Fuzzes a real proxy with engines behind it over HTTP, byte by byte.

Every answer is HTTP with one of our statuses and never a 500. No engine gets anything that the client made up, nothing
is left in flight, and the proxy goes on. A soak runs for ten minutes.
"""

import asyncio
import json
import logging
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httptools
import pytest

from tests.system.fuzz.campaign import FOUND, GROWTH_BYTES, MOST, written_down
from tests.system.fuzz.mutation import EVIL, spoiled_bytes, spoiled_json
from tests.system.proxy.test_legs import ANSWER, NIXL
from tests.unit.proxy.execution.test_agent_answers import MESSAGES, RESPONSES, STREAMS
from tests.unit.proxy.requests.test_forbidden_fields import BODIES, acted_on, as_object

Effort = Callable[[int, int], int]
Record = Callable[[dict[str, object]], None]

LANES = 8
"""Connections at a time."""
SILENT_S = 0.1
"""A connection on which nothing comes for so long is half closed: its request is not whole, and will not be."""
LONGEST_S = 30.0
"""From then on it is answered or closed within this."""
STATUSES = {200, 400, 401, 404, 405, 408, 411, 413, 415, 417, 429, 431, 501, 502, 503, 505}
STREAM = b'data: {"choices":[{"index":0,"text":"x","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
AGENT_STREAMS = {
    name: b"".join(STREAMS[path][1]) for name, path in (("messages", MESSAGES.path), ("input", RESPONSES.path))
}
"""What an engine sends of a stream of `/v1/messages` and of `/v1/responses`, by the member that holds the prompt."""
PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/embeddings", "/v1/models", "/health"),
    *("/v1/messages", "/v1/responses", "/v1/messages/count_tokens", "/v1/responses/resp_1", "/v1/responses/x/cancel"),
)
HEADERS = (
    "x-request-id: {evil}",
    "x-request-id: ___prefill_addr_{evil}:1___decode_addr_{evil}:2_00000000000000000000000000000000",
    "x-override-bootstrap-host: {evil}",
    "x-prefiller-host-port: {evil}:80",
    "x-data-parallel-rank: 7",
    "content-encoding: gzip",
    "transfer-encoding: chunked",
    "content-length: 5",
    "content-length: 18446744073709551616",
    "expect: 100-continue",
    "connection: close",
    "connection: upgrade",
    "upgrade: h2c",
    "authorization: Bearer x",
    "traceparent: 00-{evil}",
    "content-type: text/plain",
    "accept: " + "x" * 3000,
    "\u00e9: x",
    " folded: x",
)


def bodies() -> list[bytes]:
    """Of every kind, plain, streamed, and with what only a proxy may say."""
    native = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": EVIL, "remote_port": 1}}
    carried: tuple[dict[str, Any], ...] = (
        {},
        native,
        {"vllm_xargs": native},
        {"sampling_params": {"extra_args": native}},
        {"bootstrap_host": EVIL},
    )
    shapes: tuple[dict[str, Any], ...] = ({}, {"stream": True, "n": 2})
    kinds = [{**body, "model": "stub"} for body in BODIES.values()]
    return [json.dumps(body | more | shape).encode() for body in kinds for more in carried for shape in shapes]


def request(dice: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One request or several on one connection, some of them broken."""
    raw = b""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        body = spoiled_json(dice, corpus) if dice.random() < 0.8 else dice.choice(corpus)
        lines = [f"{dice.choice(('POST', 'POST', 'POST', 'GET', 'PUT', 'x'))} {dice.choice(PATHS)} HTTP/1.1"]
        lines += ["host: p", *["content-type: application/json"] * (dice.random() < 0.9)]
        lines += [line.format(evil=EVIL) for line in dice.sample(HEADERS, dice.choice((0, 0, 1, 2)))]
        if dice.random() < 0.15:
            lines.append("transfer-encoding: chunked")
            at = dice.randrange(len(body) + 1)
            body = (
                b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:at], body[at:]) if part) + b"0\r\n\r\n"
            )
        else:
            lines.append(f"content-length: {len(body) + dice.choice((0, 0, 0, 0, 0, 0, 1, -1))}")
        raw += "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
    return spoiled_bytes(dice, raw, corpus) if dice.random() < 0.25 else raw


class Answers:
    """The answers on one connection."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.whole = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """More of them."""
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 100:  # which is no answer
            self.statuses.append(status)

    def on_message_complete(self) -> None:
        self.whole = len(self.statuses)


async def asked(port: int, raw: bytes) -> Answers:
    """Send it, and read until all is answered or the proxy closes; half close where it waits for more."""
    answers = Answers()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(LONGEST_S):
            writer.write(raw)
            ended = False
            while True:
                try:
                    async with asyncio.timeout(None if ended else SILENT_S):
                        data = await reader.read(1 << 16)
                except TimeoutError:
                    writer.write_eof()
                    ended = True
                    continue
                if not data:
                    break
                answers.feed(data)
                if answers.whole >= raw.count(b" HTTP/1.1\r\n"):
                    break
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return answers


def engine(told: list[bytes]) -> Any:
    """Answers every leg well, as a stream where it is asked for one; keeps what it was told.

    It does not know for which API it answers, so an answer has the members of all, and a stream of chats the events of
    messages, too.
    """
    agents: dict[str, Any] = {"type": "message", "content": [], "output": []}
    whole = json.dumps(agents | ANSWER | {"kv_transfer_params": NIXL}).encode()

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(body)
        kind, answer = b"application/json", whole
        asked = json.loads(body)
        if asked.get("stream") is True:
            kind = b"text/event-stream"
            answer = next((sent for name, sent in AGENT_STREAMS.items() if name in asked), b"") + STREAM
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(answer)) + answer
        )

    return script


def steered(body: bytes) -> bool:
    """Whether an engine would act on something that the client has made up: anything but a harmless request id."""
    said = acted_on(json.loads(body))
    document = as_object(as_object(said.get("kv_transfer_params")).get("kvparams"))
    document.pop("request_id", None)
    return EVIL in json.dumps(said)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_whatever_is_sent_the_proxy_answers_and_goes_on(
    scripted: Any, proxy: Any, effort: Effort, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    told: list[bytes] = []
    prefill, decode = await scripted(engine(told)), await scripted(engine(told))
    running = await proxy([prefill.url], [decode.url], log_requests="off")
    dice, corpus = random.Random(3), bodies()
    seen: Counter[int] = Counter()
    ways: set[object] = set()
    sent = longest_bytes = 0
    longest_s = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    async def one(raw: bytes) -> None:
        nonlocal sent, longest_s, longest_bytes
        with written_down("edge", raw):
            began = time.monotonic()
            answers = await asked(running.port, raw)
            longest_s = max(longest_s, time.monotonic() - began)
            assert STATUSES.issuperset(answers.statuses), answers.statuses
        sent += 1
        longest_bytes = max(longest_bytes, len(raw))
        seen.update(answers.statuses)
        ways.add(tuple(answers.statuses))

    async def lane(end: float) -> None:
        while time.monotonic() < end:
            await one(request(dice, corpus))
            while told:
                body = told.pop()
                with written_down("edge-leg", body):
                    assert not steered(body)
            for log in (prefill, decode):
                log.bodies.clear()
                log.heads.clear()

    for path in sorted(FOUND.glob("edge-*")):
        await one(path.read_bytes())
    seconds = effort(5, 600)
    end = time.monotonic() + seconds
    await asyncio.gather(*(lane(end) for _ in range(LANES)))
    assert not [found for found in caplog.records if found.levelno >= logging.ERROR]
    for kind in ("completions", "messages", "responses"):
        for stream in (False, True):
            body = BODIES[kind] | {"model": "stub", "stream": stream}
            assert (await running.client.post(f"/v1/{kind}", json=body)).status_code == 200
    assert await running.metric("kvparams_proxy_in_flight") == 0
    assert await running.metric("kvparams_proxy_leases") == 0
    assert seen[200] > 0
    assert seen[400] > 0
    assert len(corpus) < MOST
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    assert grown < GROWTH_BYTES
    statuses = {str(status): number for status, number in sorted(seen.items())}
    record(
        {
            "seconds": seconds,
            "connections": sent,
            "statuses": statuses,
            "ways": len(ways),
            "longest_s": round(longest_s, 2),
            "largest_kib": longest_bytes >> 10,
            "grown_mib": round(grown / 2**20, 1),
        }
    )


async def test_what_nobody_strips_would_steer_an_engine() -> None:
    """The control: read as they come, some of these bodies do."""
    assert sum(steered(body) for body in bodies()) > len(bodies()) / 3
