"""Tests which requests have media in them, and that equal media have equal names."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.jsontext.document import JSONLimits, MemberSpan, find_members
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import parse_request, parse_request_in_steps
from kvparams_proxy.requests.media_detection import find_media_in_steps
from tests.support.processor import is_within
from tests.support.proxy.steps import drained

LIMITS = JSONLimits(max_bytes=64 << 20)
PICTURE = "data:image/png;base64," + "iVBORw0KGgo" * 50


def media_of(kind: EndpointKind, body: dict[str, Any], *, indent: int | None = None) -> str:
    """The name, which is the same for whoever reads the body at once and in steps."""
    raw = json.dumps(body, indent=indent).encode()
    parsed = drained(parse_request_in_steps(kind, raw, "r", "t", LIMITS, find_media=True))
    at_once = parse_request(kind, raw, "r", "t", LIMITS, find_media=True)
    assert at_once is None or at_once.facts.media == parsed.facts.media
    return parsed.facts.media


def chat(*parts: object) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]}


TEXT = {"type": "text", "text": "What is this? An image_url?"}
WITH_MEDIA: list[tuple[EndpointKind, dict[str, Any]]] = [
    ("chat", chat(TEXT, {"type": "image_url", "image_url": {"url": PICTURE}})),
    ("chat", chat({"image_url": PICTURE}, TEXT)),
    ("chat", chat({"type": "image_url", "image_url": {"detail": "low", "url": "https://h/cat.png"}})),
    ("chat", chat({"type": "audio_url", "audio_url": {"url": "https://h/a.wav"}})),
    ("chat", chat({"type": "video_url", "video_url": {"url": "https://h/a.mp4"}})),
    ("chat", chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]}),
    ("responses", {"input": [{"type": "function_call_output", "output": [{"image_url": PICTURE}]}]}),
    (
        "messages",
        {
            **chat({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}}),
            "max_tokens": 9,
        },
    ),
]


@pytest.mark.parametrize(("kind", "body"), WITH_MEDIA)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("before", [0, 100_000])
def test_media_are_found(kind: EndpointKind, body: dict[str, Any], indent: int | None, before: int) -> None:
    """Also behind a long text, and whatever the white space."""
    name = "input" if kind == "responses" else "messages"
    body = {**body, name: [{"role": "user", "content": "x" * before}, *body[name]]}
    assert media_of(kind, body, indent=indent)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", chat(TEXT)),
        ("chat", {"messages": [{"role": "user", "content": json.dumps(WITH_MEDIA[0][1])}]}),
        ("chat", {"messages": [{"role": "user", "content": '\\", "image_url": "x'}]}),
        ("chat", {**chat(TEXT), "metadata": {"image_url": PICTURE}}),
        ("chat", chat({"type": "image_embeds", "image_embeds": "AAAA"})),
        ("responses", {"input": '{"image_url": "x"}'}),
        ("completions", {"prompt": "an image", "image_url": PICTURE}),
        ("other", {"messages": [{"role": "user", "content": [{"image_url": PICTURE}]}]}),
    ],
)
@pytest.mark.parametrize("long", [False, True])
def test_what_only_looks_like_media_is_none(kind: EndpointKind, body: dict[str, Any], long: bool) -> None:
    assert media_of(kind, {**body, "user": "x" * 200_000} if long else body) == ""


@pytest.mark.parametrize("size", [0, 200_000])
def test_media_are_looked_for_only_where_somebody_encodes_them(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: they are found where they are looked for."""
    searched: list[EndpointKind] = []

    def search(kind: EndpointKind, *rest: Any) -> Any:
        searched.append(kind)
        return find_media_in_steps(kind, *rest)

    monkeypatch.setattr("kvparams_proxy.requests.intake.find_media_in_steps", search)
    body = chat({"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "x" * size})
    raw = json.dumps(body).encode()
    found = [
        drained(parse_request_in_steps("chat", raw, "r", "t", LIMITS, find_media=wanted)).facts.media
        for wanted in (False, True)
    ]
    assert found == ["", found[1]] != ["", ""]
    assert searched == ["chat"]


@given(text=st.text())
def test_no_text_is_taken_for_a_medium(text: str) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}).encode()
    assert drained(find_media_in_steps("chat", raw, find_members(raw))) == ""


