"""The settings of `kvparams proxy`: as flags, and under `proxy` in the fleet file.

A setting has one name in both places, one type and one sentence that says what it does. A flag takes precedence over
the file, the file over the default. `--help` and docs/configuration.md are made from these models.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, NamedTuple, cast, get_args

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, ValidationInfo
from pydantic.fields import FieldInfo

from kvparams import plugins
from kvparams.routing.managers import factory
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.settings_model import Allowed, SettingsModel, must_be_one_of
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.share_url import ShareURL, parse_share_url
from kvparams_proxy.config.spec_fields import FilePath, Switch, check_path, check_printable, rules_of
from kvparams_proxy.config.spec_parsing import DefaultsSection
from kvparams_proxy.tokenization.tokenizer_choice import TokenizerChoices, parse_tokenizer_choices

__all__ = ["OPTIONS", "OPTION_GROUPS", "Option", "ProxyOptions"]


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
    try:
        path = check_path(value, info)
    except ValueError:
        path = None
    if path is None or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("must be -, off or the path of a file that can be written")
    return str(path)


def _check_mode(value: object) -> ManagerMode:
    if not isinstance(value, str):
        raise ValueError("must be a name, with options behind it where it has any: NAME,OPTION=VALUE")
    return parse_mode_flag(value)


def _check_share_url(value: object) -> ShareURL:
    if not isinstance(value, str):
        raise ValueError("must be a URL such as valkey://host:6379?prefix=site-a")
    return parse_share_url(value)


def _policies() -> list[str]:
    return plugins.plugin_names("policies")


def _help(text: str) -> Any:
    return Field(description=text)


_MOST: Final = (1 << 53) - 1
_S: Final = Flag("S", is_number=True)
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number of seconds, more than 0"), _S]
_SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a number of seconds, at least 0"), _S]
_Count = Annotated[int, Field(ge=1, le=_MOST), Allowed("a whole number, at least 1"), Flag("N", is_number=True)]
_CountOrNone = Annotated[int, Field(ge=0, le=_MOST), Allowed("a whole number, at least 0"), Flag("N", is_number=True)]
_Port = Annotated[int, Field(ge=0, le=65535), Allowed("a port from 0 to 65535"), Flag("PORT", is_number=True)]
_Name = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    AfterValidator(check_printable),
    Allowed("text of 1 to 1024 characters"),
    Flag("NAME"),
]
_File = Annotated[FilePath, Flag("FILE")]
_Share = Annotated[float, Field(ge=0, le=1), Allowed("a share, from 0 to 1"), Flag("SHARE", is_number=True)]
_Log = Annotated[str, PlainValidator(_check_log), Flag("FILE|-|off")]
_Policy = Annotated[
    str, PlainValidator(lambda value: must_be_one_of(value, _policies())), Flag("NAME", known=_policies)
]
_Mode = Annotated[ManagerMode, PlainValidator(_check_mode), Flag("NAME[,OPTION=VALUE]", known=factory.manager_names)]
_Tokenizers = Annotated[
    TokenizerChoices,
    PlainValidator(lambda value, info: parse_tokenizer_choices(value, rules_of(info).folder)),
    Flag("[MODEL=]PATH|engine|bytes"),
]
_Switch = Annotated[Switch, Flag("")]
_ShareURL = Annotated[ShareURL, PlainValidator(_check_share_url), Flag("URL")]


class _OptionGroup(SettingsModel):
    """A group of `--help`."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    title: ClassVar[str] = ""
    names_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        DefaultsSection.model_fields, "is not known here: it belongs under `defaults`, or to an instance"
    )


