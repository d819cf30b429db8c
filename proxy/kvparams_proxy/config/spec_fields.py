"""The types of an entry's members: what may stand there, in words where it may not.

The words never repeat a value that might hold a secret. What depends on `SpecRules` gets them as the context of the
validation.
"""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from kvparams.dialects.ec import EC_NAME
from kvparams.instances import Role
from kvparams.routing.handoff_verifier import parse_declared_address
from kvparams.settings_model import Allowed, SettingsModel, check_setting, must_be_one_of
from kvparams_proxy.fleet.registry.instance_spec import RankRange, SpecRules
from kvparams_proxy.tls import EngineTLSSettings

__all__ = [
    "Addresses",
    "Choices",
    "Connector",
    "EngineRole",
    "EngineTLS",
    "EngineTLSFiles",
    "EngineURL",
    "EventStream",
    "FilePath",
    "InstanceConnector",
    "InstanceId",
    "Labels",
    "Ranks",
    "Selector",
    "ShortText",
    "StoreName",
    "Switch",
    "check_addresses",
    "check_connector",
    "check_id",
    "check_label",
    "check_path",
    "check_printable",
    "check_ranks",
    "check_url",
    "rules_of",
]

_MAX_LABELS: Final = 64
_MAX_ADDRESSES: Final = 64
_MAX_CHOICES: Final = 256
_ID: Final = r"^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$"
_STREAM: Final = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9._-]{0,252}):(\d{1,5})")
_HOST_AND_PORT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}:\d{1,5}")
_MISTYPED_URL: Final = re.compile(r"([A-Za-z]{2,8}):?/{1,2}([A-Za-z0-9][A-Za-z0-9.-]{0,252}(?::\d{1,5})?)/?")
_SOCKET_FILE: Final = re.compile(r"ipc://[!-~]{1,100}")
_CONNECTOR_CLASS: Final = re.compile(r"(?i)(Connector)?(V1)?$")
_CONNECTOR_OF_CLASS: Final = {
    "kvparams": "store",
    "kvstore": "store",
    "nixlpull": "nixl",
    "mooncakestore": "content",
    "lmcache": "content",
    "lmcachemp": "content",
}
"""The connectors of vLLM's classes without `Connector` and `V1`: see the table in docs/quickstart.md."""
_MISTYPED: Final = 0.9
"""How similar a name must be to that of a class; most names end with `connector`."""
_MAX_CLASS_NAME: Final = 128
_MAX_RANKS: Final = 256
_MAX_RANK: Final = 4095
_RANKS: Final = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_VISIBLE: Final = re.compile(r"[!-~]{1,2048}")


def rules_of(info: ValidationInfo) -> SpecRules:
    """Returns the rules by which an entry is read."""
    return cast("SpecRules", info.context)


