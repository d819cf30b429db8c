"""Server-sent events as bytes: where each one ends, what is in it, and what examining it would cost.

Invariant: every function here is linear in the bytes it is given, whatever the sizes of the reads that brought them.
Reference: https://html.spec.whatwg.org/multipage/server-sent-events.html; engines end their lines with LF or CR LF.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final

from kvparams_proxy.upstream.types import UpstreamError

__all__ = [
    "DONE",
    "ELIDED_LIST",
    "LARGE_EVENT_BYTES",
    "MAX_EVENTS_PER_TURN",
    "SSEBoundaries",
    "SSEBuffer",
    "check_parse_cost",
    "complete_events_end",
    "done_event_end",
    "elide_token_lists",
    "event_data",
    "named_event_end",
    "restore_token_lists",
    "split_events",
]

MAX_EVENTS_PER_TURN: Final = 600
"""The most events that are examined one by one in a turn of the event loop. It brings `TURN_BYTES` at most, and events
that must be examined have more than a hundred bytes."""
LARGE_EVENT_BYTES: Final = 64 << 10
"""An event this short costs little to parse, whatever is in it."""
_RAW_BYTES: Final = 8 << 20
"""The longest event. vLLM names the ids of the prompt in the first one: 8 MiB holds more than a million."""
_BYTES: Final = 1 << 20
"""The longest event without such lists of ids. It is searched about fifteen times, which takes 10 ms. The longest that
engines send are one with the whole answer, at the end of a stream of `/v1/responses`, and one with the whole prompt,
where `echo` is asked for: 1 MiB holds 200,000 tokens of text."""
_PARSE_NS: Final = 12_000_000
"""The longest time that parsing one event may take, as `_parse_ns` estimates it."""

_CROWDED: Final = 50_000
"""Quotes of an event that has too many members whatever stands in its strings."""

_IDS: Final = b'token_ids"'
_LIST: Final = re.compile(rb'token_ids"[ \t\r\n]{0,64}+:[ \t\r\n]{0,64}+\[')
_MOST_LISTS: Final = 1024
"""Lists in one event that are looked at: a stream has one for each choice, and one for the prompt."""
ELIDED_LIST: Final = b"[-0.0e-7]"
"""Stands for a list that was cut out: JSON that no engine writes."""
DONE: Final = b"[DONE]"
_DONE_HEAD: Final = 64
"""Bytes of the line of the last event before `[DONE]`, at most."""
_FIRST_DONE: Final = re.compile(rb"data:[ \t]*+\[DONE\][ \t]*+[\r\n]")
_DONE: Final = re.compile(rb"\ndata:[ \t]*+\[DONE\][ \t]*+[\r\n]")
"""The last event. A line break in a JSON string is escaped, so generated text never looks like it."""


class SSEBuffer:
    """Collects the pieces of a stream until an event is complete."""

    __slots__ = ("_partial",)

    def __init__(self) -> None:
        self._partial = bytearray()

    def __len__(self) -> int:
        return len(self._partial)

    def feed(self, data: bytes) -> bytes:
        """Returns the events that are complete now, in one piece, and keeps the rest.

        Raises:
            UpstreamError: the event that has begun is too long.
        """
        partial = self._partial
        if not partial:
            end = complete_events_end(data)
            partial += data[end:]
            return data[:end]
        searched = max(0, len(partial) - 3)  # an end may lie across two pieces
        partial += data
        end = _last_end(partial, searched)
        if not end:
            if len(partial) > _RAW_BYTES:
                raise UpstreamError(f"an event is longer than {_RAW_BYTES} bytes")
            return b""
        with memoryview(partial) as view:
            complete = bytes(view[:end])
        self._partial = partial[end:]
        return complete

    def take(self) -> bytes:
        """Returns the event that has begun, and forgets it."""
        partial, self._partial = self._partial, bytearray()
        return bytes(partial)


class SSEBoundaries:
    """Finds the ends of events in `raw` for positions that only grow."""

    __slots__ = ("_crlf", "_lf", "_raw")

    def __init__(self, raw: bytes, at: int = 0) -> None:
        self._raw = raw
        self._look(at)

    def after(self, at: int) -> int:
        """Returns the position behind the event that `at` is in."""
        if at > self._lf:
            self._look(at)
        elif 0 <= self._crlf < at:
            self._crlf = self._raw.find(b"\r\n\r\n", at, self._lf)
        if self._crlf >= 0:
            return self._crlf + 4
        return min(self._lf + 2, len(self._raw))

    def _look(self, at: int) -> None:
        """Finds the blank lines that come next: one behind CR LF counts where it is in front of the other."""
        lf = self._raw.find(b"\n\n", at)
        self._lf = lf if lf >= 0 else len(self._raw)
        self._crlf = self._raw.find(b"\r\n\r\n", at, self._lf)


def complete_events_end(raw: bytes) -> int:
    """Returns how many bytes of `raw` are whole events: up to and with the last blank line."""
    if raw.endswith(b"\n\n"):  # nearly always: an engine sends events whole
        return len(raw)
    return _last_end(raw, 0)


def _last_end(raw: bytes | bytearray, at: int) -> int:
    lf, crlf = raw.rfind(b"\n\n", at), raw.rfind(b"\r\n\r\n", at)
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def split_events(raw: bytes) -> Iterator[bytes]:
    """Yields the events of `raw` one by one, each with the blank line that ends it."""
    ends = SSEBoundaries(raw)
    at = 0
    while at < len(raw):
        end = ends.after(at)
        yield raw[at:end]
        at = end


def event_data(event: bytes) -> bytes:
    """Returns what the `data` lines of one event hold; empty for a comment.

    Raises:
        UpstreamError: parsing it would hold the event loop for too long.
    """
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 2:  # nearly always: one line
        data = event[6:-2].strip() if event.endswith(b"\n\n") else event[6:].strip()
    else:
        if len(event) > LARGE_EVENT_BYTES and event.count(b"\n") > MAX_EVENTS_PER_TURN:
            raise UpstreamError("an event of its stream has too many lines")
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    if len(data) > LARGE_EVENT_BYTES:
        check_parse_cost(data)
    return data


def check_parse_cost(raw: bytes) -> None:
    """Refuses JSON text that would hold the event loop for too long while it is parsed.

    Raises:
        UpstreamError: it has too many members.
    """
    if _parse_ns(raw) > _PARSE_NS:
        raise UpstreamError("the engine's answer has too many members to be examined")


def _parse_ns(data: bytes) -> int:
    """Estimates for how long a JSON parser would hold the loop, in nanoseconds.

    The factors are those of pydantic-core 2.47 on a core that parses 150,000 token ids in 10 ms.
    """
    members_ns = _members_ns(data)
    if members_ns > 5 * _PARSE_NS:
        return members_ns
    text_ns = 24 * data.count(b"\\") + len(data) // 4
    if members_ns > _PARSE_NS:  # brackets and commas in strings cost nothing
        plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        if plain.count(b'"') < _CROWDED:
            members_ns = _members_ns(b"".join(plain.split(b'"')[::2]))
    return text_ns + members_ns


def _members_ns(data: bytes) -> int:
    return 250 * (data.count(b"{") + data.count(b"[")) + 70 * data.count(b",")


def done_event_end(events: bytes, at: int) -> int:
    """Returns the position behind the event `[DONE]` in whole events, or -1 where it is not among them.

    `at`: where `DONE` stands in them first.
    """
    found = _FIRST_DONE.match(events) or _DONE.search(events, max(0, at - _DONE_HEAD))
    if found is None:
        return -1
    end = found.end()
    if events.startswith(b"\n\n", end - 1):
        return end + 1
    return SSEBoundaries(events, end - 2).after(end - 2)


def named_event_end(line: bytes) -> Callable[[bytes, int], int]:
    """Returns a function that finds the position behind the event with this `event:` line, as `done_event_end` does.

    `line`: a pattern that matches the line and the first byte of its end. A JSON string holds no line break, so
    generated text never looks like the line.
    """
    first, later = re.compile(line), re.compile(rb"\n" + line)

    def end_of(events: bytes, at: int) -> int:
        found = first.match(events) or later.search(events)
        if found is None:
            return -1
        return SSEBoundaries(events, found.end() - 1).after(found.end() - 1)

    return end_of


def elide_token_lists(events: bytes) -> tuple[bytes, list[bytes]]:
    """Cuts long lists of token ids out of whole events, or of an answer: searching and parsing the rest is cheap.

    Returns:
        The text with a placeholder for each list, and the lists for `restore_token_lists`.

    Raises:
        UpstreamError: it is too long all the same.
    """
    lists: list[bytes] = []
    pieces: list[bytes] = []
    at = 0
    ids = events.find(_IDS)
    for _ in range(_MOST_LISTS):
        if ids < 0:
            break
        behind = ids + len(_IDS)
        if (found := _LIST.match(events, ids)) is not None:
            start = found.end() - 1
            end = events.find(b"]", start) + 1
            if not end:
                break
            if (
                end - start > LARGE_EVENT_BYTES
                and events.find(b'"', start, end) < 0
                and events.find(b"[", start + 1, end) < 0
            ):
                lists.append(events[start:end])
                pieces += (events[at:start], ELIDED_LIST)
                at = end
            behind = end
        ids = events.find(_IDS, behind)
    if lists:
        shorter = b"".join((*pieces, events[at:]))
        if shorter.count(ELIDED_LIST) == len(lists):  # nothing else looks like a placeholder
            events = shorter
        else:
            lists = []
    if len(events) > _BYTES:
        raise UpstreamError(f"an event or an answer is longer than {_BYTES} bytes")
    return events, lists


def restore_token_lists(events: bytes, lists: list[bytes]) -> bytes:
    """Puts back what `elide_token_lists` has cut out; nothing where the placeholders were taken out since."""
    pieces: list[bytes] = []
    at = 0
    for ids in lists:
        start = events.find(ELIDED_LIST, at)
        if start < 0:
            break
        pieces += (events[at:start], ids)
        at = start + len(ELIDED_LIST)
    pieces.append(events[at:])
    return b"".join(pieces)
