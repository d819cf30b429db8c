"""From the command line and the fleet file to `Settings`: layered, checked, and everything wrong said at once.

A flag goes before the file, the file before the default. The one rule: what is started was checked completely; after
this nothing about the settings can fail.
"""

import argparse
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvparams.admission import QueueLimits, RoleLimits
from kvparams.dialects.registry import each_table
from kvparams.jsontext import JSONLimits
from kvparams.managers.choice import Mode
from kvparams.scheduling import Role
from kvparams.trust.keyring import KeyringError
from kvparams_proxy import production_stack
from kvparams_proxy.clients.connections import ConnectionLimits
from kvparams_proxy.clients.keys_file import KeysError, read_keys
from kvparams_proxy.descriptors import connections_for, descriptor_limit, descriptors_for, refusals_for
from kvparams_proxy.options import DEFAULTS, OPTIONS, check_settings
from kvparams_proxy.production_stack import StaticFleet
from kvparams_proxy.registry.access import Places, load_access
from kvparams_proxy.registry.checks import (
    check_addresses,
    check_connector,
    check_id,
    check_url,
    is_label,
    is_label_value,
)
from kvparams_proxy.registry.entries import Entry, Rules, Selector
from kvparams_proxy.registry.file import FileProvider
from kvparams_proxy.registry.parsing import check_bootstrap, parse_entry, store_of
from kvparams_proxy.registry.problems import ConfigError, Problems
from kvparams_proxy.secret import Secret, SecretError, open_to_others, secret_from_file, secret_from_variable
from kvparams_proxy.server import ServerSettings
from kvparams_proxy.settings import DEFAULT_MODES, Settings, known_rules
from kvparams_proxy.signing import FollowedSigner, Signing
from kvparams_proxy.tls import EngineTLS, TLSError, TLSSettings, server_context
from kvparams_proxy.tokens.choices import TokenizerError, load_tokenizers
from kvparams_proxy.tokens.service import Tokenizers

__all__ = ["Configuration", "configure"]


class Configuration(NamedTuple):
    """What to start."""

    settings: Settings
    host: str
    port: int
    server: ServerSettings
    entries: tuple[Entry, ...]
    """Every engine that is known now, those of the fleet file included."""
    notes: tuple[str, ...]
    """What the operator should know."""


