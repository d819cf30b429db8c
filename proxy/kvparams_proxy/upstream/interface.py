"""The interface executions use to reach an engine: over HTTP (`connection_pool.py`), in this process, over a queue.

An implementation keeps the promises of `types.ResponseSink`: a sink hears `on_done` exactly once, never from within
`exchange`, and nothing after it.
"""

from collections.abc import Callable
from typing import Protocol

from kvparams.instances import Instance
from kvparams_proxy.upstream.types import ResponseSink, UpstreamBody, UpstreamError, UpstreamRequest

__all__ = ["ExchangeHandle", "Upstream", "UpstreamFactory"]


class ExchangeHandle(Protocol):
    """A running exchange. All methods do nothing once it is over."""

    def abort(self, error: UpstreamError) -> None:
        """Aborts the exchange.

        The engine learns that nobody waits, and the sink hears `error`, which is told whether the engine may have seen
        the request (`connected` and `sent`).
        """
        ...

    def discard(self) -> None:
        """Ends the exchange. The engine learns that nobody waits; the sink hears nothing more."""
        ...

    def half_close(self) -> bool:
        """Closes the sending direction, and still receives what the engine may have sent already.

        Returns false where that cannot be done: then nothing has been done.
        """
        ...

    def pause(self) -> None:
        """Pauses delivery until `resume`, except for data in flight, and lets the engine feel it."""
        ...

    def resume(self) -> None:
        """Resumes delivery."""
        ...


class Upstream(Protocol):
    """An engine, as legs, releases and probes reach it."""

    @property
    def has_own_key(self) -> bool:
        """True if requests carry the engine's own key: then no other Authorization may be among their headers."""
        ...

    @property
    def shared(self) -> bool:
        """True if several engines are behind it, so that the failure of one says nothing of the next."""
        ...

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """The IP addresses that its name has led to, the last few. Empty for an upstream without addresses."""
        ...

    @property
    def open_connections(self) -> int:
        """The number of connections, idle ones included."""
        ...

    def request(self, path: bytes, headers: bytes, body: UpstreamBody) -> UpstreamRequest:
        """Builds a POST request for `exchange`. `headers` are whole lines, each ending in CRLF."""
        ...

    def get(self, path: bytes, headers: bytes = b"") -> UpstreamRequest:
        """Builds a GET request. `headers` are as for `request`."""
        ...

    def exchange(self, request: UpstreamRequest, sink: ResponseSink, *, once: bool = False) -> ExchangeHandle:
        """Sends `request` and delivers its answer to `sink`.

        `once`: never send it twice, even where the engine has most likely not seen it.
        """
        ...

    def close(self) -> None:
        """Refuses new exchanges. Running exchanges are told that they were cut off."""
        ...


UpstreamFactory = Callable[[Instance], Upstream | None]
"""The way to an instance that is not reached over HTTP; None for all others."""
