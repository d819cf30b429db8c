"""Incremental JSON reader: checks a document in steps of bounded work and hands over its parts.

A C parser holds the interpreter's lock for a whole document, so a long one would hold up an event loop from any thread.
This reader opens long containers itself and gives the parsers what is short, some 32 KiB at a time. The caller may do
other work between two steps. Nothing of the document is kept but what a `Receiver` keeps.

Two parsers are used: pydantic_core's for numbers and strings, which it reads fastest, and the standard library's for
short containers, since it says where they end and tells doubled keys.

Invariant: every byte is in a text that a parser has accepted, or is one that this module expects where it stands.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from json import JSONDecoder
from typing import Final, NamedTuple, cast

from pydantic_core import PydanticSerializationError, from_json, to_json

from kvparams.errors import JSONTextError

__all__ = [
    "DEFAULT_LIMITS",
    "DOUBLE_DIGITS",
    "STEP_BYTES",
    "Build",
    "ContainerReader",
    "Field",
    "JSONLimits",
    "Receiver",
    "check_finite",
    "not_json",
    "skip_space",
    "string_end",
]


@dataclass(frozen=True, slots=True)
class JSONLimits:
    """How much text is read at all."""

    max_bytes: int = 16 << 20
    """Longer text is refused before it is parsed."""
    max_depth: int = 64
    """Objects and lists inside each other; the parser itself stops at about 200."""
    max_containers: int = 20_000
    """Objects and lists in all. Each costs time and memory far beyond its two bytes."""
    max_strings: int = 200_000
    """Strings in all, keys included."""
    max_members: int = 10_000
    """Members of an object whose members are told apart in the raw bytes: the outermost one."""


DEFAULT_LIMITS: Final = JSONLimits()


class Field(NamedTuple):
    """Where one member of an object stands: `raw[start:end]` is `"name": value`, `raw[value:end]` the value alone."""

    start: int
    value: int
    end: int


class Receiver:
    """Receives the parts of one object or list in the order of the text. This one keeps nothing.

    Short parts are told whole, several at a time; a container that is too long for that has a receiver of its own.
    """

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: dict[str, Field] | None = None
        """Where the members of an object stand, by name, for a receiver that has set it to a dictionary."""

    def members(self, members: dict[str, object]) -> None:
        """Some members of the object. Where they stand is in `spans` by then."""

    def values(self, values: list[object]) -> None:
        """Some elements of the list."""

    def nested(self, name: str | None, opening: int) -> "Receiver | None":
        """A long container begins: the value of the member `name`, or an element of the list.

        Args:
            name: the member's name; None in a list.
            opening: the byte that opens it, `{` or `[`.

        Returns:
            What receives its parts; None if nobody wants them.
        """
        return None

    def wants(self, name: str | None) -> bool:
        """Whether a string that is longer than a step is wanted whole. Otherwise its beginning is told in its place."""
        return False

    def closed(self) -> None:
        """The container is complete."""


class Build(Receiver):
    """Builds the object or list that the parts make."""

    __slots__ = ("value",)

    def __init__(self, opening: int) -> None:
        """`opening`: the byte that opens it."""
        super().__init__()
        self.value: dict[str, object] | list[object] = {} if opening == _OPEN_OBJECT else []

    def members(self, members: dict[str, object]) -> None:
        """See `Receiver.members`."""
        cast("dict[str, object]", self.value).update(members)

    def values(self, values: list[object]) -> None:
        """See `Receiver.values`."""
        cast("list[object]", self.value).extend(values)

    def nested(self, name: str | None, opening: int) -> "Build":
        """See `Receiver.nested`."""
        inner = Build(opening)
        if name is None:
            cast("list[object]", self.value).append(inner.value)
        else:
            cast("dict[str, object]", self.value)[name] = inner.value
        return inner

    def wants(self, name: str | None) -> bool:
        """See `Receiver.wants`."""
        return True


STEP_BYTES: Final = 32 << 10
"""Text that one step gives to the parser. The costliest, such as `1e1,1e1,...`, takes about 2 ms."""
_STEP_TURNS: Final = 256
"""Of the reader's loop, in one step."""
_STEP_PARTS: Final = 2048
"""Strings, members and elements of short containers in one step, about."""
_RUN_PARTS: Final = 512
"""Strings or members that are parsed together."""
_BYTES_PER_PART: Final = 32
_MOST_KEYS: Final = 32_768
"""In one set: one that is larger takes long to grow."""
_LONGEST_TOKEN: Final = 64 << 10
"""Bytes of a name, a number or white space in one place."""
_PARSER_DEPTH: Final = 201
"""Objects and lists inside each other that `from_json` takes (pydantic_core 2.50); of those with values 200."""
_NEAR: Final = 256
"""Bytes within which a list of numbers begins, and does not end, where a container is read by parts for it."""
_SHORT: Final = 64
"""Bytes: in a shorter text one regular expression finds a bracket sooner than three searches."""

