"""An HTTP/1.1 connection to an engine. Asyncio and httptools call it; it calls the sink of its exchange.

It sends POST with a body it already holds and reads what HTTP/1.1 allows for an answer. An ordinary answer is read by
native code, where there is some (`ordinary_response.py`).

Invariant: an exchange ends once, whatever an engine sends, and a connection is used again only when its last answer was
whole and alone. A second answer on it belongs to no request.
"""

import asyncio
import logging
import re
from typing import Final, Protocol, cast

import httptools

from kvparams.native import NATIVE
from kvparams_proxy.event_loop.clock import Clock
from kvparams_proxy.upstream.exchange import UpstreamExchange
from kvparams_proxy.upstream.ordinary_response import OrdinaryResponse
from kvparams_proxy.upstream.types import (
    MAX_BYTES_PER_TURN,
    NO_HEAD,
    ResponseHead,
    ResponseSink,
    UpstreamError,
    UpstreamLimits,
    UpstreamRequest,
    describe_error,
)

__all__ = ["UpstreamConnection"]


_log: Final = logging.getLogger(__name__)
_SHORT_BYTES: Final = 16 << 10
"""To copy so much costs less than to write two buffers."""
_HEAD_END: Final = re.compile(rb"\n\r?\n")
_HEEDED: Final = frozenset((b"content-type", b"content-length", b"transfer-encoding", b"retry-after"))
"""Headers of an answer that matter."""
_STALE_S: Final = 1.0
"""A kept connection that the engine had closed already fails within a round trip; later, the engine may have begun."""


