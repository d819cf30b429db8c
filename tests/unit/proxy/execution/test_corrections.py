"""Tests corrections of an engine's answer: they change what must change and no other byte."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.errors import JSONTextError
from kvparams_proxy.execution.answer_forms import CHOICES_FORM
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.execution.sse import complete_events_end
from kvparams_proxy.upstream.types import UpstreamError

EVENTS = [
    b'data: {"choices":[{"text":"a"}],"usage":null}\n\n',
    b'data: {"choices":[{"text":"say \\"prompt_tokens\\" or \\"kv_transfer_params\\""}]}\n\n',
    b": keep-alive\n\n",
    b'event: x\ndata: {"usage": {"prompt_tokens": 5, "total": 6 }, "x" : 1.50}\n\n',
    b'data: {"kv_transfer_params":{"remote_host":"10.0.0.1"},"choices":[]}\r\n\r\n',
    b'data: {"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":5}},"kv_transfer_params":null}\n\n',
    b"data: [DONE]\n\n",
]


def correcting(details: object) -> ResponseCorrector:
    made = ResponseCorrector("r", EngineAddresses())
    made.cache_report = details
    return made


def payloads(raw: bytes) -> list[Any]:
    lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_cached_tokens_become_prefills_and_params_go() -> None:
    corrected = correcting({"cached_tokens": 3}).correct_events(b"".join(EVENTS))
    seen = payloads(corrected)
    assert all(event.get("kv_transfer_params") is None for event in seen)
    assert [e["usage"].get("prompt_tokens_details") for e in seen if e.get("usage")] == [{"cached_tokens": 3}] * 2
    passing = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":5}}\n\n'
    assert correcting({"cached_tokens": 3}).correct_events(passing) == passing
    assert b"10.0.0.1" not in corrected
    for untouched in (*EVENTS[:3], EVENTS[6]):
        assert untouched in corrected
    assert b'"total": 6' in corrected
    assert b'"x" : 1.50' in corrected
    assert b"event: x\n" in corrected


def test_what_prefill_did_not_report_decode_may_not_claim() -> None:
    """Decode counts transferred KV as cached; without prefill's word there is no number to give."""
    raw = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}'
    assert json.loads(correcting(None).correct_document(raw))["usage"]["prompt_tokens_details"] is None
    silent = b'{"usage":{"prompt_tokens":9}}'
    assert correcting(None).correct_document(silent) is silent


def test_nothing_to_correct_is_returned_as_it_is() -> None:
    raw = b'{ "choices" : [1.0], "usage" : {"prompt_tokens" : 9, "prompt_tokens_details" : {"cached_tokens":8 }} }'
    assert correcting({"cached_tokens": 8}).correct_document(raw) is raw
    plain = EVENTS[0] + EVENTS[1] + EVENTS[6]
    assert correcting({"cached_tokens": 8}).correct_events(plain) == plain


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"7", b'{"a":NaN}'])
def test_what_is_not_an_object_is_refused(raw: bytes) -> None:
    with pytest.raises(JSONTextError):
        correcting(None).correct_document(raw)


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 600), max_size=6))
def test_how_events_are_cut_by_the_network_makes_no_difference(events: list[bytes], cuts: list[int]) -> None:
    raw = b"".join(events)
    corrections = correcting({"cached_tokens": 3})
    expected = corrections.correct_events(raw)
    got, tail, at = b"", b"", 0
    for cut in [*sorted(min(cut, len(raw)) for cut in cuts), len(raw)]:
        tail += raw[at:cut]
        at = cut
        end = complete_events_end(tail)
        got += corrections.correct_events(tail[:end])
        tail = tail[end:]
    assert (got, tail) == (expected, b"")


def test_details_are_read_where_they_are() -> None:
    made = correcting(None)
    made.learn_prefill_usage({"usage": {"prompt_tokens_details": {"cached_tokens": 1}}})
    assert made.cache_report == {"cached_tokens": 1}
    silent: list[dict[str, object]] = [{}, {"usage": None}, {"usage": {}}, {"usage": 7}]
    for answer in silent:
        made.learn_prefill_usage(answer)
        assert made.cache_report is None


@pytest.mark.parametrize(
    "member", ['"remote_host":"10.0.0.1"', '"bootstrap_host":"10.0.0.1"', '"nvext":{"worker_id":{"at":"10.0.0.1"}}']
)
def test_an_address_in_a_later_event_is_taken_out_too(member: str) -> None:
    """The control: the first event needs no correction, so later ones are no longer read closely."""
    corrections = correcting(None)
    assert corrections.correct_events(EVENTS[0]) == EVENTS[0]
    unread = b'data: {"choices":[], "x" :[ ]}\n\n'
    assert corrections.correct_events(unread) is unread
    assert corrections.correct_events(b'data: {"choices":[],%b}\n\n' % member.encode()) == b'data: {"choices":[]}\n\n'


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (b'{"choices": [{"index": 0, "text": ""}]}', True),
        (b"{}", False),
        (b'{"choices": []}', False),
        (b'{"choices": [{}]}', False),
        (b'{"error": {"message": "aborted"}}', False),
        (b'{"choices": [{"index": 0, "text": "a"}], "error": {"message": "aborted"}}', False),
        (b'[{"choices": 1}]', False),
        (b"no", False),
    ],
)
def test_an_answer_is_what_whole_lets_through(raw: bytes, wanted: bool) -> None:
    assert EngineResponse(raw).has_content is wanted
    try:
        ResponseCorrector("r", EngineAddresses(), CHOICES_FORM).correct_document(raw)
    except (JSONTextError, UpstreamError):
        assert not wanted
    else:
        assert wanted
