"""Reads the usage that an engine reports at the end of its response, without holding the response."""

import json
from typing import Final, cast

__all__ = ["UsageReader"]

_TAIL_BYTES: Final = 4096
_MEMBER: Final = b'"usage":'


class UsageReader:
    """Keeps the end of a body."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Receives a piece of the body."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:] if len(data) < _TAIL_BYTES else data[-_TAIL_BYTES:]

    def usage(self) -> dict[str, object] | None:
        """Returns the last usage object, or None where there is none."""
        start = self._tail.rfind(_MEMBER)
        if start < 0:
            return None
        text = self._tail[start + len(_MEMBER) :].decode("utf-8", "replace").lstrip()
        try:
            found: object = json.JSONDecoder().raw_decode(text)[0]
        except (ValueError, RecursionError):
            return None
        return cast("dict[str, object]", found) if isinstance(found, dict) else None
