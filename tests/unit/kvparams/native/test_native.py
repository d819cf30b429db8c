"""Tests that native code says the same as the Python code that it stands for, or nothing."""

import json
import re
from typing import Any
from unittest.mock import patch

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvparams.jsontext import document, editing
from kvparams.jsontext.document import DEFAULT_LIMITS, MemberSpan, find_members
from kvparams.native import NATIVE
from kvparams.routing import handoff_verifier
from tests.unit.kvparams.jsontext.test_json_document import INDENTS, OBJECTS, text

if NATIVE is None:
    pytest.skip("asked to do without native code, or there is no compiler", allow_module_level=True)

PIECES = st.lists(
    st.sampled_from(
        [
            *(
                b"POST ",
                b"GET ",
                b"PUT ",
                b"/v1/completions",
                b"/a?b=%20",
                b"/\xff",
                b" HTTP/1.1\r\n",
                b" HTTP/1.0\r\n",
            ),
            *(
                b"Host: a\r\n",
                b"host: 127.0.0.1:80\r\n",
                b"HOST:b\r\n",
                b"Host: a b\r\n",
                b"Host: [::1]:1\r\n",
                b"Host:\r\n",
            ),
            *(
                b"Content-Length: 5\r\n",
                b"content-length:0\r\n",
                b"Content-Length: +5\r\n",
                b"Content-Length: 5, 5\r\n",
            ),
            *(b"Content-Length: 00005\r\n", b"Content-Length: 5 \r\n", b"content-length: 99999999999\r\n"),
            *(
                b"Transfer-Encoding: chunked\r\n",
                b"Connection: close\r\n",
                b"Connection: Keep-Alive\r\n",
                b"Expect: x\r\n",
            ),
            *(
                b"Upgrade: h2c\r\n",
                b"Connection: upgrade\r\n",
                b"Proxy-Connection: close\r\n",
                b"X-Y_z: 1\r\n",
                b"X: a\tb\r\n",
            ),
            *(
                b"X: \r\n",
                b"X : 1\r\n",
                b" folded\r\n",
                b"X: 1\n",
                b"X: 1\r",
                b"X: \x00\r\n",
                b"X: \x80\r\n",
                b"\r\n",
                b"\n",
                b"a: b",
            ),
        ]
    ),
    max_size=12,
)
ORDINARY_HEADS = st.tuples(
    st.sampled_from([b"POST", b"GET"]),
    st.from_regex(rb"/[A-Za-z0-9/._~%?&=:@!$'()*+,;-]{0,20}", fullmatch=True),
    st.lists(
        st.tuples(
            st.from_regex(rb"X-[A-Za-z0-9_-]{1,10}|Content-Type|accept|User-Agent", fullmatch=True),
            st.from_regex(rb"[!-~]([ -~]{0,20}[!-~])?", fullmatch=True),
        ),
        max_size=6,
    ),
)


