"""Messages between prefill and decode nodes: one line of JSON, a line feed, and raw bytes.

Messages for one result queue that are sent together share one broker message, one after the other.

`README.md` beside this file is the page for other implementers. Anything that is not exactly one of these messages is
refused. Members added by a later version are ignored.
"""

import json
import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, cast

from kvparams.errors import KVParamsError

__all__ = [
    "ControlMessage",
    "ControlOrder",
    "MalformedMessage",
    "ResultEnd",
    "ResultHead",
    "ResultMessage",
    "ResultPart",
    "WorkItem",
    "WorkLost",
    "WorkRefused",
    "WorkTaken",
    "node_of",
    "read_control",
    "read_results",
    "read_work",
    "validated_head",
    "write_control",
    "write_part",
    "write_result",
    "write_work",
]

MESSAGE_VERSION: Final = 1
_MOST_HEAD: Final = 64 << 10
_MOST_BODY: Final = 64 << 20
_MOST_REASON: Final = 500
_NODE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID: Final = re.compile(r"([A-Za-z0-9_-]{1,64})\.[0-9a-z]{1,32}")
_PATH: Final = re.compile(r"/[A-Za-z0-9_/.-]{0,255}")
_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([!-~\x80-\xff]([ -~\x80-\xff]*[!-~\x80-\xff])?)?\r\n")
_VALUE: Final = re.compile(r"[ -~\x80-\xff]{0,1000}")
_NOT_OURS: Final = frozenset(
    ("authorization", "connection", "content-length", "content-type", "expect", "host", "transfer-encoding", "upgrade")
)
"""Headers that belong to the connection to an engine, or to its key: a decode node writes them itself."""

ControlOrder = Literal["cancel", "pause", "resume", "ask"]
ResultFailure = Literal["failed", "timeout", "full"]
_ORDERS: Final = ("cancel", "pause", "resume", "ask")
_FAILURES: Final = ("failed", "timeout", "full")


