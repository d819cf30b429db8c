"""Defines the modes of coordination under chaos: which proxies stand before which engines, and how each is started.

In every mode, clients have one or several proxies and may ask any of them.
"""

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["WAYS", "Way"]

_BOTH: Final = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Way:
    """One of them."""

    name: str
    flags: tuple[str, ...] = ()
    """Arguments of every proxy or sidecar."""
    roles: tuple[str, ...] = _BOTH
    """Of the engines."""
    beside: Literal["prefill", "decode"] | None = None
    """Each engine of this role has the proxy beside it; None: one proxy is before all engines."""
    inside: bool = False
    """It is in the engine's own server."""
    queued: bool = False
    """Between the roles is a broker."""
    connector: str = "store"
    room_first: bool = False
    """Room for the answer is taken before prefill has begun."""
    states: tuple[str, ...] = ("prefill", "queued", "decode", "first_byte")
    """Those in which a request may be, and its client may leave."""

    def __str__(self) -> str:
        return self.name


_NO_PREFILL: Final = ("queued", "decode", "first_byte")
_UNBOUNDED: Final = ("prefill", "decode", "first_byte")

WAYS: Final = (
    Way("prefill_then_decode"),
    Way("decode_first", ("--mode", "prefill_then_decode,decode_first=true"), room_first=True),
    Way("concurrent_legs", ("--mode", "concurrent_legs"), connector="store-meet", states=_NO_PREFILL),
    Way("aggregated", ("--mode", "aggregated"), roles=("aggregated",), states=_NO_PREFILL),
    Way("conditional", ("--mode", "conditional,remote_tokens=64,fallback=true")),
    Way("prefill_local_decode_remote", beside="prefill"),
    Way("decode_local_prefill_remote", beside="decode", room_first=True),
    Way("prefill_local_decode_remote, middleware", beside="prefill", inside=True, states=_UNBOUNDED),
    Way("decode_local_prefill_remote, middleware", beside="decode", inside=True, states=_UNBOUNDED),
    Way("queue_mediated", beside="prefill", queued=True, states=_UNBOUNDED),
)
