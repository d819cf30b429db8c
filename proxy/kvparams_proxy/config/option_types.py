"""Defines the types of the proxy's settings: how each is checked, and how its flag is written."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, cast

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo

from kvparams import plugins
from kvparams.routing.managers import factory
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.settings_model import Allowed, did_you_mean, must_be_one_of
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.model_aliases import ModelAliases, parse_model_aliases
from kvparams_proxy.config.share_url import ShareURL as ParsedShareURL
from kvparams_proxy.config.share_url import parse_share_url
from kvparams_proxy.config.spec_fields import FilePath, check_path, check_printable, rules_of
from kvparams_proxy.config.spec_fields import Switch as SwitchValue
from kvparams_proxy.telemetry.logging_setup import LogFormat, LogLevel
from kvparams_proxy.tokenization.tokenizer_choice import TokenizerChoices, parse_tokenizer_choices

__all__ = [
    "MOST_WORKERS",
    "Aliases",
    "Count",
    "CountOrNone",
    "File",
    "Flag",
    "Folder",
    "Log",
    "LogFormatName",
    "LogLevelName",
    "Mode",
    "Name",
    "OnOff",
    "Policy",
    "Port",
    "Seconds",
    "SecondsOrNone",
    "Share",
    "ShareURL",
    "Switch",
    "Tokenizers",
    "Workers",
    "described",
]

MOST_WORKERS: Final = 64
_LEVEL_SYNONYMS: Final[Mapping[object, str]] = {"trace": "debug"}
"""Levels of vLLM production-stack's router that this log does not have."""
_MOST: Final = (1 << 53) - 1


class Flag(NamedTuple):
    """Describes how a type is written as the value of a flag."""

    metavar: str
    """Empty for a flag without a value."""
    is_number: bool = False
    known: Callable[[], list[str]] | None = None
    """The names to choose from, where that is what it is."""


def _check_log(value: object, info: ValidationInfo) -> str:
    if value in ("-", "off"):
        return cast("str", value)
    if isinstance(value, str) and "/" not in value and did_you_mean(value, ("off",)):
        raise ValueError(f"must be -, off, or the path of a file; did you mean off? A file is written ./{value[:64]}")
    try:
        path = check_path(value, info)
    except ValueError:
        path = None
    if path is None or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("must be -, off, or the path of a file that can be written")
    return str(path)


def _on_off(value: object) -> object:
    """Returns the word that YAML reads as a truth value."""
    return ("off", "on")[value] if isinstance(value, bool) else value


def _check_mode(value: object) -> ManagerMode:
    if not isinstance(value, str):
        raise ValueError("must be the name of a mode, with options if it needs any: NAME,OPTION=VALUE")
    return parse_mode_flag(value)


def _check_share_url(value: object) -> ParsedShareURL:
    if not isinstance(value, str):
        raise ValueError("must be a URL such as valkey://host:6379?prefix=site-a")
    return parse_share_url(value)


def _check_workers(value: object) -> int:
    if value == "auto":
        usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return min(usable, MOST_WORKERS)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
        raise ValueError(f"must be auto or a whole number from 1 to {MOST_WORKERS}")
    return value


def _policies() -> list[str]:
    return plugins.plugin_names("policies")


def described(text: str) -> Any:
    return Field(description=text)


_S: Final = Flag("S", is_number=True)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number of seconds, more than 0"), _S]
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a number of seconds, at least 0"), _S]
Count = Annotated[int, Field(ge=1, le=_MOST), Allowed("a whole number, at least 1"), Flag("N", is_number=True)]
CountOrNone = Annotated[int, Field(ge=0, le=_MOST), Allowed("a whole number, at least 0"), Flag("N", is_number=True)]
Port = Annotated[int, Field(ge=0, le=65535), Allowed("a port from 0 to 65535"), Flag("PORT", is_number=True)]
Workers = Annotated[int, PlainValidator(_check_workers), Flag("N|auto", is_number=True)]
Name = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    AfterValidator(check_printable),
    Allowed("text of 1 to 1024 characters"),
    Flag("NAME"),
]
File = Annotated[FilePath, Flag("FILE")]
Folder = Annotated[FilePath, Flag("DIR")]
Share = Annotated[float, Field(ge=0, le=1), Allowed("a share, from 0 to 1"), Flag("SHARE", is_number=True)]
Log = Annotated[str, PlainValidator(_check_log), Flag("FILE|-|off")]
LogLevelName = Annotated[
    str,
    PlainValidator(lambda value: must_be_one_of(_LEVEL_SYNONYMS.get(value, value), list(LogLevel))),
    Flag("LEVEL", known=lambda: [str(one) for one in LogLevel]),
]
LogFormatName = Annotated[
    str,
    PlainValidator(lambda value: must_be_one_of(value, list(LogFormat))),
    Flag("FORMAT", known=lambda: [str(one) for one in LogFormat]),
]
OnOff = Annotated[str, PlainValidator(lambda value: must_be_one_of(_on_off(value), ("on", "off"))), Flag("on|off")]
Policy = Annotated[str, PlainValidator(lambda value: must_be_one_of(value, _policies())), Flag("NAME", known=_policies)]
Mode = Annotated[ManagerMode, PlainValidator(_check_mode), Flag("NAME[,OPTION=VALUE]", known=factory.manager_names)]
Tokenizers = Annotated[
    TokenizerChoices,
    PlainValidator(lambda value, info: parse_tokenizer_choices(value, rules_of(info).folder)),
    Flag("[MODEL=]PATH|engine|bytes"),
]
Aliases = Annotated[ModelAliases, PlainValidator(parse_model_aliases), Flag("ALIAS=MODEL")]
Switch = Annotated[SwitchValue, Flag("")]
ShareURL = Annotated[ParsedShareURL, PlainValidator(_check_share_url), Flag("URL")]
