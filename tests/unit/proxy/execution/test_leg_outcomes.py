"""Tests the outcome of a leg: whether another instance is tried, which one is blamed, and what becomes of the KV."""

from typing import NamedTuple

import pytest

from kvparams.instances import Role
from kvparams.routing.plan import StreamProgress
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.leg_outcomes import LegEnd, classify_leg_outcome, invalid_response_failure
from kvparams_proxy.upstream.types import (
    ResponseHead,
    UpstreamError,
    UpstreamErrorResponse,
    UpstreamOverflow,
    UpstreamTimeout,
)
from tests.support.proxy.fixtures import instance

DECODE = instance(Role.DECODE, "http://10.9.8.7:8000", "store")
ADDRESSES = EngineAddresses(["http://10.9.8.7:8000"])
SAID = b'{"error":{"message":"no","type":"invalid_request_error","code":400}}'
BUSY = UpstreamOverflow("has 2048 connections", connected=False)
UNREACHABLE = UpstreamError("refused", connected=False)
BROKEN = UpstreamError("the connection was lost")
SILENT = UpstreamTimeout("sent nothing for longer than its time-out")


def reported(code: int) -> UpstreamErrorResponse:
    return UpstreamErrorResponse({"message": "no", "code": code})


class Meaning(NamedTuple):
    status: int
    """What the client would be told."""
    retryable: bool
    blames_instance: bool
    kv_untouched: bool = False
    may_have_acted: bool = True
    is_busy: bool = False


ENDS: dict[str, tuple[LegEnd, Meaning]] = {
    "400": (LegEnd(DECODE, ResponseHead(400), SAID, None), Meaning(400, False, False, True)),
    "401, a key of ours": (LegEnd(DECODE, ResponseHead(401), SAID, None), Meaning(502, True, False, True)),
    "401, the client's key": (LegEnd(DECODE, ResponseHead(401), SAID, None, False), Meaning(401, False, False, True)),
    "403, a key of ours": (LegEnd(DECODE, ResponseHead(403), SAID, None), Meaning(502, True, False, True)),
    "429": (LegEnd(DECODE, ResponseHead(429), SAID, None), Meaning(429, True, True, True, False, True)),
    "429, the client's key": (
        LegEnd(DECODE, ResponseHead(429), SAID, None, False),
        Meaning(429, True, False, True, False, True),
    ),
    "500": (LegEnd(DECODE, ResponseHead(500), b"", None), Meaning(502, True, True)),
    "500 behind a broker": (LegEnd(DECODE, ResponseHead(500), b"", None, shared=True), Meaning(502, True, False)),
    "503": (LegEnd(DECODE, ResponseHead(503), b"", None), Meaning(503, True, True, is_busy=True)),
    "an error in the answer, 500": (LegEnd(DECODE, ResponseHead(200), b"", reported(500)), Meaning(502, True, True)),
    "an error in the answer, 400": (LegEnd(DECODE, ResponseHead(200), b"", reported(400)), Meaning(400, False, False)),
    "silence while the plan had little time": (
        LegEnd(DECODE, ResponseHead(), b"", SILENT, limit_s=2.0),
        Meaning(504, True, False),
    ),
    "silence within a limit that is long": (
        LegEnd(DECODE, ResponseHead(), b"", SILENT, limit_s=60.0),
        Meaning(504, True, True),
    ),
    "no connection is free": (
        LegEnd(DECODE, ResponseHead(), b"", BUSY),
        Meaning(503, True, False, True, False, True),
    ),
    "no connection is made": (
        LegEnd(DECODE, ResponseHead(), b"", UNREACHABLE),
        Meaning(503, True, True, True, False, True),
    ),
    "no connection is made to a broker": (
        LegEnd(DECODE, ResponseHead(), b"", UNREACHABLE, shared=True),
        Meaning(503, True, True, True, False, True),
    ),
    "the connection breaks": (LegEnd(DECODE, ResponseHead(), b"", BROKEN), Meaning(502, True, True)),
    "the connection to a broker breaks": (
        LegEnd(DECODE, ResponseHead(), b"", BROKEN, shared=True),
        Meaning(502, True, False),
    ),
    "a time-out": (LegEnd(DECODE, ResponseHead(200), b"", SILENT), Meaning(504, True, True)),
}


@pytest.mark.parametrize("name", ENDS)
def test_each_end_of_a_leg_has_one_meaning(name: str) -> None:
    end, meaning = ENDS[name]
    outcome = classify_leg_outcome(end, ADDRESSES, b"{}")
    failure = outcome.failure
    assert failure is not None
    assert failure.instance is DECODE
    assert meaning == Meaning(
        failure.error.status,
        failure.retryable,
        outcome.blames_instance,
        end.kv_untouched,
        failure.may_have_acted,
        outcome.is_busy,
    )
    assert outcome.evidence
    assert "10.9.8.7" not in failure.error.message


def test_a_leg_that_went_well_is_no_failure() -> None:
    end = LegEnd(DECODE, ResponseHead(200), b"{}", None)
    outcome = classify_leg_outcome(end, ADDRESSES, b"{}")
    assert outcome.failure is None
    assert not outcome.blames_instance
    assert not end.kv_untouched


def test_a_second_connection_that_is_not_made_leaves_the_kv_in_doubt() -> None:
    """The first one may have carried the request."""
    error = UpstreamError("refused", connected=False)
    error.sent = True
    end = LegEnd(DECODE, ResponseHead(), b"", error)
    outcome = classify_leg_outcome(end, ADDRESSES, b"{}")
    assert outcome.failure is not None
    assert outcome.failure.may_have_acted
    assert not end.kv_untouched


def test_how_far_the_client_has_come_is_told_to_the_plan() -> None:
    sent = StreamProgress([1, 2], [3])
    end = LegEnd(DECODE, ResponseHead(200), b"", BROKEN)
    failure = classify_leg_outcome(end, ADDRESSES, b"{}", begun=True, sent=sent).failure
    assert failure is not None
    assert failure.response_started
    assert failure.progress is sent


@pytest.mark.parametrize(("said", "wait_s"), [(b"7", 7), (b"0", 1), (b"9999", 60), (b"tomorrow", 1), (b"", 1)])
def test_a_busy_engine_says_when_to_ask_again(said: bytes, wait_s: int) -> None:
    end = LegEnd(DECODE, ResponseHead(503, retry_after=said), b"", None)
    failure = classify_leg_outcome(end, ADDRESSES, b"{}").failure
    assert failure is not None
    assert failure.error.retry_after_s == wait_s


def test_an_answer_that_is_no_json_is_for_another_instance() -> None:
    failure = invalid_response_failure(DECODE)
    assert failure.retryable
    assert failure.may_have_acted
    assert failure.instance is DECODE
    assert failure.error.status == 502