_QUOTE: Final = 0x22
_COMMA: Final = 0x2C
_COLON: Final = 0x3A
_BACKSLASH: Final = 0x5C
_OPEN_LIST: Final = 0x5B
_CLOSE_LIST: Final = 0x5D
_OPEN_OBJECT: Final = 0x7B
_CLOSE_OBJECT: Final = 0x7D

_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_MEMBER: Final = re.compile(
    rb'[ \t\r\n,]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*+:[ \t\r\n]*+(["{\[]|[^,}\]\s"{\[]++)', re.DOTALL
)
"""One member up to the first byte of a string or container, or to the end of any other value."""
_SCALAR: Final = re.compile(rb'[^\s,:\[\]{}"]*+')
_OPENING: Final = re.compile(rb"[\[{}]")
_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_CHARACTERS: Final = re.compile(
    rb'[^"\\]*+(?:\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb'|u(?![dD][89abAB])[0-9a-fA-F]{4}|[^u])[^"\\]*+)*+',
    re.DOTALL,
)
"""Characters of a string, up to its end or to an escape that is not complete; a surrogate pair is one escape."""
_NEXT: Final = re.compile(r"[ \t\r\n]*+,[ \t\r\n]*+")
_NUMBERS: Final = re.compile(rb"\[[ \t\r\n]*+[-0-9]")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_LONGEST_ESCAPE: Final = 12
_POSITION: Final = re.compile(r" at line \d+ column \d+\Z")
_INFINITE: Final = float("inf")
DOUBLE_DIGITS: Final = 300
"""A number without an exponent needs more digits than this to overflow a double."""

# What may stand at the current place: the first part of a container or its end; a part, behind a comma; a comma or the
# end; a colon; the value of a member; the rest of a string.
_FIRST, _PART, _AFTER, _AT_COLON, _VALUE, _IN_STRING = range(6)


class _Container:
    """One object or list that is open."""

    __slots__ = ("_before", "_keys", "closing", "is_object", "name", "receiver", "start", "value")

    def __init__(self, opening: int, receiver: Receiver | None) -> None:
        self.is_object = opening == _OPEN_OBJECT
        self.closing = _CLOSE_OBJECT if self.is_object else _CLOSE_LIST
        self.receiver = receiver
        self._keys: set[str] = set()
        self._before: list[set[str]] = []
        """Keys that came before those."""
        self.name: str | None = None
        """Of the member that is being read alone; in a list always None, as the next two are of no meaning there."""
        self.start = 0
        self.value = 0

    def add(self, names: dict[str, object]) -> None:
        """Take note of the names of members.

        Raises:
            JSONTextError: one of them stands there twice.
        """
        if not self._keys.isdisjoint(names) or any(not keys.isdisjoint(names) for keys in self._before):
            raise _stands_twice(
                next(name for name in names if any(name in keys for keys in (self._keys, *self._before)))
            )
        self._keys.update(names)
        if len(self._keys) > _MOST_KEYS:
            self._before.append(self._keys)
            self._keys = set()


