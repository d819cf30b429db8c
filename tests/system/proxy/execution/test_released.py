"""Tests that a request's objects are freed when it ends, without the garbage collector."""

import asyncio
import gc
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest

from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.execution.executor import Execution
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.requests.body import RequestBody
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.server.asgi_exchange import ASGIExchange
from kvparams_proxy.server.direct_path import DirectDownstream
from kvparams_proxy.server.http_protocol import HTTPProtocol
from kvparams_proxy.upstream.connection import UpstreamConnection
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.exchange import UpstreamExchange
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError, UpstreamLimits
from tests.support.waiting import until
from tests.system.proxy.upstream.test_broken_engines import BODY, DONE, EVENT, GOOD, SSE, chunk, sending, whole

KINDS = (Execution, PlanContext, ParsedRequest, StreamRelay, ResponseCollector, UpstreamExchange)
ERROR = whole(b"no").replace(b"200 OK", b"500 X")
REFUSAL = whole(b'{"error":{"message":"no","code":400}}').replace(b"200 OK", b"400 X")


async def silent(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "well": dict,
    "prefill fails": lambda: {"prefill": sending(ERROR)},
    "prefill refuses": lambda: {"prefill": sending(REFUSAL)},
    "prefill says no JSON": lambda: {"prefill": sending(whole(b"no"))},
    "prefill says nothing of KV": lambda: {"prefill": sending(whole(b'{"choices":[{"index":0,"text":"x"}]}'))},
    "prefill closes": lambda: {"prefill": sending(close=True)},
    "prefill is no HTTP": lambda: {"prefill": sending(b"no\r\n\r\n")},
    "prefill is silent": lambda: {"prefill": silent},
    "decode fails": lambda: {"decode": sending(ERROR)},
    "decode refuses": lambda: {"decode": sending(REFUSAL)},
    "decode closes": lambda: {"decode": sending(close=True)},
    "decode is no HTTP": lambda: {"decode": sending(b"no\r\n\r\n")},
    "decode is silent": lambda: {"decode": silent},
    "a stream breaks": lambda: {"decode": sending(SSE + chunk(EVENT), close=True)},
    "a stream ends early": lambda: {"decode": sending(SSE + chunk(EVENT) + b"0\r\n\r\n")},
    "a stream has an error": lambda: {"decode": sending(SSE + chunk(b'data: {"error":{"message":"no"}}\n\n'))},
    "a stream is garbage": lambda: {"decode": sending(SSE + chunk(EVENT) + b"zz\r\n")},
    "a stream goes on": lambda: {"decode": sending(SSE + chunk(EVENT + DONE + EVENT) + b"0\r\n\r\n")},
    "a stream does not end": lambda: {"decode": sending(SSE + chunk(EVENT + DONE))},
}


@pytest.fixture
def collector_off() -> Generator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(kinds: tuple[type, ...] = KINDS) -> Counter[str]:
    """What there is of requests, by type, as far as the collector knows of it."""
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))


async def at_rest(kinds: tuple[type, ...] = KINDS) -> Counter[str]:
    """What there is while the proxy asks its engines nothing: probes and readings of metrics are exchanges, too."""
    await until(lambda: not alive())
    return alive(kinds)


async def outlived(scripted: Any, proxy: Any, name: str, stream: bool, **settings: Any) -> None:
    """Sends three requests to engines that behave in one of the `WAYS`; nothing of them is left."""
    good = sending(SSE + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n") if stream else sending(whole(GOOD))
    scripts = {"prefill": sending(whole(GOOD)), "decode": good, **WAYS[name]()}
    engines = {role: await scripted(script) for role, script in scripts.items()}
    limits = {"prefill_timeout_s": 0.3, "decode_timeout_s": 0.3}
    urls = [engines["prefill"].url], [engines["decode"].url]
    running = await proxy(*urls, probe_interval_s=60.0, **limits, **settings)
    before = await at_rest()
    for _ in range(3):
        got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
        assert got.status_code == 200 or name != "well", got.text
    await until(lambda: _gone(before))
    assert alive() == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WAYS)
async def test_nothing_of_a_request_outlives_it(
    scripted: Any, proxy: Any, collector_off: None, name: str, stream: bool
) -> None:
    await outlived(scripted, proxy, name, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "name", ["well", "prefill fails", "prefill is silent", "decode fails", "decode is silent", "a stream breaks"]
)
async def test_nothing_of_two_legs_at_once_outlives_them(
    scripted: Any, proxy: Any, collector_off: None, name: str, stream: bool
) -> None:
    mode = parse_mode_flag("concurrent_legs")
    await outlived(scripted, proxy, name, stream, dialect="store-meet", modes=(mode,))


