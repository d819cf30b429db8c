"""`--print-config`: the effective settings as a fleet file, with a comment on each line that says where it came from.

What has no value, or no place in a fleet file, stands in comments, and so do values that depend on this machine. Paths
are absolute, so that the file may be read from another folder. No secret is printed: settings hold the paths of the
files with secrets, and user and password of a URL are left out.
"""

import argparse
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Final, cast

from kvparams.errors import printable
from kvparams.instances import Role
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.cli.configuration import Configuration
from kvparams_proxy.config.mode_parsing import mode_document
from kvparams_proxy.config.model_parsing import model_document
from kvparams_proxy.config.options import OPTIONS
from kvparams_proxy.config.settings import DEFAULT_MODES
from kvparams_proxy.config.share_url import ShareURL
from kvparams_proxy.config.yaml_reader import read_yaml
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules
from kvparams_proxy.server.shared_admin import spec_document
from kvparams_proxy.tls import EngineTLSSettings

__all__ = ["describe_effective_settings"]

_COMMENT_COLUMN: Final = 60
_DEFAULT: Final = "default"
_USER: Final = re.compile(r"(?<=//)[^/?#]*@")
_LEFT_OUT: Final = "; user and password are left out"
_NOT_COMMON: Final = "; left out, because some instances have no key"
_NO_FILE_NUMBER: Final = "; left out, because a fleet file has no such long numbers"
_LOG_WORDS: Final = frozenset({"-", "off"})
_ACTIONS: Final = frozenset({"check", "print_config"})
_DEFAULTS: Final = frozenset({"connector", "engine_key_file", "engine_ca", "engine_address", "bootstrap"})
_SHOWN_ELSEWHERE: Final = frozenset(
    {
        *(option.attribute for option in OPTIONS),
        "config",
        *_DEFAULTS,
        *Role,
        *(f"{role}_labels" for role in Role),
        *(f"{role}_model_labels" for role in Role),
    }
)
"""The destinations of options that stand in a section of the fleet file, or name the file."""


def describe_effective_settings(command: str, arguments: argparse.Namespace, asked: Configuration) -> str:
    """Returns the settings with which the command would start.

    Args:
        command: `proxy`, `sidecar` or `picker`.
        arguments: the parsed command line. `option_sources` tells flags from environment variables.
        asked: what was built from it.
    """
    sources: Mapping[str, str] = getattr(arguments, "option_sources", {})
    lines = [f"# kvparams {command}: the effective settings; each comment says where the value came from.", "proxy:"]
    lines += _option_lines(asked, sources, getattr(arguments, "decided_options", ()))
    lines += ["# Options that are no settings of a fleet file; those without a value are left out:"]
    lines += _other_lines(arguments, sources)
    flag_rules = asked.settings.spec_rules
    rules = asked.rules or flag_rules
    has_common_key = _has_common_key(rules, _entries(arguments, asked))
    lines += _role_lines(rules, flag_rules, asked.file, sources)
    lines += _default_lines(rules, asked, sources, has_common_key)
    if asked.options.mode is None:
        source = _DEFAULT if asked.settings.modes == DEFAULT_MODES else asked.file
        if asked.settings.local_id is not None:
            source = sources.get("role", "--role")
        lines += ["modes:", *(_line(f"  - {_yaml(mode_document(mode))}", source) for mode in asked.settings.modes)]
    if asked.settings.models:
        lines += ["models:", *_model_lines(asked)]
    instances = list(_instance_lines(arguments, asked, rules, sources))
    return "\n".join([*lines, "instances:" if instances else "instances: []", *instances])