class _Window:
    """A part of the text, decoded, in which short values are read one after another."""

    __slots__ = ("_ascii", "_index", "_place", "_raw", "_text", "at", "end")

    def __init__(self, raw: bytes, at: int, most_bytes: int) -> None:
        self._raw = raw
        self.at = self._place = at
        end = min(at + most_bytes, len(raw))
        while end < len(raw) and end > at and raw[end] & 0xC0 == 0x80:  # not within a character
            end -= 1
        text = raw[at:end]
        try:
            self._text = text.decode()
        except UnicodeDecodeError as error:
            self._text = text[: error.start].decode()
        self.end = end
        self._ascii = len(self._text) == end - at
        self._index = 0
        """Of the character at `_place`, a byte of the text."""

    def values(self, at: int, most: int) -> tuple[list[object], int]:
        """At most so many values that follow one another from `at` on, and where the last one ends. It ends where
        something is no JSON, and where a value may go on behind the window."""
        text = self._text
        if self._ascii:
            begin = at - self.at
        else:
            begin = self._index = self._index + len(self._raw[self._place : at].decode())
            self._place = at
        values: list[object] = []
        decode, comma = _DECODER.raw_decode, _NEXT.match
        end = next_ = begin
        try:
            while len(values) < most:
                value, after = decode(text, next_)
                found = comma(text, after)
                if found is None and type(value) not in _CLOSED:  # a number may go on behind the window
                    break
                values.append(value)
                end = after
                if found is None:
                    break
                next_ = found.end()
        except JSONTextError:
            raise
        except (ValueError, RecursionError):
            pass
        if self._ascii:
            return values, self.at + end
        self._place += len(text[begin:end].encode())
        self._index = end
        return values, self._place