class _ListenOptions(_OptionGroup):
    title = "where to listen"

    host: Annotated[_Name, _help("the address; 0.0.0.0 is every one of this machine")] = "127.0.0.1"
    port: Annotated[_Port, _help("the port; 0 is any free one")] = 8100
    tls_certificate: Annotated[
        _File | None, _help("PEM: speak https to clients, with this certificate and those above it")
    ] = None
    tls_key: Annotated[_File | None, _help("PEM: its private key")] = None
    tls_client_ca: Annotated[_File | None, _help("PEM: clients must show a certificate of this authority (mTLS)")] = (
        None
    )
    max_connections: Annotated[
        _Count | None,
        _help(
            "clients may have so many connections; the one that has been idle for longest makes room for a new one, "
            "and where none waits for a request the new one is answered 503 (default: somewhat less than half of the "
            "files that the process may open)"
        ),
    ] = None
    max_connections_per_address: Annotated[
        _Count | None, _help("... from one IP address; further ones are answered 503")
    ] = None
    drain_delay: Annotated[
        _SecondsOrNone,
        _help(
            "after SIGTERM or Ctrl-C /health is 503 and requests are still taken for so long; behind a load balancer "
            "choose more than it takes to notice"
        ),
    ] = 0.0
    grace: Annotated[
        _SecondsOrNone,
        _help(
            "after that requests that run may go on for so long; then, or at a second signal, they are cut with an "
            "error"
        ),
    ] = 120.0


class _ClientOptions(_OptionGroup):
    title = "clients"

    client_keys: Annotated[_File | None, _help("clients need a key of this file; `kvparams keys` makes them")] = None
    client_timeout: Annotated[_Seconds, _help("for how long a client may take nothing of its answer")] = 300.0
    max_body_bytes: Annotated[_Count, _help("of one request; images in chats may need more")] = 16 << 20
    max_body_memory: Annotated[
        _Count | None,
        _help(
            "bytes that the bodies of all requests may take together; further ones are answered 503 with Retry-After "
            "(default: 512 MiB, or 32 times --max-body-bytes)"
        ),
    ] = None
    expose_route: Annotated[
        _Switch, _help("name the instances used in x-kvparams-prefill and -decode; in -decision why")
    ] = False


class _LegOptions(_OptionGroup):
    title = "how legs run"

    mode: Annotated[
        _Mode | None,
        _help(
            "how prefill and decode are coordinated (default: prefill_then_decode); several, each for some requests, "
            "stand in the fleet file under `modes`"
        ),
    ] = None
    policy: Annotated[
        _Policy | None,
        _help(
            "who runs a leg (default: cache_aware where --tokenizer says how prompts get token ids, otherwise "
            "round_robin)"
        ),
    ] = None
    tokenizer: Annotated[
        _Tokenizers | None,
        _help(
            "how prompts that are text get token ids, for routing: by the tokenizer in this folder (tokenizer.json), "
            "by the engine's /tokenize, or by bytes; several, for some models each, separated by commas"
        ),
    ] = None
    prefill_timeout: Annotated[_Seconds, _help("for a whole prefill leg")] = 300.0
    decode_timeout: Annotated[
        _Seconds, _help("the longest silence of a decode engine; SSE comments are silence, too")
    ] = 600.0
    request_timeout: Annotated[
        _Seconds | None, _help("for a whole request, from its last byte to the end of its answer")
    ] = None
    retries: Annotated[_CountOrNone, _help("further attempts one request may have when engines fail")] = 2
    continuation: Annotated[
        _Switch,
        _help(
            "a stream whose decode engine fails goes on on another, from its token ids; not with `n` above 1, `stop`, "
            "tools, logprobs, structured output or penalties, which end with an error event"
        ),
    ] = False
    probe: Annotated[_Seconds, _help("how often each engine is asked whether it lives and what it serves")] = 5.0
    slow_start: Annotated[_SecondsOrNone, _help("in how much time an engine that comes back gets its whole share")] = (
        10.0
    )


class _RoomOptions(_OptionGroup):
    title = "room: without these limits the engines' own queues fill"

    prefill_requests: Annotated[
        _Count | None, _help("one prefill engine runs at most so many at a time; others wait here")
    ] = None
    prefill_tokens: Annotated[_Count | None, _help("... and so many prompt tokens")] = None
    decode_requests: Annotated[
        _Count | None, _help("one decode engine runs at most so many at a time; others wait here")
    ] = None
    decode_tokens: Annotated[_Count | None, _help("... and so many prompt tokens")] = None
    aggregated_requests: Annotated[
        _Count | None, _help("one aggregated engine runs at most so many; others wait here")
    ] = None
    aggregated_tokens: Annotated[_Count | None, _help("... and so many prompt tokens")] = None
    queue: Annotated[
        _CountOrNone, _help("so many may wait for each role; further ones are answered 503 with Retry-After")
    ] = 1024
    queue_per_tenant: Annotated[
        _Count | None, _help("... and so many of one tenant; further ones are answered 429")
    ] = None
    queue_wait: Annotated[_Seconds, _help("for how long one may wait")] = 60.0


