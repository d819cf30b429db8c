"""Incremental JSON reader: checks a document in steps of bounded work and hands over its parts.

A C parser holds the interpreter's lock for a whole document, so a long one would hold up an event loop from any thread.
This reader opens long containers itself and gives the parsers what is short, 32 KiB at a time. The caller may do
other work between two steps. Nothing of the document is kept but what a `Receiver` keeps.

Every byte is either in a text that a parser has accepted, or one that this module expects in that place.
"""

import re
from collections.abc import Collection, Iterator
from typing import Final, cast

from pydantic_core import from_json

from kvparams.errors import JSONTextError
from kvparams.jsontext.finite_numbers import check_finite
from kvparams.jsontext.open_container import OpenContainer, doubled_member_error
from kvparams.jsontext.receivers import Receiver
from kvparams.jsontext.scanner import (
    LONGEST_ESCAPE,
    LONGEST_TOKEN,
    NEAR,
    STEP_BYTES,
    JSONLimits,
    MemberSpan,
    begins_with_numbers,
    not_json_error,
    piece_end,
    plain_members,
    plain_values,
    scalar_end,
    skip_space,
    string_end,
    token_too_long_error,
)
from kvparams.jsontext.window import DecodedWindow

__all__ = ["IncrementalReader"]

_STEP_TURNS: Final = 256
"""Of the reader's loop, in one step."""
_STEP_PARTS: Final = 2048
"""Strings, members and elements of short containers in one step, about."""
_RUN_PARTS: Final = 512
"""Values that are read one after another in one turn."""
_BYTES_PER_PART: Final = 32
_PARSER_DEPTH: Final = 201
"""Objects and lists inside each other that `from_json` takes (pydantic_core 2.50); of those with values 200."""

_QUOTE, _COMMA, _COLON = 0x22, 0x2C, 0x3A
_POSITION: Final = re.compile(r" at line \d+ column \d+\Z")

# What may stand at the current place: the first part of a container or its end; a part, behind a comma; a comma or the
# end; a colon; the value of a member; the rest of a string.
_FIRST, _PART, _AFTER, _AT_COLON, _VALUE, _IN_STRING = range(6)


_NO_WINDOW: Final = DecodedWindow(b"", -1, 0)


