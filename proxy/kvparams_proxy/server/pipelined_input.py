"""Keeps what a client sends behind the request that is being answered, within a bound.

Requests are parsed and answered one after the other, one in a turn of the event loop; what comes behind the current one
waits as it came. It is read all the same: otherwise nobody would notice that the client leaves.
"""

import asyncio
from typing import Final

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.server.asgi_exchange import ASGIExchange
from kvparams_proxy.server.direct_path import DirectDownstream
from kvparams_proxy.server.http_parser import RequestParser

__all__ = ["PipelinedInput"]

_AHEAD_BYTES: Final = 256 << 10
"""A connection is read until so many bytes of pipelined requests wait on it."""


class PipelinedInput(RequestParser):
    """The reading half of a connection."""

    __slots__ = (
        "_ahead",
        "_ahead_at",
        "_behind",
        "_bodies",
        "_current",
        "_kept_bytes",
        "_reading_paused",
        "_scheduled",
        "_write_paused",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, bodies: BodyBudget | None) -> None:
        """`bodies`: the budget that what waits counts against."""
        super().__init__(loop, limit_s)
        self._bodies = bodies
        self._current: DirectDownstream | ASGIExchange | None = None
        """The request that is being received or answered."""
        self._ahead = b""
        """What came behind the request that is being answered, not parsed yet from `_ahead_at` on."""
        self._ahead_at = 0
        self._behind = bytearray()
        """What came later than that."""
        self._kept_bytes = 0
        """How much both hold, as the budget knows it."""
        self._scheduled = False
        """Whether the next turn of the loop goes on with that."""
        self._reading_paused = False
        self._write_paused = False

    def data_received(self, data: bytes) -> None:
        """Parses what came, up to the end of one request."""
        if self._input_ignored:
            self._more = True
        elif self._ahead or self._behind or self._busy:
            self._behind += data
            self._account()
        else:
            self._parse(data, 0)

    @property
    def _busy(self) -> bool:
        """Returns whether the client has to wait: for a response, or until it has read one."""
        return (self._current is not None and self._receiving is None) or (self._write_paused and self._current is None)

    def _keep(self, data: bytes, at: int) -> None:
        self._ahead, self._ahead_at = data, at
        self._account()
        self._schedule()

    def _account(self) -> None:
        """Tells the budget of bodies what waits behind the request that is being answered."""
        kept = len(self._ahead) - self._ahead_at + len(self._behind)
        more, self._kept_bytes = kept - self._kept_bytes, kept
        bodies = self._bodies
        if bodies is not None and more < 0:
            bodies.release(-more)
        elif bodies is not None and more:
            try:
                bodies.reserve(more)
            except ProxyError:
                self._kept_bytes -= more
                self._drop_ahead()
                self._not_served()
                return
        if kept > _AHEAD_BYTES:
            self.pause_reading()

    def _drop_ahead(self) -> None:
        """Forgets what waits."""
        if self._kept_bytes:
            self._ahead, self._ahead_at, self._behind = b"", 0, bytearray()
            self._account()

    def _schedule(self) -> None:
        """Goes on in the next turn of the loop: requests that are answered at once must not hold up the others."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Parses the next request that waits."""
        self._scheduled = False
        if self._input_ignored or self._busy or self.transport.is_closing():
            return
        data, at = self._ahead, self._ahead_at
        if data:
            self._ahead, self._ahead_at = b"", 0
        else:
            data, self._behind = bytes(self._behind), bytearray()
        self._parse(data, at)
        self._account()
        self.resume_reading()
        if self._behind and not self._busy:
            self._schedule()

    def pause_reading(self) -> None:
        """See `ResponseConnection.pause_reading`."""
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """See `ResponseConnection.resume_reading`."""
        if self._reading_paused and self._kept_bytes <= _AHEAD_BYTES and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()
