"""Specifications of instances as their source declares them, and the rules that parse them.

A specification is a value: two are equal exactly if nothing about the instance has changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Final

from kvparams.instances import DataParallelRank, Instance, Role
from kvparams_proxy.fleet.registry.credentials import (
    NO_CREDENTIAL_SOURCES,
    NO_CREDENTIALS,
    CredentialSources,
    EngineCredentials,
)

__all__ = [
    "KV_EVENTS_REQUIREMENT",
    "InstanceSpec",
    "LabelSelector",
    "RankRange",
    "SpecRules",
    "rank_id",
    "rank_stream",
    "spec_of",
    "specs_by_rank",
]

KV_EVENTS_REQUIREMENT: Final = "needs pyzmq and msgspec: pip install 'kvparams[proxy,index,events]'"
"""What stands behind `kv_events`."""

LabelSelector = Mapping[str, frozenset[str]]
"""Labels that an instance must have, each with one of these values; nothing is selected by an empty one."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """An instance as its source declares it. Two are equal exactly if nothing about the instance has changed."""

    id: str
    url: str
    role: Role
    dialect: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    drain: bool = False
    """No new requests go there."""
    credential_sources: CredentialSources = NO_CREDENTIAL_SOURCES
    """Where its key and certificates are."""
    credentials: EngineCredentials = NO_CREDENTIALS
    """What was read there; see `kvparams_proxy.fleet.registry.credentials.load_access`."""
    bootstrap: str | None = None
    """The URL of its bootstrap server, where its connector has one and it is not where the connector says."""

    addresses: tuple[str, ...] = ()
    """Where it may say that it is, beside the hosts of its URLs."""
    kv_events: str | None = None
    """Where it publishes what becomes of its cache (ZMQ)."""
    kv_events_replay: str | None = None
    """Where it can be asked for what it published before."""
    store: str | None = None
    """Which store its KV goes to and comes from, shared with all that name the same one."""
    group: str | None = None
    """The replica it belongs to."""
    compatibility: str | None = None
    """Whose KV it understands: of all with an equal one."""
    uid: str | None = None
    """What its source calls this incarnation: with another one it is another incarnation, whatever its name."""
    rank: DataParallelRank | None = None
    """The data-parallel rank behind its URL that it is."""

    def make_instance(self) -> Instance:
        """Creates a new incarnation of the instance."""
        return Instance(
            self.id,
            token_hex(8),
            self.role,
            self.url,
            self.dialect,
            self.labels,
            self.bootstrap,
            self.addresses,
            self.kv_events,
            self.kv_events_replay,
            self.store,
            self.group,
            self.compatibility,
            rank=self.rank,
        )


@dataclass(frozen=True, slots=True)
class SpecRules:
    """Rules that parse entries: the known names, and the defaults."""

    connectors: frozenset[str]
    """The names of the dialects that are spoken here."""
    connector: str = "nixl"
    """The dialect of entries that name none."""
    unusable_connectors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of other dialects that are registered, why they are not spoken."""
    bootstrap_connectors: frozenset[str] = frozenset()
    """The dialects whose prefill engines have a bootstrap server."""
    store_connectors: frozenset[str] = frozenset()
    """The dialects whose engines save to a store what they compute, and look it up there."""
    kv_events_installed: bool = True
    """Whether what KV events need is installed."""
    selectors: Mapping[Role, LabelSelector] = field(default_factory=dict[Role, LabelSelector])
    """The role of an entry that names none."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of every entry; its own come on top."""
    addresses: tuple[str, ...] = ()
    """Of entries that name none."""
    credential_sources: CredentialSources = NO_CREDENTIAL_SOURCES
    """Of entries that name none."""
    credentials: EngineCredentials = NO_CREDENTIALS
    """What was read there."""
    folder: Path = Path()
    """Relative paths begin here."""
    model_aliases: Mapping[str, str] | None = None
    """Further names of models, if flags give them: the fleet file sets nothing for these names."""
    may_name_credentials: bool = True
    """Whether an entry may say where a key is. Not over the network: the key would be sent to a URL of its choice."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """The data-parallel ranks behind one URL."""

    count: int
    start: int = 0
    """The number of the first one."""


def rank_id(id: str, number: int) -> str:
    """Returns the id of the instance that is one rank of the entry `id`."""
    return f"{id}-dp{number}"


def rank_stream(address: str | None, number: int) -> str | None:
    """Returns where a rank publishes events, from the address of rank 0: each has the port that is higher by one.

    Sources: vLLM 0.32.0 distributed/kv_events.py (`offset_endpoint_port`); SGLang 0.5.23 disaggregation/kv_events.py.
    """
    if address is None:
        return None
    place, _, port = address.rpartition(":")
    return f"{place}:{int(port) + number}"


def specs_by_rank(spec: InstanceSpec, ranks: RankRange | None) -> tuple[InstanceSpec, ...]:
    """Returns the instance itself, or one instance for each rank behind its URL."""
    if ranks is None:
        return (spec,)
    each = (DataParallelRank(index, ranks.count, ranks.start) for index in range(ranks.count))
    return tuple(
        replace(
            spec,
            id=rank_id(spec.id, rank.number),
            kv_events=rank_stream(spec.kv_events, rank.number),
            kv_events_replay=rank_stream(spec.kv_events_replay, rank.number),
            rank=rank,
        )
        for rank in each
    )


def spec_of(instance: Instance, rules: SpecRules) -> InstanceSpec:
    """Returns the specification of an existing instance; its key and certificates are those of the rules."""
    i = instance
    return InstanceSpec(
        i.id,
        i.url,
        i.role,
        i.dialect,
        i.labels,
        credential_sources=rules.credential_sources,
        credentials=rules.credentials,
        bootstrap=i.bootstrap,
        addresses=i.addresses,
        kv_events=i.kv_events,
        kv_events_replay=i.kv_events_replay,
        store=i.store,
        group=i.group,
        compatibility=i.compatibility,
        rank=i.rank,
    )
