"""Tests that `body_members` finds what Python's `json` finds, in bounded steps, and looks at nothing else."""

import json
from collections.abc import Generator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.errors import JSONTextError
from kvparams.jsontext.scanner import DEFAULT_LIMITS
from kvparams_connectors.engines.vllm import body_members
from kvparams_connectors.engines.vllm.body_members import find_values, may_have_member

NAME = b"kv_transfer_params"
T = TypeVar("T")
TEXTS = st.text(st.sampled_from('ab"\\\n{}[],: \u00e9\ud800kv_')) | st.just(NAME.decode())
VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=12,
)


def run(steps: Generator[None, None, T]) -> tuple[T, int]:
    """Returns what the steps lead to, and how many they were."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def values(text: bytes) -> list[Any]:
    return [json.loads(text[start:end]) for start, end in run(find_values(text, NAME, DEFAULT_LIMITS))[0]]


@given(
    members=st.lists(st.tuples(TEXTS, VALUES)),
    gap=st.sampled_from([b"", b" ", b"\n\t "]),
    is_ascii=st.booleans(),
    step=st.sampled_from([2, 3, 7, 64 << 10]),
)
def test_what_json_finds_is_found(members: list[tuple[str, Any]], gap: bytes, is_ascii: bool, step: int) -> None:
    def encoded(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=is_ascii).encode(errors="surrogatepass")

    pairs = [encoded(name) + gap + b":" + gap + encoded(value) for name, value in members]
    text = gap + b"{" + gap + (gap + b"," + gap).join(pairs) + gap + b"}" + gap
    wanted = [value for name, value in members if name == NAME.decode()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_members, "STEP_BYTES", step)
        found = values(text)
    assert repr(found) == repr(wanted)  # NaN is not equal to itself
    assert not wanted or run(may_have_member(text, NAME))[0]


@pytest.mark.parametrize("at", range(len(NAME)))
def test_a_name_may_have_escapes(at: int) -> None:
    for form in (b"\\u%04x", b"\\u%04X"):
        name = NAME[:at] + form % NAME[at] + NAME[at + 1 :]
        text = b'{"%b": 7}' % name
        assert json.loads(text) == {NAME.decode(): 7}
        assert run(may_have_member(text, NAME))[0]
        assert values(text) == [7]


def test_prompts_with_escapes_are_not_read() -> None:
    text = json.dumps({"prompt": "Z\u00fcrich \u2026 \U0001f600 \u00df \x7f\x00"}).encode()
    assert b"\\u00" in text
    assert not run(may_have_member(text, NAME))[0]


def test_a_name_across_two_stretches_of_the_search_is_seen() -> None:
    for at in range(1, len(NAME)):
        text = b" " * (body_members.SEARCH_BYTES - at) + NAME
        assert run(may_have_member(text, NAME))[0]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"7",
        b"[1]",
        b"{",
        b'{"kv_transfer_params": 7',
        b'{"kv_transfer_params": "',
        b'{"kv_transfer_params": [',
        b'{"kv_transfer_params": "\\',
        b'{"kv_transfer_params": ["',
        b'{"kv_transfer_params" 7}',
    ],
)
def test_what_is_no_object_has_no_members(text: bytes) -> None:
    assert values(text) == []


@pytest.mark.parametrize("unit", [b'"",', b"1,", b"       ,", b'"\\"",', b'"xxxxxxxxx",'])
def test_long_text_is_passed_in_steps(unit: bytes) -> None:
    text = b'{"a": [%b0], "kv_transfer_params": 7}' % (unit * ((1 << 20) // len(unit)))
    spans, steps = run(find_values(text, NAME, DEFAULT_LIMITS))
    assert [text[start:end] for start, end in spans] == [b"7"]
    assert steps >= len(text) // body_members.STEP_BYTES


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{%b}" % b",".join([b'"a":0'] * 4097), "more than 4096 members"),
        (b'{"a":[%b]}' % b",".join([b"[]"] * 20_000), "more than 20000 objects and lists"),
        (b'{"%b":0}' % (b"a" * 70_000), "a name of more than 65536 bytes"),
    ],
)
def test_what_would_take_long_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(JSONTextError, match=reason):
        run(find_values(text, NAME, DEFAULT_LIMITS))