def _option_lines(asked: Configuration, sources: Mapping[str, str], without: Collection[str]) -> Iterator[str]:
    derived = {
        "policy": asked.settings.policy,
        "max_connections": asked.server.connections.total,
        "max_body_memory": asked.settings.body_memory_bytes,
    }
    for option in OPTIONS:
        name, value = option.attribute, getattr(asked.options, option.attribute)
        if option.name in without:
            continue
        if name in asked.flag_options:
            source = sources.get(name, f"--{option.name}")
        elif name in asked.file_options:
            source = asked.file
        else:
            source = _DEFAULT
        if name == "log_requests" and value not in _LOG_WORDS:
            value = None if value is None else Path(value)
        if value is None and name in derived:
            yield _line(f"  # {option.name}: {_yaml(derived[name])}", source)
        elif value is None:
            yield _line(f"  # {option.name}: not set", source)
        elif isinstance(value, int | float) and not _is_readable(_yaml(value)):
            yield _line(f"  # {option.name}: {_yaml(value)}", source, _NO_FILE_NUMBER)
        else:
            note = _LEFT_OUT if isinstance(value, ShareURL) and "@" in value.server else ""
            yield _line(f"  {option.name}: {_yaml(_written(value))}", source, note)


def _is_readable(number: str) -> bool:
    """Returns whether a fleet file may have this number."""
    try:
        read_yaml(number)
    except ConfigError:
        return False
    return True


def _written(value: object) -> object:
    """Returns a value as it would stand in a fleet file."""
    if isinstance(value, ManagerMode):
        return ",".join([value.use, *(f"{name}={_plain(given)}" for name, given in value.options.items())])
    if isinstance(value, Mapping):  # by model
        ways = cast("Mapping[str | None, object]", value)
        return {"*" if model is None else model: str(_written(way)) for model, way in ways.items()}
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value.absolute())
    return str(value)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _other_lines(arguments: argparse.Namespace, sources: Mapping[str, str]) -> Iterator[str]:
    """Returns the other options of the command that have a value."""
    variables: Iterable[str] = getattr(arguments, "known_variables", ())
    names = {variable.removeprefix("KVPARAMS_").lower() for variable in variables} | sources.keys()
    for name in sorted(names - _SHOWN_ELSEWHERE - _ACTIONS):
        value: object = getattr(arguments, name, None)
        for one in cast("list[object]", value) if isinstance(value, list) else [value]:
            if one is None or (one is False and name not in sources):
                continue
            shown = printable(_USER.sub("", str(one)))
            note = _LEFT_OUT if _USER.search(str(one)) else ""
            yield _line(f"#   --{name.replace('_', '-')} {shown}", sources.get(name, _DEFAULT), note)


def _model_lines(asked: Configuration) -> Iterator[str]:
    """Returns the section `models`. What an entry leaves out is as printed above."""
    for name, entry in asked.settings.models.items():
        yield _line(f"  {_key(name)}: {_yaml(model_document(entry))}", asked.file)


