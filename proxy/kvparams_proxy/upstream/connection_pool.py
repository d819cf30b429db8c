"""The HTTP/1.1 client of the data path: the connections to one engine.

It does only what two legs need. A request tries an idle connection once. If the engine has closed it, the request is
sent on a new connection.
"""

import asyncio
import errno
import logging
import ssl
from collections import deque
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from kvparams_proxy.event_loop.clock import Clock, ClockTimer, MonotonicClock
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.connection import UpstreamConnection
from kvparams_proxy.upstream.exchange import UpstreamExchange
from kvparams_proxy.upstream.types import (
    ResponseSink,
    UpstreamBody,
    UpstreamError,
    UpstreamLimits,
    UpstreamOverflow,
    UpstreamRequest,
    describe_error,
)

__all__ = ["UpstreamConnectionPool"]

_MOST_PEERS: Final = 16
_SAY_AGAIN_S: Final = 10.0
_RANK_HEADER: Final = b"x-data-parallel-rank: %d\r\n"
"""Sources: vLLM 0.32.0 entrypoints/generate/base/serving.py; SGLang 0.5.23 srt/entrypoints/openai/serving_base.py."""
_log: Final = logging.getLogger(__name__)


class UpstreamConnectionPool:
    """The connections to one engine."""

    def __init__(
        self,
        url: str,
        limits: UpstreamLimits,
        tls: ssl.SSLContext | None = None,
        *,
        server_name: str | None = None,
        key: Secret | None = None,
        rank: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Creates the pool without connections.

        Args:
            url: `http(s)://host[:port]`.
            limits: what the engine may take.
            tls: for https; the system's trust by default.
            server_name: what the engine's certificate must say, where that is not the host in its URL.
            key: the engine's own; it goes with every request.
            rank: the data-parallel rank behind the URL that POST requests are for, where there are several.
            clock: what the time to connect is measured by, if not the loop's own.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise ValueError(f"an engine's URL is http://host:port or https://host:port, not {url!r}")
        self.limits: Final = limits
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._server_name = server_name if self._tls is not None else None
        self.has_own_key: Final = key is not None
        """Whether requests carry the engine's own key: then no other Authorization may be among their headers."""
        self.shared: Final = False
        """See `Upstream.shared`."""
        self._own = b"" if key is None else key.authorization_header()
        self._rank = b"" if rank is None else _RANK_HEADER % rank
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._prefixes: dict[bytes, bytes] = {}
        self.peer_addresses: tuple[str, ...] = ()
        """The IP addresses that the URL's host has led to, the last few."""
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False
        self._said_s = -_SAY_AGAIN_S
        self._loop = asyncio.get_running_loop()
        self.clock: Final = clock or MonotonicClock(self._loop.time)

    def request(self, path: bytes, headers: bytes, body: UpstreamBody) -> UpstreamRequest:
        """Builds a POST request. `headers` are whole lines, each ending in CRLF."""
        prefix = self._prefixes.get(path)
        if prefix is None:
            prefix = self._prefixes[path] = (
                b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept: */*\r\n%b%b"
                % (path, self._authority, self._own, self._rank)
            )
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        return b"%bcontent-length: %d\r\n\r\n" % (prefix + headers, size), body

    def get(self, path: bytes, headers: bytes = b"") -> UpstreamRequest:
        """Builds a GET request. `headers` are as for `request`."""
        lines = headers + self._own
        return b"GET %b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\n%b\r\n" % (path, self._authority, lines), b""

    def exchange(self, request: UpstreamRequest, sink: ResponseSink, *, once: bool = False) -> UpstreamExchange:
        """Sends `request` and delivers its answer to `sink`. `once`: see `UpstreamExchange`."""
        exchange = UpstreamExchange(self, request, sink, once)
        idle = self._idle
        while idle:
            connection = idle.pop()
            transport = connection.transport
            if transport.is_closing():
                continue
            if self._loop.time() - connection.idle_since > self.limits.idle_s:
                transport.close()
                continue
            exchange.start_on(connection)
            return exchange
        self.restart(exchange)
        return exchange

    def restart(self, exchange: UpstreamExchange) -> None:
        """Runs `exchange` on a new connection."""
        if self._closed:
            gone = UpstreamError("the engine has been removed", connected=False)
            self._loop.call_soon(exchange.finish, gone)
            return
        if len(self._open) + len(self._connecting) >= self.limits.connections:
            full = UpstreamOverflow("too many connections to the engine are open", connected=False)
            self._loop.call_soon(exchange.finish, full)
            return
        task = self._loop.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(partial(self._connected, exchange))
        exchange.set_connecting(task)

    def _connected(self, exchange: UpstreamExchange, task: asyncio.Task[None]) -> None:
        """Handles the end of an attempt to connect; it may have been cancelled, even before it had begun."""
        self._connecting.discard(task)
        if task.cancelled():
            exchange.finish(UpstreamError("no connection to the engine (given up)", connected=False))

    async def _connect(self, exchange: UpstreamExchange) -> None:
        try:
            connection = await self._connected_in_time()
        except (OSError, TimeoutError, UnicodeError) as error:  # ssl.SSLError is an OSError; a host may be no name
            exchange.finish(self._no_connection(error))
            return
        except asyncio.CancelledError:
            del exchange  # the task keeps its error, whose frames would hold the request
            raise
        if connection.transport.is_closing():  # lost already: nobody would say so again
            exchange.finish(UpstreamError("no connection to the engine (closed at once)", connected=False))
            return
        self._open.add(connection)
        if (peer := connection.peer) is not None and peer not in self.peer_addresses:
            self.peer_addresses = (*self.peer_addresses, peer)[-_MOST_PEERS:]
        if exchange.is_wanted:
            exchange.start_on(connection)
        else:
            self.put_back(connection)

    def _no_connection(self, error: Exception) -> UpstreamError:
        """Returns the error of an exchange for which no connection could be made.

        A lack of file descriptors is this process's own matter, and no reason to think an engine gone.
        """
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return UpstreamError(f"no connection to the engine ({describe_error(error)})", connected=False)
        now = self._loop.time()
        if now - self._said_s > _SAY_AGAIN_S:
            self._said_s = now
            _log.warning("no connection to an engine: this process has reached its limit of open files (ulimit -n)")
        return UpstreamOverflow("the proxy has no file descriptor left", connected=False)

    async def _connected_in_time(self) -> UpstreamConnection:
        """Returns a new connection.

        Raises:
            OSError, UnicodeError: there is no connection.
            TimeoutError: it takes too long.
        """
        async with asyncio.timeout(None) as limit:
            timer = ClockTimer(self._loop, self.clock, self.limits.connect_s, partial(limit.reschedule, 0.0))
            try:
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._server_name,
                )
                return connection
            finally:
                timer.cancel()
        raise AssertionError  # a time-out raises

    def put_back(self, connection: UpstreamConnection) -> None:
        """Takes back an idle connection; only the connection calls it."""
        now = connection.idle_since = self._loop.time()
        idle = self._idle
        idle.append(connection)
        while now - idle[0].idle_since > self.limits.idle_s:
            idle.popleft().transport.close()

    def forget(self, connection: UpstreamConnection) -> None:
        """Forgets a closed connection; only the connection calls it."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    @property
    def open_connections(self) -> int:
        """The number of connections, idle ones included."""
        return len(self._open)

    def close(self) -> None:
        """Closes all connections and refuses new exchanges. Running exchanges are told that they were cut off."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.transport.abort()
