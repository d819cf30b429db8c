"""Tests that an engine that forbids one client's requests stays in use for all others."""

import asyncio
import json
import logging
from typing import Any

import pytest

from kvparams.routing.breaker import BreakerLimits
from tests.system.proxy.upstream.test_broken_engines import BODY, DONE, EVENT, GOOD, SSE, chunk, whole

ERROR = b'{"error":{"message":"not for you","type":"%b","param":null,"code":%d}}'


def refused_at_the_head(status: int) -> bytes:
    said = ERROR % (b"x", status)
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(said), said)


def refused_in_the_answer(status: int) -> bytes:
    """vLLM 0.32.0 says in a stream that has begun what is wrong (`create_streaming_error_response`)."""
    return SSE + chunk(b"data: %b\n\n" % (ERROR % (b"x", status))) + chunk(DONE) + b"0\r\n\r\n"


def refused_in_a_document(status: int) -> bytes:
    return whole(ERROR % (b"x", status))


def refuses(refusal: bytes) -> Any:
    """Returns a script that refuses the requests of one client and answers all others well."""
    stream = SSE + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"

    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(body)
        if asked["prompt"] == "forbidden":
            writer.write(refusal)
        else:
            writer.write(stream if asked.get("stream") else whole(GOOD))

    return script


FORMS = {
    "whole": (False, refused_at_the_head),
    "stream": (True, refused_at_the_head),
    "in a stream": (True, refused_in_the_answer),
    "in a document": (False, refused_in_a_document),
}


@pytest.mark.parametrize(
    ("role", "form"),
    [(role, form) for role in ("prefill", "decode") for form in FORMS if (role, form) != ("prefill", "in a stream")],
)
@pytest.mark.parametrize("status", [401, 403, 500])
async def test_who_is_forbidden_takes_no_engine_out_for_others(
    scripted: Any, proxy: Any, caplog: pytest.LogCaptureFixture, role: str, form: str, status: int
) -> None:
    """Three requests of one client, which the engines of a role refuse, all of them. The control is a failure."""
    stream, refusal = FORMS[form]
    legs = {
        each: [await scripted(refuses(refusal(status) if each == role else whole(GOOD))) for _ in range(2)]
        for each in ("prefill", "decode")
    }
    limits = BreakerLimits(consecutive=2, open_s=60.0, longest_s=60.0)
    running = await proxy(*[[each.url for each in engines] for engines in legs.values()], breaker=limits)
    forbidden = BODY | {"prompt": "forbidden", "stream": stream}
    for _ in range(3):
        got = await running.client.post("/v1/completions", json=forbidden)
        assert (got.status_code, got.json()["error"]["code"]) == (
            502,
            f"{role}_failed" if status == 500 else f"{role}_unauthorized",
        )
    opened = await running.metric("kvparams_proxy_breaker_state")
    blamed = [
        record.getMessage()
        for record in caplog.records
        if record.name.endswith("state_log") and record.levelno >= logging.WARNING
    ]
    if status == 500:
        assert opened
        assert blamed
        return
    assert (opened, blamed) == (0, [])
    before = [len(each.bodies) for each in legs[role]]
    for _ in range(4):
        assert (await running.client.post("/v1/completions", json=BODY | {"stream": stream})).status_code == 200
    assert [len(each.bodies) - count for each, count in zip(legs[role], before, strict=True)] == [2, 2]