class Heard:
    """What httptools makes of a message."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.heads = self.messages = 0

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.heads += 1

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages += 1


def check_request(data: bytes) -> bool:
    """Compares both readers; returns whether the native one has read the head."""
    found = NATIVE.request_head(data, 0)
    if found is None:
        return False
    end, method, url, headers, length = found
    heard = Heard()
    parser: Any = httptools.HttpRequestParser(heard)
    parser.feed_data(data[:end])
    assert heard.heads == 1
    assert (parser.get_method(), heard.url, heard.headers) == (method, url, headers)
    assert parser.get_http_version() == "1.1"
    assert parser.should_keep_alive()
    assert not parser.should_upgrade()
    assert heard.messages == (length == 0)
    parser.feed_data(b"x" * length)
    assert (heard.messages, heard.body) == (1, b"x" * length)
    return True


@given(PIECES)
@example([b"POST ", b"/a?b=%20", b" HTTP/1.1\r\n", b"Host: a\r\n", b"Content-Length: 5\r\n", b"\r\n"])
def test_a_request_head_is_what_httptools_finds(pieces: list[bytes]) -> None:
    check_request(b"".join(pieces))


@given(ORDINARY_HEADS, st.integers(0, 300))
def test_ordinary_request_heads_are_read(head: tuple[bytes, bytes, list[tuple[bytes, bytes]]], length: int) -> None:
    method, url, headers = head
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    whole = b"%b %b HTTP/1.1\r\nHost: h:80\r\n%bContent-Length: %d\r\n\r\n" % (method, url, lines, length)
    assert check_request(whole)
    assert NATIVE.request_head(b"%b" % whole[:-1], 0) is None, "it is not whole"
    assert NATIVE.request_head(b"ab" + whole, 2) is not None


@pytest.mark.parametrize(
    "line",
    [
        *(b"Expect: 100-continue", b"Upgrade: h2c", b"Connection: close", b"Connection: upgrade", b"Host: b"),
        *(b"Transfer-Encoding: chunked", b"Content-Length: 5", b"X : y", b"X: y "),
        *(b" x", b"X:  y", b"X: \x7f", b": y"),
    ],
)
def test_what_asks_for_more_is_left_to_httptools(line: bytes) -> None:
    ordinary = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n%b\r\n"
    assert NATIVE.request_head(ordinary % b"", 0) is not None
    assert NATIVE.request_head(ordinary % (line + b"\r\n"), 0) is None


RESPONSES = st.lists(
    st.sampled_from(
        [
            *(
                b"HTTP/1.1 200 OK\r\n",
                b"HTTP/1.1 503 Service Unavailable\r\n",
                b"HTTP/1.1 204 No\r\n",
                b"HTTP/1.1 100 Go\r\n",
            ),
            *(b"HTTP/1.1 200\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 304 Not\r\n", b"content-length: 5\r\n"),
            *(
                b"Content-Length: 0\r\n",
                b"Content-Length: -1\r\n",
                b"transfer-encoding: chunked\r\n",
                b"a: b\r\n",
                b"a:\r\n",
            ),
            *(
                b"Transfer-Encoding: gzip, chunked\r\n",
                b"Connection: close\r\n",
                b"connection: keep-alive\r\n",
                b"\r\n",
                b"\n",
            ),
            *(b"Content-Type: application/json\r\n", b"content-type: text/event-stream\r\n", b"Retry-After: 3\r\n"),
            *(b"Upgrade: x\r\n", b"Proxy-Connection: close\r\n", b" folded\r\n", b"a : b\r\n"),
        ]
    ),
    max_size=9,
)


@given(RESPONSES)
@example([b"HTTP/1.1 200 OK\r\n", b"content-length: 5\r\n", b"\r\n"])
@example([b"HTTP/1.1 200 OK\r\n", b"transfer-encoding: chunked\r\n", b"\r\n"])
def test_a_response_head_is_what_httptools_finds(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    found = NATIVE.response_head(data)
    if found is None:
        return
    end, status, content_type, retry_after, length = found
    heard = Heard()
    parser: Any = httptools.HttpResponseParser(heard)
    parser.feed_data(data[:end])
    headers = dict(heard.headers)
    assert (heard.heads, parser.get_status_code()) == (1, status)
    assert (headers.get(b"content-type", b""), headers.get(b"retry-after", b"")) == (content_type, retry_after)
    assert parser.should_keep_alive()
    parser.feed_data(b"5\r\nxxxxx\r\n0\r\n\r\n" if length < 0 else b"x" * length)
    assert (heard.messages, len(heard.body)) == (1, 5 if length < 0 else length)


ODD_CHUNKS = [
    *(b"5;a=b\r\nhello\r\n", b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"5\r\nhello!\r\n"),
    *(b"\r\n", b"x", b"000a\r\n0123456789\r\n"),
]
CHUNKS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=20).map(lambda data: b"%x\r\n%b\r\n" % (len(data), data)),
        st.sampled_from(ODD_CHUNKS),
    ),
    max_size=6,
)


@given(CHUNKS, st.lists(st.integers(1, 30), max_size=12))
def test_chunks_are_what_httptools_finds_however_they_are_cut(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    heard = Heard()
    parser: Any = httptools.HttpResponseParser(heard)
    parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    broken = False
    try:
        parser.feed_data(data)
    except httptools.HttpParserError:
        broken = True
    body, left, state, tail, at = b"", 0, 0, b"", 0
    for cut in (*cuts, len(data) + 1):
        part = tail + data[at : at + cut]
        at = min(at + cut, len(data))
        some, used, left, state = NATIVE.read_chunks(part, left)
        tail = part[used:]
        body += some
        if state:
            break
        assert len(tail) <= 16, "a size line that is not whole is short"
    if state == 1:
        assert heard.messages >= 1 or broken
        assert heard.body.startswith(body)
    elif state == 2:  # httptools goes on from here
        assert heard.body.startswith(body)
        assert left == 0
    elif state == 3:
        assert broken
    else:
        assert at == len(data)
        assert (heard.messages, heard.body) == (0, body)
        assert not broken


VALUES = st.sampled_from([b"1", b"null", b'"x"', b"[1,2]", b'{"a":1}'])


@given(OBJECTS, INDENTS, st.booleans(), st.data())
def test_members_are_where_the_python_code_finds_them(
    value: dict[str, Any], indent: Any, ascii_only: bool, data: st.DataObject
) -> None:
    raw = text(value, indent, ascii_only)
    document_ = json.loads(raw)
    found = NATIVE.member_spans(raw, document_, MemberSpan, DEFAULT_LIMITS.max_depth)
    with patch.object(document, "NATIVE", None):
        spans = find_members(raw)
    if found is not None:
        assert found == spans
        assert list(found) == list(spans)
        assert all(type(span) is MemberSpan for span in found.values())
    for name in [*document_, "new"]:
        place = NATIVE.find_member(raw, name)
        assert place is None or place == spans[name]
        assert place is not None or found is None or name not in document_
    names = [*spans, "new", "other"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), st.none() | VALUES, max_size=4))
    changes = {name: value for name, value in changes.items() if re.fullmatch(r"[a-z]+", name)}
    edited = NATIVE.edit_members(raw, spans, changes)
    with patch.object(editing, "NATIVE", None):
        expected = editing.edit(raw, spans, changes)
    assert edited in (None, expected)
    if not any(value is None and name in spans for name, value in changes.items()):
        assert edited is not None


@pytest.mark.parametrize("raw", [b'{"a":1,"a":2}', b'{"\\u0061":1}', b'{"b":1}', b"{}", b"[]", b"", b'{"a":1', b'{"a"'])
def test_a_member_that_is_not_plainly_there_is_not_found(raw: bytes) -> None:
    assert NATIVE.find_member(raw, "a") is None
    assert NATIVE.find_member(bytearray(b'{"a":1}'), "a") is None  # pyright: ignore[reportArgumentType]
    assert NATIVE.find_member(b' {"b":[{"a":[]}] , "a" : "}" } ', "a") == (19, 25, 28)


@pytest.mark.parametrize(
    ("raw", "ordinary"),
    [
        (b'{"a":1,"b":[{"c":[]},{}],"d":"x\\"y"}', True),
        (b" { } ", True),
        (b'{"a":{"b":1,"b":2}}', False),
        (b'{"a":1,"a":2}', False),
        (b'{"a\\u0062":1}', False),
        (b'{"a":1e5}', False),
        (b'{"a":[1E5]}', False),
        (b'{"a":%b}' % (b"9" * 301), False),
        (b'{"a":%b1%b}' % (b"[" * 31, b"]" * 31), True),
        (b'{"a":%b1%b}' % (b"[" * 33, b"]" * 33), False),
        (b'{"a":[%b0]}' % (b"[]," * 1998), True),
        (b'{"a":[%b0]}' % (b"[]," * 2001), False),
        (b'{"a":{%b}}' % b",".join(b'"%d":0' % n for n in range(32)), True),
        (b'{"a":{%b}}' % b",".join(b'"%d":0' % n for n in range(33)), False),
    ],
)
def test_which_objects_are_ordinary(raw: bytes, ordinary: bool) -> None:
    found = NATIVE.member_spans(raw, json.loads(raw), MemberSpan, 64)
    assert (found is not None) is ordinary


def test_the_depth_that_is_allowed_holds() -> None:
    raw = b'{"a":[[1]]}'
    for depth, ordinary in ((3, True), (2, False), (1, False), (0, False)):
        assert (NATIVE.member_spans(raw, json.loads(raw), MemberSpan, depth) is not None) is ordinary


@given(st.binary(max_size=80), st.dictionaries(st.text(max_size=3), st.integers(), max_size=4), st.integers(-3, 70))
def test_no_input_does_harm(raw: bytes, members: dict[str, Any], number: int) -> None:
    """Also where the text is not what was parsed: under an address sanitizer this reads nothing that is not there."""
    NATIVE.member_spans(raw, members, MemberSpan, number)
    for name in members:
        NATIVE.find_member(raw, name)
    NATIVE.request_head(raw, min(max(number, 0), len(raw)))
    NATIVE.response_head(raw)
    NATIVE.read_chunks(raw, max(number, -2))
    NATIVE.pack_numbers(b'"a":[' + raw, "a")
    spans = {name: MemberSpan(number, value % 90 - 5, value % 83) for name, value in members.items()}
    NATIVE.edit_members(raw, spans, dict.fromkeys(members, raw))


SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", 1.0, "\u00fc"])
MEMBERS = st.dictionaries(st.sampled_from("abc"), SCALARS | st.just([1]), max_size=3)


@given(MEMBERS, MEMBERS, st.sets(st.sampled_from("abc")))
def test_forms_are_those_that_the_python_code_finds(said: dict[str, Any], like: dict[str, Any], any_: set[str]) -> None:
    kinds: dict[str, Any] = {name: type(value) for name, value in like.items()}
    form = tuple((name, kinds[name], ... if name in any_ else value) for name, value in like.items())
    found = NATIVE.has_form(said, form)
    with patch.object(handoff_verifier, "NATIVE", None):
        assert handoff_verifier._has_form(said, form) is found  # pyright: ignore[reportPrivateUsage]
    assert NATIVE.has_form(like, form)


@given(
    st.binary(max_size=40),
    st.lists(st.sampled_from([b"a", b"ab", b"b\0", b'"x"', b"aaa"]), max_size=4),
    st.integers(0, 50),
)
def test_words_are_found_where_python_finds_them(raw: bytes, words: list[bytes], at: int) -> None:
    text = b'ab"x"'.join([raw, raw[:3]])
    assert NATIVE.find_words(text, tuple(words), at) == [text.find(word, at) for word in words]


WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("member_spans", (b"{}", {}, MemberSpan)),
    ("member_spans", (b"{}", {}, dict, 3)),
    ("member_spans", (b"{}", {}, MemberSpan, "3")),
    ("request_head", (b"", 1)),
    ("request_head", (b"", -1)),
    ("request_head", ("", 0)),
    ("response_head", ("",)),
    ("read_chunks", (b"", -3)),
    ("read_chunks", (b"",)),
    ("edit_members", (b"{}", {})),
    ("find_words", (b"", [b"a"], 0)),
    ("find_words", (b"", ("a",), 0)),
    ("find_words", (b"", (b"a",), -1)),
    ("find_member", (b"{}",)),
    ("find_member", (b"{}", b"a")),
    ("has_form", ({}, [])),
    ("has_form", ({"a": 1}, (1,))),
    ("has_form", ({"a": 1}, (("a", int),))),
    ("pack_numbers", (b"{}",)),
    ("pack_numbers", (b"{}", b"a")),
    ("pack_numbers", (b"{}", "\ud800")),
]


@pytest.mark.parametrize(("call", "arguments"), WRONG)
def test_wrong_arguments_are_errors(call: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(NATIVE, call)(*arguments)


def test_what_is_no_bytes_or_dict_is_left_to_the_python_code() -> None:
    assert NATIVE.edit_members(bytearray(b"{}"), {}, {"a": b"1"}) is None  # pyright: ignore[reportArgumentType]
    assert NATIVE.edit_members(b"{}", {}, {"a": bytearray(b"1")}) is None  # pyright: ignore[reportArgumentType]
    assert NATIVE.pack_numbers(bytearray(b'"a":[1]'), "a") is None  # pyright: ignore[reportArgumentType]
    assert NATIVE.member_spans(bytearray(b"{}"), {}, MemberSpan, 9) is None  # pyright: ignore[reportArgumentType]
