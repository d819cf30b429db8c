"""Tests that content counts as progress and as an event in any spelling, even if it changes between events."""

import pytest

from kvparams_proxy.event_loop.clock import MonotonicClock
from kvparams_proxy.execution.answer_forms import CHOICES_FORM
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.upstream.types import ResponseHead
from tests.unit.proxy.execution.test_metrics_stream_events import Client, Owner

SPELLINGS = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
    b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n',
    b'data: {"choices" : [ { "text":"a"} ]}\n\n',
    b'data: {"choices":\ndata: [\ndata:  {\ndata: "text":"a"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"a"}]}\r\n\r\n',
)

COMPLETIONS = APIEndpoint("/v1/completions", "completions")
NOTHING = (b'data: {"choices": [ ]}\n\n', b'data: {"choices":[{}]}\n\n', b'data: {"usage":{}}\n\n', b": beat\n\n")


class Stream:
    """A relay and the time that it sees."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.owner = Owner()
        corrections = ResponseCorrector("r", EngineAddresses(), CHOICES_FORM)
        self.relay = StreamRelay(
            Client(), b"", corrections, 1 << 20, self.owner, MonotonicClock(lambda: self.now_s), COMPLETIONS
        )
        self.relay.on_head(ResponseHead(200, b"text/event-stream"))

    def feed(self, *reads: bytes) -> None:
        for read in reads:
            self.now_s += 1
            self.relay.on_body(read)


@pytest.mark.parametrize("first", SPELLINGS)
def test_content_in_any_spelling_is_progress_and_is_counted(first: bytes) -> None:
    stream = Stream()
    stream.feed(first)
    for number in range(3):
        for spelled in SPELLINGS:
            stream.feed(spelled)
            assert stream.relay.last_content_s == stream.now_s, (number, spelled)
    stream.feed(SPELLINGS[1] * 5, SPELLINGS[2] + SPELLINGS[1])
    stream.feed(b"data: [DONE]\n\n")
    stream.relay.on_done(None)
    assert stream.owner.events == 1 + 3 * len(SPELLINGS) + 7


@pytest.mark.parametrize("first", SPELLINGS)
@pytest.mark.parametrize("nothing", NOTHING)
def test_an_event_without_content_is_no_progress_in_any_spelling(first: bytes, nothing: bytes) -> None:
    stream = Stream()
    stream.feed(first, *[nothing] * 5)
    assert stream.relay.last_content_s == 1
