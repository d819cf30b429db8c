"""Reads an ordinary answer with native code, up to its end or to something that is not ordinary.

Ordinary is a head that comes whole, with a status that has a body, and either a Content-Length or chunks without
extensions and trailers.
"""

from typing import Final

from kvparams.native import NativeCode
from kvparams_proxy.upstream.types import ResponseHead

__all__ = ["OrdinaryResponse"]

_COMPLETE: Final = 1
_NOT_ORDINARY: Final = 2


class OrdinaryResponse:
    """The answers of one connection, one after the other. It has no part in what a connection or a sink decides."""

    __slots__ = (
        "_chunk_left",
        "_left",
        "_native",
        "_tail",
        "has_more",
        "head",
        "is_broken",
        "is_complete",
        "is_reading",
        "rest",
    )

    def __init__(self, native: NativeCode) -> None:
        self._native = native
        self.is_reading = False
        """Whether more of an answer is to come here."""
        self.is_complete = False
        """Whether the last answer has ended; otherwise it is not ordinary, and `rest` is left of it."""
        self.is_broken = False
        """Whether it is not HTTP behind what was returned of its body."""
        self.has_more = False
        """Whether something stood behind its end."""
        self.head = b""
        """The head of an answer in chunks, as it came."""
        self.rest = b""
        """What was not read of it: it begins with the size of a chunk."""
        self._left: int | None = None
        """Bytes of the body that are still to come; None where chunks say it."""
        self._chunk_left = 0
        self._tail = b""
        """The beginning of a size line that is not whole."""

    def begin(self, data: bytes, head_bytes: int) -> tuple[ResponseHead, bytes] | None:
        """Reads the beginning of an answer, and returns its head and what came of its body.

        Returns None where it is not ordinary: then nothing was read.
        """
        found = self._native.response_head(data)
        if found is None:
            return None
        end, status, content_type, retry_after, length = found
        if end > head_bytes:
            return None
        if length >= 0:
            left = length - (len(data) - end)
            if left < 0:  # a second answer
                return None
            self._left = left
            self.is_reading = left > 0
            self.is_complete = left == 0
            self.has_more = False
            body = data[end:]
        else:
            self._left = None
            self._chunk_left = 0
            self._tail = b""
            self.head = data[:end]
            body = self._read_chunks(data[end:])
        return ResponseHead(status, content_type, True, retry_after), body

    def read(self, data: bytes) -> bytes:
        """Reads more of an answer, and returns what came of the body."""
        left = self._left
        if left is None:
            return self._read_chunks(self._tail + data if self._tail else data)
        self._left = left = left - len(data)
        if left > 0:
            return data
        self.is_reading = False
        self.is_complete = True
        self.has_more = left < 0
        return data[:left] if left < 0 else data

    def _read_chunks(self, data: bytes) -> bytes:
        body, used, self._chunk_left, state = self._native.read_chunks(data, self._chunk_left)
        if state == 0:
            self.is_reading = True
            self._tail = data[used:]
        elif state == _COMPLETE:
            self.is_reading = False
            self.is_complete = True
            self.has_more = used < len(data)
        elif state == _NOT_ORDINARY:
            self.is_reading = self.is_complete = False
            self.rest = data[used:]
        else:  # a chunk is longer than it says
            self.is_reading = self.is_complete = False
            self.is_broken = True
        return body
