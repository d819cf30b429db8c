"""Tests the parsing of engines' errors."""

import json
import time

import pytest

from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_errors import engine_error_response

HUGE = {
    "lists": b'{"error":{"message":"too long"},"x":[' + b"[]," * 2_000_000 + b"0]}",
    "numbers": b'{"error":{"message":"too long"},"x":[' + b"1e1," * 2_000_000 + b"0]}",
    "members": b'{"error":{"message":"too long"},' + b",".join(b'"%d":1' % n for n in range(400_000)) + b"}",
    "slashes": b'{"error":{"message":"' + b"\\\\" * 4_000_000 + b'"}}',
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_error_is_not_read(name: str) -> None:
    began = time.thread_time()
    refused = engine_error_response("decode", 400, HUGE[name], EngineAddresses(), b"{}")
    assert time.thread_time() - began < 0.06
    assert refused.status == 400
    assert refused.message == "the decode engine refused the request (400)"


def test_an_error_of_usual_length_is_read() -> None:
    """The control: validation errors of vLLM repeat what they refuse."""
    raw = json.dumps({"error": {"message": "too long", "input": "x" * 50_000}}).encode()
    assert engine_error_response("decode", 400, raw, EngineAddresses(), b"{}").message == "too long"
