"""Tests the comparison itself: it ignores what it should, and nothing else."""

import json
from typing import cast

import pytest

from tests.system.differential.comparing import Seen, difference, taken_in
from tests.system.differential.generator import CHAT, COMPLETIONS, GENERATE, JSON, Case, lanes

CASE = Case(COMPLETIONS, {})
USAGE: JSON = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def choice(index: int, text: str, finish: str | None = None) -> JSON:
    """One choice."""
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": None}


def document(*choices: JSON, **more: object) -> JSON:
    """An answer or an event."""
    return {"id": "cmpl-1", "created": 17, "model": "m", "choices": list(choices), **more}


def sent(events: list[JSON], end: str = "data: [DONE]\n\n") -> str:
    """A stream."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


def answered(body: JSON | str, status: int = 200) -> Seen:
    """What a client makes of an answer; text is a stream."""
    if isinstance(body, str):
        return taken_in(status, "text/event-stream; charset=utf-8", body)
    return taken_in(status, "application/json", json.dumps(body))


STREAM = [
    document(choice(0, "a")),
    document(choice(1, "x")),
    document(choice(0, "b", "stop")),
    document(choice(1, "y", "length")),
    document(usage=USAGE),
]


def test_ids_times_and_the_order_between_choices_are_overlooked() -> None:
    whole = document(choice(0, "a", "stop"), usage=USAGE)
    assert difference(CASE, answered(whole), answered(whole | {"id": "cmpl-2", "created": 99})) is None

    swapped = [{**STREAM[at], "id": "another", "created": 18} for at in (1, 0, 2, 3, 4)]
    assert difference(CASE, answered(sent(STREAM)), answered(sent(swapped))) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"model": "other"}, "model"),
        ({"usage": {**USAGE, "prompt_tokens_details": None}}, "prompt_tokens_details"),
        ({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 3}}}, "cached_tokens"),
        ({"usage": None}, "usage"),
        ({"choices": []}, "choices"),
        ({"choices": [choice(0, "b", "stop")]}, "text"),
        ({"choices": [{**choice(0, "a", "stop"), "logprobs": {"a": 1}}]}, "logprobs"),
    ],
)
def test_whatever_else_is_different_in_an_answer_is_named(change: JSON, word: str) -> None:
    whole = document(choice(0, "a", "stop"), usage=USAGE)

    found = difference(CASE, answered(whole), answered(whole | change))

    assert found is not None
    assert word in found


def test_a_member_that_is_absent_is_not_null() -> None:
    whole = document(choice(0, "a", "stop"))

    assert difference(CASE, answered(whole), answered(whole | {"usage": None})) is not None


@pytest.mark.parametrize(
    "other",
    [
        sent(STREAM, end=""),
        sent(STREAM[:4]),
        sent([*STREAM[:2], document(choice(0, "", None)), *STREAM[2:]]),
        sent([document(choice(0, "ab", "stop")), STREAM[1], *STREAM[3:]]),
        sent([*STREAM[:4], document(usage={**USAGE, "prompt_tokens": 4})]),
        sent([{**STREAM[0], "usage": None}, *STREAM[1:]]),
        document(choice(0, "ab", "stop")),
    ],
)
def test_whatever_else_is_different_in_a_stream_is_seen(other: JSON | str) -> None:
    assert difference(CASE, answered(sent(STREAM)), answered(other)) is not None


def test_a_refusal_of_the_proxys_own_may_be_in_its_own_words() -> None:
    def error(message: str, param: str | None) -> JSON:
        return {"error": {"message": message, "type": "x", "param": param, "code": 400}}

    early, late = Case(COMPLETIONS, {}, "early"), Case(COMPLETIONS, {}, "engine")
    one, other = answered(error("a", "n"), 400), answered(error("b", None), 400)
    fine = answered(document(choice(0, "a")))

    assert difference(early, one, other) is None
    assert difference(early, one, answered(error("b", None), 404)) is not None
    assert difference(early, one, answered({"detail": "no"}, 400)) is not None
    assert difference(late, one, other) is not None
    assert difference(late, fine, fine) is not None  # what must be refused was not


def test_requests_are_the_same_for_the_same_seed_and_show_everything() -> None:
    paths = (COMPLETIONS, CHAT, GENERATE)
    cases = [case for lane in lanes(7, 2_000, paths) for case in lane]
    names = {name for case in cases for name in case.body}
    names |= {name for case in cases for name in cast("JSON", case.body.get("sampling_params", {}))}

    assert lanes(7, 2_000, paths) == lanes(7, 2_000, paths) != lanes(8, 2_000, paths)
    assert {case.path for case in cases} == set(paths)
    assert names >= {
        *("prompt", "messages", "token_ids", "max_tokens", "max_completion_tokens", "min_tokens", "n", "seed", "stop"),
        *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logprobs", "top_logprobs", "echo", "stream"),
        *("stream_options", "return_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "response_format", "structured_outputs", "tools", "tool_choice", "cache_salt", "model"),
        *("top_p", "top_k", "min_p", "x_unknown", "kv_transfer_params", "vllm_xargs"),
    }
