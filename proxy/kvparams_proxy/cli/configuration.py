"""Builds the configuration from the command line and the fleet file, and reports all errors at once.

A flag goes before the file, the file before the default. Settings are checked completely here; none can fail after the
start.
"""

import argparse
import ssl
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

from pydantic import ValidationError

from kvparams.dialects.registry import load_tables_and_errors
from kvparams.instances import Instance, Role
from kvparams.jsontext.document import JSONLimits
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.settings_model import describe_setting_error, did_you_mean, find_setting_errors
from kvparams_proxy.cli import production_stack_flags
from kvparams_proxy.cli.discovery_configuration import discovery_providers
from kvparams_proxy.cli.engine_flags import engine_specs
from kvparams_proxy.cli.production_stack_flags import StaticFleet
from kvparams_proxy.cli.security_configuration import (
    admin_token,
    check_client_keys,
    notes_of_open_files,
    server_tls,
    sharing_settings,
    signing_settings,
    viewer_token,
)
from kvparams_proxy.cli.shared_urls import notes_of_shared_urls
from kvparams_proxy.config.fleet_file import FleetFileProvider
from kvparams_proxy.config.options import OPTIONS, ProxyOptions
from kvparams_proxy.config.picker_url import PickerURL, parse_picker_url
from kvparams_proxy.config.settings import DEFAULT_MODES, Settings, default_spec_rules
from kvparams_proxy.config.sharing import SharingSettings
from kvparams_proxy.config.signing import SigningSettings
from kvparams_proxy.config.spec_fields import check_addresses, check_connector, check_label
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.fleet.registry.credentials import CredentialSources, load_credentials
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, LabelSelector, SpecRules
from kvparams_proxy.fleet.registry.providers import InstanceProvider
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.connections import ConnectionLimits
from kvparams_proxy.server.file_descriptors import connections_for, descriptor_limit, descriptors_for, refusals_for
from kvparams_proxy.server.http_server import ServerSettings
from kvparams_proxy.tls import EngineTLSSettings
from kvparams_proxy.tokenization.errors import TokenizerError
from kvparams_proxy.tokenization.service import TokenizersByModel
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod, load_tokenizers

__all__ = ["Configuration", "build_configuration"]


class Configuration(NamedTuple):
    """Describes the server to start: its settings, address, instances and the problems to report."""

    settings: Settings
    host: str
    port: int
    server: ServerSettings
    entries: tuple[InstanceSpec, ...]
    """Every engine that is known now, those of the fleet file included."""
    notes: tuple[str, ...]
    """What the operator should know."""
    workers: int = 1
    """The number of processes that serve. A sidecar ignores it."""
    max_connections: int | None = None
    """The limit for all workers together, if one is given."""
    options: ProxyOptions = ProxyOptions()
    """The options, of which `settings` and `server` are made."""
    flag_options: frozenset[str] = frozenset()
    """Names of options that the command line or the environment sets."""
    file: str = ""
    """The path of the fleet file; empty without one."""
    file_options: frozenset[str] = frozenset()
    """Names of options that the fleet file sets."""
    rules: SpecRules | None = None
    """The rules for entries, with `roles` and `defaults` of the fleet file."""


