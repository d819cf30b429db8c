"""Every setting of the proxy: one name each, read once, checked at the start, never changed afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvparams.admission import QueueLimits, RoleLimits
from kvparams.breaker import BreakerLimits
from kvparams.dialects import Dialect
from kvparams.dialects.registry import each_route, routes
from kvparams.jsontext import JSONLimits
from kvparams.managers.choice import Mode
from kvparams.scheduling import Instance, Role
from kvparams_proxy.registry.entries import Rules
from kvparams_proxy.registry.providers import Provider
from kvparams_proxy.secret import Secret
from kvparams_proxy.signing import Signing
from kvparams_proxy.tokens.choices import By
from kvparams_proxy.tokens.service import Tokenizers
from kvparams_proxy.upstream.terms import UpstreamLimits

__all__ = ["DEFAULT_MODES", "Settings", "known_dialects", "known_rules"]


DEFAULT_MODES: Final = (Mode("prefill_then_decode"),)


def known_dialects() -> dict[str, Dialect]:
    """Every registered dialect that a proxy can speak, by name."""
    return routes()


def known_rules() -> Rules:
    """For entries, where nothing else is said: every registered connector is known."""
    dialects, unusable = each_route()
    bootstrapped = (name for name, dialect in dialects.items() if dialect.bootstrap is not None)
    storing = (name for name, dialect in dialects.items() if dialect.mode == "store")
    return Rules(
        frozenset(dialects),
        unusable=unusable,
        bootstrapped=frozenset(bootstrapped),
        storing=frozenset(storing),
        hears=all(find_spec(package) is not None for package in ("zmq", "msgspec")),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator decides."""

    instances: tuple[Instance, ...]
    """The engines that are given here; providers and the admin API may name more."""
    beside: str | None = None
    """The id of the one of `instances` that this proxy is beside, as a sidecar: nobody else runs legs of its role."""
    rules: Rules = field(default_factory=known_rules)
    """How entries are read; the key and certificates for `instances` are those in it."""
    providers: tuple[Provider, ...] = ()
    """Who else knows engines: the fleet file."""
    admin: Secret | None = None
    """The token of the admin API; without one there is none."""
    client_keys: Path | None = None
    """The file of client keys (`kvparams keys`); without one anybody may ask."""
    signing: Signing | None = None
    """Documents are signed, for engines that verify them."""
    policy: str = "round_robin"
    """A name in the entry-point group `kvparams.policies`; both roles use it."""
    tokenizers: Tokenizers = field(default_factory=dict[str | None, By])
    """How prompts get the ids that policies route by; without, only those that the client sent are known."""
    modes: tuple[Mode, ...] = DEFAULT_MODES
    """How requests are coordinated, at first."""
    keep_modes: bool = False
    """Whether these stay whatever the fleet file says."""
    prefill_timeout_s: float = 300.0
    """From sending the prefill leg to the end of its answer."""
    decode_timeout_s: float = 600.0
    """The longest silence of a decode engine: before the first event that says something to the client, between two of
    them, and before the end of an answer that is no stream."""
    request_timeout_s: float | None = None
    """From a request's last byte to the end of its answer, whatever happens; None: without a limit."""
    client_timeout_s: float = 300.0
    """For how long a client may take nothing of an answer that waits for it."""
    retries: int = 2
    """Further attempts one request may have when an engine fails."""
    continuation: bool = False
    """Continue a stream whose decode engine fails on another one, from the token ids already sent."""
    probe_s: float = 5.0
    """How often each engine is asked whether it is there and what it serves."""
    limits: Mapping[Role, RoleLimits] = field(default_factory=dict[Role, RoleLimits])
    """What one instance of a role may run at a time; without, nobody ever waits in the proxy."""
    queue: QueueLimits = field(default_factory=QueueLimits)
    """How many may wait for room, and how long."""
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    """When an instance whose legs fail is left alone."""
    slow_start_s: float = 10.0
    """In how much time an instance that comes (back) gets its whole share; 0 is at once."""
    expose_route: bool = False
    """Name the instances that ran the legs in `x-kvparams-prefill` and `x-kvparams-decode`; where the policy looks at
    prefix caches, say in `x-kvparams-decision` why."""
    log_requests: str = "-"
    """Where the request log goes: the path of a file, "-" for stdout, or "off"."""
    trace: float | None = None
    """Send OpenTelemetry traces of this share of the requests, 0 to 1, of those whose client has not decided."""
    body: JSONLimits = field(default_factory=JSONLimits)
    """Of a client's request."""
    body_memory_bytes: int = 512 << 20
    """What the bodies of all requests may take together; further ones are answered 503."""
    upstream: UpstreamLimits = field(default_factory=UpstreamLimits)
    """Of an engine's answers and connections."""

    def __post_init__(self) -> None:
        names = [instance.id for instance in self.instances]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two instances are called {name!r}; give each a name of its own")
        if self.beside is not None:
            local = self.local
            if local is None:
                raise ValueError(f"no instance is called {self.beside!r}, beside which this proxy should be")
            if any(instance.role is local.role for instance in self.instances if instance is not local):
                raise ValueError(f"beside a {local.role} engine, the others have another role")
        for name in ("prefill_timeout_s", "decode_timeout_s", "request_timeout_s", "client_timeout_s", "probe_s"):
            value: float | None = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be more than 0 seconds")
        if not self.log_requests or (self.trace is not None and not 0 <= self.trace <= 1):
            raise ValueError("log_requests must not be empty, and trace from 0 to 1")
        if self.body_memory_bytes < self.body.max_bytes:
            raise ValueError("body_memory_bytes must be at least what one body may have")
        if self.retries < 0 or self.slow_start_s < 0:
            raise ValueError("retries and slow_start_s must not be negative")

    @property
    def local(self) -> Instance | None:
        """The instance that this proxy is beside."""
        return next((instance for instance in self.instances if instance.id == self.beside), None)
