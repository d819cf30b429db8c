"""Tests the client that plays traces, against answers that are cut anywhere or wrong."""

import asyncio
import time

import pytest

from benchmarks.load_client import Pool, Request, Tally, Target
from tests.system.benchmarks.scripted_server import OK, chunked, scripted_server


async def tally_of(answer: bytes, count: int = 1) -> Tally:
    """Asks a server with this answer for streams of four events, one after the other, and returns the results."""
    tally, ended = Tally(), asyncio.Event()
    async with scripted_server(answer, close=True) as port:
        target = Target(port, "/v1/completions", b'{"prompt": "@@@@@@@@"}', stream=True, events=4)
        pool = Pool(target, tally, lambda _: ended.set())
        for serial in range(count):
            ended.clear()
            pool.send(Request(time.monotonic(), target.request(serial), measured=True))
            async with asyncio.timeout(10):
                await ended.wait()
        await pool.close()
    return tally


async def test_every_event_is_seen_however_it_is_cut() -> None:
    events = b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: {"text":"c"}\n\ndata: [DONE]\n\n'
    for size in range(1, len(events) + 1):
        answer = chunked(*(events[at : at + size] for at in range(0, len(events), size)))
        tally = await tally_of(answer)
        assert (dict(tally.errors), tally.right, len(tally.itl_s)) == ({}, 1, 3), size


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (chunked(b"data: 1\n\n", b"data: [DONE]\n\n"), "2 events instead of 4"),
        (chunked(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", b"data: 4\n\n"), "no [DONE]"),
        (chunked(b"data: [DONE]\n\n")[:-7], "connection lost"),
        (OK.replace(b"200 OK", b"503 Service Unavailable"), "status 503"),
        (b"not HTTP at all\r\n\r\n", "malformed answer"),
    ],
)
async def test_a_wrong_answer_is_an_error_with_a_name_and_in_no_percentile(answer: bytes, error: str) -> None:
    tally = await tally_of(answer)
    assert (tally.right, dict(tally.errors), len(tally.e2e_s)) == (0, {error: 1}, 0)


async def test_a_connection_closed_while_idle_costs_one_more_try_and_no_error() -> None:
    events = chunked(*(b"data: %d\n\n" % each for each in range(3)), b"data: [DONE]\n\n")
    tally = await tally_of(events, 10)
    assert (tally.right, dict(tally.errors)) == (10, {})