def _role_lines(rules: SpecRules, flag_rules: SpecRules, file: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Returns the section `roles`."""
    if rules.selectors:
        yield "roles:"
    for role, selector in rules.selectors.items():
        source = file
        if role in flag_rules.selectors:
            flag = f"{role}_labels" if f"{role}_labels" in sources else f"{role}_model_labels"
            source = sources.get(flag, f"--{flag.replace('_', '-')}")
        labels = {label: sorted(values) for label, values in selector.items()}
        yield _line(f"  {role}: {_yaml(labels)}", source)


def _default_lines(
    rules: SpecRules, asked: Configuration, sources: Mapping[str, str], has_common_key: bool
) -> Iterator[str]:
    """Returns the section `defaults`. A member that the file sets takes precedence over its flag."""
    flag_rules = asked.settings.spec_rules
    places, flag_places = rules.credential_sources, flag_rules.credential_sources
    members: tuple[tuple[str, str, object, object], ...] = (
        ("connector", "connector", rules.connector, flag_rules.connector),
        ("labels", "", dict(rules.labels), dict(flag_rules.labels)),
        ("addresses", "engine_address", list(rules.addresses), list(flag_rules.addresses)),
        ("key_file", "engine_key_file", places.key_file, flag_places.key_file),
        ("tls", "engine_ca", places.tls, flag_places.tls),
    )
    yield "defaults:"
    for name, flag, value, of_flag in members:
        source = sources.get(flag, _DEFAULT) if value == of_flag else asked.file
        if name == "key_file" and value is not None and not has_common_key:
            yield _line(f"  # {name}: {_yaml(_written(value))}", source, _NOT_COMMON)
        elif isinstance(value, EngineTLSSettings):
            yield _line(f"  {name}: {_yaml(_tls_document(value))}", source)
        elif value:
            yield _line(f"  {name}: {_yaml(_written(value) if isinstance(value, Path) else value)}", source)


def _tls_document(tls: EngineTLSSettings) -> dict[str, object]:
    given = {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key, "server_name": tls.server_name}
    return {name: _written(value) for name, value in given.items() if value is not None}


def _instance_lines(
    arguments: argparse.Namespace, asked: Configuration, rules: SpecRules, sources: Mapping[str, str]
) -> Iterator[str]:
    """Returns the instances, except the engine beside a sidecar: `--engine` names it."""
    has_common_key = _has_common_key(rules, _entries(arguments, asked))
    given = {instance.id for instance in asked.settings.instances}
    for entry in _entries(arguments, asked):
        if entry.rank is not None and entry.rank.index > 0:
            continue  # the first rank stands for all of them
        source = asked.file
        if entry.id in given:
            flag = entry.role.value if getattr(arguments, entry.role.value, None) else "static_backends"
            source = sources.get(flag, f"--{flag.replace('_', '-')}")
        yield _line(f"  - {_yaml(_entry_document(entry, rules, has_common_key))}", source)


def _entries(arguments: argparse.Namespace, asked: Configuration) -> list[InstanceSpec]:
    """Returns the instances to print. Credentials of those that flags name are those of the flags."""
    given = {instance.id for instance in asked.settings.instances}
    places = asked.settings.spec_rules.credential_sources
    local_role: str | None = arguments.role if hasattr(arguments, "engine") else None
    return [
        replace(entry, credential_sources=places) if entry.id in given else entry
        for entry in asked.entries
        if entry.role.value != local_role
    ]


def _has_common_key(rules: SpecRules, entries: Iterable[InstanceSpec]) -> bool:
    """Returns whether `defaults` can hold the key: an instance cannot say that it has none."""
    has_key = rules.credential_sources.key_file is not None
    return has_key and all(entry.credential_sources.key_file is not None for entry in entries)


def _entry_document(entry: InstanceSpec, rules: SpecRules, has_common_key: bool) -> dict[str, object]:
    """Returns an entry as it would stand in the file, which has the same `defaults`."""
    document = {name: value for name, value in spec_document(entry).items() if value not in ({}, [])}
    if rules.addresses and not entry.addresses:
        document["addresses"] = []
    places, common = entry.credential_sources, rules.credential_sources
    if places.key_file is not None and (places.key_file != common.key_file or not has_common_key):
        document["key_file"] = _written(places.key_file)
    if places.tls is not None and places.tls != common.tls and entry.url.startswith("https:"):
        document["tls"] = _tls_document(places.tls)
    return document


def _line(text: str, source: str, note: str = "") -> str:
    return f"{text:<{_COMMENT_COLUMN}}  # {printable(source)}{note}"


def _yaml(value: object) -> str:
    """Returns a value in YAML's flow style."""
    if isinstance(value, Mapping):
        members = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{_key(name)}: {_yaml(one)}" for name, one in members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, cast("Iterable[object]", value))) + "]"
    if isinstance(value, float):
        return _number(value)
    return _text(str(value)) if not isinstance(value, bool | int | None) else json.dumps(value)


def _number(value: float) -> str:
    """Returns a number without an exponent: YAML 1.1 reads 1e-05 as text."""
    if not math.isfinite(value):
        return {"inf": ".inf", "-inf": "-.inf"}.get(str(value), ".nan")
    text = format(Decimal(repr(value)), "f")
    return text if "." in text else f"{text}.0"


def _text(value: str) -> str:
    """Returns a text in double quotes. What is not printable is escaped, as YAML escapes it."""
    escaped = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(escaped.get(one, one if one.isprintable() else f"\\U{ord(one):08x}") for one in value) + '"'


def _key(name: str) -> str:
    return name if re.fullmatch(r"[a-z_]+", name) else _text(name)
