"""Every setting of the proxy: one name each, read once, checked at the start, never changed afterwards."""

from dataclasses import dataclass, field

from kvparams.jsontext import JSONLimits
from kvparams.scheduling import Instance
from kvparams_proxy.upstream import UpstreamLimits

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator decides."""

    instances: tuple[Instance, ...]
    """The engines."""
    policy: str = "round_robin"
    """A name in the entry-point group `kvparams.policies`; both roles use it."""
    manager: str = "prefill_then_decode"
    """A name in the entry-point group `kvparams.managers`."""
    prefill_timeout_s: float = 300.0
    """From sending the prefill leg to the end of its answer."""
    decode_timeout_s: float = 600.0
    """The longest silence of a decode engine, before its first byte or between two."""
    probe_s: float = 5.0
    """How often each engine is asked whether it is there and what it serves."""
    expose_route: bool = False
    """Name the instances that ran the legs in `x-kvparams-prefill` and `x-kvparams-decode`."""
    body: JSONLimits = field(default_factory=JSONLimits)
    """Of a client's request."""
    upstream: UpstreamLimits = field(default_factory=UpstreamLimits)
    """Of an engine's answers and connections."""

    def __post_init__(self) -> None:
        names = [instance.id for instance in self.instances]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two instances are called {name!r}; give each a name of its own")
        for name in ("prefill_timeout_s", "decode_timeout_s", "probe_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds")
