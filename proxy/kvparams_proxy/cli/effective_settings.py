"""`--print-config`: the effective settings as a fleet file, with a comment on each line that says where it came from.

What has no value, or no place in a fleet file, stands in comments. No secret is printed: settings hold the paths of the
files with secrets, and user and password of a URL are left out.
"""

import argparse
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

from kvparams.instances import Role
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.cli.configuration import Configuration
from kvparams_proxy.config.mode_parsing import mode_document
from kvparams_proxy.config.options import OPTIONS
from kvparams_proxy.config.settings import DEFAULT_MODES
from kvparams_proxy.fleet.registry.instance_spec import spec_of
from kvparams_proxy.server.shared_admin import spec_document

__all__ = ["describe_effective_settings"]

_COMMENT_COLUMN: Final = 60
_DEFAULT: Final = "default"
_USER: Final = re.compile(r"(?<=//)[^/@\s]*@")
_OTHERS: Final = (
    "connector",
    "discover",
    "bootstrap",
    "engine_address",
    *(f"{role}_labels" for role in Role),
    "engine_key_file",
    "engine_ca",
    "role",
    "broker",
    "pool",
    "decode_picker",
    "prefill_partner",
    *(
        "grpc_host",
        "grpc_port",
        "grpc_certificate",
        "grpc_key",
        "grpc_client_ca",
        "fallbacks",
        "partner_header",
        "objective",
    ),
)
"""The destinations of options that have no place under `proxy` in a fleet file."""


def describe_effective_settings(command: str, arguments: argparse.Namespace, asked: Configuration) -> str:
    """Returns the settings with which the command would start.

    Args:
        command: `proxy`, `sidecar` or `picker`.
        arguments: the parsed command line. `option_sources` tells flags from environment variables.
        asked: what was built from it.
    """
    sources: Mapping[str, str] = getattr(arguments, "option_sources", {})
    lines = [f"# kvparams {command}: the effective settings; each comment says where the value came from.", "proxy:"]
    lines += _option_lines(asked, sources, () if command == "proxy" else ("mode", "workers"))
    lines += ["# Options that are no settings of a fleet file:", *_other_lines(arguments, sources)]
    if asked.options.mode is None:
        source = _DEFAULT if asked.settings.modes == DEFAULT_MODES else asked.file
        if asked.settings.local_id is not None:
            source = sources.get("role", "--role")
        lines += ["modes:", *(_line(f"  - {_yaml(mode_document(mode))}", source) for mode in asked.settings.modes)]
    lines += ["instances:" if asked.entries else "instances: []", *_instance_lines(arguments, asked, sources)]
    return "\n".join(lines)


def _option_lines(asked: Configuration, sources: Mapping[str, str], without: Collection[str]) -> Iterator[str]:
    derived = {
        "policy": asked.settings.policy,
        "max_connections": asked.server.connections.total,
        "max_body_memory": asked.settings.body_memory_bytes,
    }
    for option in OPTIONS:
        name, value = option.attribute, getattr(asked.options, option.attribute)
        if name in without:
            continue
        if name in asked.flag_options:
            source = sources.get(name, f"--{option.name}")
        elif name in asked.file_options:
            source = asked.file
        else:
            source = _DEFAULT
        if value is None:
            value = derived.get(name)
        if value is None:
            yield _line(f"  # {option.name}: not set", source)
        else:
            yield _line(f"  {option.name}: {_yaml(_written(value))}", source)


def _written(value: object) -> object:
    """Returns a value as it would stand in a fleet file."""
    if isinstance(value, ManagerMode):
        return ",".join([value.use, *(f"{name}={_plain(given)}" for name, given in value.options.items())])
    if isinstance(value, Mapping):  # of tokenizers
        ways = cast("Mapping[str | None, object]", value)
        return {"*" if model is None else model: str(way) for model, way in ways.items()}
    if isinstance(value, bool | int | float):
        return value
    return _USER.sub("", str(value))


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _other_lines(arguments: argparse.Namespace, sources: Mapping[str, str]) -> Iterator[str]:
    for name in _OTHERS:
        value: object = getattr(arguments, name, None)
        flag = f"--{name.replace('_', '-')}"
        for one in cast("list[object]", value) if isinstance(value, list) else [value]:
            if one is not None:
                text = _USER.sub("", str(one))
                yield _line(f"#   {flag} {text}", sources.get(name, _DEFAULT))


def _instance_lines(arguments: argparse.Namespace, asked: Configuration, sources: Mapping[str, str]) -> Iterator[str]:
    rules = asked.settings.spec_rules
    given = {instance.id: spec_of(instance, rules) for instance in asked.settings.instances}
    for entry in asked.entries:
        document = spec_document(entry)
        key_file: Path | None = entry.credential_sources.key_file
        if key_file is not None:
            document["key_file"] = str(key_file)
        source = asked.file
        if entry.id == asked.settings.local_id:
            source = sources.get("engine", "--engine")
        elif entry.id in given:
            flag = entry.role.value if getattr(arguments, entry.role.value, None) else "static_backends"
            source = sources.get(flag, f"--{flag.replace('_', '-')}")
        yield _line(f"  - {_yaml({name: value for name, value in document.items() if value not in ({}, [])})}", source)


def _line(text: str, source: str) -> str:
    return f"{text:<{_COMMENT_COLUMN}}  # {source}"


def _yaml(value: object) -> str:
    """Returns a value in YAML's flow style. JSON is that, apart from line breaks, which it has none of."""
    if isinstance(value, Mapping):
        members = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{_key(name)}: {_yaml(one)}" for name, one in members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, cast("Iterable[object]", value))) + "]"
    return json.dumps(value, default=str)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[a-z_]+", name) else json.dumps(name)
