"""Tests engines without room: another one is asked, and without one the client learns when to ask again."""

import asyncio
import json
from typing import Any

import pytest

from kvparams.routing.breaker import BreakerLimits
from tests.system.proxy.upstream.test_broken_engines import BODY, DONE, EVENT, GOOD, SSE, chunk, sending, whole

SAID = b'{"error":{"message":"too many requests are running","type":null,"param":null,"code":429}}'
NEVER = BreakerLimits(consecutive=10_000, window=10_000, failures=10_000)


def busy(status: bytes = b"429 Too Many Requests", after: bytes | None = b"7") -> Any:
    said = b"" if after is None else b"Retry-After: %b\r\n" % after
    return sending(b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, said, len(SAID), SAID))


async def good(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    streams = json.loads(body).get("stream")
    writer.write(SSE + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n" if streams else whole(GOOD))


async def engines_of(scripted: Any, role: str, *scripts: Any) -> list[list[Any]]:
    """So many of that role, one sound one of the other."""
    return [[await scripted(each) for each in (scripts if r == role else [good])] for r in ("prefill", "decode")]


def legs(engine: Any) -> int:
    """How many it was sent; requests that only give KV back are none."""
    return sum(b'"phase"' in body for body in engine.bodies)


async def before(proxy: Any, engines: list[list[Any]], **changes: Any) -> Any:
    return await proxy(*([engine.url for engine in of] for of in engines), **{"breaker": NEVER, **changes})


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 X"])
async def test_it_is_another_ones_turn(scripted: Any, proxy: Any, role: str, status: bytes) -> None:
    engines = await engines_of(scripted, role, busy(status), good)
    running = await before(proxy, engines)
    for stream in (False, True, False, True):
        got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
        assert got.status_code == 200, got.text
    full, sound = engines[role == "decode"]
    assert legs(full) >= 2  # the control: it was asked
    assert legs(sound) == 4
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_blocks_that_a_busy_engine_has_not_looked_at_go_to_another(scripted: Any, proxy: Any) -> None:
    """The control is 503: whoever says that may have fetched them, so they are computed again."""
    for status, again in ((b"429 X", 0), (b"503 X", 1)):
        engines = await engines_of(scripted, "decode", busy(status), good)
        running = await before(proxy, engines)
        for _ in range(4):
            assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200
        (prefill,), (full, sound) = engines
        assert legs(full) >= 2
        assert (legs(prefill), legs(sound)) == (4 + again * legs(full), 4)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_where_nobody_else_is_left_the_client_learns_when_to_ask_again(
    scripted: Any, proxy: Any, role: str, stream: bool
) -> None:
    for status, expected, code in ((b"429 X", 429, 429), (b"503 X", 503, f"{role}_busy")):
        engines = await engines_of(scripted, role, busy(status), busy(status))
        running = await before(proxy, engines, retries=1)
        got = await running.client.post("/v1/completions", json=BODY | {"stream": stream})
        assert (got.status_code, got.headers["retry-after"]) == (expected, "7")
        error = got.json()["error"]
        assert error["code"] == code
        assert error["type"] == {429: "rate_limit_error", 503: "service_unavailable"}[expected]
        assert ("too many requests are running" in error["message"]) is (expected == 429)  # a 5xx is not for clients
        assert [legs(engine) for engine in engines[role == "decode"]] == [1, 1]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (b"7", 7),
        (b" 60 ", 60),
        (b"0", 1),
        (b"86400", 60),
        (b"9" * 5000, 1),
        (b"-3", 1),
        (b"1.5", 1),
        (b"Fri, 31 Dec 2027 23:59:59 GMT", 1),
        (b"", 1),
        (None, 1),
    ],
)
async def test_it_is_told_in_whole_seconds_and_within_a_minute(
    scripted: Any, proxy: Any, after: bytes | None, expected: int
) -> None:
    for status in (b"429 X", b"503 X"):
        running = await before(proxy, await engines_of(scripted, "decode", busy(status, after)), retries=0)
        got = await running.client.post("/v1/completions", json=BODY)
        assert (got.status_code, got.headers["retry-after"]) == (int(status[:3]), str(expected))


@pytest.mark.parametrize("stream", [False, True])
async def test_it_may_be_said_in_the_answer(scripted: Any, proxy: Any, stream: bool) -> None:
    said = SSE + chunk(b"data: %b\n\n" % SAID) + chunk(DONE) + b"0\r\n\r\n" if stream else whole(SAID)
    running = await before(proxy, await engines_of(scripted, "decode", sending(said), good))
    for _ in range(2):
        assert (await running.client.post("/v1/completions", json=BODY | {"stream": stream})).status_code == 200
    alone = await before(proxy, await engines_of(scripted, "decode", sending(said)))
    got = await alone.client.post("/v1/completions", json=BODY | {"stream": stream})
    assert (got.status_code, got.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("status", [b"429 X", b"503 X"])
async def test_who_is_busy_again_and_again_is_left_alone_for_a_while(scripted: Any, proxy: Any, status: bytes) -> None:
    engines = await engines_of(scripted, "decode", busy(status))
    limits = BreakerLimits(consecutive=3, window=6, failures=6, open_s=15.0)
    running = await before(proxy, engines, retries=0, breaker=limits, probe_interval_s=60.0)
    codes = [(await running.client.post("/v1/completions", json=BODY)).json()["error"]["code"] for _ in range(5)]
    assert codes[3:] == ["no_decode_instance"] * 2
    assert legs(engines[1][0]) == 3


@pytest.mark.parametrize("own", [True, False])
async def test_a_limit_on_a_clients_own_key_leaves_the_engine_to_others(scripted: Any, proxy: Any, own: bool) -> None:
    engines = await engines_of(scripted, "decode", busy())
    limits = BreakerLimits(consecutive=3, window=6, failures=6, open_s=15.0)
    running = await before(proxy, engines, retries=0, breaker=limits, probe_interval_s=60.0)
    headers = {"authorization": "Bearer sk-of-the-client"} if own else {}
    codes = [
        (await running.client.post("/v1/completions", json=BODY, headers=headers)).json()["error"]["code"]
        for _ in range(5)
    ]
    assert codes[3:] == ([429] * 2 if own else ["no_decode_instance"] * 2)
