"""The settings of `kvparams proxy`: as flags, and under `proxy` in the fleet file.

A setting has one name in both places, one type and one sentence that says what it does. A flag takes precedence over
the file, the file over the default. `--help` and docs/configuration.md are made from these models.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Final, NamedTuple, cast, get_args

from pydantic import ConfigDict
from pydantic.fields import FieldInfo

from kvparams.settings_model import SettingsModel
from kvparams_proxy.config.option_types import (
    MOST_WORKERS,
    Aliases,
    Count,
    CountOrNone,
    File,
    Flag,
    Folder,
    Log,
    LogFormatName,
    LogLevelName,
    Mode,
    Name,
    OnOff,
    Policy,
    Port,
    Seconds,
    SecondsOrNone,
    Share,
    ShareURL,
    Switch,
    Tokenizers,
    Workers,
    described,
)
from kvparams_proxy.config.spec_parsing import DefaultsSection

__all__ = ["MOST_WORKERS", "OPTIONS", "OPTION_GROUPS", "Option", "ProxyOptions"]


class _OptionGroup(SettingsModel):
    """A group of `--help`."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    title: ClassVar[str] = ""
    names_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        DefaultsSection.model_fields, "is not an option of the proxy; it belongs under `defaults` or to an instance"
    )


class _ListenOptions(_OptionGroup):
    title = "where to listen"

    host: Annotated[Name, described("the address to listen on; 0.0.0.0 stands for all addresses of this machine")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, described("the port to listen on; 0 picks a free one")] = 8100
    tls_certificate: Annotated[File | None, described("serve https with this certificate chain (PEM)")] = None
    tls_key: Annotated[File | None, described("the private key of --tls-certificate (PEM)")] = None
    tls_client_ca: Annotated[
        File | None, described("require client certificates that these authorities have issued (mTLS, PEM)")
    ] = None
    max_connections: Annotated[
        Count | None,
        described(
            "the largest number of client connections. A new connection closes the one that has been idle for "
            "longest; if none is idle, the new one gets a 503 (default: somewhat less than half of the files "
            "that the process may open)"
        ),
    ] = None
    max_connections_per_address: Annotated[
        Count | None, described("the largest number of client connections from one IP address; further ones get a 503")
    ] = None
    workers: Annotated[
        Workers,
        described(
            "the number of processes that serve this port, up to 64; auto is one for each usable core; SIGHUP replaces "
            "them without losing a request"
        ),
    ] = 1
    takeover: Annotated[
        Folder | None,
        described(
            "the directory where a running proxy hands its listening socket to its successor, which is started with "
            "the same option: no connection is refused in between. Only the user of the proxy may enter the directory"
        ),
    ] = None
    drain_delay: Annotated[
        SecondsOrNone,
        described(
            "seconds after SIGTERM or Ctrl-C in which /health answers 503 and new requests are still accepted. "
            "Behind a load balancer, choose more than the load balancer needs to notice"
        ),
    ] = 0.0
    grace: Annotated[
        SecondsOrNone,
        described(
            "seconds after --drain-delay in which running requests may finish. Then, or at a second signal, they "
            "end with an error"
        ),
    ] = 120.0


class _ClientOptions(_OptionGroup):
    title = "clients"

    client_keys: Annotated[
        File | None, described("require an API key of this file from clients; `kvparams keys` makes them")
    ] = None
    client_timeout: Annotated[
        Seconds, described("how long a client may read nothing of its answer before it is disconnected")
    ] = 300.0
    max_body_bytes: Annotated[
        Count, described("the largest body of a request, in bytes; images in chats may need more")
    ] = 16 << 20
    max_body_memory: Annotated[
        Count | None,
        described(
            "the largest size of all request bodies together, in bytes; further requests get a 503 with "
            "Retry-After (default: 512 MiB, or 32 times --max-body-bytes)"
        ),
    ] = None
    expose_route: Annotated[
        Switch,
        described(
            "add response headers that name the engines (x-kvparams-prefill, x-kvparams-decode) and explain the "
            "choice (x-kvparams-decision)"
        ),
    ] = False