class _SharingOptions(_OptionGroup):
    title = "several proxies in front of one fleet"

    share: Annotated[
        _ShareURL | None,
        _help(
            "where the proxies of a site tell each other their load, caches and failures: "
            "valkey://host:6379?prefix=SITE; no request ever waits for it"
        ),
    ] = None
    share_keys: Annotated[
        _File | None,
        _help("the signing keys that these proxies have in common (default: the file of --sign-with)"),
    ] = None


class _SigningOptions(_OptionGroup):
    title = "signed documents, for engines that verify them"

    sign_with: Annotated[
        _File | None, _help("sign what engines are told of KV; `kvparams signing-keys` makes this file")
    ] = None
    audience: Annotated[_Name | None, _help("... for the engines of the pool of this name")] = None


class _AdminOptions(_OptionGroup):
    title = "admin API, under /admin"

    admin_token_file: Annotated[_File | None, _help("there is one, and this file holds the token that it asks for")] = (
        None
    )
    admin_token_env: Annotated[_Name | None, _help("... or this environment variable does")] = None


class _TelemetryOptions(_OptionGroup):
    title = "seen from outside, beside /metrics"

    log_requests: Annotated[
        _Log, _help("one line of JSON for each request, nothing of what was asked or answered in it")
    ] = "-"
    trace: Annotated[
        _Share | None, _help("send OpenTelemetry traces of this share of requests; OTEL_* variables say where to")
    ] = None


class _FaultOptions(_OptionGroup):
    title = "for finding faults"

    plain_asgi: Annotated[
        _Switch, _help("write answers through ASGI instead of the transport (slower, works the same)")
    ] = False


class ProxyOptions(
    _FaultOptions,
    _TelemetryOptions,
    _AdminOptions,
    _SigningOptions,
    _SharingOptions,
    _RoomOptions,
    _LegOptions,
    _ClientOptions,
    _ListenOptions,
):
    """The options of the proxy. Pydantic orders the fields from the last base to the first."""

    def override(self, flags: "ProxyOptions") -> "ProxyOptions":
        """Returns these settings with those that `flags` sets in their place."""
        return self.model_copy(update={name: getattr(flags, name) for name in flags.model_fields_set})


OPTION_GROUPS: Final[tuple[type[_OptionGroup], ...]] = tuple(reversed(ProxyOptions.__bases__))


class Option(NamedTuple):
    """An option of the proxy."""

    name: str
    """Of the flag, without dashes before it, and in the file."""
    flag: Flag
    default: object
    """None: not set."""
    help: str
    group: str

    @property
    def attribute(self) -> str:
        """The name in the namespace of arguments and in `ProxyOptions`."""
        return self.name.replace("-", "_")

    def parse_flag(self, given: object) -> object:
        """Returns what would stand in the file instead of a flag's text; a text that is no number stays as it is."""
        if isinstance(given, str) and self.flag.is_number:
            for kind in (int, float):
                try:
                    return kind(given)
                except ValueError:
                    continue
        return given


def _flag_of(field: FieldInfo) -> Flag:
    """Returns the flag of a type, which may be one or None."""
    metadata = [*field.metadata, *(one for kind in get_args(field.annotation) for one in _metadata_of(kind))]
    return next(one for one in metadata if isinstance(one, Flag))


def _metadata_of(kind: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", getattr(kind, "__metadata__", ()))


def _options() -> Iterator[Option]:
    for group in OPTION_GROUPS:
        for field in group.model_fields.values():
            yield Option(field.alias or "", _flag_of(field), field.default, field.description or "", group.title)


OPTIONS: Final = tuple(_options())