class MalformedMessage(KVParamsError, ValueError):
    """A message is not valid. `id` and `node` name its work and its sender, where they could be read."""

    def __init__(self, message: str, id: str | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.id = id
        self.node = node


class WorkItem(NamedTuple):
    """A request to one engine, for any decode node."""

    id: str
    """Names the node that asks, a full stop, and the attempt: never the same twice."""
    path: str
    headers: bytes
    """Whole lines, each ending in CRLF."""
    body: bytes


class WorkTaken(NamedTuple):
    """Says that a decode node runs the work. It is sent at first, on request, and after a reconnect."""

    id: str
    node: str


class ResultHead(NamedTuple):
    """The head of an engine's response."""

    status: int
    content_type: bytes
    retry_after: bytes


class ResultEnd(NamedTuple):
    """The failure that ended a response."""

    failure: ResultFailure
    """`full`: the engine has no more connections. `timeout`: it said nothing for too long."""
    reason: str
    sent: bool
    """Whether the engine may have seen the request."""


class ResultPart(NamedTuple):
    """A piece of an engine's answer. Parts of one answer count from 0 and may come twice or out of order."""

    id: str
    node: str
    number: int
    head: ResultHead | None
    """Of the first."""
    body: bytes
    last: bool
    end: ResultEnd | None
    """With `last`; None where all is well."""


class WorkLost(NamedTuple):
    """Says that the broker has handed the work to `node` after another node, which did not say that it is done.

    The work is not run again.
    """

    id: str
    node: str


class WorkRefused(NamedTuple):
    """Says that no node of this version can run the work. It is among the dead letters."""

    id: str
    node: str
    reason: str


class ControlMessage(NamedTuple):
    """An order of a prefill node for the decode node that runs its work."""

    order: ControlOrder
    id: str


ResultMessage = WorkTaken | ResultPart | WorkLost | WorkRefused


def node_of(id: str) -> str:
    """Returns the node that asks: its result queue is named after it."""
    return id.partition(".")[0]


def write_work(work: WorkItem) -> bytes:
    """Serializes a piece of work."""
    headers = work.headers.decode("latin-1")
    head = {"queue": MESSAGE_VERSION, "kind": "work", "id": work.id, "path": work.path, "headers": headers}
    return b"%b\n%b" % (json.dumps(head, separators=(",", ":")).encode(), work.body)


def read_work(raw: bytes) -> WorkItem:
    """Parses a piece of work.

    Raises:
    MalformedMessage: it is not a valid message.
    """
    head, body = _split(raw)
    id = _id(head)
    try:
        _kind(head, "work")
        path, headers = _text(head, "path", _PATH), head.get("headers")
        if not isinstance(headers, str):
            raise MalformedMessage("headers must be text")
        _check_headers(headers)
    except MalformedMessage as error:
        error.id = id
        raise
    return WorkItem(id, path, headers.encode("latin-1"), body)


def write_result(result: WorkTaken | WorkLost | WorkRefused) -> bytes:
    """Serializes a result message."""
    kind = {WorkTaken: "taken", WorkLost: "lost", WorkRefused: "refused"}[type(result)]
    head = {"queue": MESSAGE_VERSION, "kind": kind, **result._asdict()}
    if isinstance(result, WorkRefused):
        head["reason"] = result.reason[:_MOST_REASON]
    return json.dumps(head, separators=(",", ":")).encode() + b"\n"


def write_part(part: ResultPart) -> bytes:
    """Serializes a part of a response."""
    begin = b'{"queue":1,"kind":"part","id":"%b","node":"%b","number":%d,"size":%d' % (
        part.id.encode(),
        part.node.encode(),
        part.number,
        len(part.body),
    )
    if part.head is not None:
        begin += b',"head":%b' % json.dumps(_said(part.head), separators=(",", ":")).encode()
    if part.last:
        end = "well" if part.end is None else {**part.end._asdict(), "reason": part.end.reason[:_MOST_REASON]}
        begin += b',"end":%b' % json.dumps(end, separators=(",", ":")).encode()
    return b"%b}\n%b" % (begin, part.body)


def validated_head(head: ResultHead) -> ResultHead:
    """Returns the head, if it may be sent. One that is too long could invalidate all that shares its broker message.

    Raises:
        MalformedMessage: nobody would read it.
    """
    return _head(_said(head))


def read_results(raw: bytes) -> Iterator[ResultMessage | MalformedMessage]:
    """Yields all messages of one broker message, in order.

    A message that is invalid but has a known end is yielded as `MalformedMessage`.

    Raises:
        MalformedMessage: where the next one ends cannot be read; nothing after it is.
    """
    at = 0
    while True:
        head, begin = _first_line(raw, at)
        size = head.get("size", None if head.get("kind") == "part" else 0)
        if type(size) is not int or not 0 <= size <= min(_MOST_BODY, len(raw) - begin):
            raise MalformedMessage("size must be that of its body")
        at = begin + size
        try:
            result = _result(head, raw[begin:at])
        except MalformedMessage as error:
            error.id, error.node = _found(head, "id", _ID), _found(head, "node", _NODE)
            result = error
        yield result
        if at == len(raw):
            return


def _result(head: dict[str, object], body: bytes) -> ResultMessage:
    id, node, kind = _id(head), _text(head, "node", _NODE), head.get("kind")
    if kind == "part":
        number, said, end = head.get("number"), head.get("head"), head.get("end")
        if type(number) is not int or not 0 <= number < 1 << 53:
            raise MalformedMessage("number must be a whole number")
        begins = None if said is None else _head(said)
        return ResultPart(id, node, number, begins, body, end is not None, None if end is None else _end(end))
    if body:
        raise MalformedMessage("only work and parts have a body")
    if kind == "taken":
        return WorkTaken(id, node)
    if kind == "lost":
        return WorkLost(id, node)
    if kind == "refused":
        reason = head.get("reason")
        if not isinstance(reason, str) or len(reason) > _MOST_REASON:
            raise MalformedMessage("reason must be short text")
        return WorkRefused(id, node, reason)
    raise MalformedMessage("it is no kind of result")


def write_control(control: ControlMessage) -> bytes:
    """Serializes a control message."""
    return b'{"queue":1,"kind":"control","order":"%b","id":"%b"}\n' % (control.order.encode(), control.id.encode())


def read_control(raw: bytes) -> ControlMessage:
    """Parses a control message.

    Raises:
    MalformedMessage: it is not a valid message.
    """
    head, body = _split(raw)
    _kind(head, "control")
    order = head.get("order")
    if body or order not in _ORDERS:
        raise MalformedMessage(f"order must be one of {', '.join(_ORDERS)}, without a body")
    return ControlMessage(order, _id(head))


def _split(raw: bytes) -> tuple[dict[str, object], bytes]:
    head, begin = _first_line(raw, 0)
    if len(raw) - begin > _MOST_BODY:
        raise MalformedMessage("its body is too long")
    return head, raw[begin:]


def _first_line(raw: bytes, at: int) -> tuple[dict[str, object], int]:
    """Parses the line of JSON at `at`, and returns it with the start of the next byte."""
    feed = raw.find(b"\n", at, at + _MOST_HEAD + 1)
    if feed < 0:
        raise MalformedMessage("it must begin with a line of JSON that is not too long")
    try:
        document: object = json.loads(raw[at:feed])
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise MalformedMessage("its first line is no JSON object")
    head = cast("dict[str, object]", document)
    if type(version := head.get("queue")) is not int or version != MESSAGE_VERSION:
        raise MalformedMessage(f"it is not of version {MESSAGE_VERSION}")
    return head, feed + 1


def _kind(head: dict[str, object], kind: str) -> None:
    if head.get("kind") != kind:
        raise MalformedMessage(f"it is no {kind}")


def _text(head: dict[str, object], name: str, pattern: re.Pattern[str]) -> str:
    value = _found(head, name, pattern)
    if value is None:
        raise MalformedMessage(f"{name} is none")
    return value


def _found(head: dict[str, object], name: str, pattern: re.Pattern[str]) -> str | None:
    value = head.get(name)
    return value if isinstance(value, str) and pattern.fullmatch(value) is not None else None


def _id(head: dict[str, object]) -> str:
    return _text(head, "id", _ID)


def _check_headers(text: str) -> None:
    at = 0
    while at < len(text):
        found = _LINE.match(text, at)
        if found is None or found[1].lower() in _NOT_OURS:
            raise MalformedMessage("headers must be whole lines, none of them about the connection")
        at = found.end()


def _said(head: ResultHead) -> dict[str, object]:
    kind, later = head.content_type.decode("latin-1"), head.retry_after.decode("latin-1")
    return {"status": head.status, "type": kind, "retry_after": later}


def _head(said: object) -> ResultHead:
    if isinstance(said, dict):
        head = cast("dict[str, object]", said)
        status, kind, later = head.get("status"), head.get("type"), head.get("retry_after")
        if type(status) is int and 200 <= status <= 599 and _is_value(kind) and _is_value(later):
            return ResultHead(status, cast("str", kind).encode("latin-1"), cast("str", later).encode("latin-1"))
    raise MalformedMessage("head must be a status, a type and retry_after")


def _is_value(value: object) -> bool:
    return isinstance(value, str) and _VALUE.fullmatch(value) is not None


def _end(said: object) -> ResultEnd | None:
    if said == "well":
        return None
    if isinstance(said, dict):
        end = cast("dict[str, object]", said)
        failure, reason, sent = end.get("failure"), end.get("reason"), end.get("sent")
        if failure in _FAILURES and isinstance(reason, str) and len(reason) <= _MOST_REASON and isinstance(sent, bool):
            return ResultEnd(failure, reason, sent)
    raise MalformedMessage("end must be well, or a failure, a reason and sent")
