"""Models of what names instances: entries of the fleet file, of the admin API and of further providers.

An entry that is not understood completely is refused, and everything wrong with it is said at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, cast

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from kvparams.dialects.ec import EC_NAME
from kvparams.instances import Role
from kvparams.settings_model import SettingsModel
from kvparams_proxy.config.spec_fields import (
    Addresses,
    Connector,
    EngineRole,
    EngineTLS,
    EngineURL,
    EventStream,
    FilePath,
    InstanceConnector,
    InstanceId,
    Labels,
    Ranks,
    Selector,
    ShortText,
    StoreName,
    Switch,
    check_id,
    rules_of,
)
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.fleet.registry.credentials import NO_CREDENTIALS, CredentialSources
from kvparams_proxy.fleet.registry.instance_spec import (
    KV_EVENTS_REQUIREMENT,
    InstanceSpec,
    LabelSelector,
    RankRange,
    SpecRules,
    rank_id,
    rank_stream,
    specs_by_rank,
)
from kvparams_proxy.tls import EngineTLSSettings

__all__ = [
    "DefaultsSection",
    "InstanceEntry",
    "RemoteInstanceEntry",
    "RolesSection",
    "check_bootstrap_allowed",
    "default_store",
    "parse_specs",
]

_LAST_PORT: Final = 65_535
_NOT_REMOTE: Final = "is not accepted by the admin API; put it into `defaults` of the fleet file"


class CredentialMembers(SettingsModel):
    """The members that name the places of an engine's key and certificates."""

    key_file: Annotated[FilePath | None, Field(description="the file with the engine's API key")] = None
    tls: Annotated[
        EngineTLS | None,
        Field(description="for an `https` engine, any of these members; see [security](security.md)"),
    ] = None

    @field_validator("tls")
    @classmethod
    def _check_scheme(cls, tls: EngineTLSSettings | None, info: ValidationInfo) -> EngineTLSSettings | None:
        if str(info.data.get("url", "")).startswith("http:"):
            raise ValueError("is given, but url is http://; use https://, or remove it")
        return tls

    def credential_sources(self, rules: SpecRules) -> CredentialSources:
        """Returns what is named here, and what the rules name where this is silent."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _CREDENTIALS if name in self.model_fields_set}
        return replace(rules.credential_sources, **given)


_CREDENTIALS: Final = tuple(CredentialMembers.model_fields)


class DefaultsSection(CredentialMembers):
    """Members that hold for every instance that does not set them."""

    connector: Connector | None = None
    labels: Labels = Field(default_factory=dict[str, str])
    addresses: Addresses | None = None

    def apply_to(self, rules: SpecRules) -> SpecRules:
        """Returns the rules with what is said here; credentials are not loaded yet."""
        return replace(
            rules,
            connector=rules.connector if self.connector is None else self.connector,
            labels={**rules.labels, **self.labels},
            addresses=rules.addresses if self.addresses is None else self.addresses,
            credential_sources=self.credential_sources(rules),
        )


class RolesSection(SettingsModel):
    """For each role the labels by which an instance without a role finds it."""

    prefill: Selector | None = None
    decode: Selector | None = None
    aggregated: Selector | None = None
    encode: Selector | None = None

    def selectors(self) -> dict[Role, LabelSelector]:
        """Returns the selectors that are given."""
        given = ((role, cast("dict[str, tuple[str, ...]] | None", getattr(self, role))) for role in Role)
        return {
            role: {label: frozenset(values) for label, values in selector.items()}
            for role, selector in given
            if selector is not None
        }


class RemoteInstanceEntry(SettingsModel):
    """An instance that somebody names over the network. The context of its validation is a `SpecRules`."""

    names_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(_CREDENTIALS, _NOT_REMOTE)

    id: Annotated[InstanceId, Field(description="the name in logs, metrics and the admin API; required, unique")]
    url: Annotated[EngineURL, Field(description="the URL of the engine; required, unique within a role")]
    labels: Annotated[Labels, Field(description="labels of your choice; `roles` can match them")] = Field(
        default_factory=dict[str, str]
    )
    role: Annotated[
        EngineRole | None,
        Field(validate_default=True, description="the role of the engine; without it, `labels` and `roles` decide"),
    ] = None
    connector: Annotated[
        InstanceConnector | None,
        Field(validate_default=True, description="the engine's KV connector; `--connector` if left out"),
    ] = None
    bootstrap: Annotated[
        EngineURL | None,
        Field(description="the URL of the prefill engine's bootstrap server, for connectors that have one"),
    ] = None
    addresses: Annotated[
        Addresses | None, Field(description="further addresses that a prefill engine may name in its answers")
    ] = None
    kv_events: Annotated[
        EventStream | None,
        Field(
            description="the address at which the engine publishes KV events, for `cache_aware`; only for prefill and "
            "aggregated engines"
        ),
    ] = None
    kv_events_replay: Annotated[
        EventStream | None,
        Field(description="the address at which lost KV events are requested again; needs `kv_events`"),
    ] = None
    store: Annotated[
        StoreName | None, Field(description="the name of the KV store that engines share, for `cache_aware`")
    ] = None
    group: Annotated[
        InstanceId | None,
        Field(description="the replica that the engine belongs to; an engine with a group is paired only within it"),
    ] = None
    compatibility: Annotated[
        ShortText | None,
        Field(description="the build or KV layout; only engines with equal values are paired"),
    ] = None
    drain: Annotated[Switch, Field(description="send no new requests to this engine")] = False
    ranks: Annotated[
        Ranks | None,
        Field(
            description="the data-parallel ranks behind the URL: their number, or the first and the last; each is an "
            "instance of its own; see [data-parallel ranks](operations.md#data-parallel-ranks-behind-one-url)"
        ),
    ] = None

    @field_validator("role")
    @classmethod
    def _find_role(cls, role: Role | None, info: ValidationInfo) -> Role | None:
        if role is not None or "labels" not in info.data:
            return role
        rules = rules_of(info)
        return _role_by_label({**rules.labels, **info.data["labels"]}, rules)

    @field_validator("connector")
    @classmethod
    def _use_common_connector(cls, connector: str | None, info: ValidationInfo) -> str:
        if info.data.get("role") is Role.ENCODE:
            if connector not in (None, EC_NAME):
                raise ValueError("is for engines that hand over KV; leave it out for an encode engine")
            return EC_NAME
        if connector == EC_NAME:
            raise ValueError(f"{EC_NAME} is only for encode engines")
        return rules_of(info).connector if connector is None else connector

    @field_validator("bootstrap")
    @classmethod
    def _check_bootstrap(cls, url: str | None, info: ValidationInfo) -> str | None:
        role, connector = info.data.get("role"), info.data.get("connector")
        if role is not None and connector is not None:
            check_bootstrap_allowed(role, connector, rules_of(info))
        return url

    @field_validator("kv_events")
    @classmethod
    def _check_events(cls, stream: str | None, info: ValidationInfo) -> str | None:
        if not rules_of(info).kv_events_installed:
            raise ValueError(KV_EVENTS_REQUIREMENT)
        if info.data.get("role") in (Role.DECODE, Role.ENCODE):
            raise ValueError("is only for engines that prefill; the proxy does not use the caches of others")
        return stream

    @field_validator("kv_events_replay")
    @classmethod
    def _check_replay(cls, stream: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("kv_events", "") is None:
            raise ValueError("is given, but kv_events is missing; it only fills gaps of kv_events")
        return stream

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, ranks: RankRange | None, info: ValidationInfo) -> RankRange | None:
        if ranks is None:
            return None
        last = ranks.start + ranks.count - 1
        if "id" in info.data:
            try:
                check_id(rank_id(info.data["id"], last))
            except ValueError:
                raise ValueError("make the id shorter: each rank gets an id of its own, such as id-dp0") from None
        for name in ("kv_events", "kv_events_replay"):
            stream = cast("str | None", info.data.get(name))
            if stream is None:
                continue
            if not stream.startswith("tcp:"):
                raise ValueError(f"{name} must be tcp://host:port; each rank publishes at a port of its own")
            if int((rank_stream(stream, last) or "").rpartition(":")[2]) > _LAST_PORT:
                raise ValueError(f"the port of {name} is too high: each rank publishes at the next one")
        events, replay = (cast("str | None", info.data.get(name)) for name in ("kv_events", "kv_events_replay"))
        if events is not None and replay is not None and _overlap(events, replay, ranks):
            raise ValueError(
                f"the ports of kv_events and kv_events_replay must be {ranks.count} or more apart: each rank has the "
                "next of both"
            )
        return ranks

    def to_specs(self, rules: SpecRules) -> tuple[InstanceSpec, ...]:
        """Returns the instance, or one for each of its ranks.

        Credentials that it names itself are to be loaded; others are those of the rules.
        """
        return specs_by_rank(self._to_spec(rules), self.ranks)

    def _to_spec(self, rules: SpecRules) -> InstanceSpec:
        places = rules.credential_sources
        if isinstance(self, CredentialMembers):
            places = self.credential_sources(rules)
        if self.url.startswith("https:") and places.tls is None:
            places = replace(places, tls=EngineTLSSettings())
        connector = rules.connector if self.connector is None else self.connector
        return InstanceSpec(
            id=self.id,
            url=self.url,
            role=cast("Role", self.role),
            dialect=connector,
            labels={**rules.labels, **self.labels},
            drain=self.drain,
            credential_sources=places,
            credentials=rules.credentials if places == rules.credential_sources else NO_CREDENTIALS,
            bootstrap=self.bootstrap,
            addresses=rules.addresses if self.addresses is None else self.addresses,
            kv_events=self.kv_events,
            kv_events_replay=self.kv_events_replay,
            store=self.store if "store" in self.model_fields_set else default_store(connector, rules),
            group=self.group,
            compatibility=self.compatibility,
        )


class InstanceEntry(CredentialMembers, RemoteInstanceEntry):
    """An instance of the fleet file."""

    names_elsewhere: ClassVar[Mapping[str, str]] = {}


def parse_specs(document: object, where: str, rules: SpecRules, problems: ConfigProblems) -> tuple[InstanceSpec, ...]:
    """Returns the instances of one entry, several if it has ranks.

    If the entry cannot be used, there are none, and what is wrong is added to `problems`.
    """
    kind = InstanceEntry if rules.may_name_credentials else RemoteInstanceEntry
    try:
        return kind.model_validate(document, context=rules).to_specs(rules)
    except ValidationError as error:
        problems.add_errors(error, where)
        return ()


def _overlap(events: str, replay: str, ranks: RankRange) -> bool:
    """Returns whether a port of one rank would be another port of another one."""
    (host, _, port), (other, _, other_port) = events.rpartition(":"), replay.rpartition(":")
    return host == other and abs(int(port) - int(other_port)) < ranks.count


def default_store(connector: str, rules: SpecRules) -> str | None:
    """Returns the store of an entry that names none: those of one connector share one."""
    return connector if connector in rules.store_connectors else None


def check_bootstrap_allowed(role: Role, connector: str, rules: SpecRules) -> None:
    """Refuses a bootstrap server where nobody would ask it.

    Raises:
        ValueError: with the reason in words.
    """
    if role is not Role.PREFILL:
        raise ValueError("is only for prefill engines; decode engines learn the address with each request")
    if connector in rules.connectors and connector not in rules.bootstrap_connectors:
        known = ", ".join(sorted(rules.bootstrap_connectors)) or "none"
        raise ValueError(f"the connector {connector} has no bootstrap server; connectors that have one: {known}")


def _role_by_label(labels: Mapping[str, str], rules: SpecRules) -> Role:
    found = [
        role
        for role, selector in rules.selectors.items()
        if selector and all(labels.get(label) in values for label, values in selector.items())
    ]
    if len(found) == 1:
        return found[0]
    if not rules.selectors:
        raise ValueError(f"is missing; a role is {' or '.join(Role)}")
    if found:
        raise ValueError(f"is missing, and the labels match several roles: {' and '.join(found)}")
    raise ValueError("is missing, and the labels match no role")
