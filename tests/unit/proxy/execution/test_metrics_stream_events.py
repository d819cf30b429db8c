"""Tests the count of a stream's events with content, in any spelling and cut anywhere."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import Role
from kvparams_proxy.event_loop.clock import MonotonicClock
from kvparams_proxy.execution.answer_forms import CHOICES_FORM, OTHER_FORM
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.requests.downstream import DownstreamObserver
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.upstream.types import ResponseHead, UpstreamError

COMPLETIONS = APIEndpoint("/v1/completions", "completions")
RESPONSES = APIEndpoint("/v1/responses", "other", Role.DECODE, sends_done_event=False)

LIKE_EVENTS = ['"choices":[{"', "data: {", "\n\n", '.delta"', "\\", '{"choices":[{"index":0}]}', "data: [DONE]\n\n"]


class Client:
    """A downstream that keeps what it is given."""

    def __init__(self) -> None:
        self.got = b""

    def watch(self, watcher: DownstreamObserver) -> None: ...

    def head(self, status: int, headers: bytes, length: int | None) -> None: ...

    def body(self, data: bytes) -> None:
        self.got += data

    def end(self) -> None: ...

    def drop(self) -> None: ...


class Owner:
    """Hears how many there were."""

    events: int | None = None
    error: UpstreamError | None = None

    def stream_held(self) -> None: ...

    def stream_begun(self) -> None: ...

    def stream_complete(self) -> None: ...

    def stream_ended(
        self, head: ResponseHead, whole: bytes, error: UpstreamError | None, sent_bytes: int, sent_events: int
    ) -> None:
        self.events, self.error = sent_events, error


def relayed(parts: Sequence[bytes], *, choices: bool = True) -> tuple[Owner, bytes]:
    client, owner = Client(), Owner()
    corrections = ResponseCorrector("r", EngineAddresses(), CHOICES_FORM if choices else OTHER_FORM)
    relay = StreamRelay(
        client, b"", corrections, 1 << 20, owner, MonotonicClock(time.monotonic), COMPLETIONS if choices else RESPONSES
    )
    relay.on_head(ResponseHead(200, b"text/event-stream"))
    for part in parts:
        relay.on_body(part)
    relay.on_done(None)
    assert owner.error is None
    return owner, client.got


def event(document: dict[str, Any], compact: bool, end: bytes = b"\n\n") -> bytes:
    separators = (",", ":") if compact else None
    return b"data: " + json.dumps(document, separators=separators, ensure_ascii=False).encode() + end


TEXT = st.one_of(st.text(max_size=20), st.sampled_from(LIKE_EVENTS))


@given(st.lists(TEXT, min_size=1, max_size=12), st.booleans(), st.booleans(), st.integers(1, 400), st.data())
def test_every_event_with_content_is_counted_once(
    texts: list[str], compact: bool, chat: bool, piece: int, data: st.DataObject
) -> None:
    end = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    stream = b": nothing yet" + end
    for number, text in enumerate(texts):
        said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        document = {"id": "x", "choices": [{"index": number % 2, **said}], "usage": None}
        stream += event(document, compact, end)
        if data.draw(st.booleans()):
            stream += b": still here" + end
    stream += event({"id": "x", "choices": [], "usage": {"completion_tokens": 99}}, compact, end)
    stream += b"data: [DONE]" + end
    owner, got = relayed([stream[at : at + piece] for at in range(0, len(stream), piece)])
    assert owner.events == len(texts)
    assert got == stream


@pytest.mark.parametrize("compact", [True, False])
def test_of_a_response_the_deltas_are_counted(compact: bool) -> None:
    kinds = ["created", "output_item.added", *["output_text.delta"] * 5, "reasoning_text.delta", "completed"]
    parts = [
        b"event: response.%b\n" % kind.encode() + event({"type": f"response.{kind}", "delta": "a"}, compact)
        for kind in kinds
    ]
    owner, _ = relayed(parts, choices=False)
    assert owner.events == 6


def test_a_stream_that_fails_counts_what_was_sent() -> None:
    client, owner = Client(), Owner()
    relay = StreamRelay(
        client,
        b"",
        ResponseCorrector("r", EngineAddresses()),
        1 << 20,
        owner,
        MonotonicClock(time.monotonic),
        COMPLETIONS,
    )
    relay.on_head(ResponseHead(200, b"text/event-stream"))
    relay.on_body(event({"choices": [{"text": "a"}]}, True) * 3)
    relay.on_done(UpstreamError("the connection was lost"))
    assert owner.events == client.got.count(b'"text"') == 3
