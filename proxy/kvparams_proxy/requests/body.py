"""The bodies of requests on their way in: how they are gathered, and how much memory all of them may take together."""

from collections.abc import Callable
from typing import Final

from kvparams_proxy.errors import ProxyError

__all__ = ["BodyBudget", "RequestBody", "body_too_large_error", "declared_length"]

_JOINED_BYTES: Final = 64 << 10
"""Pieces are joined up to this size: an object per piece of two bytes would take twenty times the body's size."""
_LARGE_BYTES: Final = 256 << 10
_RETRY_S: Final = 1
_MOST_DIGITS: Final = 19
"""A Content-Length with more digits than this is over any limit."""


class BodyBudget:
    """Bounds the bytes of all request bodies that the proxy holds, from their first byte to the end of the request."""

    __slots__ = ("_freed", "held_bytes", "limit_bytes", "refused")

    def __init__(self, limit_bytes: int, freed: Callable[[int], None] | None = None) -> None:
        """`freed` hears how many bytes a large body gave back."""
        self._freed = freed
        self.limit_bytes: Final = limit_bytes
        self.held_bytes = 0
        self.refused: int = 0
        """How many requests were refused because the budget was used up."""

    def reserve(self, size: int) -> None:
        """Counts `size` more bytes.

        Raises:
            ProxyError: 503, the budget is used up; nothing was counted.
        """
        if self.held_bytes + size > self.limit_bytes:
            self.refused += 1
            message = "the request bodies in the proxy have reached their memory limit; try again later"
            raise ProxyError(503, "service_unavailable", message, code="body_memory_full", retry_after_s=_RETRY_S)
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Counts `size` bytes no longer."""
        self.held_bytes -= size
        if size > _LARGE_BYTES and self._freed is not None:
            self._freed(size)


class RequestBody:
    """Gathers a request body piece by piece, under its own limit and the shared budget if one is given."""

    __slots__ = ("_budget", "_limit_bytes", "_pieces", "_size")

    def __init__(self, limit_bytes: int, budget: BodyBudget | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._budget = BodyBudget(limit_bytes) if budget is None else budget
        self._pieces: list[bytes | bytearray] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Adds `piece` at the end.

        Raises:
            ProxyError: 413, the body is larger than its limit; 503, see `BodyBudget.reserve`.
        """
        size = len(piece)
        if self._size + size > self._limit_bytes:
            raise body_too_large_error(self._limit_bytes)
        self._budget.reserve(size)
        self._size += size
        pieces = self._pieces
        if not pieces:
            pieces.append(piece)
            return
        last = pieces[-1]
        if type(last) is bytearray and len(last) < _JOINED_BYTES:
            last += piece
        elif size < _JOINED_BYTES:
            pieces.append(bytearray(piece))
        else:
            pieces.append(piece)

    def join(self) -> bytes:
        """Returns the whole body, which stays in the budget until `release`."""
        pieces = self._pieces
        self._pieces = []
        first = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return first if type(first) is bytes else bytes(first)

    def release(self) -> None:
        """Drops what was gathered and gives its bytes back to the budget. Calling it again does nothing."""
        self._pieces = []
        if self._size:
            self._budget.release(self._size)
            self._size = 0


def declared_length(value: bytes) -> int:
    """Returns the length that a Content-Length header declares, or some length beyond any limit where it is beyond.

    Leading zeros have no meaning (RFC 9110, section 8.6), and `int` refuses more than 4,300 digits with a `ValueError`.

    Raises:
        ProxyError: 400, it is not a number.
    """
    digits = value.strip().lstrip(b"0") or b"0"
    if not digits.isdigit():
        raise ProxyError(400, "invalid_request_error", "the Content-Length is not a number")
    return int(digits[: _MOST_DIGITS + 1])


def body_too_large_error(limit_bytes: int) -> ProxyError:
    """Returns the error for a body of more than `limit_bytes`."""
    return ProxyError(413, "invalid_request_error", f"the body is larger than {limit_bytes} bytes")
