"""The members of an entry, one check for each: what may stand there, in words where it may not.

The one rule: a check returns the value in its type or raises `ValueError` with a sentence that says what it must be. A
value that might hold a secret is not repeated.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

from kvparams.instances import Role
from kvparams.routing.handoff_verifier import parse_declared_address
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.tls import EngineTLSSettings, TLSError

__all__ = [
    "CREDENTIAL_FIELDS",
    "DEFAULTS_FIELDS",
    "REMOTE_SPEC_FIELDS",
    "SPEC_FIELDS",
    "FieldCheck",
    "check_addresses",
    "check_connector",
    "check_id",
    "check_url",
    "is_label",
    "is_label_value",
]

_MAX_LABELS: Final = 64
_MAX_ADDRESSES: Final = 64
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,252}")
_ENV: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_STREAM: Final = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9._-]{0,252}):(\d{1,5})")
_SOCKET_FILE: Final = re.compile(r"ipc://[!-~]{1,100}")
_VISIBLE: Final = re.compile(r"[!-~]{1,2048}")

FieldCheck = Callable[[object, SpecRules], object]


def check_id(value: object) -> str:
    """An instance's name: it stands in documents, headers and paths.

    Raises:
        ValueError: with the reason in words.
    """
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError("must be 1 to 128 letters, digits and ._~-, the first a letter or digit")
    return value


def check_url(value: object) -> str:
    """An engine's address, without the slash at its end.

    Raises:
        ValueError: with the reason in words; the value is not in it, it may hold a password.
    """
    wanted = "must be http://host:port or https://host:port"
    if not isinstance(value, str) or not _VISIBLE.fullmatch(value):
        raise ValueError(wanted)
    try:
        parts = urlsplit(value)
        good = bool(parts.hostname) and parts.port != 0 and parts.scheme in ("http", "https")
    except ValueError:  # a port that is none, a bracket that does not close
        good, parts = False, None
    if parts is not None and "@" in parts.netloc:
        raise ValueError(f"{wanted}, without a user or password; an engine's API key goes into a key_file")
    if parts is None or not good or parts.path not in ("", "/") or "?" in value or "#" in value:
        raise ValueError(wanted)
    return f"{parts.scheme}://{parts.netloc}"


def is_label(name: str) -> bool:
    """Whether a label may be called this."""
    return _LABEL.fullmatch(name) is not None


def is_label_value(value: object) -> bool:
    """Whether a label may have this value."""
    return isinstance(value, str) and 0 < len(value) <= 253 and value.isprintable()


def _check_role(value: object, rules: SpecRules) -> Role:
    try:
        return Role(cast("str", value))
    except ValueError:
        both = "; an engine that does both for one request is aggregated, one that does either two instances of one URL"
        raise ValueError(f"must be {' or '.join(Role)}{both if value == 'both' else ''}") from None


def check_connector(value: object, rules: SpecRules) -> str:
    """The name of a dialect that is spoken here.

    Raises:
        ValueError: it is none; the message says why, where it is one all the same.
    """
    if isinstance(value, str) and value in rules.connectors:
        return value
    known = f"must be one of {', '.join(sorted(rules.connectors))}"
    why = rules.unusable_connectors.get(value) if isinstance(value, str) else None
    raise ValueError(known if why is None else f"{known}; {value} cannot be used: {why}")


def _check_labels(value: object, rules: SpecRules) -> dict[str, str]:
    if not isinstance(value, dict) or len(cast("dict[str, object]", value)) > _MAX_LABELS:
        raise ValueError(f"must be an object of at most {_MAX_LABELS} labels")
    labels = cast("dict[str, object]", value)
    for name, text in labels.items():
        if not is_label(name):
            raise ValueError(f"{name[:64]!r} is no label: letters, digits and ._/-, the first a letter or digit")
        if not is_label_value(text):
            raise ValueError(f"the value of {name!r} must be text of 1 to 253 characters; put quotes around it")
    return cast("dict[str, str]", labels)


def check_addresses(value: object) -> tuple[str, ...]:
    """Where an engine may say that it is.

    Raises:
        ValueError: with the reason in words.
    """
    wanted = f"must be a list of at most {_MAX_ADDRESSES}, each a host, host:port or a network such as 10.1.0.0/16"
    if not isinstance(value, list) or len(cast("list[object]", value)) > _MAX_ADDRESSES:
        raise ValueError(wanted)
    for text in cast("list[object]", value):
        try:
            parse_declared_address(text if isinstance(text, str) else "")
        except ValueError:
            raise ValueError(wanted) from None
    return tuple(cast("list[str]", value))


def _check_stream(value: object, rules: SpecRules) -> str:
    """Where ZMQ messages come from."""
    text = value if isinstance(value, str) else ""
    at = _STREAM.fullmatch(text)
    if at is not None and 0 < int(at[1]) < 65536:
        return text
    if _SOCKET_FILE.fullmatch(text) and rules.may_name_credentials:
        return text
    raise ValueError("must be tcp://host:port, where the engine's publisher is reached from here")


def _check_store(value: object, rules: SpecRules) -> str | None:
    if value is False:
        return None
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError("must be a name, the same for all that share the store, or false: there is none")
    return value


def _check_drain(value: object, rules: SpecRules) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _check_compatibility(value: object, rules: SpecRules) -> str:
    if not is_label_value(value):
        raise ValueError("must be text of 1 to 253 characters; engines with equal ones understand each other's KV")
    return cast("str", value)


def _check_path(value: object, rules: SpecRules) -> Path:
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or "\0" in value:
        raise ValueError("must be the path of a file")
    return rules.folder / value


def _check_env(value: object, rules: SpecRules) -> str:
    if not isinstance(value, str) or not _ENV.fullmatch(value):
        raise ValueError("must be the name of an environment variable")
    return value


def _check_tls(value: object, rules: SpecRules) -> EngineTLSSettings:
    known = ("ca", "certificate", "key", "server_name")
    if not isinstance(value, dict) or not value or any(name not in known for name in cast("dict[str, object]", value)):
        raise ValueError(f"must be an object with one or more of {', '.join(known)}")
    given = cast("dict[str, object]", value)
    name = given.get("server_name")
    if name is not None and not isinstance(name, str):
        raise ValueError("server_name must be text")
    files = {key: _check_path(path, rules) for key, path in given.items() if key != "server_name"}
    try:
        return EngineTLSSettings(**files, server_name=name)
    except TLSError as error:
        raise ValueError(str(error)) from error


CREDENTIAL_FIELDS: Final[Mapping[str, FieldCheck]] = {"key_file": _check_path, "key_env": _check_env, "tls": _check_tls}
"""Where an instance's key and certificates are."""
DEFAULTS_FIELDS: Final[Mapping[str, FieldCheck]] = {
    "connector": check_connector,
    "labels": _check_labels,
    "addresses": lambda value, rules: check_addresses(value),
    **CREDENTIAL_FIELDS,
}
"""What may hold for all instances of a file."""
REMOTE_SPEC_FIELDS: Final[Mapping[str, FieldCheck]] = {
    "id": lambda value, rules: check_id(value),
    "url": lambda value, rules: check_url(value),
    "role": _check_role,
    "connector": check_connector,
    "bootstrap": lambda value, rules: check_url(value),
    "addresses": lambda value, rules: check_addresses(value),
    "kv_events": _check_stream,
    "kv_events_replay": _check_stream,
    "store": _check_store,
    "group": lambda value, rules: check_id(value),
    "compatibility": _check_compatibility,
    "labels": _check_labels,
    "drain": _check_drain,
}
"""An entry that came over the network."""
SPEC_FIELDS: Final[Mapping[str, FieldCheck]] = {**REMOTE_SPEC_FIELDS, **CREDENTIAL_FIELDS}
"""An entry of the file."""
