"""Defines the receivers that take the parts of a long JSON document while it is read in steps.

A receiver keeps a bounded amount of data, or its user bounds the text.
"""

from collections.abc import Mapping
from typing import Final, cast

from kvparams.errors import JSONTextError
from kvparams.jsontext.scanner import STEP_BYTES, MemberSpan

__all__ = [
    "OPEN_LIST",
    "OPEN_OBJECT",
    "SHORT_BYTES",
    "AbridgedObjectReceiver",
    "ListReceiver",
    "Receiver",
    "TreeBuilder",
]

OPEN_LIST: Final = 0x5B
OPEN_OBJECT: Final = 0x7B
_MEMBER_VALUES: Final = 8
"""What a member counts for: it takes as long as so many numbers."""
_MOST_KEPT: Final = 256 << 10
"""Bytes of text whose values `AbridgedObjectReceiver` keeps, of all members together."""
SHORT_BYTES: Final = 1024
"""Of a member that `AbridgedObjectReceiver` keeps beside those."""


class Receiver:
    """Receives the parts of one object or list in the order of the text. This one keeps nothing.

    Short parts are told whole, several at a time; a container that is too long for that has a receiver of its own.
    """

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: dict[str, MemberSpan] | None = None
        """Where the members of an object stand, by name, for a receiver that has set it to a dictionary."""

    def on_members(self, members: dict[str, object]) -> None:
        """Takes some members of the object, whose positions are in `spans` by then."""

    def on_values(self, values: list[object]) -> None:
        """Takes some elements of the list."""

    def on_nested(self, name: str | None, opening: int) -> "Receiver | None":
        """A long container begins: the value of the member `name`, or an element of the list.

        Args:
            name: the member's name; None in a list.
            opening: the byte that opens it, `{` or `[`.

        Returns:
            What receives its parts; None if nobody wants them.
        """
        return None

    def wants_whole_string(self, name: str | None) -> bool:
        """Returns True to receive a string that is longer than a step as a whole, and not only its beginning."""
        return False

    def on_closed(self) -> None:
        """The container is complete."""


class TreeBuilder(Receiver):
    """Builds the object or list that the parts make."""

    __slots__ = ("_left", "value")

    def __init__(self, opening: int, most_values: int | None = None, left: list[int] | None = None) -> None:
        """Creates a builder of an empty object or list.

        Args:
            opening: the byte that opens it.
            most_values: more values than this, at any depth, are refused, a member counting as eight; None for no
                bound of its own.
            left: how many there may still be, shared with the container around it.
        """
        super().__init__()
        self.value: dict[str, object] | list[object] = {} if opening == OPEN_OBJECT else []
        self._left = left if most_values is None else [most_values]

    def on_members(self, members: dict[str, object]) -> None:
        """See `Receiver.on_members`."""
        self._count(_MEMBER_VALUES * len(members))
        cast("dict[str, object]", self.value).update(members)

    def on_values(self, values: list[object]) -> None:
        """See `Receiver.on_values`."""
        self._count(len(values))
        cast("list[object]", self.value).extend(values)

    def on_nested(self, name: str | None, opening: int) -> "TreeBuilder":
        """See `Receiver.on_nested`."""
        inner = TreeBuilder(opening, left=self._left)
        if name is None:
            cast("list[object]", self.value).append(inner.value)
        else:
            cast("dict[str, object]", self.value)[name] = inner.value
        return inner

    def wants_whole_string(self, name: str | None) -> bool:
        """See `Receiver.wants_whole_string`."""
        return True

    def _count(self, values: int) -> None:
        if self._left is not None:
            self._left[0] -= values
            if self._left[0] < 0:
                raise JSONTextError("it holds too many values")


class AbridgedObjectReceiver(Receiver):
    """Keeps the members of a long object: short ones as they are, of long ones something short of the same kind."""

    __slots__ = ("_kept", "_needed", "_special", "document", "fields", "long", "whole")

    def __init__(
        self,
        needed: frozenset[str] = frozenset(),
        special: "Mapping[str, AbridgedObjectReceiver | ListReceiver] | None" = None,
    ) -> None:
        """Creates a receiver of an empty object.

        Args:
            needed: names of members that are kept in any case, if they are no long containers.
            special: what receives the member of this name where it is a long container of the right kind.
        """
        super().__init__()
        self.spans = self.fields = dict[str, MemberSpan]()
        """Where the members stand."""
        self._needed = needed
        self._special = special or {}
        self._kept = 0
        self.document: dict[str, object] = {}
        """The members in the order of the text."""
        self.long: dict[str, Receiver] = {}
        """Of `special`, what has received a member."""
        self.whole = True
        """Whether all members are as they are in the text."""

    def on_members(self, members: dict[str, object]) -> None:
        """See `Receiver.on_members`."""
        for name, value in members.items():
            field = self.fields[name]
            size = field.end - field.start
            if size > STEP_BYTES:  # of a long string it is only the beginning
                self.whole = False
            if size > SHORT_BYTES and name not in self._needed:
                self._kept += min(size, STEP_BYTES)
                if self._kept > _MOST_KEPT:
                    self.whole = False
                    self.document[name] = _in_place_of(value)
                    continue
            self.document[name] = value

    def on_nested(self, name: str | None, opening: int) -> Receiver | None:
        """See `Receiver.on_nested`."""
        name = cast("str", name)
        self.whole = False
        receiver = self._special.get(name)
        if isinstance(receiver, AbridgedObjectReceiver if opening == OPEN_OBJECT else ListReceiver):
            self.long[name] = receiver
            self.document[name] = (
                receiver.document if isinstance(receiver, AbridgedObjectReceiver) else receiver.stand_in
            )
            return receiver
        self.document[name] = _in_place_of({} if opening == OPEN_OBJECT else [])
        return None


class ListReceiver(Receiver):
    """Receives a long list, for `AbridgedObjectReceiver`."""

    __slots__ = ("stand_in",)

    def __init__(self, stand_in: object = None) -> None:
        """`stand_in`: what is its only element in the document."""
        super().__init__()
        self.stand_in: list[object] = [stand_in]
        """A short list that stands for it in the document."""


def _in_place_of(value: object) -> object:
    """Returns something short of the same kind, which is as true."""
    if isinstance(value, str):
        return value[:SHORT_BYTES]
    if isinstance(value, list):
        return [None]
    return {"": None} if isinstance(value, dict) else value
