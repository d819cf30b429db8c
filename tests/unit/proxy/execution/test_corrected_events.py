"""Tests that corrected events have the engine's content, whatever form the engine gave them."""

import json
import random
import re
import time
from contextlib import suppress
from typing import Any

import pytest

from kvparams_proxy.event_loop.clock import MonotonicClock
from kvparams_proxy.execution.answer_forms import CHOICES_FORM
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.upstream.types import ResponseHead
from tests.unit.proxy.execution.test_metrics_stream_events import Client, Owner

TEXTS = (
    "a",
    "[DONE]",
    "\n\ndata: [DONE]\n\n",
    "\r\n\r\n",
    'data: {"usage":1}',
    "é\u2028",
    '"kv_transfer_params":{',
    "",
)

COMPLETIONS = APIEndpoint("/v1/completions", "completions")


def parse_sse(stream: bytes) -> list[bytes]:
    """Returns the data of each event, as https://html.spec.whatwg.org/multipage/server-sent-events.html says."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in re.split(rb"\r\n|\n|\r", stream)[:-1]:
        name, _, value = line.partition(b":")
        if not line and data:
            events.append(b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value.removeprefix(b" "))
    return events


def meaning(data: bytes) -> object:
    """Returns what a client makes of one event, without what is corrected."""
    with suppress(ValueError):
        document: dict[str, Any] = json.loads(data)
        document.pop("kv_transfer_params", None)
        document.get("usage", {}).pop("prompt_tokens_details", None)
        return document
    return data


def event(rng: random.Random, number: int) -> bytes:
    document: dict[str, Any] = {"id": "x", "choices": [{"index": 0, "text": f"{number}{rng.choice(TEXTS)}"}]}
    if rng.random() < 0.3:
        document["kv_transfer_params"] = {"a": 1, "b": {"c": 2}}
    if rng.random() < 0.3:
        document |= {"choices": [], "usage": {"prompt_tokens": number}}
    indent = rng.choice((None, None, 1))
    text = json.dumps(document, indent=indent, ensure_ascii=rng.random() < 0.5)
    lines = [rng.choice(("data: ", "data:", "data:  ")) + line for line in text.split("\n")]
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines) + 1), ": a comment")
    if rng.random() < 0.2:
        lines.insert(0, "event: message")
    end = rng.choice(("\n", "\n", "\r\n"))
    return f"{end.join(lines)}{end}{end}".encode()


def relayed(reads: list[bytes]) -> bytes:
    client, owner = Client(), Owner()
    corrections = ResponseCorrector("r", EngineAddresses(), CHOICES_FORM)
    corrections.cache_report = {"cached_tokens": 3}
    relay = StreamRelay(client, b"", corrections, 1 << 20, owner, MonotonicClock(time.monotonic), COMPLETIONS)
    relay.on_head(ResponseHead(200, b"text/event-stream"))
    for read in reads:
        relay.on_body(read)
    relay.on_done(None)
    return client.got


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_data_of_several_lines_stays_data_in_every_line(end: bytes) -> None:
    lines = (b'data: {"id":"x",', b'data: "choices":[{"index":0,"text":"a"}],', b'data: "kv_transfer_params":{"a":1}}')
    raw = end.join((b"event: message", *lines, b"", b""))
    got = relayed([raw, b"data: [DONE]\n\n"])
    assert got == raw.replace(b'{"a":1}', b"null") + b"data: [DONE]\n\n"


@pytest.mark.parametrize("seed", range(300))
def test_a_parser_reads_the_same_events_after_correction(seed: int) -> None:
    rng = random.Random(seed)
    first = b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\n'
    sent = first + b"".join(event(rng, number) for number in range(8)) + b"data: [DONE]\n\n"
    longest = rng.choice((1, 3, 50, 1000))
    reads: list[bytes] = []
    at = 0
    while at < len(sent):
        size = rng.randrange(1, longest + 1)
        reads.append(sent[at : at + size])
        at += size
    got = relayed(reads)
    assert list(map(meaning, parse_sse(got))) == list(map(meaning, parse_sse(sent)))
    assert b'"c"' not in got
