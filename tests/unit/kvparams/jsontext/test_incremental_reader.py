"""Tests that the incremental reader agrees with the other one on every text and cut, and that no step takes long."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvparams.errors import JSONTextError
from kvparams.jsontext import document
from kvparams.jsontext.document import (
    DEFAULT_LIMITS,
    JSONLimits,
    find_members,
    load_object,
    load_short_object,
    read_object,
)
from kvparams.jsontext.editing import edit, edit_with_spans, find_removals, remove_ranges, shift_spans
from kvparams.jsontext.incremental_reader import IncrementalReader
from kvparams.jsontext.receivers import OPEN_OBJECT, AbridgedObjectReceiver, ListReceiver, Receiver, TreeBuilder
from kvparams.jsontext.scanner import LONGEST_TOKEN, STEP_BYTES, UNLIMITED, MemberSpan
from kvparams.native import NATIVE
from tests.support.processor import is_within
from tests.unit.kvparams.jsontext.test_json_document import ENCODINGS, INDENTS, OBJECTS, plain, text

STEP_CPU_S = 0.02
"""Of the one thread: what else runs on the machine does not count."""
LARGE = 15_000_000
STEPS = st.sampled_from([1, 13, 17, 32, 100, 5000])
Read = tuple[dict[str, object], dict[str, MemberSpan]]


def in_steps(raw: bytes, limits: JSONLimits = DEFAULT_LIMITS, step_bytes: int = STEP_BYTES) -> Read:
    """What the incremental reader makes of a whole object."""
    built, stand = TreeBuilder(OPEN_OBJECT), dict[str, MemberSpan]()
    built.spans = stand
    for _ in read_object(raw, built, limits, step_bytes=step_bytes):
        pass
    return cast("dict[str, object]", built.value), stand


def if_short(raw: bytes, limits: JSONLimits) -> Read:
    """What is made at once of an object that is plainly cheap; any other is read as ever."""
    with patch.object(document, "AT_ONCE_BYTES", 0):
        return load_short_object(raw, limits) or load_object(raw, limits)


def outcome(read: Callable[[], Read]) -> object:
    """What a reader finds, in the order in which it finds it; None where it refuses."""
    try:
        document, stand = read()
    except JSONTextError:
        return None
    return json.dumps(document), list(stand.items())


def agree(raw: bytes, step_bytes: int, limits: JSONLimits = DEFAULT_LIMITS) -> None:
    found = outcome(lambda: load_object(raw, limits))
    assert outcome(lambda: in_steps(raw, limits, step_bytes)) == found, raw
    assert outcome(lambda: if_short(raw, limits)) == found, raw


@given(OBJECTS.filter(plain), INDENTS, ENCODINGS, STEPS, st.integers(1, 8))
def test_it_reads_what_the_other_reader_reads_however_the_text_is_cut(
    document: dict[str, object], indent: int | None, ascii_only: bool, step_bytes: int, depth: int
) -> None:
    raw = text(document, indent, ascii_only)
    agree(raw, step_bytes)
    agree(raw, step_bytes, JSONLimits(max_depth=depth))


PARTS = st.sampled_from(
    [
        *(
            b"{",
            b"}",
            b"[",
            b"]",
            b":",
            b",",
            b" ",
            b"\n",
            b'"',
            b'"a"',
            b'"b":',
            b'"k":[',
            b'"m":{',
            b"}]",
            b"],",
            b"},",
        ),
        *(b"1", b"-", b"0", b"12345", b"1.5e3", b"1e999", b"-1E400", b".", b"e", b"true", b"null", b"nul", b"NaN"),
        *(
            b"\\",
            b'\\"',
            b"\\\\",
            b"\\u0041",
            b"\\ud83d",
            b"\\ude00",
            b"\\x",
            b"\xc3\xa9",
            b"\xf0\x9f\x98\x80",
            b"\xff",
        ),
        *(b"\x01", b"x", b'"\\n"', b'"long text here ', b'",', b'"a":1,', b'"a":2', b"9" * 310, b"9" * 310 + b".5"),
    ]
)


@example([b'"k":[', b"1.5", b"e", b"3", b"]"], True, 13)
@example([b'"k":[', b'"', b"\\ud83d", b'"', b"]"], True, 13)
@example([b'"k":[', b'{"a":1,"a":2}', b"]"], True, 13)
@example([b'"a":1,', b'"m":{', b"}", b",", b'"a":2'], True, 13)
@given(st.lists(PARTS, max_size=24), st.booleans(), STEPS)
def test_it_refuses_what_the_other_reader_refuses(parts: list[bytes], braces: bool, step_bytes: int) -> None:
    raw = b"".join(parts)
    agree(b"{%b}" % raw if braces else raw, step_bytes)


@given(OBJECTS.filter(plain), ENCODINGS, STEPS, st.data())
def test_a_text_that_was_spoiled_is_judged_alike(
    document: dict[str, object], ascii_only: bool, step_bytes: int, data: st.DataObject
) -> None:
    raw = text(document, None, ascii_only)
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, min(len(raw), start + 6)))
    agree(raw[:start] + data.draw(PARTS | st.just(b"") | st.just(raw[end:])) + raw[end:], step_bytes)


FAULTS: Mapping[str, bytes] = {
    "stands twice": b'{"a":1,"a":2}',
    "infinities are not JSON": b"[1e999]",
    "nested deeper": b"[" * 70 + b"]" * 70,
    "not valid JSON": b"[1,]",
}


@pytest.mark.parametrize("said", FAULTS)
@pytest.mark.parametrize("padding", [10, 40_000, 80_000])
def test_a_fault_is_named_alike_wherever_it_stands(said: str, padding: int) -> None:
    """Alone, or in a list that is too long to be read at once, or behind a string that is."""
    fault = FAULTS[said]
    for raw in (
        b'{"x":"%b","y":%b}' % (b"p" * padding, fault),
        b'{"x":[%b%b]}' % (b'"pppp",' * (padding // 7), fault),
        b'{"x":{"y":[{"p":"%b"},%b]}}' % (b"p" * padding, fault),
    ):
        with pytest.raises(JSONTextError, match=said):
            load_object(raw)
        with pytest.raises(JSONTextError, match=said):
            in_steps(raw)


@pytest.mark.parametrize(
    ("member", "limits"),
    [
        (b"[%b]" % b",".join([b"[]"] * 1001), JSONLimits(max_containers=1000)),
        (b"[%b]" % b",".join([b'{"a":{}}'] * 501), JSONLimits(max_containers=1000)),
        (b"[%b]" % b",".join([b'""'] * 1001), JSONLimits(max_strings=1000)),
        (b'[[{"a":"b"},"c"],"d"]', JSONLimits(max_strings=4)),
        (b"{%b}" % b",".join(b'"%d":1' % i for i in range(1001)), JSONLimits(max_strings=1000)),
        (b'[{"a":[{}]}]', JSONLimits(max_depth=4)),
    ],
)
def test_limits_are_kept_to_the_last_part(member: bytes, limits: JSONLimits) -> None:
    raw = b'{"x":%b}' % member
    for step_bytes in (13, 100, STEP_BYTES):
        with pytest.raises(JSONTextError, match=r"more than|nested deeper"):
            in_steps(raw, limits, step_bytes)
        more = JSONLimits(max_containers=1500, max_strings=1500, max_depth=6)
        assert in_steps(raw, more, step_bytes)[0] == json.loads(raw), "the control: a little more is enough"


def test_members_are_counted_where_they_are_told_apart() -> None:
    raw = b"{%b}" % b",".join(b'"%d":1' % i for i in range(1001))
    for reader in (load_object, in_steps):
        assert len(reader(raw, JSONLimits(max_members=1001))[0]) == 1001
        with pytest.raises(JSONTextError, match="more than 1000 members"):
            reader(raw, JSONLimits(max_members=1000))


@pytest.mark.parametrize("what", [b'{"%b":1}' % (b"k" * 70_000), b'{"a":0.%b}' % (b"1" * 70_000)])
def test_names_and_numbers_without_an_end_are_refused(what: bytes) -> None:
    assert len(what) > LONGEST_TOKEN
    with pytest.raises(JSONTextError, match=f"of more than {LONGEST_TOKEN} bytes"):
        in_steps(what)


@pytest.mark.parametrize("size", [LONGEST_TOKEN - 2, LONGEST_TOKEN - 1, 70_000, 200_000])
def test_a_long_name_is_judged_alike(size: int) -> None:
    for raw in (b'{"%b":1}' % (b"k" * size), b'{"a":"b","%b":"c"}' % (b"k" * size)):
        agree(raw, STEP_BYTES)


def test_where_it_is_not_strict_only_json_is_asked_for() -> None:
    raw = b'{"x":[{"a":1,"a":2},1e999,%b],"y":"z"}' % b",".join([b"[]"] * 30_000)
    built = TreeBuilder(OPEN_OBJECT)
    for _ in read_object(raw, built, UNLIMITED, strict=False):
        pass
    assert built.value == json.loads(raw)
    with pytest.raises(JSONTextError, match="not valid JSON"):
        for _ in read_object(raw + b"]", TreeBuilder(OPEN_OBJECT), UNLIMITED, strict=False):
            pass


# no step takes long


def filled(head: bytes, unit: bytes, tail: bytes, size: int) -> bytes:
    """So many bytes of text: `unit` again and again between the other two."""
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def listed(unit: bytes, size: int, last: bytes = b"1") -> bytes:
    return filled(b'{"x":[', unit, last + b"]}", size)


def joined(unit: Callable[[int], bytes], times: int) -> bytes:
    return b",".join(map(unit, range(times)))


def quoted(unit: bytes, size: int) -> bytes:
    return filled(b'{"x":"', unit, b'"}', size)


NASTY: Mapping[str, Callable[[int], bytes]] = {
    "1e1": lambda size: listed(b"1e1,", size),
    "1": lambda size: listed(b"1,", size),
    "1 spaced": lambda size: listed(b"1 , ", size),
    "1.5": lambda size: listed(b"1.5,", size),
    "1e100": lambda size: listed(b"1e100,", size),
    "null": lambda size: listed(b"null,", size),
    "numbers of 4,000 digits": lambda size: listed(b"9" * 4000 + b",", size),
    "fractions of 30,000 digits": lambda size: listed(b"0." + b"1" * 30_000 + b",", size),
    "one number": lambda size: b'{"x":' + b"9" * size + b"}",
    "white space": lambda size: b'{"x":' + b" " * size + b"1}",
    "white space between": lambda size: listed(b" " * 60_000 + b"1,", size),
    "escaped quotes": lambda size: quoted(b'\\"', size),
    "backslashes": lambda size: quoted(b"\\\\", size),
    "backslashes without an end": lambda size: b'{"x":"' + b"\\" * size,
    "an odd backslash": lambda size: quoted(b"\\\\", size)[:-2] + b'\\"}',
    "escapes": lambda size: quoted(b"\\u00e9", size),
    "surrogates": lambda size: quoted(b"\\ud83d\\ude00", size),
    "new lines": lambda size: quoted(b"\\n", size),
    "plain text": lambda size: quoted(b"a", size),
    "emoji": lambda size: quoted("\U0001f600".encode(), size),
    "no end": lambda size: b'{"x":"' + b"a" * size,
    "brackets in a string": lambda size: quoted(b"{[", size),
    "quotes and brackets": lambda size: quoted(b'\\"{', size),
    "empty strings": lambda size: listed(b'"",', size, b'""'),
    "strings of 60": lambda size: listed(b'"' + b"a" * 60 + b'",', size),
    "strings of 33,000": lambda size: listed(b'"' + b"a" * 33_000 + b'",', size),
    "empty objects": lambda size: listed(b"{},", size),
    "objects": lambda size: listed(b'{"a":"b","c":[1]},', size),
    "nested without an end": lambda size: b'{"x":' + b"[" * size,
    "60 deep again and again": lambda size: listed(b"[" * 60 + b'"a",' * 9_000 + b"1" + b"]" * 60 + b",", size),
    "60 deep around numbers": lambda size: listed(b"[" * 60 + b"1," * 20_000 + b"1" + b"]" * 60 + b",", size),
    "keys": lambda size: b'{"x":{%b}}' % joined(lambda i: b'"%x":1' % i, size // 9),
    "190,000 keys": lambda size: b'{"x":{%b}}' % joined(lambda i: b'"%x":"%064d"' % (i, i), size // 160),
    "top keys": lambda size: b"{%b}" % joined(lambda i: b'"%x":1' % i, size // 9),
    "lists of 60,000": lambda size: listed(b"[" + b"1e1," * 15_000 + b"1],", size),
    "keys of 60,000": lambda size: b"{%b}" % joined(lambda i: b'"%d%b":1' % (i, b"k" * 60_000), size // 60_000),
}
"""Texts of about so many bytes that once took seconds, or might."""


def stepped(raw: bytes, receiver: Receiver) -> Iterator[float]:
    """What each step of reading costs, in seconds of this thread; also one that refuses the text."""
    steps = read_object(raw, receiver)
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration:
            return
        except JSONTextError:
            yield time.thread_time() - began
            return
        yield time.thread_time() - began


@pytest.mark.parametrize("size", [LARGE // 4, pytest.param(LARGE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NASTY)
def test_no_step_takes_long_whatever_the_text(name: str, size: int) -> None:
    """Up to three times: a processor that is shared may be slow once."""
    raw = NASTY[name](size)
    costs: list[float] = []
    gc.disable()  # it would examine whatever the tests before have left
    try:
        for _ in range(3):
            costs.append(max(stepped(raw, AbridgedObjectReceiver())))
            if costs[-1] < STEP_CPU_S:
                break
    finally:
        gc.enable()
    assert is_within(min(costs), STEP_CPU_S), costs


CHEAP = {
    "one string": b'{"a":"b"}',
    "a prompt": filled(b'{"prompt":"', b"words ", b'","n":1,"t":0.5,"stream":true}', 250_000),
    "lines": filled(b'{"prompt":"', b"a line of some words\\n", b'"}', 250_000),
    "escapes": filled(b'{"x":"', b"\\u00e9", b'"}', 64_000),
    "escaped quotes": filled(b'{"x":"', b'\\"', b'"}', 64_000),
    "backslashes": filled(b'{"x":"', b"\\\\", b'"}', 64_000),
    "escaped names": b"{" + b",".join(b'"%b%d":1' % (b"\\u0061" * 160, number) for number in range(60)) + b"}",
    "a long name": b'{"%b":1}' % (b"k" * (LONGEST_TOKEN - 2)),
    "ids": filled(b'{"x":[', b"1,", b'1],"model":"m"}', 64_000),
    "numbers of 4,000 digits": filled(b'{"x":[', b"9" * 4000 + b",", b"1]}", 64_000),
    "spaced": filled(b'{"x":[', b"1 , ", b"1]}", 64_000),
    "null": filled(b'{"x":[', b"null,", b"1]}", 64_000),
    "lists": b"{" + b",".join(b'"%d%b":[1,2]' % (number, b"k" * 900) for number in range(60)) + b"}",
    "members": b"{" + b",".join(b'"%d":"%04000d"' % (number, number) for number in range(60)) + b"}",
    "many lists": b"{" + b",".join(b'"%d":[%b1]' % (number, b"1," * 500) for number in range(60)) + b"}",
}
DEAR = {
    "many ids": filled(b'{"x":[', b"1,", b"1]}", 70_000),
    "many members": b"{" + b",".join(b'"%d":1' % number for number in range(600)) + b"}",
    "members": b"{" + b",".join(b'"%d":"%0100d"' % (number, number) for number in range(65)) + b"}",
    "lists": b"{" + b",".join(b'"%d":[%b1]' % (number, b"1," * 60) for number in range(500)) + b"}",
    "escapes": filled(b'{"x":"', b"\\u00e9", b'"}', 250_000),
    "escaped quotes": filled(b'{"x":"', b'\\"', b'"}', 250_000),
    "escaped quotes without an end": filled(b'{"x":"', b'\\"', b"", 250_000),
    "backslashes": filled(b'{"x":"', b"\\\\", b'"}', 250_000),
    "escaped names": b"{" + b",".join(b'"%b%d":1' % (b"\\u0061" * 80, number) for number in range(500)) + b"}",
    "a name too long": b'{"%b":1}' % (b"k" * (LONGEST_TOKEN - 1)),
    "exponents": filled(b'{"x":[', b"1e1,", b"1]}", 6_000),
    "fractions": filled(b'{"x":[', b"1.5,", b"1]}", 6_000),
    "a float too large": filled(b'{"x":"', b"a", b'","y":1e999}', 6_000),
    "a number without an end": b'{"x":' + b"9" * 6_000 + b"}",
    "an object": filled(b'{"x":"', b"a", b'","y":{}}', 6_000),
    "a list in a list": filled(b'{"x":"', b"a", b'","y":[[]]}', 6_000),
    "strings": filled(b'{"x":[', b'"a",', b'""]}', 6_000),
    "a long text": filled(b'{"x":"', b"a", b'"}', 300_000),
    "a string without an end": b'{"x":"' + b"a" * 6_000,
    "a list": filled(b"[", b"1,", b"1]", 6_000),
}


@pytest.mark.parametrize("name", CHEAP)
def test_what_is_read_at_once_takes_no_long(name: str) -> None:
    raw, costs = CHEAP[name], list[float]()
    for _ in range(3):
        began = time.thread_time()
        assert load_short_object(raw) is not None
        costs.append(time.thread_time() - began)
    assert is_within(min(costs), STEP_CPU_S / 4), costs


@pytest.mark.parametrize("name", DEAR)
def test_what_may_take_long_is_not_read_at_once(name: str) -> None:
    with patch.object(document, "NATIVE", None):
        assert load_short_object(DEAR[name]) is None


@pytest.mark.skipif(NATIVE is None, reason="asked to do without native code, or there is no compiler")
@pytest.mark.parametrize("name", {**DEAR, **NASTY})
def test_what_native_code_reads_at_once_takes_no_long(name: str) -> None:
    raw, costs = DEAR.get(name) or NASTY[name]((64 << 10) - 64), list[float]()
    for _ in range(3):
        began = time.thread_time()
        with suppress(JSONTextError):
            load_short_object(raw)
        costs.append(time.thread_time() - began)
    assert is_within(min(costs), STEP_CPU_S), costs


@pytest.mark.parametrize("name", ["1e1", "escaped quotes", "backslashes", "objects", "white space between"])
def test_the_cost_is_linear(name: str) -> None:
    """A quarter of the text takes a quarter of the time, more or less."""
    raw = NASTY[name](LARGE)
    part = raw[: len(raw) // 4]  # without an end: refused, after all of it was read
    quarter = min(sum(stepped(part, Receiver())) for _ in range(3))
    bound_s = 10 * quarter + 0.02
    assert any(sum(stepped(raw, Receiver())) < bound_s for _ in range(2))


# what is kept


def test_of_a_long_object_short_members_are_kept_and_the_kind_of_long_ones() -> None:
    document = {
        "a": 1,
        "text": "t" * 100_000,
        "list": list(range(100_000)),
        "object": {str(i): i for i in range(20_000)},
        "short": {"a": [1, {"b": None}]},
        "s": "s",
    }
    raw = json.dumps(document).encode()
    receiver = AbridgedObjectReceiver()
    for _ in read_object(raw, receiver):
        pass
    kept = receiver.document
    assert {name: kept[name] for name in ("a", "short", "s")} == {"a": 1, "short": document["short"], "s": "s"}
    assert {name: type(value) for name, value in kept.items()} == {
        name: type(value) for name, value in document.items()
    }
    assert cast("str", document["text"]).startswith(cast("str", kept["text"]))
    assert len(cast("str", kept["text"])) < 40_000
    assert all(kept[name] and len(cast("list[object]", kept[name])) == 1 for name in ("list", "object"))
    assert receiver.fields == find_members(raw)
    assert not receiver.whole


@given(st.lists(st.tuples(st.integers(0, 30_000), st.booleans()), max_size=30))
def test_no_more_is_kept_than_a_bound_and_what_is_needed(sizes: list[tuple[int, bool]]) -> None:
    document: dict[str, Any] = {f"k{i}": [0] * (size // 3) for i, (size, _) in enumerate(sizes)}
    needed = frozenset(f"k{i}" for i, (_, is_needed) in enumerate(sizes) if is_needed)
    receiver = AbridgedObjectReceiver(needed)
    for _ in read_object(json.dumps(document).encode(), receiver, JSONLimits(max_bytes=1 << 30)):
        pass
    assert receiver.document.keys() == document.keys()
    assert all(bool(receiver.document[name]) is bool(value) for name, value in document.items())
    kept = (value for name, value in receiver.document.items() if name not in needed)
    assert sum(len(cast("list[object]", value)) for value in kept) < 300_000 // 3
    assert receiver.whole is (receiver.document == document)


def test_what_is_long_is_told_to_whoever_asks_for_it() -> None:
    class Count(ListReceiver):
        seen = 0

        def on_values(self, values: list[object]) -> None:
            self.seen += len(values)

    count, inner = Count(), AbridgedObjectReceiver()
    receiver = AbridgedObjectReceiver(special={"list": count, "object": inner, "other": count})
    document: dict[str, Any] = {
        "list": ["x"] * 20_000,
        "object": {"a": 1, "b": "y" * 50_000},
        "other": {"c": "z" * 50_000},
    }
    raw = json.dumps(document).encode()
    for _ in read_object(raw, receiver):
        pass
    assert count.seen == 20_000
    assert receiver.long == {"list": count, "object": inner}, "an object is not told to whoever receives lists"
    assert inner.document["a"] == 1
    place = inner.fields["b"]
    assert json.loads(raw[place.value : place.end]) == document["object"]["b"]


def test_a_container_that_stands_in_a_text_is_passed_over() -> None:
    raw = b'xx{"a":[1,{"b":"]}"}]}yy'
    assert IncrementalReader(raw, 2, UNLIMITED).finish() == len(raw) - 2
    reader = IncrementalReader(raw, 2, UNLIMITED, step_bytes=13)
    for _ in reader.steps():
        pass
    assert reader.at == len(raw) - 2


# editing without a further walk

CHANGES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "max_tokens", "stream"]),
    st.none() | st.sampled_from([b"1", b'{"x": [1]}', b'"\xc3\xa9"']),
    max_size=6,
)
EMPTY: dict[str, object] = {}
NESTED: object = [1, EMPTY]
VALUES: st.SearchStrategy[object] = st.integers() | st.text(max_size=5) | st.just(NESTED)
MEMBERS: st.SearchStrategy[dict[str, object]] = st.dictionaries(st.sampled_from("abcd\u00e9"), VALUES, max_size=5)


@given(MEMBERS.filter(plain), INDENTS, ENCODINGS, CHANGES)
def test_where_members_stand_after_an_edit_is_known_without_a_walk(
    document: dict[str, object], indent: int | None, ascii_only: bool, changes: dict[str, bytes | None]
) -> None:
    raw = text(document, indent, ascii_only)
    made, stand = edit_with_spans(raw, find_members(raw), changes)
    assert made == edit(raw, find_members(raw), changes)
    assert list(stand.items()) == list(find_members(made).items())


@given(
    MEMBERS.filter(plain),
    MEMBERS.filter(plain),
    INDENTS,
    st.sets(st.sampled_from("abcd")),
    st.sets(st.sampled_from("abcd")),
)
def test_members_are_cut_out_of_an_object_and_of_one_in_it_at_once(
    document: dict[str, object], inner: dict[str, object], indent: int | None, gone: set[str], inner_gone: set[str]
) -> None:
    raw = text({**document, "inner": inner}, indent, True)
    stand = find_members(raw)
    place = stand["inner"]
    inside = {
        name: MemberSpan(*(place.value + at for at in field))
        for name, field in find_members(raw[place.value : place.end]).items()
    }
    cuts = sorted(find_removals(raw, stand, gone) + find_removals(raw, inside, inner_gone))
    left = remove_ranges(raw, cuts)
    kept = {name: value for name, value in document.items() if name not in gone}
    assert json.loads(left) == {**kept, "inner": {name: v for name, v in inner.items() if name not in inner_gone}}
    assert shift_spans(stand, cuts) == find_members(left)
    start = shift_spans(stand, cuts)["inner"].value
    assert shift_spans(inside, cuts, start) == find_members(left[start : shift_spans(stand, cuts)["inner"].end])
