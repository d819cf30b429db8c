"""Defines instances, and the policy interface that chooses the instance of a leg.

A policy is a pure decision over the candidates that it is given. Load, turns, speeds and the prefix index belong to the
fleet, so that several processes can share them without the policy knowing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeVar

from kvparams.engine_backlog import EngineBacklog

__all__ = [
    "Candidate",
    "DataParallelRank",
    "Instance",
    "InstanceRestriction",
    "RequestFacts",
    "Role",
    "RoundRobin",
    "SchedulingPolicy",
    "ranks_key",
]


class Role(StrEnum):
    """A `Role` is the use of an instance."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    """It does both, for requests that are not split."""
    ENCODE = "encode"
    """It encodes images, audio and video, and hands the encodings to the engine that computes the prompt."""


@dataclass(frozen=True, slots=True)
class DataParallelRank:
    """A `DataParallelRank` is one of several engines behind one URL, each with a cache and a scheduler of its own."""

    index: int
    """Its place among the ranks behind the URL, from 0: by this number requests are sent to it."""
    count: int
    """The number of ranks behind the URL."""
    start: int = 0
    """The number of the first rank behind the URL; above 0 where other URLs have the ranks before it."""

    @property
    def number(self) -> int:
        """Its number in the whole deployment: in the engine's id, metrics and KV events."""
        return self.start + self.index


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An `Instance` is a running engine; after a restart it is another one, with the same id and another incarnation.

    Compared by identity, which makes it a cheap key: whoever keeps the fleet keeps one object for each instance.
    """

    id: str
    """The operator's name for it, unique in the fleet."""
    incarnation: str
    """Changes whenever the proxy sees the engine come back; KV of an earlier incarnation is gone."""
    role: Role
    url: str
    """`http://host:port` or `https://host:port`, without a path."""
    dialect: str
    """How its KV connector is spoken to: a name in the entry-point group `kvparams.dialects`."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the operator calls it besides: instances are found by these."""
    bootstrap: str | None = None
    """The URL of its bootstrap server, where its dialect has one and it is not where the dialect says."""
    addresses: tuple[str, ...] = ()
    """Where else it may say that it is, beside the hosts of its URLs: see
    `kvparams.routing.handoff_verifier.declared`."""
    kv_events: str | None = None
    """Where it publishes what becomes of its cache (ZMQ)."""
    kv_events_replay: str | None = None
    """Where it can be asked for what it published before."""
    store: str | None = None
    """What is computed here is in the store of this name as well, and is fetched from there by all who share it."""
    group: str | None = None
    """The replica it belongs to: see `kvparams.routing.pairing`."""
    compatibility: str | None = None
    """Whose KV it understands: of all with an equal one."""
    version: str = "1.0"
    """The highest version of the protocol that both it and whoever asked it speak: see `kvparams.versions`. One that
    speaks another is another incarnation."""
    rank: DataParallelRank | None = None
    """The data-parallel rank behind its URL that it is; None where the URL is one engine."""


def ranks_key(instance: Instance) -> tuple[Role, str] | None:
    """Returns what all data-parallel ranks of one engine have in common; None for an engine without ranks."""
    return None if instance.rank is None else (instance.role, instance.url)


class Candidate(Protocol):
    """An instance that may be chosen, and its load at this moment."""

    @property
    def instance(self) -> Instance:
        """Returns the instance of this candidate."""
        ...

    @property
    def in_flight(self) -> int:
        """Legs that run there now, counted from the moment of choice."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt tokens of these."""
        ...

    @property
    def backlog(self) -> EngineBacklog:
        """Returns the pending work and the learnt speed of this candidate."""
        ...


class InstanceRestriction(NamedTuple):
    """An `InstanceRestriction` limits which instances may run the legs of one role."""

    ids: frozenset[str]
    """The ids of these instances."""
    is_required: bool
    """Whether the request fails if none of them can be used. Otherwise other instances run the leg then."""


_NOTHING_CACHED: Final[Mapping[Instance, int]] = MappingProxyType({})
_NOTHING_TO_LOAD: Final[Mapping[Instance, float]] = MappingProxyType({})
_UNRESTRICTED: Final[Mapping[Role, InstanceRestriction]] = MappingProxyType({})


class RequestFacts(NamedTuple):
    """A `RequestFacts` holds the known facts about a request when its legs are planned."""

    request_id: str
    """The client's where it was harmless; on both legs and on the answer."""
    transfer_id: str
    """Minted for this attempt to move KV; never repeated, whatever the client sends."""
    model: str | None
    prompts: int
    """Prompts in the request; chat is one."""
    choices: int
    """Answers asked for each prompt (`n`)."""
    token_ids: Sequence[int] | None
    """The prompt, where it came as token ids of one prompt and the engine computes exactly these."""
    cache_salt: str | None
    tenant: str = ""
    """Who asks, where clients have keys; shares of the queue are by tenant."""
    priority: int = 0
    """Higher goes first where requests have to wait."""
    prompt_tokens: int = 0
    """About how many tokens the prompt has: what limits in tokens count."""
    prompt_scored: bool = False
    """The engine that answers has to compute all tokens of the prompt itself: the answer says something of each of
    them, or the engine takes no KV from others for it (a beam search)."""
    session: str = ""
    """What the client calls the conversation that this is a turn of; empty where it does not say."""
    cached_tokens: Mapping[Instance, int] = _NOTHING_CACHED
    """Tokens of the prompt's prefix that an instance is believed to hold; none where it is not named."""
    stored_tokens: int = 0
    """Tokens of the prompt's prefix that can be fetched from a store or a peer by whoever runs the leg."""
    peer_stored_tokens: Mapping[Instance, int] = _NOTHING_CACHED
    """The same for instances that reach another store than most, or none."""
    routing_ids: Sequence[int] | None = None
    """The prompt as ids by which to find its prefix, where they are not `token_ids`: the client's ids as the engine
    probably cuts them, or token ids or pseudo tokens that the proxy makes. They may be wrong, so they are for routing
    alone and stand in no document."""
    foreign_cached_tokens: Mapping[Instance, int] = _NOTHING_CACHED
    """Tokens that an instance is expected to hold beyond `cached_tokens`, from proxies that share nothing with this
    one (`kvparams.routing.foreign_prefixes`)."""
    restrictions: Mapping[Role, InstanceRestriction] = _UNRESTRICTED
    """Restrictions by role: the endpoints that a gateway allows, or the prefill engine that a picker has chosen."""
    media: str = ""
    """Names the first image, audio or video in the prompt, equally where its content is equal; empty without one."""
    adapter_load_s: Mapping[Instance, float] = _NOTHING_TO_LOAD
    """The seconds that an instance should need to load the LoRA adapter that is asked for; instances that have it
    loaded, and all if the model is no adapter, are not named."""


C = TypeVar("C", bound=Candidate)


class SchedulingPolicy(Protocol):
    """Chooses among candidates. Third parties register theirs in the entry-point group `kvparams.policies`.

    One whose class has `uses_prefixes = True` is told what prefill instances are believed to have cached
    (`RequestFacts.cached_tokens`), and how they keep pace. For others nobody keeps these books.
    """

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The candidate that runs the leg.

        Args:
            candidates: never empty; always in the same order while the fleet does not change.
            request: what is known about it.
            turn: how many choices were made with this policy for this role before; it never repeats.
        """
        ...


class RoundRobin:
    """Everyone in turn."""

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The next candidate in order, whatever the request."""
        return candidates[turn % len(candidates)]
