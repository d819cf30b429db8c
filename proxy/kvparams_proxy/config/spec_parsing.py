"""Reads entries: those of the file, of the admin API and of further providers.

The one rule: an entry that is not understood completely is refused, and everything wrong with it is said at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from kvparams.instances import Role
from kvparams_proxy.config.spec_fields import (
    CREDENTIAL_FIELDS,
    DEFAULTS_FIELDS,
    REMOTE_SPEC_FIELDS,
    SPEC_FIELDS,
    FieldCheck,
    is_label,
    is_label_value,
)
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.fleet.registry.credentials import NO_CREDENTIALS, CredentialSources
from kvparams_proxy.fleet.registry.instance_spec import KV_EVENTS_REQUIREMENT, InstanceSpec, LabelSelector, SpecRules
from kvparams_proxy.tls import EngineTLSSettings

__all__ = [
    "MAX_INSTANCES",
    "check_bootstrap_allowed",
    "default_store",
    "parse_defaults",
    "parse_selectors",
    "parse_spec",
    "report_unknown_names",
]

MAX_INSTANCES: Final = 4096
"""Of one source."""


def parse_spec(document: object, where: str, rules: SpecRules, problems: ConfigProblems) -> InstanceSpec | None:
    """Check one entry: an object with `id`, `url` and what else `SPEC_FIELDS` names. None if it cannot be used.

    Its `access` is that of the rules, unless it names other places: then it is to be loaded.
    """
    found = _members(
        document, where, SPEC_FIELDS if rules.may_name_credentials else REMOTE_SPEC_FIELDS, rules, problems
    )
    if found is None:
        return None
    given = cast("dict[str, object]", document)
    for name in ("id", "url"):
        if name not in given:
            problems.add(_join(where, name), "is missing")
    labels = {**rules.labels, **cast("dict[str, str]", found.get("labels", {}))}
    role = cast("Role | None", found.get("role"))
    if "role" not in given and ("labels" in found or "labels" not in given):
        role = _role_by_label(labels, where, rules, problems)
    places = _places(found, where, rules, problems)
    url = cast("str", found.get("url", ""))
    if url.startswith("http:") and "tls" in found:
        problems.add(_join(where, "url"), "is http://, but tls is given; say https:// or take it out")
    elif url.startswith("https:") and places.tls is None:
        places = replace(places, tls=EngineTLSSettings())
    connector = cast("str", found.get("connector", rules.connector))
    bootstrap = cast("str | None", found.get("bootstrap"))
    if bootstrap is not None and role is not None:
        check_bootstrap_allowed(role, connector, rules, _join(where, "bootstrap"), problems)
    if "kv_events_replay" in found and "kv_events" not in found:
        problems.add(_join(where, "kv_events"), "is missing: kv_events_replay only fills its gaps")
    if "kv_events" in found and not rules.kv_events_installed:
        problems.add(_join(where, "kv_events"), KV_EVENTS_REQUIREMENT)
    if "kv_events" in found and role is Role.DECODE:
        problems.add(_join(where, "kv_events"), "is for engines that prefill: nobody asks what others have cached")
    if "id" not in found or not url or role is None:
        return None
    return InstanceSpec(
        cast("str", found["id"]),
        url,
        role,
        connector,
        labels,
        cast("bool", found.get("drain", False)),
        places,
        rules.credentials if places == rules.credential_sources else NO_CREDENTIALS,
        bootstrap,
        cast("tuple[str, ...]", found.get("addresses", rules.addresses)),
        cast("str | None", found.get("kv_events")),
        cast("str | None", found.get("kv_events_replay")),
        cast("str | None", found["store"]) if "store" in found else default_store(connector, rules),
        cast("str | None", found.get("group")),
        cast("str | None", found.get("compatibility")),
    )


def default_store(connector: str, rules: SpecRules) -> str | None:
    """The store of an entry that names none: those of one connector share one."""
    return connector if connector in rules.store_connectors else None


def check_bootstrap_allowed(role: Role, connector: str, rules: SpecRules, where: str, problems: ConfigProblems) -> None:
    """Refuse a bootstrap server where nobody would ask it."""
    if role is not Role.PREFILL:
        problems.add(where, "is for prefill engines; decode engines are told where theirs is")
    elif connector in rules.connectors and connector not in rules.bootstrap_connectors:
        known = ", ".join(sorted(rules.bootstrap_connectors)) or "none"
        problems.add(where, f"the connector {connector} has no such server; connectors that have one: {known}")


def parse_defaults(document: object, where: str, rules: SpecRules, problems: ConfigProblems) -> SpecRules:
    """Check what holds for all entries that do not say otherwise; the rules with it in them, access not yet loaded."""
    found = _members(document, where, DEFAULTS_FIELDS, rules, problems)
    if found is None:
        return rules
    return replace(
        rules,
        connector=cast("str", found.get("connector", rules.connector)),
        labels={**rules.labels, **cast("dict[str, str]", found.get("labels", {}))},
        addresses=cast("tuple[str, ...]", found.get("addresses", rules.addresses)),
        credential_sources=_places(found, where, rules, problems),
    )


def parse_selectors(document: object, where: str, problems: ConfigProblems) -> dict[Role, LabelSelector]:
    """Check `{prefill: {label: value or list of values}, decode: ...}`."""
    if not isinstance(document, dict):
        problems.add(where, "must be an object: a role, and the labels by which its instances are found")
        return {}
    found: dict[Role, LabelSelector] = {}
    for name, value in cast("dict[str, object]", document).items():
        here = _join(where, name)
        if name not in list(Role):
            problems.add(here, f"is no role; a role is {' or '.join(Role)}")
        elif not isinstance(value, dict) or not value:
            problems.add(here, "must be an object with one label or more, such as {model: llama-prefill}")
        else:
            selector: dict[str, frozenset[str]] = {}
            for label, wanted in cast("dict[str, object]", value).items():
                values = cast("list[object]", wanted) if isinstance(wanted, list) else [wanted]
                if not is_label(label) or not values or not all(is_label_value(v) for v in values):
                    problems.add(_join(here, label[:64]), "must be a label's value, or a list of values, as text")
                else:
                    selector[label] = frozenset(cast("list[str]", values))
            found[Role(name)] = selector
    return found


def report_unknown_names(names: Iterable[str], known: Iterable[str], where: str, problems: ConfigProblems) -> None:
    """Refuse members that nobody reads, and say what there is, here or where they belong."""
    for name in names:
        if name not in known:
            elsewhere = " (it belongs under `defaults`, or to an instance)" if name in DEFAULTS_FIELDS else ""
            problems.add(_join(where, name[:64]), f"is not known here{elsewhere}; known: {', '.join(known)}")


def _members(
    document: object, where: str, checks: Mapping[str, FieldCheck], rules: SpecRules, problems: ConfigProblems
) -> dict[str, object] | None:
    """The members that are well said; the others are problems. None if it is no object at all."""
    if not isinstance(document, dict):
        problems.add(where, f"must be an object with {', '.join(checks)}")
        return None
    given = cast("dict[str, object]", document)
    for name in given:
        if name in CREDENTIAL_FIELDS and name not in checks:
            problems.add(_join(where, name), "is not taken over the network; put it into `defaults` of the fleet file")
    report_unknown_names([name for name in given if name not in CREDENTIAL_FIELDS], list(checks), where, problems)
    found: dict[str, object] = {}
    for name, check in checks.items():
        if name in given:
            try:
                found[name] = check(given[name], rules)
            except ValueError as error:
                problems.add(_join(where, name), str(error))
    return found


def _places(found: Mapping[str, object], where: str, rules: SpecRules, problems: ConfigProblems) -> CredentialSources:
    """What an entry names, and what the rules name where it is silent."""
    if "key_file" in found and "key_env" in found:
        problems.add(_join(where, "key_env"), "key_file is given too; name one of them")
    named = cast("dict[str, Any]", {name: value for name, value in found.items() if name in CREDENTIAL_FIELDS})
    if "key_file" in named or "key_env" in named:
        named = {"key_file": None, "key_env": None, **named}
    return replace(rules.credential_sources, **named) if named else rules.credential_sources


def _role_by_label(labels: Mapping[str, str], where: str, rules: SpecRules, problems: ConfigProblems) -> Role | None:
    found = [
        role
        for role, selector in rules.selectors.items()
        if selector and all(labels.get(label) in values for label, values in selector.items())
    ]
    if len(found) == 1:
        return found[0]
    if not rules.selectors:
        problems.add(_join(where, "role"), f"is missing; a role is {' or '.join(Role)}")
    elif found:
        problems.add(_join(where, "labels"), f"are those of {' and of '.join(found)}; say which with role")
    else:
        problems.add(_join(where, "role"), "is missing, and no role is found by its labels")
    return None


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