class ConnectionOwner(Protocol):
    """The pool, as connections see it."""

    @property
    def limits(self) -> UpstreamLimits:
        """The limits of the engine."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock that measures how long engines take."""
        ...

    def put_back(self, connection: "UpstreamConnection") -> None:
        """Hears that the connection is idle."""
        ...

    def forget(self, connection: "UpstreamConnection") -> None:
        """Hears that the connection is closed."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """A connection to an engine. It carries one exchange at a time."""

    __slots__ = (
        "_bodiless_bytes",
        "_complete",
        "_exchange",
        "_head",
        "_head_done",
        "_keep_alive",
        "_later",
        "_ordinary",
        "_parser",
        "_paused",
        "_pieces",
        "_pool",
        "_replays",
        "_reused",
        "_sent_at",
        "_sink",
        "_strange",
        "idle_since",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionOwner) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: UpstreamExchange | None = None
        self._sink: ResponseSink | None = None
        self._reused = False
        self._replays = False
        self._strange = False
        self._sent_at = 0.0
        self._paused = False
        self._later = b""
        """What a read has brought and further turns will deliver; nothing is read meanwhile."""
        self._ordinary = None if NATIVE is None else OrdinaryResponse(NATIVE)
        self.idle_since = 0.0
        self._head = NO_HEAD
        self._bodiless_bytes = 0
        """Of this answer, since a piece of its body came last; 0 where nothing has come."""
        self._head_done = False
        self._complete = False
        self._keep_alive = False
        self._pieces: list[bytes] = []

    # what the pool and the exchange call

    def begin(self, exchange: UpstreamExchange, sink: ResponseSink | None, request: UpstreamRequest) -> None:
        """Sends a request; the answer goes to `sink`. Whatever the last answer was, it was read to its end."""
        self._exchange = exchange
        self._sink = sink
        self._head = NO_HEAD
        self._head_done = self._complete = self._keep_alive = False
        self._bodiless_bytes = 0
        self._pieces = []
        self._sent_at = self._pool.clock.coarse_time_s
        head, body = request
        if not isinstance(body, bytes):
            self.transport.writelines((head, *body))
        elif len(body) < _SHORT_BYTES:
            self.transport.write(head + body)  # one buffer is written at once; of several, a list is kept
        else:
            self.transport.writelines((head, body))

    def close(self) -> None:
        """Closes the connection at once; its sink has been told."""
        self._exchange = self._sink = None
        self.transport.abort()

    def half_close(self) -> bool:
        """Closes the sending direction only. Returns whether that was possible."""
        if not self.transport.can_write_eof() or self.transport.is_closing():
            return False
        self._strange = True
        self.transport.write_eof()
        return True

    def pause(self) -> None:
        """Stops reading from the socket."""
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Reads from the socket again."""
        if self._paused:
            self._paused = False
            if self._later:
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                self.transport.resume_reading()

    @property
    def peer(self) -> str | None:
        """The engine's IP address, as far as the network tells."""
        name: object = self.transport.get_extra_info("peername")
        return str(cast("tuple[object, ...]", name)[0]) if isinstance(name, tuple) and name else None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parses the data and delivers it at once; of much data, some in each turn of the event loop."""
        if self._later:  # of what TLS has decrypted, more may come while nothing is read
            self._later += data
            return
        if len(data) > MAX_BYTES_PER_TURN:
            self._later = data[MAX_BYTES_PER_TURN:]
            if not self._paused:
                self.transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._go_on)
            data = data[:MAX_BYTES_PER_TURN]
        sink = self._sink
        if sink is None:  # an idle engine has nothing to say
            self.transport.abort()
            return
        wrong = ""
        try:
            ordinary = self._ordinary
            if ordinary is not None and (ordinary.is_reading or self._bodiless_bytes == 0):
                data = self._read_ordinary(ordinary, data, sink)
                if not data:
                    if self._complete and self._sink is sink:
                        self._end()
                    return
            if not self._head_done and self._bodiless_bytes + len(data) > self._pool.limits.head_bytes:
                self._check_head(data)
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                if not self._complete and not self._pieces:
                    raise
                wrong = describe_error(error)  # behind what came well, which counts however the bytes fall into reads
            pieces = self._pieces
            if not pieces:  # a head, trailers, the framing of chunks: the parser may keep all of it
                self._bodiless_bytes += len(data)
                if self._bodiless_bytes > self._pool.limits.head_bytes and not self._complete:
                    raise ValueError("its headers are too long" if not self._head_done else "its chunks are empty")
            elif self._sink is sink:
                self._bodiless_bytes = 1
                self._pieces = []
                sink.on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except UpstreamError as error:  # the sink has seen enough
            self._fail(error)
            return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self._fail(UpstreamError(f"the engine's answer is not usable HTTP ({describe_error(error)})"))
            return
        except Exception:  # noqa: BLE001  a fault of the proxy: still, this exchange ends and the engine is told
            _log.exception("an answer could not be taken")
            self._fail(UpstreamError("the proxy failed; its log says why"))
            return
        if self._complete:
            self._strange = self._strange or bool(wrong)
            self._end()
        elif wrong and self._sink is sink:
            self._fail(UpstreamError(f"the engine's answer is not usable HTTP ({wrong})"))

    def _read_ordinary(self, response: OrdinaryResponse, data: bytes, sink: ResponseSink) -> bytes:
        """Delivers what native code makes of the data. Returns what httptools is to read, which may be all of it.

        Raises:
            UpstreamError: the sink has seen enough.
            ValueError: the data is not HTTP.
        """
        if response.is_reading:
            body = response.read(data)
        else:
            found = response.begin(data, self._pool.limits.head_bytes)
            if found is None:
                return data
            self._head, body = found
            self._head_done = True
            self._bodiless_bytes = 1
            sink.on_head(self._head)
        if body and self._sink is sink:
            sink.on_body(body)
        if response.is_reading or self._sink is not sink:
            return b""
        if response.is_broken:
            raise ValueError("a chunk is longer than it says")
        if response.is_complete:
            self._complete = self._keep_alive = True
            self._strange = self._strange or response.has_more
            return b""
        self._replays = True  # httptools reads the head, which was delivered, and then what is left
        self._parser.feed_data(response.head)
        self._replays = False
        return response.rest

    def _go_on(self) -> None:
        """Delivers more of the last read, unless the answer is over or paused."""
        later = self._later
        if not later or self._paused or self._sink is None:
            return
        self._later = b""
        if len(later) <= MAX_BYTES_PER_TURN:
            self.transport.resume_reading()
        self.data_received(later)

    def _check_head(self, data: bytes) -> None:
        """Checks the length of the head.

        Raises:
            ValueError: the head that `data` belongs to is too long, however its bytes fall into reads.
        """
        left_bytes = self._pool.limits.head_bytes - self._bodiless_bytes
        if _HEAD_END.search(data, 0, max(0, left_bytes)) is None:
            raise ValueError("its headers are too long")

    def connection_lost(self, exc: Exception | None) -> None:
        """Completes a body that ends with the connection; any other answer is cut off."""
        self._pool.forget(self)
        del self._parser  # it holds this connection
        exchange, self._exchange, self._sink = self._exchange, None, None
        if exchange is None:
            return
        if self._head_done and not self._head.framed and exc is None:
            exchange.finish(None)
            return
        untouched = (
            self._reused and self._bodiless_bytes == 0 and self._pool.clock.coarse_time_s - self._sent_at < _STALE_S
        )
        exchange.finish(
            UpstreamError("the engine closed the connection before its answer was complete"), untouched=untouched
        )

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """Refuses a second answer to one request, which would be another client's."""
        if self._complete:
            self._strange = True
        elif not self._replays:
            self._head = ResponseHead()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps the few headers that matter."""
        if self._head_done:  # trailers
            return
        name = name.lower()
        if name not in _HEEDED:
            return
        if name == b"content-type":
            self._head.content_type = value
        elif name == b"retry-after":
            self._head.retry_after = value
        else:
            self._head.framed = True

    def on_headers_complete(self) -> None:
        """Delivers the head, unless it is a mere 100 Continue."""
        if self._complete or self._replays:  # of a second answer: nobody's; of this one, and delivered
            return
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise ValueError("it switches protocols")
            return
        head = self._head
        head.status = status
        if status in (204, 304):
            head.framed = True
        self._head_done = True
        if self._sink is not None:
            self._sink.on_head(head)

    def on_body(self, data: bytes) -> None:
        """Collects a piece of the body; pieces of one read are delivered together."""
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Notes the end of the message: the connection must not be used again before the parser has returned."""
        if self._head_done:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it when it returns

    def _end(self) -> None:
        exchange, self._exchange, self._sink = self._exchange, None, None
        if self._strange or self._later or not self._keep_alive or self.transport.is_closing():
            self.transport.close()
        else:
            if self._paused:
                self.resume()
            self._reused = True
            self._pool.put_back(self)
        if exchange is not None:
            exchange.finish(None)

    def _fail(self, error: UpstreamError) -> None:
        exchange, self._exchange, self._sink = self._exchange, None, None
        self.transport.abort()
        if exchange is not None:
            exchange.finish(error)
