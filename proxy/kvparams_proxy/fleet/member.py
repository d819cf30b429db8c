"""A member of the fleet: an engine, and the facts known about it now.

Only `Fleet` and `Dispatcher` change a member; all other code reads it.
"""

from enum import StrEnum

from kvparams.dialects.interface import BootstrapInfo
from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Instance, RequestFacts
from kvparams.routing.adapter_slots import AdapterSlots
from kvparams.routing.admission import RoleLimits
from kvparams.routing.breaker import Breaker, BreakerState
from kvparams.routing.engine_metrics import MovedBytes

__all__ = ["Member", "MemberState"]


class MemberState(StrEnum):
    """The state of a member, as operators see it."""

    READY = "ready"
    BROKEN = "broken"
    """It answers probes, but legs failed: its breaker is open or half open."""
    NOT_READY = "not_ready"
    """It does not answer probes, or was not asked yet."""
    DRAINING = "draining"
    """No new legs by the operator's wish."""
    LEFT = "left"
    """It was removed; its last legs are running."""


class Member:
    """An instance and the facts known about it now: a `kvparams.instances.Candidate`."""

    __slots__ = (
        "adapter_slots",
        "adapters",
        "backlog",
        "base_model",
        "bootstrap_info",
        "breaker",
        "busy",
        "cache_usage",
        "draining",
        "elsewhere",
        "elsewhere_tokens",
        "foreign",
        "foreign_tokens",
        "has_left",
        "in_flight",
        "instance",
        "limits",
        "models",
        "moved_bytes",
        "ready",
        "tokens",
        "trial",
        "was_ever_ready",
    )

    def __init__(self, instance: Instance, breaker: Breaker, pace: EngineBacklog, *, ready: bool) -> None:
        self.instance = instance
        self.ready = ready
        """Whether it was alive when it was last asked."""
        self.was_ever_ready = ready
        """False as long as it has never been known to be alive: the first time makes no new incarnation."""
        self.models: frozenset[str] | None = None
        """The models it serves; None as long as it has not said."""
        self.base_model: str | None = None
        """The first of them that is no adapter."""
        self.adapters: frozenset[str] = frozenset()
        """The LoRA adapters among the models."""
        self.adapter_slots: AdapterSlots | None = None
        """The adapters that it should have loaded; None as long as it has named none."""
        self.bootstrap_info: BootstrapInfo | None = None
        """What its bootstrap server said last, where its dialect has one."""
        self.in_flight = 0
        """Legs that run there, those of earlier incarnations, of other proxies and of foreign clients included."""
        self.tokens = 0
        """Prompt tokens of these."""
        self.elsewhere = 0
        """Of these legs, those of other proxies."""
        self.elsewhere_tokens = 0
        """Prompt tokens of those."""
        self.foreign = 0
        """Of these legs, the estimated number of clients that no proxy here knows: `kvparams.routing.foreign_load`."""
        self.foreign_tokens = 0
        """Estimated prompt tokens of those."""
        self.backlog = pace
        """What it still has to do and how fast it is."""
        self.cache_usage: float | None = None
        """The share of its KV cache that is used, as it said last; None where nobody asks, or it does not say."""
        self.moved_bytes: MovedBytes | None = None
        """The KV bytes that it has moved; None likewise."""
        self.limits: RoleLimits | None = None
        """Those of the models that it serves; None where they have none of their own."""
        self.draining = False
        self.has_left = False
        self.breaker = breaker
        self.busy = False
        """Whether the breaker opened because the engine had no room, as it said itself."""
        self.trial: RequestFacts | None = None
        """The request whose leg shows whether it works again."""

    @property
    def own_in_flight(self) -> int:
        """The number of legs of this proxy."""
        return self.in_flight - self.elsewhere - self.foreign

    @property
    def own_tokens(self) -> int:
        """The prompt tokens of these."""
        return self.tokens - self.elsewhere_tokens - self.foreign_tokens

    @property
    def known_in_flight(self) -> int:
        """The number of legs of this proxy and of those that tell it of theirs."""
        return self.in_flight - self.foreign

    @property
    def available(self) -> bool:
        """True if it may be given a leg now, regardless of room."""
        return self.ready and not self.draining and not self.has_left and self.breaker.allows_requests

    def is_usable(self, suspicion: int = 2) -> bool:
        """Returns whether it may be given a leg, regardless of room, when engines up to this suspicion must be used.

        Args:
            suspicion: 0 asks for what `available` says; 1 includes half-open breakers whose trial is running; 2
                includes open ones, but for engines that have said themselves that they have no room.
        """
        if not self.ready or self.draining or self.has_left:
            return False
        if self.breaker.allows_requests:
            return True
        if self.breaker.state is BreakerState.OPEN:
            return suspicion > 1 and not self.busy
        return suspicion > 0

    @property
    def state(self) -> MemberState:
        """The state, as one word."""
        if self.has_left:
            return MemberState.LEFT
        if self.draining:
            return MemberState.DRAINING
        if not self.ready:
            return MemberState.NOT_READY
        return MemberState.READY if self.breaker.state is BreakerState.CLOSED else MemberState.BROKEN

    def serves(self, model: str | None) -> bool:
        """Returns whether it serves the model. True while it has not reported its models."""
        return model is None or self.models is None or model in self.models

    def has_to_load(self, model: str | None) -> bool:
        """Returns whether the model is an adapter that it serves and should have in none of its slots now."""
        return self.adapter_slots is not None and model in self.adapters and model not in self.adapter_slots
