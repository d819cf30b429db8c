"""The interface executions use to reach an engine: over HTTP (`connection_pool.py`), in this process, over a queue.

Invariant: an implementation keeps what `types.ResponseSink` promises. A sink hears `on_done` exactly once, never from
within `exchange`, and nothing after it.
"""

from collections.abc import Callable
from typing import Protocol

from kvparams.instances import Instance
from kvparams_proxy.upstream.types import ResponseSink, UpstreamBody, UpstreamError, UpstreamRequest

__all__ = ["ExchangeHandle", "Upstream", "UpstreamFactory"]


class ExchangeHandle(Protocol):
    """A running exchange. All methods do nothing once it is over."""

    def abort(self, error: UpstreamError) -> None:
        """End it now: the engine learns that nobody waits, the sink hears `error`, which is told whether the engine may
        have seen the request (`connected` and `sent`)."""
        ...

    def discard(self) -> None:
        """End it now: the engine learns that nobody waits, the sink hears nothing more."""
        ...

    def half_close(self) -> bool:
        """Let the engine see that nobody waits any more, and hear out what it may have sent already. False where that
        cannot be done: then nothing has been done."""
        ...

    def pause(self) -> None:
        """Deliver nothing until `resume`, but for what is on its way, and let the engine feel it."""
        ...

    def resume(self) -> None:
        """Deliver again."""
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
        """The IP addresses that its name has led to, the last few; empty where it is not reached by one."""
        ...

    @property
    def open_connections(self) -> int:
        """Idle ones included."""
        ...

    def request(self, path: bytes, headers: bytes, body: UpstreamBody) -> UpstreamRequest:
        """A POST, as `exchange` takes it. `headers` are whole lines, each ending in CRLF."""
        ...

    def get(self, path: bytes) -> UpstreamRequest:
        """A GET."""
        ...

    def exchange(self, request: UpstreamRequest, sink: ResponseSink, *, once: bool = False) -> ExchangeHandle:
        """Send `request`, deliver its answer to `sink`. `once`: never send it twice, even where the engine has most
        likely not seen it."""
        ...

    def close(self) -> None:
        """Exchanges that run hear that they were cut off, and none begins any more."""
        ...


UpstreamFactory = Callable[[Instance], Upstream | None]
"""The way to an instance that is not reached over HTTP; None for all others."""
