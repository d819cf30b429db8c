"""The settings an operator may give, in one table: as flags of `kvparams proxy`, and under `proxy` in the fleet file.

The one rule: a setting has one name, in both places, and one sentence that says what it does; a flag goes before the
file, the file before the default.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from kvparams import plugins
from kvparams.routing.managers import factory
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.spec_parsing import report_unknown_names
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.tokenization.tokenizer_choice import parse_tokenizer_choices

__all__ = ["OPTIONS", "OPTION_DEFAULTS", "Option", "OptionType", "check_proxy_section"]

_CONTINUATION: Final = (
    "a stream whose decode engine fails goes on on another, from its token ids; not with `n` above 1, `stop`, tools, "
    "logprobs, structured output or penalties, which end with an error event"
)


_CONNECTIONS: Final = (
    "clients may have so many connections; the one that has been idle for longest makes room for a new one, and where "
    "none waits for a request the new one is answered 503 (default: somewhat less than half of the files "
    "that the process may open)"
)
_DRAIN_DELAY: Final = (
    "after SIGTERM or Ctrl-C /health is 503 and requests are still taken for so long; behind a load balancer choose "
    "more than it takes to notice"
)
_GRACE: Final = (
    "after that requests that run may go on for so long; then, or at a second signal, they are cut with an error"
)
_BODY_MEMORY: Final = (
    "bytes that the bodies of all requests may take together; further ones are answered 503 with Retry-After "
    "(default: 512 MiB, or 32 times --max-body-bytes)"
)
_MODE_HELP: Final = (
    "how prefill and decode are coordinated (default: prefill_then_decode); several, each for some requests, stand in "
    "the fleet file under `modes`"
)
_TOKENIZER: Final = (
    "how prompts that are text get token ids, for routing: by the tokenizer in this folder (tokenizer.json), by the "
    "engine's /tokenize, or by bytes; several, for some models each, separated by commas"
)


_POLICIES: Final = (
    "who runs a leg (default: cache_aware where --tokenizer says how prompts get token ids, otherwise round_robin)"
)


class OptionType(NamedTuple):
    """What a setting may be."""

    metavar: str
    parse_flag: Callable[[str], object]
    """Of a flag's text, what would stand in the file."""
    check: Callable[[object, Path], object]
    """The value, or `ValueError` with what it must be. Relative paths begin in the folder that is given."""
    known: Callable[[], list[str]] | None = None
    """The names to choose from, where that is what it is."""