def _object(members: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(members)
    if len(found) != len(members):
        seen: set[str] = set()
        raise _stands_twice(next(name for name, _ in members if name in seen or seen.add(name)))
    return found


def _float(text: str) -> float:
    found = float(text)
    if found - found != 0:
        raise _infinite()
    return found


def _constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


_CLOSED: Final = frozenset((str, list, dict))
"""What shows in the text where it ends."""
_DECODER: Final = JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


_NO_WINDOW: Final = _Window(b"", -1, 0)


class ContainerReader:
    """Checks one object or list and hands over its parts, in steps of bounded work."""

    __slots__ = (
        "_containers",
        "_expects",
        "_limits",
        "_max_open",
        "_open",
        "_outer",
        "_pieces",
        "_raw",
        "_reach",
        "_step_bytes",
        "_strings",
        "_whole",
        "_window",
        "_work",
        "at",
    )

    def __init__(
        self,
        raw: bytes,
        at: int,
        limits: JSONLimits,
        receiver: Receiver | None = None,
        *,
        depth: int = 1,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """
        Args:
            raw: the text.
            at: the place of the opening bracket.
            limits: those of depth, containers and strings are kept here.
            receiver: receives the parts; None to check them only.
            depth: of this container in the document.
            step_bytes: about how much text one step reads.
        """
        self._raw = raw
        self._limits = limits
        self._max_open = min(limits.max_depth, _PARSER_DEPTH) + 1 - depth
        self._step_bytes = max(step_bytes, _LONGEST_ESCAPE)
        self._containers = self._strings = 0
        self._work = 0
        """Parts that were looked at, about: what a step costs beside its bytes."""
        self._reach = self._step_bytes
        """Within how many bytes a container must end that is told whole."""
        self._outer: list[_Container] = []
        self._open = _Container(raw[at], receiver)
        self._window = _NO_WINDOW
        self._opened()
        self._pieces: list[str] = []
        self._whole = False
        self.at = at + 1
        """The next place to read; at the end the one behind the container."""

    def steps(self) -> Iterator[None]:
        """Do the work, one step for each item.

        Raises:
            JSONTextError: it is no JSON, or not plain (see `kvparams.jsontext.loads`).
        """
        while not self._step():
            yield

    def finish(self) -> int:
        """Do all of the work at once, and return the position behind the container.

        Raises:
            JSONTextError: as above.
        """
        self._containers = 0
        values, end = self._short(self.at - 1, 1, 0)
        if values:
            return end
        self._containers = 1
        while not self._step():
            pass
        return self.at

    def _step(self) -> bool:
        """Whether it was the last one."""
        raw, size = self._raw, len(self._raw)
        until, enough = self.at + self._step_bytes, self._work + _STEP_PARTS
        for _ in range(_STEP_TURNS):
            at = self.at
            if at >= until or self._work >= enough:
                break
            if at >= size:
                raise not_json("it ends too early", size)
            byte, expects, container = raw[at], self._expects, self._open
            if expects == _IN_STRING:
                self._string_piece(at)
                break
            if byte <= 0x20:
                self.at = skip_space(raw, at)
                if self.at == at:
                    raise not_json("a control character", at)
            elif byte == container.closing and expects in (_AFTER, _FIRST):
                self.at = at + 1
                if self._closed(container):
                    self._check_strings()
                    return True
            elif expects == _AFTER:
                if byte != _COMMA:
                    raise not_json("expected a comma, or the end of the list or object", at)
                self.at = at + 1
                self._expects = _PART
            elif expects == _AT_COLON:
                if byte != _COLON:
                    raise not_json("expected a colon", at)
                self.at = at + 1
                self._expects = _VALUE
            elif container.is_object and expects != _VALUE:
                if byte != _QUOTE:
                    raise not_json("expected a name in quotes", at)
                self._members(container, at)
            elif byte in b"{[":
                self._nested(container, at, byte)
            elif container.is_object:
                self._value(container, at, byte)
            else:
                self._values(container, at, byte)
        self._check_strings()
        return False

    def _check_strings(self) -> None:
        if self._strings > self._limits.max_strings:
            raise JSONTextError(f"more than {self._limits.max_strings} strings")

    def _closed(self, container: _Container) -> bool:
        """The container has ended; whether it is the outermost one."""
        if container.receiver is not None:
            container.receiver.closed()
        if not self._outer:
            return True
        self._open = self._outer.pop()
        self._ended(self._open)
        return False

    def _nested(self, container: _Container, at: int, opening: int) -> None:
        """Read containers that are short, as many as there are; or else begin to read a long one."""
        container.value = at
        if not _long_numbers(self._raw, at):
            values, end = self._short(at, 1 if container.is_object else _RUN_PARTS, len(self._outer) + 1)
            if values:
                self.at = end
                self._told(container, values)
                return
        receiver = container.receiver
        if receiver is not None:
            receiver = receiver.nested(container.name, opening)
        self._outer.append(container)
        self._open = _Container(opening, receiver)
        self._opened()
        self.at = at + 1

    def _opened(self) -> None:
        self._containers += 1
        if self._containers > self._limits.max_containers:
            raise self._too_many_containers()
        if len(self._outer) >= self._max_open:
            raise self._too_deep()
        self._expects = _FIRST

    def _too_many_containers(self) -> JSONTextError:
        return JSONTextError(f"more than {self._limits.max_containers} objects and lists")

    def _too_deep(self) -> JSONTextError:
        return JSONTextError(f"nested deeper than {self._limits.max_depth} levels")

    def _short(self, at: int, most: int, depth: int) -> tuple[list[object], int]:
        """Values that follow one another from `at` on, the last one short, and where it ends. None where already the
        first one is long, or has to be read by parts to say what is wrong with it. `depth`: how many containers are
        open."""
        raw, window = self._raw, self._window
        values, end = window.values(at, most) if at >= window.at and at + self._reach // 2 < window.end else ([], at)
        if not values:
            self._window = _Window(raw, at, self._reach)
            values, end = self._window.values(at, most)
        if not values:  # what is in it may be long as well: less is tried next
            self._work += self._reach // _BYTES_PER_PART
            self._reach = max(self._reach // 2, _NEAR)
            return values, end
        self._reach = min(self._reach * 2, self._step_bytes)
        self._measure(values, depth)
        if raw.find(b"\\u", at, end) >= 0 and _SURROGATE.search(raw, at, end):
            _check_pairs(values, at)
        return values, end

    def _measure(self, values: list[object], depth: int) -> None:
        """Count what is in these values, inside so many open containers."""
        strings = containers = 0
        level: list[object] = [values]
        while level:
            inner: list[object] = []
            for container in level:
                inside = cast("Collection[object]", container)
                self._work += len(inside)
                if type(container) is dict:
                    strings += len(inside)
                    inside = cast("dict[str, object]", container).values()
                for value in inside:
                    kind = type(value)
                    if kind is str:
                        strings += 1
                    elif kind is dict or kind is list:
                        inner.append(value)
            if inner and depth == self._max_open:
                raise self._too_deep()
            depth += 1
            containers += len(inner)
            level = inner
        self._strings += strings
        self._containers += containers
        if self._containers > self._limits.max_containers:
            raise self._too_many_containers()

    def _members(self, container: _Container, at: int) -> None:
        """Read members whose values are no containers, as many as there are; or else the name of one."""
        raw = self._raw
        fields, end, strings = _plain_members(raw, at, self._step_bytes)
        if not fields:
            self._name(container, at)
            return
        members = cast("dict[str, object]", _parsed(b"{%b}", raw, at, end))
        if len(members) != len(fields):
            raise _doubled(raw, fields)
        container.add(members)
        self._strings += strings
        self._work += strings
        receiver = container.receiver
        if receiver is not None:
            if receiver.spans is not None:
                receiver.spans.update(zip(members, fields, strict=True))
                self._check_members(receiver.spans)
            receiver.members(members)
        self.at = end
        self._expects = _AFTER

    def _name(self, container: _Container, at: int) -> None:
        end = string_end(self._raw, at, at + _LONGEST_TOKEN)
        if not end:
            raise _endless("a name", self._raw, at)
        name = str(_parsed(b"%b", self._raw, at, end))
        container.add({name: None})
        self._strings += 1
        container.name, container.start = name, at
        self.at = end
        self._expects = _AT_COLON

    def _values(self, container: _Container, at: int, byte: int) -> None:
        """Read elements that are no containers, as many as there are."""
        end, strings = _plain_values(self._raw, at, self._step_bytes)
        if end == at:
            self._value(container, at, byte)
            return
        values = cast("list[object]", _parsed(b"[%b]", self._raw, at, end))
        self._strings += strings
        self._work += strings
        if container.receiver is not None:
            container.receiver.values(values)
        self.at = end
        self._expects = _AFTER

    def _value(self, container: _Container, at: int, byte: int) -> None:
        """Read one value that is no container, of any length."""
        raw = self._raw
        container.value = at
        if byte != _QUOTE:
            end = _end(_SCALAR, raw, at, at + _LONGEST_TOKEN)
            if end - at == _LONGEST_TOKEN:
                raise _endless("a number", raw, at)
        else:
            self._strings += 1
            end = string_end(raw, at, at + self._step_bytes)
            if not end:
                self._whole = container.receiver is not None and container.receiver.wants(container.name)
                self._pieces = []
                self.at = at + 1
                self._expects = _IN_STRING
                return
        self.at = end
        self._told(container, [_parsed(b"%b", raw, at, end)])

    def _string_piece(self, at: int) -> None:
        raw = self._raw
        end, last = _piece_end(raw, at, self._step_bytes)
        piece = str(_parsed(b'"%b"', raw, at, end))
        if self._whole or not self._pieces:
            self._pieces.append(piece)
        self.at = end
        if last:
            self.at = end + 1
            pieces, self._pieces = self._pieces, []
            self._told(self._open, ["".join(pieces)])

    def _told(self, container: _Container, values: list[object]) -> None:
        """Elements of a list, or the value of a member, are complete."""
        self._ended(container)
        receiver = container.receiver
        if receiver is not None:
            if container.name is None:
                receiver.values(values)
            else:
                receiver.members({container.name: values[0]})

    def _ended(self, container: _Container) -> None:
        """So is the part of a container that it belongs to."""
        receiver, name = container.receiver, container.name
        if name is not None and receiver is not None and receiver.spans is not None:
            receiver.spans[name] = Field(container.start, container.value, self.at)
            self._check_members(receiver.spans)
        self._expects = _AFTER

    def _check_members(self, spans: dict[str, Field]) -> None:
        if len(spans) > self._limits.max_members:
            raise JSONTextError(f"more than {self._limits.max_members} members")


def _plain_members(raw: bytes, at: int, most_bytes: int) -> tuple[list[Field], int, int]:
    """Members from `at` on whose values are no containers, all within so many bytes: where they stand, where the last
    one ends, and how many strings there are in them."""
    stop = min(at + most_bytes, len(raw))
    fields: list[Field] = []
    strings = 0
    match = _MEMBER.match
    while len(fields) < _RUN_PARTS and (member := match(raw, at, stop)) is not None:
        _, (start, _), (value, end) = member.regs
        byte = raw[value]
        if byte == _QUOTE:
            end = string_end(raw, value, stop)
            if not end:
                break
            strings += 1
        elif byte in b"{[" or end == stop:  # the last one: it may go on
            break
        # a third of the cost of Field(...)
        fields.append(tuple.__new__(Field, (start, value, end)))  # pyright: ignore[reportUnknownMemberType]
        at = end
        if at == stop or raw[at] == _CLOSE_OBJECT:
            break
    return fields, at, strings + len(fields)


def _plain_values(raw: bytes, at: int, most_bytes: int) -> tuple[int, int]:
    """Where the elements of a list end that begin at `at`, are no containers and stand within so many bytes, and how
    many strings are among them."""
    stop = min(at + most_bytes, len(raw))
    end, close, strings = at, -1, 0
    while strings < _RUN_PARTS:
        if close < end:
            close = raw.find(b"]", end, stop)
            if close < 0:
                close = stop
        quote = raw.find(b'"', end, close)
        edge = close if quote < 0 else quote
        if edge - end > 2 or raw[edge - 1] != _COMMA:
            opening = _opening(raw, end, edge)
            if opening >= 0:
                edge = opening
        if edge == quote:
            after = string_end(raw, quote, stop)
            if after:
                end = after
                strings += 1
                continue
        elif edge == close and edge < stop:
            return edge, strings
        return max(end, raw.rfind(b",", end, edge)), strings
    return end, strings


def _opening(raw: bytes, at: int, end: int) -> int:
    """The first place in `raw[at:end]` with a bracket other than `]`, or -1."""
    if end - at < _SHORT:
        found = _OPENING.search(raw, at, end)
        return -1 if found is None else found.start()
    first = end
    for bracket in (b"{", b"[", b"}"):
        place = raw.find(bracket, at, first)
        if place >= 0:
            first = place
    return first if first < end else -1


def string_end(raw: bytes, at: int, stop: int) -> int:
    """The position behind the closing quote of the string that opens at `at`, or 0 where it does not end before
    `stop`. The cost is linear, whatever is escaped in it."""
    end = raw.find(b'"', at + 1, stop)
    if end > 0 and raw[end - 1] == _BACKSLASH:
        end = _end(_STRING, raw, at + 1, stop)
        if end >= min(stop, len(raw)) or raw[end] != _QUOTE:
            return 0
    return end + 1


def _piece_end(raw: bytes, at: int, most_bytes: int) -> tuple[int, bool]:
    """Where a piece ends of a string that goes on at `at`, and whether it is the last one. No piece ends within a
    character, an escape or a surrogate pair."""
    size = len(raw)
    stop = min(at + most_bytes, size)
    quote = raw.find(b'"', at, stop)
    if quote == at or (quote > at and raw[quote - 1] != _BACKSLASH):
        return quote, True
    end = stop
    if quote > at or raw.find(b"\\", max(at, stop - _LONGEST_ESCAPE), stop) >= 0:
        end = _end(_CHARACTERS, raw, at, stop)
        if end < size and raw[end] == _QUOTE:
            return end, True
    if end == size:
        raise not_json("a string without an end", size)
    while end > at and raw[end] & 0xC0 == 0x80:
        end -= 1
    if end == at:
        raise not_json("a character or escape of no meaning in a string", at)
    return end, False


def skip_space(raw: bytes, at: int) -> int:
    """The position behind the white space that stands at `at`, if any.

    Raises:
        JSONTextError: it is too long.
    """
    end = _end(_SPACE, raw, at, at + _LONGEST_TOKEN)
    if end - at == _LONGEST_TOKEN:
        raise JSONTextError(f"white space of more than {_LONGEST_TOKEN} bytes, at byte {at}")
    return end


def _end(pattern: re.Pattern[bytes], raw: bytes, at: int, stop: int) -> int:
    """Where the match of a pattern ends that always has one."""
    found = pattern.match(raw, at, stop)
    return at if found is None else found.end()


def _parsed(form: bytes, raw: bytes, at: int, end: int) -> object:
    text = raw[at:end]
    try:
        found = cast("object", from_json(form % text, allow_inf_nan=False))
    except ValueError as error:
        raise not_json(_POSITION.sub("", str(error)), at) from error
    check_finite(text, found)
    return found


def check_finite(text: bytes, value: object) -> None:
    """Refuse a number that a double can only hold as infinity.

    Args:
        text: the text of the value, without that of containers in it.
        value: what it parses to: a number, or a list or an object of such and of other values.

    Raises:
        JSONTextError: there is one.
    """
    if text.find(b"e") < 0 and text.find(b"E") < 0 and (len(text) < DOUBLE_DIGITS or text.find(b".") < 0):
        return
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).values()
    elif not isinstance(value, list):
        value = (value,)
    values = cast("Collection[object]", value)
    if _INFINITE in values or -_INFINITE in values:
        raise _infinite()


def _infinite() -> JSONTextError:
    return JSONTextError("a number is too large for a double; infinities are not JSON")


def _check_pairs(values: list[object], at: int) -> None:
    """Refuse half a surrogate pair in a string, which the standard library's parser takes."""
    try:
        to_json(values)
    except PydanticSerializationError as error:
        raise not_json("half a surrogate pair", at) from error


def _long_numbers(raw: bytes, at: int) -> bool:
    """Whether the container that opens at `at` begins with a long list of numbers: such are better read by parts."""
    found = _NUMBERS.search(raw, at, at + _NEAR)
    return found is not None and raw.find(b"]", found.end(), found.end() + _NEAR) < 0


def _stands_twice(name: str) -> JSONTextError:
    return JSONTextError(f"the key {name[:64]!r} stands twice in one object")


def _doubled(raw: bytes, fields: Iterable[Field]) -> JSONTextError:
    """Which of the members at `fields` has the name of one before it."""
    seen: set[str] = set()
    name = ""
    for field in fields:
        name = str(from_json(raw[field.start : string_end(raw, field.start, len(raw))]))
        if name in seen:
            break
        seen.add(name)
    return _stands_twice(name)


def not_json(why: str, at: int) -> JSONTextError:
    """The error for text that is no JSON."""
    return JSONTextError(f"not valid JSON: {why}, near byte {at}")


def _endless(what: str, raw: bytes, at: int) -> JSONTextError:
    if at + _LONGEST_TOKEN > len(raw):
        return not_json(f"{what} without an end", at)
    return JSONTextError(f"{what} of more than {_LONGEST_TOKEN} bytes, at byte {at}")
