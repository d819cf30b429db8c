"""Tests that the record of a stream has only what the client has."""

import json

import pytest

from kvparams.errors import JSONTextError
from kvparams_proxy.execution.stream_continuation import StreamRecorder

CUT_OFF = b'data: {"choices":[\n\n'
GARBLED = b'data: {"choices":,}\n\n'


def event(token: int, **more: object) -> bytes:
    choice = {"index": 0, "text": chr(token), "token_ids": [token], "finish_reason": None, **more}
    return b"data: %b\n\n" % json.dumps({"id": "x", "choices": [choice]}).encode()


def answered(recorder: StreamRecorder) -> list[int]:
    sent = recorder.progress()
    assert sent is not None
    assert list(sent.prompt_ids) == [1, 2]
    return list(sent.answer_ids)


def begun() -> StreamRecorder:
    recorder = StreamRecorder(chat=False, keep_ids=False, count=True)
    recorder.events(event(65, prompt_token_ids=[1, 2]))
    return recorder


@pytest.mark.parametrize("looked", [False, True], ids=["never looked into", "looked into"])
def test_what_was_not_sent_is_not_counted(looked: bool) -> None:
    recorder = begun()
    recorder.events(event(66))
    if looked:
        assert answered(recorder) == [65, 66]
    recorder.events(event(67) + event(68))
    recorder.undo_last()
    recorder.events(event(69))
    assert answered(recorder) == [65, 66, 69]


def test_what_stands_before_an_event_that_was_cut_off_is_not_counted() -> None:
    recorder = begun()
    with pytest.raises(JSONTextError):
        recorder.events(event(66) + CUT_OFF)
    assert answered(recorder) == [65]


def test_nobody_goes_on_behind_a_garbled_event_that_the_client_has() -> None:
    recorder = begun()
    assert recorder.events(event(66) + GARBLED).endswith(GARBLED)
    assert recorder.progress() is None
    assert recorder.missing_ending() is None


def test_a_long_stream_is_looked_into_as_it_comes() -> None:
    recorder = begun()
    for token in range(1000, 6000):
        recorder.events(event(token))
    assert answered(recorder) == [65, *range(1000, 6000)]


def test_whoever_goes_on_is_counted_as_far_as_the_client_has_it() -> None:
    recorder = begun()
    assert answered(recorder) == [65]
    recorder.mark_resumed()
    recorder.events(event(66))
    with pytest.raises(JSONTextError):
        recorder.events(event(67) + GARBLED)
    assert answered(recorder) == [65, 66]
    recorder.events(event(68, finish_reason="length"))
    recorder.undo_last()
    assert answered(recorder) == [65, 66]
    assert recorder.missing_ending() is None