def _number(text: str) -> object:
    """A number, or the text where it is none: the check says what it must be."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _seconds(*, zero: bool) -> OptionType:
    def check(value: object, folder: Path) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError("must be a number of seconds")
        if not value and not zero:
            raise ValueError("must be more than 0 seconds")
        return float(value)

    return OptionType("S", _number, check)


def _count(least: int) -> OptionType:
    def check(value: object, folder: Path) -> object:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 53:
            raise ValueError(f"must be a whole number, at least {least}")
        return value

    return OptionType("N", _number, check)


def _check_port(value: object, folder: Path) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 65535:
        raise ValueError("must be a port from 0 to 65535")
    return value


def _check_text(value: object, folder: Path) -> object:
    if not isinstance(value, str) or not 0 < len(value) <= 1024 or not value.isprintable():
        raise ValueError("must be text")
    return value


def _check_path(value: object, folder: Path) -> object:
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or "\0" in value:
        raise ValueError("must be the path of a file")
    return folder / value


def _check_switch(value: object, folder: Path) -> object:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _check_policy(value: object, folder: Path) -> object:
    if value not in plugins.plugin_names("policies"):
        raise ValueError(f"must be one of {', '.join(plugins.plugin_names('policies'))}")
    return value


def _check_share(value: object, folder: Path) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("must be a share, from 0 to 1")
    return float(value)


def _check_log(value: object, folder: Path) -> object:
    if value in ("-", "off"):
        return value
    try:
        path = cast("Path", _check_path(value, folder))
    except ValueError:
        path = Path()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("must be -, off or the path of a file that can be written")
    return str(path)


def _check_mode(value: object, folder: Path) -> object:
    if not isinstance(value, str):
        raise ValueError("must be a name, with options behind it where it has any: NAME,OPTION=VALUE")
    return parse_mode_flag(value)


_SECONDS: Final = _seconds(zero=False)
_SECONDS_OR_NONE: Final = _seconds(zero=True)
_PORT: Final = OptionType("PORT", _number, _check_port)
_NAME: Final = OptionType("NAME", str, _check_text)
_PATH: Final = OptionType("FILE", str, _check_path)
_SHARE: Final = OptionType("SHARE", _number, _check_share)
_LOG: Final = OptionType("FILE|-|off", str, _check_log)
_POLICY: Final = OptionType("NAME", str, _check_policy, lambda: plugins.plugin_names("policies"))
_MODE: Final = OptionType("NAME[,OPTION=VALUE]", str, _check_mode, factory.manager_names)
_TOKENIZERS: Final = OptionType("[MODEL=]PATH|engine|bytes", str, parse_tokenizer_choices)
SWITCH: Final = OptionType("", str, _check_switch)
"""A flag without a value; true or false in the file."""


class Option(NamedTuple):
    """One setting."""

    name: str
    """Of the flag, without dashes before it, and in the file."""
    kind: OptionType
    default: object
    """None: not set."""
    help: str
    group: str


def _group(title: str, *rows: tuple[str, OptionType, object, str]) -> tuple[Option, ...]:
    return tuple(Option(name, kind, default, help, title) for name, kind, default, help in rows)


OPTIONS: Final = (
    *_group(
        "where to listen",
        ("host", _NAME, "127.0.0.1", "the address; 0.0.0.0 is every one of this machine"),
        ("port", _PORT, 8100, "the port; 0 is any free one"),
        ("tls-certificate", _PATH, None, "PEM: speak https to clients, with this certificate and those above it"),
        ("tls-key", _PATH, None, "PEM: its private key"),
        ("tls-client-ca", _PATH, None, "PEM: clients must show a certificate of this authority (mTLS)"),
        ("max-connections", _count(1), None, _CONNECTIONS),
        ("max-connections-per-address", _count(1), None, "... from one IP address; further ones are answered 503"),
        ("drain-delay", _SECONDS_OR_NONE, 0.0, _DRAIN_DELAY),
        ("grace", _SECONDS_OR_NONE, 120.0, _GRACE),
    ),
    *_group(
        "clients",
        ("client-keys", _PATH, None, "clients need a key of this file; `kvparams keys` makes them"),
        ("client-timeout", _SECONDS, 300.0, "for how long a client may take nothing of its answer"),
        ("max-body-bytes", _count(1), 16 << 20, "of one request; images in chats may need more"),
        ("max-body-memory", _count(1), None, _BODY_MEMORY),
        ("expose-route", SWITCH, False, "name the instances used in x-kvparams-prefill and -decode; in -decision why"),
    ),
    *_group(
        "how legs run",
        ("mode", _MODE, None, _MODE_HELP),
        ("policy", _POLICY, None, _POLICIES),
        ("tokenizer", _TOKENIZERS, None, _TOKENIZER),
        ("prefill-timeout", _SECONDS, 300.0, "for a whole prefill leg"),
        ("decode-timeout", _SECONDS, 600.0, "the longest silence of a decode engine; SSE comments are silence, too"),
        ("request-timeout", _SECONDS, None, "for a whole request, from its last byte to the end of its answer"),
        ("retries", _count(0), 2, "further attempts one request may have when engines fail"),
        ("continuation", SWITCH, False, _CONTINUATION),
        ("probe", _SECONDS, 5.0, "how often each engine is asked whether it lives and what it serves"),
        ("slow-start", _SECONDS_OR_NONE, 10.0, "in how much time an engine that comes back gets its whole share"),
    ),
    *_group(
        "room: without these limits the engines' own queues fill",
        ("prefill-requests", _count(1), None, "one prefill engine runs at most so many at a time; others wait here"),
        ("prefill-tokens", _count(1), None, "... and so many prompt tokens"),
        ("decode-requests", _count(1), None, "one decode engine runs at most so many at a time; others wait here"),
        ("decode-tokens", _count(1), None, "... and so many prompt tokens"),
        ("aggregated-requests", _count(1), None, "one aggregated engine runs at most so many; others wait here"),
        ("aggregated-tokens", _count(1), None, "... and so many prompt tokens"),
        ("queue", _count(0), 1024, "so many may wait for each role; further ones are answered 503 with Retry-After"),
        ("queue-per-tenant", _count(1), None, "... and so many of one tenant; further ones are answered 429"),
        ("queue-wait", _SECONDS, 60.0, "for how long one may wait"),
    ),
    *_group(
        "signed documents, for engines that verify them",
        ("sign-with", _PATH, None, "sign what engines are told of KV; `kvparams signing-keys` makes this file"),
        ("audience", _NAME, None, "... for the engines of the pool of this name"),
    ),
    *_group(
        "admin API, under /admin",
        ("admin-token-file", _PATH, None, "there is one, and this file holds the token that it asks for"),
        ("admin-token-env", _NAME, None, "... or this environment variable does"),
    ),
    *_group(
        "seen from outside, beside /metrics",
        ("log-requests", _LOG, "-", "one line of JSON for each request, nothing of what was asked or answered in it"),
        ("trace", _SHARE, None, "send OpenTelemetry traces of this share of requests; OTEL_* variables say where to"),
    ),
    *_group(
        "for finding faults",
        ("plain-asgi", SWITCH, False, "write answers through ASGI instead of the transport (slower, works the same)"),
    ),
)

OPTION_DEFAULTS: Final[Mapping[str, object]] = {option.name: option.default for option in OPTIONS}


def check_proxy_section(
    folder: Path, document: Mapping[str, object], where: str, problems: ConfigProblems
) -> Mapping[str, object]:
    """Check the settings of a fleet file that is in `folder`: a
    `kvparams_proxy.config.fleet_document.CheckSettings`."""
    report_unknown_names(document, [option.name for option in OPTIONS], where, problems)
    found: dict[str, object] = {}
    for option in OPTIONS:
        if option.name in document:
            try:
                found[option.name] = option.kind.check(document[option.name], folder)
            except ValueError as error:
                problems.add(f"{where}.{option.name}", str(error))
    return found
