"""Tests that the events of one read take no more work than one turn of the event loop allows."""

import pytest

from kvparams_proxy.execution.answer_forms import CHOICES_FORM
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.response_corrector import ResponseCorrector
from kvparams_proxy.execution.sse import MAX_EVENTS_PER_TURN
from kvparams_proxy.upstream.types import UpstreamError

EXAMINED = b'data: {"choices":[{"index":0,"text":"\\"error\\""}],"nvext":null}\n\n'
"""An event that must be examined, and has nothing to correct."""
PLAIN = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'


def test_events_that_must_be_examined_are_as_many_as_a_turn_allows() -> None:
    corrections = ResponseCorrector("r", EngineAddresses(), CHOICES_FORM)
    most = EXAMINED * (MAX_EVENTS_PER_TURN // 2)
    for _ in range(3):  # each read has its own allowance
        assert corrections.correct_events(most) == most
    assert corrections.correct_events(PLAIN * 2 * MAX_EVENTS_PER_TURN) == PLAIN * 2 * MAX_EVENTS_PER_TURN
    with pytest.raises(UpstreamError, match="too many events"):
        corrections.correct_events(EXAMINED * (MAX_EVENTS_PER_TURN + 1))