@pytest.mark.parametrize("name", ["prefill", "decode", "stream"])
@pytest.mark.parametrize("how", ["the client leaves", "the request is overdue"])
async def test_nothing_of_a_request_outlives_it_where_it_is_cut_off(
    scripted: Any, proxy: Any, collector_off: None, name: str, how: str
) -> None:
    begun = asyncio.Event()

    async def streaming(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(EVENT))
        begun.set()
        await reader.read()

    async def waiting(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await reader.read()

    scripts = {"prefill": sending(whole(GOOD)), "decode": sending(whole(GOOD))}
    scripts["prefill" if name == "prefill" else "decode"] = streaming if name == "stream" else waiting
    engines = {role: await scripted(script) for role, script in scripts.items()}
    limit = {} if how == "the client leaves" else {"request_timeout_s": 0.3}
    running = await proxy([engines["prefill"].url], [engines["decode"].url], probe_interval_s=60.0, **limit)
    before = await at_rest()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    body = json.dumps(BODY | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await asyncio.wait_for(begun.wait(), 10)
    if how == "the client leaves":
        writer.transport.abort()
    else:
        await asyncio.wait_for(reader.readuntil(b"request_timeout"), 10)
        writer.close()
    await until(lambda: _gone(before))
    assert alive() == before


@pytest.mark.parametrize("turns", [0, 1], ids=["in the same turn", "while it is connected"])
async def test_nothing_of_a_request_outlives_it_where_its_connection_is_given_up(
    scripted: Any, collector_off: None, turns: int
) -> None:
    def unheard(head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        raise AssertionError(error)

    engine = await scripted(silent)
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits())
    before = await at_rest()
    for _ in range(3):
        exchange = pool.exchange(pool.request(b"/v1/completions", b"", TEXT), ResponseCollector(1000, unheard))
        for _ in range(turns):
            await asyncio.sleep(0)
        exchange.discard()
        del exchange
    await until(lambda: _gone(before))
    pool.close()
    assert engine.bodies == []


async def test_a_connection_that_an_engine_has_closed_is_gone(scripted: Any, proxy: Any, collector_off: None) -> None:
    prefill, decode = await scripted(sending(whole(GOOD), close=True)), await scripted(sending(whole(GOOD), close=True))
    running = await proxy([prefill.url], [decode.url], probe_interval_s=60.0)
    for _ in range(5):
        assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200

    async def few() -> bool:
        return sum(isinstance(each, UpstreamConnection) for each in gc.get_objects()) <= 2  # those of the probes

    await until(few)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
TEXT = json.dumps(BODY).encode()
CLIENTS = (HTTPProtocol, DirectDownstream, ASGIExchange, RequestBody)


@pytest.mark.parametrize("how", ["resets", "closes"])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1",
        b"POST /v1/completions HTTP/1.1\r\nhost: p\r\nx:",
        HEAD % 100_000,
        HEAD % 100_000 + b"[" * 99_999,
        HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked") + b"2\r\n[[\r\n" * 1000,
        HEAD.replace(b"completions", b"completions?x=1") % 100_000 + b"[" * 99_999,
        HEAD.replace(b"host: p", b"host: p\r\nconnection: upgrade\r\nupgrade: h2c") % 100 + b"[" * 99,
        HEAD % len(TEXT) + TEXT,
        (HEAD % len(TEXT) + TEXT) * 5,
        HEAD % len(TEXT) + TEXT + HEAD % 1000 + b"[" * 999,
        HEAD % 99_000_000,
        b"GET /health HTTP/1.1\r\nhost: p\r\n\r\n" * 3,
        b"garbage\r\n\r\n",
    ],
)
async def test_nothing_of_a_client_outlives_its_connection(
    scripted: Any, proxy: Any, collector_off: None, sent: bytes, how: str
) -> None:
    """The direct way and, for a path with a query, the one through ASGI."""
    prefill, decode = await scripted(sending(whole(GOOD))), await scripted(sending(whole(GOOD)))
    running = await proxy([prefill.url], [decode.url], probe_interval_s=60.0)
    before = await at_rest(CLIENTS + KINDS)
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(sent)
        await writer.drain()
        for _ in range(100):  # turns in which the proxy, in this same loop, accepts the client and reads what it sent
            await asyncio.sleep(0)
        if how == "resets":
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def same() -> bool:
        return alive(CLIENTS + KINDS) == before

    await until(same)


async def _gone(before: Counter[str]) -> bool:
    return alive() == before
