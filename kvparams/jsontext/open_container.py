"""An object or a list that `IncrementalReader` has opened, with the names of its members so far."""

from collections.abc import Iterable
from typing import Final

from pydantic_core import from_json

from kvparams.errors import JSONTextError
from kvparams.jsontext.receivers import Receiver
from kvparams.jsontext.scanner import MemberSpan, duplicate_key_error, string_end

__all__ = ["OpenContainer", "doubled_member_error"]

_MOST_KEYS: Final = 32_768
"""Names in one set: one that is larger takes long to grow."""
_CLOSE_LIST: Final = 0x5D
_OPEN_OBJECT: Final = 0x7B
_CLOSE_OBJECT: Final = 0x7D


class OpenContainer:
    """An `OpenContainer` is an object or list whose end has not been read."""

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
            raise duplicate_key_error(
                next(name for name in names if any(name in keys for keys in (self._keys, *self._before)))
            )
        self._keys.update(names)
        if len(self._keys) > _MOST_KEYS:
            self._before.append(self._keys)
            self._keys = set()


def doubled_member_error(raw: bytes, fields: Iterable[MemberSpan]) -> JSONTextError:
    """Returns the error for members at `fields` of which one has the name of another before it."""
    seen: set[str] = set()
    name = ""
    for field in fields:
        name = str(from_json(raw[field.start : string_end(raw, field.start, len(raw))]))
        if name in seen:
            break
        seen.add(name)
    return duplicate_key_error(name)