class IncrementalReader:
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
        "_strict",
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
        strict: bool = True,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """Creates a reader that stands at the opening bracket of a container.

        Args:
            raw: the text.
            at: the place of the opening bracket.
            limits: those of depth, containers and strings are kept here.
            receiver: receives the parts; None to check them only.
            depth: of this container in the document.
            strict: whether to refuse doubled keys and infinities, and keep the limits of containers and strings.
            step_bytes: about how much text one step reads.
        """
        self._raw = raw
        self._limits = limits
        self._strict = strict
        self._max_open = min(limits.max_depth, _PARSER_DEPTH) + 1 - depth
        self._step_bytes = max(step_bytes, LONGEST_ESCAPE)
        self._containers = self._strings = 0
        self._work = 0
        """Parts that were looked at, about: what a step costs beside its bytes."""
        self._reach = self._step_bytes
        """Within how many bytes a container must end that is told whole."""
        self._outer: list[OpenContainer] = []
        self._open = OpenContainer(raw[at], receiver)
        self._window = _NO_WINDOW
        self._opened()
        self._pieces: list[str] = []
        self._whole = False
        self.at = at + 1
        """The next place to read; at the end the one behind the container."""

    def steps(self) -> Iterator[None]:
        """Do the work, one step for each item.

        Raises:
            JSONTextError: it is no JSON, or not plain (see `kvparams.jsontext.document.loads`).
        """
        while not self._step():
            yield

    def finish(self) -> int:
        """Does all of the work at once, raising as `steps` does, and returns the position behind the container."""
        self._containers = 0
        values, end = self._short(self.at - 1, 1, 0)
        if values:
            return end
        self._containers = 1
        while not self._step():
            pass
        return self.at

    def _step(self) -> bool:
        """Reads one step and returns True if it was the last one."""
        raw, size = self._raw, len(self._raw)
        until, enough = self.at + self._step_bytes, self._work + _STEP_PARTS
        for _ in range(_STEP_TURNS):
            at = self.at
            if at >= until or self._work >= enough:
                break
            if at >= size:
                raise not_json_error("it ends too early", size)
            byte, expects, container = raw[at], self._expects, self._open
            if expects == _IN_STRING:
                self._string_piece(at)
                break
            if byte <= 0x20:
                self.at = skip_space(raw, at)
                if self.at == at:
                    raise not_json_error("a control character", at)
            elif byte == container.closing and expects in (_AFTER, _FIRST):
                self.at = at + 1
                if self._closed(container):
                    self._check_strings()
                    return True
            elif expects == _AFTER:
                if byte != _COMMA:
                    raise not_json_error("expected a comma, or the end of the list or object", at)
                self.at = at + 1
                self._expects = _PART
            elif expects == _AT_COLON:
                if byte != _COLON:
                    raise not_json_error("expected a colon", at)
                self.at = at + 1
                self._expects = _VALUE
            elif container.is_object and expects != _VALUE:
                if byte != _QUOTE:
                    raise not_json_error("expected a name in quotes", at)
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
        if self._strict and self._strings > self._limits.max_strings:
            raise JSONTextError(f"more than {self._limits.max_strings} strings")

    def _closed(self, container: OpenContainer) -> bool:
        """The container has ended; whether it is the outermost one."""
        if container.receiver is not None:
            container.receiver.on_closed()
        if not self._outer:
            return True
        self._open = self._outer.pop()
        self._ended(self._open)
        return False

    def _nested(self, container: OpenContainer, at: int, opening: int) -> None:
        """Read containers that are short, as many as there are; or else begin to read a long one."""
        container.value = at
        if not begins_with_numbers(self._raw, at):
            values, end = self._short(at, 1 if container.is_object else _RUN_PARTS, len(self._outer) + 1)
            if values:
                self.at = end
                self._told(container, values)
                return
        receiver = container.receiver
        if receiver is not None:
            receiver = receiver.on_nested(container.name, opening)
        self._outer.append(container)
        self._open = OpenContainer(opening, receiver)
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
        """Returns consecutive short values from `at` on, and the end of the last one.

        The list is empty if the first value is long or faulty. `depth` is the number of open containers.
        """
        raw, window = self._raw, self._window
        values, end = window.values(at, most) if at >= window.at and at + self._reach // 2 < window.end else ([], at)
        if not values:
            self._window = DecodedWindow(raw, at, self._reach, strict=self._strict)
            values, end = self._window.values(at, most)
        if not values:  # what is in it may be long as well: less is tried next
            self._work += self._reach // _BYTES_PER_PART
            self._reach = max(self._reach // 2, NEAR)
            return values, end
        self._reach = min(self._reach * 2, self._step_bytes)
        if not self._strict:
            self._work += len(values) + (end - at) // _BYTES_PER_PART
            return values, end
        self._measure(values, depth)
        self._window.check_pairs(values, at, end)
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

    def _members(self, container: OpenContainer, at: int) -> None:
        """Read members whose values are no containers, as many as there are; or else the name of one."""
        raw = self._raw
        fields, end, strings = plain_members(raw, at, self._step_bytes)
        if not fields:
            self._name(container, at)
            return
        members = cast("dict[str, object]", self._parsed(b"{%b}", at, end))
        if len(members) != len(fields):
            raise doubled_member_error(raw, fields)
        if self._strict:
            container.add(members)
        self._strings += strings
        self._work += strings
        receiver = container.receiver
        if receiver is not None:
            if receiver.spans is not None:
                receiver.spans.update(zip(members, fields, strict=True))
                self._check_members(receiver.spans)
            receiver.on_members(members)
        self.at = end
        self._expects = _AFTER

    def _name(self, container: OpenContainer, at: int) -> None:
        end = string_end(self._raw, at, at + LONGEST_TOKEN)
        if not end:
            raise token_too_long_error("a name", self._raw, at)
        name = str(self._parsed(b"%b", at, end))
        if self._strict:
            container.add({name: None})
        self._strings += 1
        container.name, container.start = name, at
        self.at = end
        self._expects = _AT_COLON

    def _values(self, container: OpenContainer, at: int, byte: int) -> None:
        """Read elements that are no containers, as many as there are."""
        end, strings = plain_values(self._raw, at, self._step_bytes)
        if end == at:
            self._value(container, at, byte)
            return
        values = cast("list[object]", self._parsed(b"[%b]", at, end))
        self._strings += strings
        self._work += strings
        if container.receiver is not None:
            container.receiver.on_values(values)
        self.at = end
        self._expects = _AFTER

    def _value(self, container: OpenContainer, at: int, byte: int) -> None:
        """Read one value that is no container, of any length."""
        raw = self._raw
        container.value = at
        if byte != _QUOTE:
            end = scalar_end(raw, at)
        else:
            self._strings += 1
            end = string_end(raw, at, at + self._step_bytes)
            if not end:
                self._whole = container.receiver is not None and container.receiver.wants_whole_string(container.name)
                self._pieces = []
                self.at = at + 1
                self._expects = _IN_STRING
                return
        self.at = end
        self._told(container, [self._parsed(b"%b", at, end)])

    def _string_piece(self, at: int) -> None:
        raw = self._raw
        end, last = piece_end(raw, at, self._step_bytes)
        piece = str(self._parsed(b'"%b"', at, end))
        if self._whole or not self._pieces:
            self._pieces.append(piece)
        self.at = end
        if last:
            self.at = end + 1
            pieces, self._pieces = self._pieces, []
            self._told(self._open, ["".join(pieces)])

    def _told(self, container: OpenContainer, values: list[object]) -> None:
        """Elements of a list, or the value of a member, are complete."""
        self._ended(container)
        receiver = container.receiver
        if receiver is not None:
            if container.name is None:
                receiver.on_values(values)
            else:
                receiver.on_members({container.name: values[0]})

    def _parsed(self, form: bytes, at: int, end: int) -> object:
        """Parses `raw[at:end]` inside the text `form`."""
        text = self._raw[at:end]
        try:
            # The parser's cache of strings would be filled by a long text, and what it keeps pins the memory around
            # it: 10 MB after an object of 180,000 names (pydantic_core 2.50).
            found = cast("object", from_json(form % text, allow_inf_nan=False, cache_strings="none"))
        except ValueError as error:
            raise not_json_error(_POSITION.sub("", str(error)), at) from error
        if self._strict:
            check_finite(text, found)
        return found

    def _ended(self, container: OpenContainer) -> None:
        """Handles the end of a container: the member that it is the value of ends, too."""
        receiver, name = container.receiver, container.name
        if name is not None and receiver is not None and receiver.spans is not None:
            receiver.spans[name] = MemberSpan(container.start, container.value, self.at)
            self._check_members(receiver.spans)
        self._expects = _AFTER

    def _check_members(self, spans: dict[str, MemberSpan]) -> None:
        if len(spans) > self._limits.max_members:
            raise JSONTextError(f"more than {self._limits.max_members} members")
