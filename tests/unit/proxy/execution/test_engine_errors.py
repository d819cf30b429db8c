"""Tests the parsing of engines' errors."""

import json
import time

import pytest

from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_errors import engine_error_response, is_model_missing

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


_UNKNOWN = "The model `a` does not exist."
_UNLOADED = "The following requested LoRA adapters are not loaded: a\nLoaded adapters: dict_keys([])."


@pytest.mark.parametrize(
    ("status", "message", "kind", "model", "is_missing"),
    [
        (404, _UNKNOWN, "NotFoundError", "a", True),
        (404, f"{_UNKNOWN} Valid aliases: base.", "NotFoundError", "a", True),
        (400, _UNLOADED, "BadRequestError", "base:a", True),
        (404, _UNKNOWN, "NotFoundError", "b", False),
        (404, _UNKNOWN, "BadRequestError", "a", False),
        (404, f"1 validation error: {_UNKNOWN}", "NotFoundError", "a", False),
        (404, f"{_UNKNOWN} More.", "NotFoundError", "a", False),
        (404, {"text": _UNKNOWN}, "NotFoundError", "a", False),
        (400, _UNLOADED, "BadRequestError", "base:b", False),
        (400, f"'input': {_UNLOADED}", "BadRequestError", "base:a", False),
        (400, _UNKNOWN, "NotFoundError", "a", False),
        (500, _UNKNOWN, "NotFoundError", "a", False),
    ],
)
def test_only_the_exact_words_say_that_a_model_is_missing(
    status: int, message: object, kind: str, model: str, is_missing: bool
) -> None:
    error = {"message": message, "type": kind, "code": status}
    for document in ({"error": error}, {"object": "error", **error}):
        assert is_model_missing(status, json.dumps(document).encode(), model) is is_missing


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"error": 3}', b'{"error": "' + b"x" * (1 << 17) + b'"}'])
def test_an_answer_that_cannot_be_read_says_nothing_of_models(raw: bytes) -> None:
    assert not is_model_missing(404, raw, "a")