def check_url(value: object) -> str:
    """Returns an engine's address, without the slash at its end.

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
        if _HOST_AND_PORT.fullmatch(value):
            raise ValueError(f"{wanted}; did you mean http://{value}?")
        if hint := _nearest_url(value):
            raise ValueError(f"{wanted}; {hint}")
        path = ", without a path; the proxy adds /v1" if good and parts is not None and len(parts.path) > 1 else ""
        raise ValueError(f"{wanted}{path}")
    return f"{parts.scheme}://{parts.netloc}"


def _nearest_url(value: str) -> str:
    """Returns `did you mean URL?` for a URL whose scheme is mistyped; nothing for others."""
    found = _MISTYPED_URL.fullmatch(value)
    near = [] if found is None else get_close_matches(found[1].lower(), ("http", "https"), 1)
    meant = "" if found is None or not near else f"{near[0]}://{found[2]}"
    return f"did you mean {meant}?" if meant not in ("", value.rstrip("/")) else ""


def _check_role(value: object) -> Role:
    try:
        return Role(must_be_one_of(value, Role))
    except ValueError as error:
        both = (
            "; an engine that does both parts of one request is aggregated; for an engine that does either part, "
            "add two instances with one URL"
        )
        raise ValueError(f"{error}{both if value == 'both' else ''}") from None


def check_connector(value: object, rules: SpecRules) -> str:
    """Returns the name of a dialect that is spoken here.

    Raises:
        ValueError: it is none; the message says why, where it is one all the same.
    """
    try:
        return must_be_one_of(value, sorted(rules.connectors))
    except ValueError as error:
        if not isinstance(value, str):
            raise
        if (why := rules.unusable_connectors.get(value)) is not None:
            raise ValueError(f"{error}; {value} cannot be used: {why}") from None
        if (meant := _connector_of_class(value, rules)) is not None and "did you mean" not in str(error):
            raise ValueError(f"{error}; did you mean {meant}?") from None
        raise


def _connector_of_class(name: str, rules: SpecRules) -> str | None:
    """Returns the connector that an engine knows by the name of a class, such as NixlConnector; None if it is none."""
    base = _CONNECTOR_CLASS.sub("", name[:_MAX_CLASS_NAME]).lower()
    by_base = _CONNECTOR_OF_CLASS | {one: one for one in rules.connectors}
    meant = by_base.get(base)
    if meant is None:
        near = get_close_matches(name[:_MAX_CLASS_NAME].lower(), [f"{one}connector" for one in by_base], 1, _MISTYPED)
        meant = by_base[near[0].removesuffix("connector")] if near else None
    return meant if meant in rules.connectors else None


def _check_stream(value: object, info: ValidationInfo) -> str:
    """Returns where ZMQ messages come from."""
    text = value if isinstance(value, str) else ""
    at = _STREAM.fullmatch(text)
    if at is not None and 0 < int(at[1]) < 65536:
        return text
    if _SOCKET_FILE.fullmatch(text) and rules_of(info).may_name_credentials:
        return text
    raise ValueError("must be tcp://host:port, the address of the engine's event publisher")


def check_path(value: object, info: ValidationInfo) -> Path:
    """Returns the path of a file, in the folder of the rules. The file is not looked at.

    Raises:
        ValueError: it is no path.
    """
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or "\0" in value:
        raise ValueError("must be the path of a file")
    return rules_of(info).folder / value


def check_ranks(value: object) -> RankRange:
    """Returns the data-parallel ranks behind a URL, from their number or from the first and the last.

    Raises:
        ValueError: with the reason in words.
    """
    given = _RANKS.fullmatch(value) if isinstance(value, str) else None
    if given is not None and given[2] is not None:
        ranks = RankRange(int(given[2]) - int(given[1]) + 1, int(given[1]))
    elif given is not None:
        ranks = RankRange(int(given[1]))
    else:
        ranks = RankRange(value if type(value) is int else 0)
    if not 1 <= ranks.count <= _MAX_RANKS or ranks.start + ranks.count - 1 > _MAX_RANK:
        raise ValueError(
            f"must be the number of data-parallel ranks behind the URL, from 1 to {_MAX_RANKS}, or the first and the "
            "last of them, such as 4-7"
        )
    return ranks


def _check_address(text: str) -> str:
    parse_declared_address(text)
    return text


def check_printable(text: str) -> str:
    """Returns the text.

    Raises:
        ValueError: it has characters that cannot be shown.
    """
    if not text.isprintable():
        raise ValueError("it has characters that cannot be shown")
    return text


def _at_most(most: int) -> BeforeValidator:
    """Refuses too many entries before one of them is looked at. A list becomes a tuple."""

    def check(value: object) -> object:
        if not isinstance(value, list | dict):
            return value
        entries = cast("list[object] | dict[str, object]", value)
        if len(entries) > most:
            raise ValueError(f"has more than {most} entries")
        return entries if isinstance(entries, dict) else tuple(entries)

    return BeforeValidator(check)


def _one_or_more(value: object) -> object:
    """Returns several values as they are, and one as the only one of several."""
    return cast("object", value) if isinstance(value, tuple) else (value,)


InstanceId = Annotated[
    str, Field(pattern=_ID), Allowed("1 to 128 letters, digits and ._~-, the first a letter or digit")
]
"""A name that stands in documents, headers and paths."""
EngineURL = Annotated[str, PlainValidator(check_url)]
EngineRole = Annotated[Role, PlainValidator(_check_role)]
Connector = Annotated[str, PlainValidator(lambda value, info: check_connector(value, rules_of(info)))]
InstanceConnector = Annotated[
    str, PlainValidator(lambda value, info: EC_NAME if value == EC_NAME else check_connector(value, rules_of(info)))
]
"""The connector of one instance: also that of an encode engine, which cannot be a default."""
LabelName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,252}$"),
    Allowed("a label: letters, digits and ._/-, the first a letter or digit"),
]
_TEXT: Final = "text of 1 to 253 characters"
ShortText = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(check_printable), Allowed(_TEXT)]
_LabelText = Annotated[ShortText, Allowed(f"{_TEXT}; put quotes around it")]
Labels = Annotated[
    dict[LabelName, _LabelText], _at_most(_MAX_LABELS), Allowed(f"an object of at most {_MAX_LABELS} labels")
]
Choices = Annotated[
    tuple[ShortText, ...],
    BeforeValidator(_one_or_more),
    _at_most(_MAX_CHOICES),
    Field(min_length=1),
    Allowed(f"text, or a list of up to {_MAX_CHOICES} texts"),
]
"""Values of which one must hold."""
Selector = Annotated[
    dict[LabelName, Choices],
    _at_most(_MAX_LABELS),
    Field(min_length=1),
    Allowed("an object with one label or more, such as {model: llama-prefill}"),
]
Addresses = Annotated[
    tuple[
        Annotated[str, AfterValidator(_check_address), Allowed("a host, host:port or a network such as 10.1.0.0/16")],
        ...,
    ],
    _at_most(_MAX_ADDRESSES),
    Allowed(f"a list of at most {_MAX_ADDRESSES}, each a host, host:port or a network such as 10.1.0.0/16"),
]
EventStream = Annotated[str, PlainValidator(_check_stream)]
Switch = Annotated[bool, Allowed("true or false")]
Ranks = Annotated[RankRange, PlainValidator(check_ranks)]
FilePath = Annotated[Path, PlainValidator(check_path)]


def _check_store(value: object) -> str | None:
    if value is False:
        return None
    if isinstance(value, str) and re.fullmatch(_ID, value):
        return value
    raise ValueError(
        "must be the name of a store, equal for all engines that share it, or false if the engine has none"
    )


StoreName = Annotated[str | None, PlainValidator(_check_store)]


class EngineTLSFiles(SettingsModel):
    """The member `tls` of an engine."""

    ca: FilePath | None = None
    certificate: FilePath | None = None
    key: FilePath | None = None
    server_name: ShortText | None = None


def _check_tls(value: object, info: ValidationInfo) -> EngineTLSSettings:
    files = EngineTLSFiles.model_validate(value, context=info.context)
    if not files.model_fields_set:
        raise ValueError(f"must be an object with one or more of {', '.join(files.setting_names())}")
    return EngineTLSSettings(files.ca, files.certificate, files.key, files.server_name)


EngineTLS = Annotated[EngineTLSSettings, PlainValidator(_check_tls)]

_id: Final = TypeAdapter[str](InstanceId)
_addresses: Final = TypeAdapter[tuple[str, ...]](Addresses)
_label: Final = TypeAdapter[str](LabelName)
_short_text: Final = TypeAdapter[str](ShortText)


def check_id(value: object) -> str:
    """Returns an instance's name.

    Raises:
        ValueError: with the reason in words.
    """
    return check_setting(_id, value)


def check_addresses(value: object) -> tuple[str, ...]:
    """Returns where an engine may say that it is.

    Raises:
        ValueError: with the reason in words.
    """
    return check_setting(_addresses, value)


def check_label(name: str, value: str) -> None:
    """Checks one label.

    Raises:
        ValueError: with the reason in words.
    """
    check_setting(_label, name)
    check_setting(_short_text, value)
