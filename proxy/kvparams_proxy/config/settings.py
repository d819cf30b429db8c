"""Every setting of the proxy: one name each, read once, checked at the start, never changed afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from kvparams.dialects.interface import Dialect
from kvparams.dialects.registry import load_routable_dialects, routable_dialects
from kvparams.instances import Instance, Role
from kvparams.jsontext.document import JSONLimits
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.breaker import BreakerLimits
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.routing.model_settings import ModelSettings
from kvparams_proxy.config.picker_url import PickerURL
from kvparams_proxy.config.sharing import SharingSettings
from kvparams_proxy.config.signing import SigningSettings
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.fleet.registry.providers import InstanceProvider
from kvparams_proxy.secret import Secret
from kvparams_proxy.tokenization.service import TokenizersByModel
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from kvparams_proxy.upstream.types import UpstreamLimits

__all__ = ["DEFAULT_MODES", "PrefillPartnerMode", "Settings", "default_spec_rules", "known_dialects"]


PrefillPartnerMode = Literal["off", "prefer", "require", "llm-d"]
"""What a sidecar makes of the header in which an endpoint picker names the prefill engine: see docs/gateway.md."""
DEFAULT_MODES: Final = (ManagerMode("prefill_then_decode"),)


def known_dialects() -> dict[str, Dialect]:
    """Every registered dialect that a proxy can speak, by name."""
    return routable_dialects()


def default_spec_rules() -> SpecRules:
    """For entries, where nothing else is said: every registered connector is known."""
    dialects, unusable = load_routable_dialects()
    bootstrapped = (name for name, dialect in dialects.items() if dialect.bootstrap is not None)
    storing = (name for name, dialect in dialects.items() if dialect.mode == "store")
    return SpecRules(
        frozenset(dialects),
        unusable_connectors=unusable,
        bootstrap_connectors=frozenset(bootstrapped),
        store_connectors=frozenset(storing),
        kv_events_installed=all(find_spec(package) is not None for package in ("zmq", "msgspec")),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that an operator decides."""

    instances: tuple[Instance, ...]
    """The engines that are given here; providers and the admin API may name more."""
    local_id: str | None = None
    """The id of the one of `instances` that this proxy is beside, as a sidecar: nobody else runs legs of its role."""
    spec_rules: SpecRules = field(default_factory=default_spec_rules)
    """How entries are read; the key and certificates for `instances` are those in it."""
    providers: tuple[InstanceProvider, ...] = ()
    """Who else knows engines: the fleet file."""
    admin_token: Secret | None = None
    """The token of the admin API; without one there is none."""
    viewer_token: Secret | None = None
    """The token of the live page for people who may change nothing; the admin token opens the page as well."""
    client_keys: Path | None = None
    """The file of client keys (`kvparams keys`); without one anybody may ask."""
    signing: SigningSettings | None = None
    """Documents are signed, for engines that verify them."""
    prefill_partner: PrefillPartnerMode = "off"
    """Whether requests may name the prefill engine that an endpoint picker has chosen for them."""
    decode_picker: PickerURL | None = None
    """The external picker that chooses decode instances; without one the policy does."""
    sharing: SharingSettings | None = None
    """How this proxy shares the fleet with others; without, it is the only one."""
    policy: str = "round_robin"
    """A name in the entry-point group `kvparams.policies`; all roles but encode use it."""
    tokenizers: TokenizersByModel = field(default_factory=dict[str | None, TokenizationMethod])
    """How prompts get the ids that policies route by; without, only those that the client sent are known."""
    modes: tuple[ManagerMode, ...] = DEFAULT_MODES
    """How requests are coordinated, at first."""
    modes_are_fixed: bool = False
    """Whether these stay whatever the fleet file says."""
    models: Mapping[str, ModelSettings] = field(default_factory=dict[str, ModelSettings])
    """What holds for single models, at first; a policy always. Beside an engine (`local_id`) their modes do not."""
    model_aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """The served model by each further name that clients may use."""
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
    probe_interval_s: float = 5.0
    """How often each engine is asked whether it is there and what it serves."""
    startup_check: bool = False
    """Whether each engine takes part in one small request soon after it is ready: `checks/startup_check.py`."""
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
    upstream_limits: UpstreamLimits = field(default_factory=UpstreamLimits)
    """Of an engine's answers and connections."""

    def __post_init__(self) -> None:
        names = [instance.id for instance in self.instances]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two instances are called {name!r}; give each a name of its own")
        if self.local_id is not None:
            local = self.local
            if local is None:
                raise ValueError(f"no instance is called {self.local_id!r}, beside which this proxy should be")
            if any(instance.role is local.role for instance in self.instances if instance is not local):
                raise ValueError(f"beside a {local.role} engine, the others have another role")
        for name in (
            "prefill_timeout_s",
            "decode_timeout_s",
            "request_timeout_s",
            "client_timeout_s",
            "probe_interval_s",
        ):
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
    def for_all_models(self) -> ModelSettings:
        """Returns what holds for models that have no entry in `models`."""
        return ModelSettings(self.policy, self.modes, self.limits)

    @property
    def local(self) -> Instance | None:
        """The instance that this proxy is beside."""
        return next((instance for instance in self.instances if instance.id == self.local_id), None)