@given(
    text=st.text(max_size=30),
    question=st.text(max_size=30),
    one=st.text("abcdef", min_size=1, max_size=40),
    other=st.text("abcdef", min_size=1, max_size=40),
    indent=st.sampled_from([None, 1]),
)
def test_equal_media_have_equal_names_whatever_stands_around_them(
    text: str, question: str, one: str, other: str, indent: int | None
) -> None:
    def named(url: str, *around: str) -> str:
        parts = [{"type": "text", "text": each} for each in around]
        return media_of("chat", chat(parts[0], {"type": "image_url", "image_url": {"url": url}}, *parts[1:]))

    assert named(one, text, question) == named(one, question)
    assert (named(one, text) == named(other, text)) is (one == other)
    body = chat({"type": "image_url", "image_url": {"url": one}})
    assert media_of("chat", body, indent=indent) == named(one, text)


@pytest.mark.parametrize(
    "filling", ['"image"', '_url"', '{"image_url"', "image_url ", "\\u0069mage", " " * 70 + '"image"']
)
def test_each_step_is_short_whatever_is_in_the_text(filling: str) -> None:
    """So many windows, so many steps."""
    raw = json.dumps({"messages": [{"role": "user", "content": filling * (400_000 // len(filling))}]}).encode()
    steps = find_media_in_steps("chat", raw, find_members(raw))
    assert sum(1 for _ in steps) >= len(raw) // (16 << 10)


SPACE = b" " * 4_000_000


@pytest.mark.parametrize(
    "content",
    [
        b'[{"image_url":' + SPACE + b"1}]",
        b'[{"image_url":{"x":1,"url"' + SPACE + b":1}}]",
        b'[{"image_url":{"url":' + SPACE + b'"x"}}]',
        b'[{"image_url":{"x":[' + b'"url",' * 600_000 + b"1]}}]",
        b'[{"image_url":{"x":[' + b'"url"     \t,' * 300_000 + b"1]}}]",
        b'[{"type"' + SPACE + b':"image"}]',
        b'[{"source":{}' + SPACE + b',"type":"image"}]',
        b'[{"source":' + SPACE + b'{},"type":"image"}]',
        b'[{"source":{' + b'"data" ,' * 500_000 + b'"x":1},"type":"image"}]',
        b'[{"source":{"data"' + SPACE + b':1},"type":"image"}]',
        b"[" + b"{" * 2_000_000 + b"}" * 2_000_000 + b',"type":"image"]',
        b"[" + b'{"type":"image"  ' * 200_000,
    ],
)
def test_no_step_holds_the_event_loop_whatever_stands_beside_a_medium(content: bytes) -> None:
    raw = b'{"messages":' + content + b"}"
    at = raw.index(b"[")
    steps = find_media_in_steps("chat", raw, {"messages": MemberSpan(0, at, len(raw) - 1)})
    longest_s = 0.0
    has_ended = False
    while not has_ended:
        began_s = time.thread_time()
        has_ended = next(steps, "ended") == "ended"
        longest_s = max(longest_s, time.thread_time() - began_s)
    assert is_within(longest_s, 0.005)


def anthropic(data: str, question: str, *, type_last: bool, **more: object) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data, **more}
    members = {"source": source, "type": "image"} if type_last else {"type": "image", "source": source}
    return {**chat(members, {"type": "text", "text": question}), "max_tokens": 9}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("more", [{}, {"later": "the same"}])
def test_a_source_before_the_type_is_named_by_its_medium(indent: int | None, more: dict[str, object]) -> None:
    def named(data: str, question: str, *, type_last: bool = True) -> str:
        return media_of("messages", anthropic(data, question, type_last=type_last, **more), indent=indent)

    for size in (10, 30_000):
        one, other = "iVBORw0K" + "a" * size, "iVBORw0K" + "b" * size
        assert named(one, "Who?") == named(one, "What?")
        assert named(one, "Who?") != named(other, "Who?")
        assert named(one, "Who?") == named(one, "Who?", type_last=False)
    long, longer = ("iVBORw0K" + each * 100_000 for each in "ab")
    assert named(long, "Who?") == named(long, "What?") != named(longer, "Who?")


def test_a_medium_that_is_not_found_is_not_named_by_the_text_beside_it() -> None:
    """The last has something before its type that is no source."""

    def named(question: str, **members: object) -> str:
        part = {"type": "text", "text": question}
        return media_of("messages", {**chat(part, {**members, "type": "image"}, part), "max_tokens": 9})

    around: list[dict[str, Any]] = [
        {},
        {"source": {}},
        {"source": {"file_id": 7}},
        {"cache_control": {"type": "ephemeral"}},
    ]
    for members in around:
        assert named("Who?", **members) == named("What?", **members) != ""


def test_a_url_behind_other_members_names_its_picture() -> None:
    def named(url: str) -> str:
        picture = {"detail": "high", "x": "y" * 300, "url": url}
        return media_of("chat", chat({"type": "image_url", "image_url": picture}))

    assert named("https://h/1") == named("https://h/1") != named("https://h/2")
