"""Tests that the tools of these tests notice faults: a client that accepts wrong answers proves nothing."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.system.chaos.faults import schedule
from tests.system.chaos.streams import Question, ask, question

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
ROUTE = b"x-kvparams-prefill: p1\r\nx-kvparams-decode: d2\r\n\r\n"
KINDS = ("damage", "hold", "lose")
WHAT = replace(question("/v1/completions", "x", 2), answer=("ab", "length", 2))


def chunk(document: object) -> bytes:
    raw = b"data: %b\n\n" % (document if isinstance(document, bytes) else json.dumps(document).encode())
    return b"%x\r\n%b\r\n" % (len(raw), raw)


def token(text: str, finish: str | None = None) -> bytes:
    return chunk({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


USAGE = chunk({"choices": [], "usage": {"completion_tokens": 2}})
DONE = chunk(b"[DONE]")
LAST = b"0\r\n\r\n"
ERROR = {"error": {"code": "decode_failed", "message": "gone"}}
REFUSED = json.dumps(ERROR).encode()


@asynccontextmanager
async def saying(*pieces: bytes, then_silent: bool = False) -> AsyncGenerator[int]:
    """A server that says this to everybody."""
    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(pieces))
        if then_silent:
            await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*(task for task in serving if task is not None), return_exceptions=True)


@pytest.mark.parametrize(
    ("seen", "said", "pieces"),
    [
        ("right", "", (HEAD + ROUTE, token("a"), token("b", "length"), USAGE, DONE, LAST)),
        ("right", "", (HEAD + ROUTE, token("ab", "length") + USAGE + DONE, LAST)),
        ("wrong", "is not", (HEAD + ROUTE, token("a"), token("c", "length"), USAGE, DONE, LAST)),
        ("wrong", "is not", (HEAD + ROUTE, token("a"), token("b", "stop"), USAGE, DONE, LAST)),
        ("wrong", "is not", (HEAD + ROUTE, token("a"), token("bb", "length"), USAGE, DONE, LAST)),
        ("wrong", "is not", (HEAD + ROUTE, token("a", "length"), USAGE, DONE, LAST)),
        ("wrong", "is not", (HEAD + ROUTE, token("a"), token("b", "length"), DONE, LAST)),
        ("wrong", "is not", (HEAD + ROUTE, DONE, LAST)),
        ("cut", "[DONE]", (HEAD + ROUTE, token("a"), token("b", "length"), USAGE, LAST)),
        ("cut", "[DONE]", (HEAD + ROUTE, LAST)),
        ("cut", "last chunk", (HEAD + ROUTE, token("a"), token("b", "length"), USAGE, DONE)),
        ("cut", "last chunk", (HEAD + ROUTE,)),
        ("cut", "no head", (HEAD,)),
        ("cut", "no head", ()),
        ("error event", "decode_failed", (HEAD + ROUTE, token("a"), chunk(ERROR), LAST)),
        ("error event", "decode_failed", (HEAD + ROUTE, token("a"), chunk(ERROR), DONE, LAST)),
        ("refused", "503 decode_failed", (b"HTTP/1.1 503 X\r\ncontent-length: 60\r\n\r\n" + REFUSED,)),
    ],
)
async def test_a_client_knows_how_its_request_has_ended(seen: str, said: str, pieces: tuple[bytes, ...]) -> None:
    async with saying(*pieces) as port:
        got = await ask(port, WHAT, 10.0)
    assert (got.seen, said in got.said) == (seen, True), got


async def test_a_deadline_ends_a_request() -> None:
    async with saying(HEAD + ROUTE, token("a"), then_silent=True) as port:
        got = await ask(port, WHAT, 0.1)
    assert got.seen == "late"
    assert 0.1 <= got.ended_s - got.began_s < 5.0


async def test_nobody_there_is_an_end_too() -> None:
    async with saying() as port:
        pass
    assert (await ask(port, WHAT, 1.0)).seen == "cut"


async def test_the_route_is_known() -> None:
    async with saying(HEAD + ROUTE, token("ab", "length"), USAGE, DONE, LAST) as port:
        assert (await ask(port, Question(WHAT.path, WHAT.body), 10.0)).route == ["p1", "d2"]


def test_faults_can_be_repeated_hit_everything_and_never_one_role_twice_in_a_row() -> None:
    faults = schedule(3, 600, 5, 3, KINDS)
    assert faults == schedule(3, 600, 5, 3, KINDS) != schedule(4, 600, 5, 3, KINDS)
    assert [fault.at_s for fault in faults] == [5 * number for number in range(1, 121)]
    assert all(one.target != other.target for one, other in pairwise(faults))
    assert min(Counter((fault.target, fault.kind) for fault in faults).values()) > 3
    assert len(Counter((fault.target, fault.kind) for fault in faults)) == 9
    assert {fault.number for fault in faults if fault.target == "decode"} == {0, 1, 2}