class _LegOptions(_OptionGroup):
    title = "how legs run"

    mode: Annotated[
        Mode | None,
        described(
            "how prefill and decode are coordinated (default: prefill_then_decode). The fleet file can choose by "
            "request, under `modes`. The modes are"
        ),
    ] = None
    policy: Annotated[
        Policy | None,
        described(
            "how the proxy chooses an engine for a request (default: cache_aware with --tokenizer, otherwise "
            "round_robin). The policies are"
        ),
    ] = None
    tokenizer: Annotated[
        Tokenizers | None,
        described(
            "how the proxy gets the token ids of text prompts, for cache-aware routing: PATH, a folder with "
            "tokenizer.json; engine, which asks the engine's /tokenize; or bytes, an estimate from the text's "
            "bytes. Separate several models by commas"
        ),
    ] = None
    model_alias: Annotated[
        Aliases | None,
        described(
            "further names of models: clients may ask for ALIAS, and engines are asked for MODEL. Separate several by "
            "commas"
        ),
    ] = None
    prefill_timeout: Annotated[Seconds, described("the longest time that a prefill engine may take for a prompt")] = (
        300.0
    )
    decode_timeout: Annotated[
        Seconds, described("the longest time that a decode engine may send no tokens; SSE comments do not count")
    ] = 600.0
    request_timeout: Annotated[
        Seconds | None,
        described(
            "the longest time for a whole request, from its last byte to the end of its answer (default: no limit)"
        ),
    ] = None
    retries: Annotated[CountOrNone, described("how many more attempts a request may have when engines fail")] = 2
    continuation: Annotated[
        Switch,
        described(
            "continue a stream on another engine if its decode engine fails. Requests with `n` above 1, `stop`, "
            "tools, logprobs, structured output or penalties cannot be continued; they end with an error event"
        ),
    ] = False
    probe: Annotated[
        Seconds, described("seconds between two health checks of an engine, which also ask which models it serves")
    ] = 5.0
    startup_check: Annotated[
        OnOff,
        described(
            "on sends one small request through each engine soon after it is ready, in the background, and logs "
            "whether its KV gets to or from another engine"
        ),
    ] = "on"


class _RoomOptions(_OptionGroup):
    title = "limits (without them requests wait in the engines' own queues)"

    prefill_requests: Annotated[
        Count | None,
        described("the largest number of requests that run on one prefill engine; others wait in the proxy"),
    ] = None
    decode_requests: Annotated[
        Count | None,
        described("the largest number of requests that run on one decode engine; others wait in the proxy"),
    ] = None
    aggregated_requests: Annotated[
        Count | None,
        described("the largest number of requests that run on one aggregated engine; others wait in the proxy"),
    ] = None
    queue: Annotated[
        CountOrNone,
        described("the largest number of requests that wait for each role; further ones get a 503 with Retry-After"),
    ] = 1024
    queue_per_tenant: Annotated[
        Count | None,
        described("the largest number of one tenant's requests that wait for each role; further ones get a 429"),
    ] = None
    queue_wait: Annotated[Seconds, described("how long a request may wait in the proxy")] = 60.0


class _SharingOptions(_OptionGroup):
    title = "several proxies in front of one fleet"

    share: Annotated[
        ShareURL | None,
        described(
            "where the proxies of a site tell each other their load, caches and failures: "
            "valkey://host:6379?prefix=SITE; no request ever waits for it"
        ),
    ] = None
    share_keys: Annotated[
        File | None,
        described("the signing keys that these proxies have in common (default: the file of --sign-with)"),
    ] = None


class _SigningOptions(_OptionGroup):
    title = "signed documents, for engines that verify them"

    sign_with: Annotated[
        File | None,
        described(
            "sign the KV transfer documents for engines with the keys of this file; `kvparams signing-keys` makes it"
        ),
    ] = None
    audience: Annotated[
        Name | None, described("the name of the engine pool that signed documents are for; required with --sign-with")
    ] = None


class _AdminOptions(_OptionGroup):
    title = "admin API, under /admin, and live page, at /ui"

    admin_token_file: Annotated[
        File | None, described("serve the admin API and the live page, and require the token in this file")
    ] = None
    viewer_token_file: Annotated[
        File | None,
        described("serve the live page; with the token in this file it shows no addresses and changes nothing"),
    ] = None


class _TelemetryOptions(_OptionGroup):
    title = "logs and traces (metrics are at /metrics)"

    log_requests: Annotated[
        Log,
        described(
            "where to write one line of JSON for each request, without prompts and answers: a file, - for "
            "standard output, or off"
        ),
    ] = "-"
    log_level: Annotated[
        LogLevelName, described("the least severe lines of the proxy's own log, which is on standard error")
    ] = "info"
    log_format: Annotated[
        LogFormatName,
        described(
            "the form of these lines; auto is text on a terminal and otherwise JSON, one object in each line. "
            "The forms are"
        ),
    ] = "auto"
    trace: Annotated[
        Share | None,
        described(
            "send OpenTelemetry traces for this share of requests, from 0 to 1. The OTEL_* environment variables "
            "name the collector"
        ),
    ] = None


class ProxyOptions(
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
