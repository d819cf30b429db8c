"""Tests that every message between nodes round-trips, and that nothing else is read as one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams_proxy.queue.messages import (
    ControlMessage,
    MalformedMessage,
    ResultEnd,
    ResultHead,
    ResultMessage,
    ResultPart,
    WorkItem,
    WorkLost,
    WorkRefused,
    WorkTaken,
    node_of,
    read_control,
    read_results,
    read_work,
    validated_head,
    write_control,
    write_part,
    write_result,
    write_work,
)


def only(letter: bytes) -> ResultMessage:
    """What a letter with one message holds; raises what is wrong with it."""
    (result,) = read_results(letter)
    if isinstance(result, MalformedMessage):
        raise result
    return result


WORK = WorkItem("p0.1f", "/v1/completions", b"x-request-id: r\xe9\r\nempty: \r\n", b'{"a":1}\n\x00')
ids = st.from_regex(r"\A[A-Za-z0-9_-]{1,64}\.[0-9a-z]{1,32}\Z")
nodes = st.from_regex(r"\A[A-Za-z0-9_-]{1,64}\Z")
values = st.binary(max_size=50).filter(lambda raw: all(b >= 0x20 and b != 0x7F for b in raw))
heads = st.builds(ResultHead, st.integers(200, 599), values, values)
ends = st.none() | st.builds(
    ResultEnd, st.sampled_from(("failed", "timeout", "full")), st.text(max_size=100), st.booleans()
)


@given(ids, nodes, st.integers(0, 2**53 - 1), st.none() | heads, st.binary(), st.booleans(), ends)
def test_parts_are_read_as_they_were_written(
    id: str, node: str, number: int, head: ResultHead | None, body: bytes, last: bool, end: ResultEnd | None
) -> None:
    part = ResultPart(id, node, number, head, body, last, end if last else None)
    assert only(write_part(part)) == part


@pytest.mark.parametrize("result", [WorkTaken("p.1", "d"), WorkLost("p.1", "d"), WorkRefused("p.1", "d", "why\n")])
def test_the_other_results_are_read_as_they_were_written(result: WorkTaken | WorkLost | WorkRefused) -> None:
    again: ResultMessage = only(write_result(result))
    assert again == result
    assert node_of(again.id) == "p"


def test_what_one_letter_holds_is_read_in_order() -> None:
    parts = [ResultPart("p.1", "d", number, None, b"{\n" * number, False, None) for number in range(3)]
    letter = write_part(parts[1]) + write_result(WorkTaken("p.2", "d")) + write_part(parts[2]) + write_part(parts[0])
    assert list(read_results(letter)) == [parts[1], WorkTaken("p.2", "d"), parts[2], parts[0]]


LONG = ResultHead(200, b"x" * 1001, b"")


def test_what_is_wrong_only_inside_costs_nothing_after_it() -> None:
    good = ResultPart("p.1", "d", 0, None, b"abc", False, None)
    raw = write_part(good._replace(id="p.2"))
    for bad, id, node in (
        (write_part(ResultPart("p.2", "d", 0, LONG, b"abc", False, None)), "p.2", "d"),
        (write_part(ResultPart("p.2", "d", 0, ResultHead(600, b"", b""), b"", False, None)), "p.2", "d"),
        (raw.replace(b"part", b"none"), "p.2", "d"),
        (raw.replace(b"p.2", b"p/2"), None, "d"),
        (raw.replace(b'"d"', b'" "'), "p.2", None),
    ):
        before, found, after = read_results(write_part(good) + bad + write_part(good))
        assert (before, after) == (good, good)
        assert isinstance(found, MalformedMessage)
        assert (found.id, found.node) == (id, node)


@pytest.mark.parametrize(
    "head", [LONG, ResultHead(600, b"", b""), ResultHead(199, b"", b""), ResultHead(200, b"", b"\t")]
)
def test_a_head_that_nobody_would_read_is_not_sent(head: ResultHead) -> None:
    with pytest.raises(MalformedMessage):
        validated_head(head)
    assert validated_head(ResultHead(599, b"x" * 1000, b"")) == ResultHead(599, b"x" * 1000, b"")


def test_nothing_is_read_after_what_ends_nobody_knows_where() -> None:
    good = write_part(ResultPart("p.1", "d", 0, None, b"abc", False, None))
    for bad in (good[:-1], good.replace(b":3", b":-1"), good.replace(b',"size":3', b""), b"x"):
        reading = read_results(good + bad + good)
        assert isinstance(next(reading), ResultPart)
        with pytest.raises(MalformedMessage):
            list(reading)


def test_work_and_orders_are_read_as_they_were_written() -> None:
    assert read_work(write_work(WORK)) == WORK
    assert read_control(write_control(ControlMessage("pause", "p.1"))) == ControlMessage("pause", "p.1")


def test_members_of_a_later_version_are_passed_over() -> None:
    raw = write_result(WorkTaken("p.1", "d"))
    assert only(raw.replace(b'"kind"', b'"more":[{}],"kind"')) == WorkTaken("p.1", "d")


def test_reasons_are_cut_to_what_may_be_read() -> None:
    cut = only(write_result(WorkRefused("p.1", "d", "x" * 10_000)))
    assert isinstance(cut, WorkRefused)
    assert cut.reason == "x" * 500


def changed(raw: bytes, **members: Any) -> bytes:
    line, _, body = raw.partition(b"\n")
    document = {**json.loads(line), **members}
    return json.dumps({name: value for name, value in document.items() if value is not ...}).encode() + b"\n" + body


@pytest.mark.parametrize(
    "members",
    [
        {"queue": 2},
        {"queue": True},
        {"queue": ...},
        {"kind": "part"},
        {"id": "p0"},
        {"id": "p0.A"},
        {"id": "p0/../x.1"},
        {"id": 1},
        {"path": "v1"},
        {"path": "/a b"},
        {"path": "/a?b"},
        {"headers": "host: a\r\n"},
        {"headers": "Authorization: a\r\n"},
        {"headers": "Content-Length: 1\r\n"},
        {"headers": "a: b"},
        {"headers": "a: b\r\n\r\n"},
        {"headers": "a: b\nc: d\r\n"},
        {"headers": None},
    ],
)
def test_what_is_not_quite_work_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        read_work(changed(write_work(WORK), **members))


@pytest.mark.parametrize(
    "members",
    [
        {"number": -1},
        {"number": 1.0},
        {"number": True},
        {"size": 1},
        {"size": -1},
        {"size": False},
        {"size": ...},
        {"node": "a b"},
        {"kind": "work"},
        {"head": {"status": 100, "type": "", "retry_after": ""}},
        {"head": {"status": 200, "type": "a\r\nb", "retry_after": ""}},
        {"head": []},
        {"end": "badly"},
        {"end": {"failure": "other", "reason": "", "sent": True}},
        {"end": {"failure": "failed", "reason": "", "sent": 1}},
    ],
)
def test_what_is_not_quite_a_result_is_refused(members: dict[str, Any]) -> None:
    raw = write_part(ResultPart("p.1", "d", 0, ResultHead(200, b"", b""), b"", True, None))
    with pytest.raises(MalformedMessage):
        only(changed(raw, **members))


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]\n", b"\xff\n", b"{" * 70_000 + b"\n", b"[" * 60_000 + b"\n"])
def test_what_is_nothing_at_all_is_refused(raw: bytes) -> None:
    for read in (read_work, only, read_control):
        with pytest.raises(MalformedMessage):
            read(raw)


def test_only_work_and_parts_have_a_body() -> None:
    for read, raw in (
        (only, write_result(WorkTaken("p.1", "d"))),
        (read_control, write_control(ControlMessage("ask", "p.1"))),
    ):
        read(raw)
        with pytest.raises(MalformedMessage):
            read(raw + b"x")


def test_whose_work_it_is_can_be_told_though_it_is_malformed() -> None:
    with pytest.raises(MalformedMessage) as caught:
        read_work(changed(write_work(WORK), path="none"))
    assert caught.value.id == WORK.id