def configure(arguments: argparse.Namespace) -> Configuration:
    """Read what was asked for. Blocks: it reads the files that are named.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems = Problems()
    flags = _flags(arguments, problems)
    static = production_stack.read_flags(arguments, problems)
    rules = _rules(arguments, static, problems)
    given = _entries(arguments, static, rules, problems)
    if any(entry.url.startswith("https:") for entry in given) and rules.places.tls is None:
        rules = replace(rules, places=replace(rules.places, tls=EngineTLS()))
    rules = replace(rules, access=load_access(rules.places, "--engine-key-file, --engine-ca", problems))
    provider: FileProvider | None = None
    if arguments.config is not None:
        path = Path(arguments.config)
        try:
            provider = FileProvider(path, rules, partial(check_settings, path.parent))
        except ConfigError as error:
            for problem in error.problems:
                problems.add(f"--config {path}", problem)
    values: dict[str, Any] = dict(DEFAULTS)
    if static.documents:
        values |= {"host": production_stack.HOST, "port": production_stack.PORT}
    values |= {} if provider is None else provider.document.settings
    values |= flags
    admin = _admin(values, problems)
    tls = _tls(values, problems)
    _check_keys(values["client-keys"], problems)
    signing = _signing(values, problems)
    tokenizers = _tokenizers(values, problems)
    entries = (*given, *(() if provider is None else provider.document.entries))
    if not (entries or provider or admin or problems):
        problems.add("", "no engine is given; name at least one --prefill URL and one --decode URL, or --config FILE")
    policy, notes = _policy(values, tokenizers)
    problems.check()
    try:
        settings = Settings(
            instances=tuple(entry.instance() for entry in given),
            rules=rules,
            providers=() if provider is None else (provider,),
            admin=admin,
            client_keys=values["client-keys"],
            signing=signing,
            policy=policy,
            modes=_modes(values, provider),
            keep_modes="mode" in flags,
            tokenizers=tokenizers,
            prefill_timeout_s=values["prefill-timeout"],
            decode_timeout_s=values["decode-timeout"],
            request_timeout_s=values["request-timeout"],
            client_timeout_s=values["client-timeout"],
            retries=values["retries"],
            continuation=values["continuation"],
            probe_s=values["probe"],
            limits={role: RoleLimits(values[f"{role}-requests"], values[f"{role}-tokens"]) for role in Role},
            queue=QueueLimits(values["queue"], values["queue-per-tenant"], values["queue-wait"]),
            slow_start_s=values["slow-start"],
            expose_route=values["expose-route"],
            log_requests=values["log-requests"],
            trace=values["trace"],
            body=JSONLimits(max_bytes=values["max-body-bytes"]),
            body_memory_bytes=values["max-body-memory"] or 32 * values["max-body-bytes"],
        )
    except ValueError as error:
        raise ConfigError((str(error),)) from error
    files = descriptor_limit()
    if (wanted := descriptors_for(values["max-connections"] or 1)) > files:
        notes.append(f"--max-connections needs {wanted} open files, and {files} are allowed: see ulimit -n")
    server = ServerSettings(
        connections=ConnectionLimits(
            values["max-connections"] or connections_for(files),
            values["max-connections-per-address"],
            refusals_for(files),
        ),
        drain_delay_s=values["drain-delay"],
        grace_s=values["grace"],
        tls=tls,
        direct=not values["plain-asgi"],
    )
    secrets = dict.fromkeys((values["admin-token-file"], rules.places.key_file))
    notes += [f"{path} can be read by others: chmod 600 {path}" for path in secrets if path and open_to_others(path)]
    notes += [f"left out: {error}" for error in each_table()[1]]
    return Configuration(settings, values["host"], values["port"], server, entries, (*static.notes, *notes))


def _modes(values: Mapping[str, Any], provider: FileProvider | None) -> tuple[Mode, ...]:
    """A flag goes before the file."""
    if values["mode"] is not None:
        return (values["mode"],)
    return provider.document.modes if provider is not None and provider.document.modes else DEFAULT_MODES


def _flags(arguments: argparse.Namespace, problems: Problems) -> dict[str, object]:
    """The flags that were given, checked."""
    found: dict[str, object] = {}
    for option in OPTIONS:
        given = getattr(arguments, option.name.replace("-", "_"))
        if given is None:
            continue
        try:
            value = option.kind.read(given) if isinstance(given, str) else given
            found[option.name] = option.kind.check(value, Path())
        except ValueError as error:
            problems.add(f"--{option.name}", str(error))
    return found


def _rules(arguments: argparse.Namespace, static: StaticFleet, problems: Problems) -> Rules:
    rules = known_rules()
    try:
        check_connector(arguments.connector, rules)
    except ValueError as error:
        problems.add("--connector", str(error))
    selectors = dict(static.selectors)
    for role in Role:
        text = cast("str | None", getattr(arguments, f"{role}_labels"))
        if text is not None:
            selectors[role] = {**selectors.get(role, {}), **_selector(role, text, problems)}
    key_file = cast("str | None", arguments.engine_key_file)
    ca = cast("str | None", arguments.engine_ca)
    places = Places(
        key_file=None if key_file is None else Path(key_file),
        tls=None if ca is None else EngineTLS(ca=Path(ca)),
    )
    addresses: tuple[str, ...] = ()
    try:
        addresses = check_addresses(arguments.engine_address)
    except ValueError as error:
        problems.add("--engine-address", f"{error}")
    return replace(rules, connector=arguments.connector, selectors=selectors, places=places, addresses=addresses)


def _selector(role: Role, text: str, problems: Problems) -> Selector:
    """Of `label=value,label=value`; a label that stands twice may have either value."""
    wanted: dict[str, frozenset[str]] = {}
    for pair in text.split(","):
        label, _, value = pair.strip().partition("=")
        if not is_label(label) or not is_label_value(value):
            problems.add(f"--{role}-labels", "must be label=value, several separated by commas")
            return {}
        wanted[label] = wanted.get(label, frozenset()) | {value}
    return wanted


def _entries(arguments: argparse.Namespace, static: StaticFleet, rules: Rules, problems: Problems) -> tuple[Entry, ...]:
    """The engines that flags name."""
    entries: list[Entry] = []
    bootstraps = _bootstraps(arguments, rules, problems)
    for role in Role:
        for number, text in enumerate(cast("Sequence[str]", getattr(arguments, role.value))):
            name, equals, url = text.partition("=")
            if not equals or "://" in name:
                name, url = f"{role}-{number}", text
            bootstrap = bootstraps.pop(name, None) if role is Role.PREFILL else None
            try:
                id, url = check_id(name), check_url(url)
                entry = Entry(
                    id,
                    url,
                    role,
                    rules.connector,
                    bootstrap=bootstrap,
                    addresses=rules.addresses,
                    store=store_of(rules.connector, rules),
                )
            except ValueError as error:
                problems.add(f"--{role}, the {number + 1}. time", f"[NAME=]URL {error}")
            else:
                entries.append(entry)
    for name in bootstraps:
        problems.add("--bootstrap", f"no --prefill engine is called {name[:64]!r}")
    for document in static.documents:
        entry = parse_entry(document, "--static-backends", rules, problems)
        if entry is not None:
            entries.append(entry)
    return tuple(entries)


def _bootstraps(arguments: argparse.Namespace, rules: Rules, problems: Problems) -> dict[str, str]:
    """Where flags say that bootstrap servers are, by the name of their engine."""
    found: dict[str, str] = {}
    for text in cast("Sequence[str]", arguments.bootstrap):
        name, _, url = text.partition("=")
        try:
            found[check_id(name)] = check_url(url)
        except ValueError:
            problems.add("--bootstrap", "must be NAME=http://host:port, NAME that of a --prefill engine")
    if found:
        check_bootstrap(Role.PREFILL, rules.connector, rules, "--bootstrap", problems)
    return found


def _admin(values: Mapping[str, Any], problems: Problems) -> Secret | None:
    path, variable = values["admin-token-file"], values["admin-token-env"]
    if path is not None and variable is not None:
        problems.add("--admin-token-env", "--admin-token-file is given too; name one of them")
        return None
    try:
        if path is not None:
            return secret_from_file(path)
        return None if variable is None else secret_from_variable(variable, os.environ)
    except SecretError as error:
        problems.add("the admin API's token", str(error))
        return None


def _tls(values: Mapping[str, Any], problems: Problems) -> ssl.SSLContext | None:
    certificate, key, authority = (values[f"tls-{name}"] for name in ("certificate", "key", "client-ca"))
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None:
        problems.add("--tls-certificate, --tls-key", "https needs both")
        return None
    try:
        return server_context(TLSSettings(certificate, key, authority))
    except TLSError as error:
        problems.add("https for clients", str(error))
        return None


def _signing(values: Mapping[str, Any], problems: Problems) -> Signing | None:
    path, audience = values["sign-with"], values["audience"]
    if path is None and audience is None:
        return None
    if path is None or audience is None:
        problems.add("--sign-with, --audience", "signed documents need both")
        return None
    signing = Signing(path, audience)
    try:
        FollowedSigner(signing)
    except KeyringError as error:
        problems.add("--sign-with", str(error))
    except ValueError as error:
        problems.add("--audience", str(error))
    return signing


def _tokenizers(values: Mapping[str, Any], problems: Problems) -> Tokenizers:
    try:
        return load_tokenizers(values["tokenizer"] or {})
    except TokenizerError as error:
        problems.add("--tokenizer", str(error))
        return {}


def _policy(values: Mapping[str, Any], tokenizers: Tokenizers) -> tuple[str, list[str]]:
    """The policy that is named, or the one that is best where nobody has named one; and what is to be said of it."""
    if values["policy"] is not None or not tokenizers:
        return values["policy"] or "round_robin", []
    if any(find_spec(name) is None for name in ("numpy", "msgspec")):
        return "round_robin", ["policy round_robin; for cache_aware: pip install 'kvparams[proxy,index]'"]
    return "cache_aware", ["policy cache_aware, since prompts get token ids; --policy names another one"]


def _check_keys(path: Path | None, problems: Problems) -> None:
    if path is not None:
        try:
            read_keys(path)
        except KeysError as error:
            problems.add("--client-keys", str(error))