def build_configuration(arguments: argparse.Namespace) -> Configuration:
    """Builds the configuration. Blocks: it reads the files that are named.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems = ConfigProblems()
    static = production_stack_flags.read_production_stack_flags(arguments, problems)
    rules = _rules(arguments, static, problems)
    flags = _flags(arguments, rules, problems)
    given = engine_specs(arguments, static, rules, problems)
    if any(entry.url.startswith("https:") for entry in given) and rules.credential_sources.tls is None:
        rules = replace(rules, credential_sources=replace(rules.credential_sources, tls=EngineTLSSettings()))
    rules = replace(
        rules, credentials=load_credentials(rules.credential_sources, "--engine-key-file, --engine-ca", problems)
    )
    rules = replace(rules, model_aliases=flags.model_alias)
    provider = _file_provider(arguments.config, rules, problems)
    found = discovery_providers(arguments, static, rules if provider is None else provider.document.rules, problems)
    options = ProxyOptions()
    if static.documents or static.kubernetes:
        options = ProxyOptions(host=production_stack_flags.DEFAULT_HOST, port=production_stack_flags.DEFAULT_PORT)
    if provider is not None:
        options = options.override(provider.document.settings)
    options = options.override(flags)
    admin, viewer = admin_token(options, problems), viewer_token(options, problems)
    tls = server_tls(options, problems)
    check_client_keys(options.client_keys, problems)
    signing = signing_settings(options, problems)
    sharing = sharing_settings(options, problems)
    tokenizers = _tokenizers(options, problems)
    picker = _decode_picker(getattr(arguments, "decode_picker", None), problems)
    entries = (*given, *(() if provider is None else provider.document.entries))
    if not (entries or provider or found or admin or problems):
        problems.add("", "no engine is given; add --prefill URL and --decode URL, --discover URL or --config FILE")
    policy, notes = _policy(options, tokenizers)
    problems.raise_if_any()
    settings = _make_settings(
        options,
        instances=tuple(entry.make_instance() for entry in given),
        rules=rules,
        provider=provider,
        found=found,
        admin_token=admin,
        viewer_token=viewer,
        signing=signing,
        sharing=sharing,
        decode_picker=picker,
        policy=policy,
        modes_are_fixed=flags.mode is not None,
        tokenizers=tokenizers,
    )
    server = _server_settings(options, tls, notes)
    secrets = (options.admin_token_file, options.viewer_token_file, options.share_keys)
    notes += notes_of_open_files(*secrets, rules.credential_sources.key_file)
    notes += notes_of_shared_urls(entries)
    notes += [f"left out: {error}" for error in load_tables_and_errors()[1]]
    return Configuration(
        settings,
        options.host,
        options.port,
        server,
        entries,
        (*static.notes, *notes),
        options.workers,
        options.max_connections,
        options,
        frozenset(flags.model_fields_set),
        arguments.config or "",
        frozenset() if provider is None else frozenset(provider.document.settings.model_fields_set),
        rules if provider is None else provider.document.rules,
    )


def _file_provider(path: str | None, rules: SpecRules, problems: ConfigProblems) -> FleetFileProvider | None:
    """Returns the provider of the fleet file; None without one, or where it is wrong."""
    if path is None:
        return None
    try:
        return FleetFileProvider(Path(path), rules)
    except ConfigError as error:
        for problem in error.problems:
            problems.add(f"--config {path}", problem)
        return None


def _decode_picker(text: str | None, problems: ConfigProblems) -> PickerURL | None:
    """Returns the external picker; None without one, or where its URL is wrong."""
    try:
        return None if text is None else parse_picker_url(text)
    except ValueError as error:
        problems.add("--decode-picker", str(error))
        return None


def _make_settings(
    options: ProxyOptions,
    *,
    instances: tuple[Instance, ...],
    rules: SpecRules,
    provider: FleetFileProvider | None,
    found: tuple[InstanceProvider, ...],
    admin_token: Secret | None,
    viewer_token: Secret | None,
    signing: SigningSettings | None,
    sharing: SharingSettings | None,
    decode_picker: PickerURL | None,
    policy: str,
    modes_are_fixed: bool,
    tokenizers: TokenizersByModel,
) -> Settings:
    """Makes the settings of the proxy from its options and what has been loaded for them.

    Raises:
        ConfigError: two settings contradict each other.
    """
    try:
        return Settings(
            instances=instances,
            spec_rules=rules,
            providers=(*(() if provider is None else (provider,)), *found),
            admin_token=admin_token,
            viewer_token=viewer_token,
            client_keys=options.client_keys,
            signing=signing,
            sharing=sharing,
            policy=policy,
            modes=_modes(options, provider),
            modes_are_fixed=modes_are_fixed,
            tokenizers=tokenizers,
            models={} if provider is None else provider.document.models,
            model_aliases=options.model_alias or {},
            decode_picker=decode_picker,
            prefill_timeout_s=options.prefill_timeout,
            decode_timeout_s=options.decode_timeout,
            request_timeout_s=options.request_timeout,
            client_timeout_s=options.client_timeout,
            retries=options.retries,
            continuation=options.continuation,
            probe_interval_s=options.probe,
            startup_check=options.startup_check == "on",
            limits={
                Role.PREFILL: RoleLimits(options.prefill_requests),
                Role.DECODE: RoleLimits(options.decode_requests),
                Role.AGGREGATED: RoleLimits(options.aggregated_requests),
            },
            queue=QueueLimits(options.queue, options.queue_per_tenant, options.queue_wait),
            expose_route=options.expose_route,
            log_requests=options.log_requests,
            trace=options.trace,
            body=JSONLimits(max_bytes=options.max_body_bytes),
            body_memory_bytes=options.max_body_memory or 32 * options.max_body_bytes,
        )
    except ValueError as error:
        raise ConfigError((str(error),)) from error


def _server_settings(options: ProxyOptions, tls: ssl.SSLContext | None, notes: list[str]) -> ServerSettings:
    """Makes the settings of the HTTP server, and notes where too few files may be open."""
    files = descriptor_limit()
    if (wanted := descriptors_for(options.max_connections or 1)) > files:
        notes.append(f"--max-connections needs {wanted} open files, but the limit is {files}; raise it with ulimit -n")
    return ServerSettings(
        connections=ConnectionLimits(
            options.max_connections or connections_for(files),
            options.max_connections_per_address,
            refusals_for(files),
        ),
        drain_delay_s=options.drain_delay,
        grace_s=options.grace,
        tls=tls,
    )


def _modes(options: ProxyOptions, provider: FleetFileProvider | None) -> tuple[ManagerMode, ...]:
    """Returns the modes: those of the flag, or else those of the file."""
    if options.mode is not None:
        return (options.mode,)
    return provider.document.modes if provider is not None and provider.document.modes else DEFAULT_MODES


def _flags(arguments: argparse.Namespace, rules: SpecRules, problems: ConfigProblems) -> ProxyOptions:
    """Returns the flags that were given. Invalid ones are added to the problems and left out."""
    given = {option.name: option.parse_flag(getattr(arguments, option.attribute)) for option in OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return ProxyOptions.model_validate(given, context=rules)
    except ValidationError as error:
        for found in find_setting_errors(error):
            name = str(found["loc"][0])
            problems.add(f"--{name}", describe_setting_error(found))
            given.pop(name, None)
    return ProxyOptions.model_validate(given, context=rules)


def _rules(arguments: argparse.Namespace, static: StaticFleet, problems: ConfigProblems) -> SpecRules:
    rules = default_spec_rules()
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
    places = CredentialSources(
        key_file=None if key_file is None else Path(key_file),
        tls=None if ca is None else EngineTLSSettings(ca=Path(ca)),
    )
    addresses: tuple[str, ...] = ()
    try:
        addresses = check_addresses(arguments.engine_address)
    except ValueError as error:
        problems.add("--engine-address", f"{error}")
    return replace(
        rules, connector=arguments.connector, selectors=selectors, credential_sources=places, addresses=addresses
    )


def _selector(role: Role, text: str, problems: ConfigProblems) -> LabelSelector:
    """Parses `label=value,label=value` into a selector. A label that is repeated may have either value."""
    wanted: dict[str, frozenset[str]] = {}
    for pair in text.split(","):
        label, _, value = pair.strip().partition("=")
        try:
            check_label(label, value)
        except ValueError:
            problems.add(f"--{role}-labels", "must be LABEL=VALUE; separate several by commas")
            return {}
        wanted[label] = wanted.get(label, frozenset()) | {value}
    return wanted


def _tokenizers(options: ProxyOptions, problems: ConfigProblems) -> TokenizersByModel:
    try:
        return load_tokenizers(options.tokenizer or {})
    except TokenizerError as error:
        words = [str(way) for way in (options.tokenizer or {}).values() if isinstance(way, Path) and not way.exists()]
        nearest = next(filter(None, (did_you_mean(word, tuple(TokenizationMethod)) for word in words)), "").rstrip()
        problems.add("--tokenizer", f"{error}{f'; {nearest}' if nearest else ''}")
        return {}


def _policy(options: ProxyOptions, tokenizers: TokenizersByModel) -> tuple[str, list[str]]:
    """Returns the named policy or the best default, with notes for the operator."""
    if options.policy is not None or not tokenizers:
        return options.policy or "round_robin", []
    if any(find_spec(name) is None for name in ("numpy", "msgspec")):
        return "round_robin", ["the policy is round_robin; for cache_aware: pip install 'kvparams[proxy,index]'"]
    return "cache_aware", ["the policy is cache_aware because there is a --tokenizer; --policy chooses another one"]
