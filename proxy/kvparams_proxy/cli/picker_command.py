"""`kvparams picker` starts the endpoint picker of the Gateway API Inference Extension from the command line."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, cast

from kvparams.instances import Role
from kvparams_proxy.cli.proxy_command import (
    add_engine_flags,
    add_fleet_flags,
    add_option_flags,
    load_configuration,
    run_server,
)
from kvparams_proxy.config.discovery_url import KubernetesSource, parse_discovery_url
from kvparams_proxy.execution.active_modes import needed_roles
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec
from kvparams_proxy.picker.objectives import parse_objectives
from kvparams_proxy.picker.settings import PARTNER_DIALECTS, PartnerDialect, PickerSettings, PickerTLS

__all__ = ["COMMAND"]

_PORTS: Final = range(1 << 16)
_MOST_FALLBACKS: Final = 16
_EXAMPLE: Final = """
Envoy, or a Gateway that is built on it, asks the picker over gRPC which engine gets each request; bodies of requests
and responses go from Envoy to the engine. The picker chooses as `kvparams proxy` does, with the same options.

Example with two engines that do all the work alone, and a choice by cached prefixes:

  kvparams picker --mode aggregated --policy cache_aware --tokenizer bytes --grpc-port 9002 \\
                  --aggregated http://10.0.0.1:8000 --aggregated http://10.0.0.2:8000

Prefill and decode apart, with a sidecar (`kvparams sidecar`) beside each decode engine. The picker names the prefill
engine to the sidecar in a signed header; the sidecar has the same keys:

  kvparams picker --sign-with signing-keys.json --audience pool-a --grpc-port 9002 \\
                  --prefill http://10.0.0.1:8000 --decode http://10.0.0.3:8100

docs/gateway.md has the configuration of Envoy. Over HTTP (--port) the picker serves /health, /metrics and /admin.
"""

_SIDECAR_RANKS: Final = (
    "a decode engine has `ranks`, and sidecars pass on no rank: the engine chooses one itself, and what is counted for "
    "each rank is wrong; name the engine without `ranks`"
)
_PLAIN_KEYS: Final = (
    "the keys of engines go to the gateway in headers, over gRPC without TLS: add --grpc-certificate and --grpc-key "
    "unless nobody else can read or reach that port"
)


class PickerCommand:
    """See `kvparams.cli.Command`."""

    summary = "Run an endpoint picker, which Envoy and Gateways ask where each request goes."
    reads_variables = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the picker's own flags, and those of the proxy."""
        parser.epilog = _EXAMPLE
        own = parser.add_argument_group("endpoint picker")
        own.add_argument(
            "--grpc-host",
            default="127.0.0.1",
            metavar="HOST",
            help="the address to listen on for gRPC (default: 127.0.0.1)",
        )
        own.add_argument(
            "--grpc-port",
            type=int,
            default=9002,
            metavar="PORT",
            help="the port for gRPC; 0 picks a free one (default: 9002)",
        )
        own.add_argument("--grpc-certificate", metavar="FILE", help="serve gRPC over TLS with this certificate (PEM)")
        own.add_argument("--grpc-key", metavar="FILE", help="the private key of --grpc-certificate (PEM)")
        own.add_argument(
            "--grpc-client-ca", metavar="FILE", help="require client certificates of these authorities (mTLS, PEM)"
        )
        own.add_argument(
            "--fallbacks",
            type=int,
            default=2,
            metavar="N",
            help="name N further endpoints, for the gateway's retries (default: 2). A cluster of type ORIGINAL_DST "
            "reads only one endpoint: use 0",
        )
        own.add_argument(
            "--partner-header",
            choices=PARTNER_DIALECTS,
            default="signed",
            help="how sidecars are told which prefill engine to use: signed (with --sign-with), llm-d "
            "(x-prefiller-host-port, not signed) or both (default: signed)",
        )
        own.add_argument(
            "--objective",
            action="append",
            default=[],
            metavar="NAME=PRIORITY",
            help="the priority of requests whose header x-gateway-inference-objective has this name: higher goes first "
            "where requests wait, and below 0 they get a 429 instead. Repeat the option for each objective; with "
            "--client-keys the keys have priorities instead",
        )
        engines = parser.add_argument_group("engines")
        ranks = "; not behind a sidecar, which passes on no rank"
        add_engine_flags(engines, "or of the sidecar in front of it", ranks)
        add_fleet_flags(engines)
        add_option_flags(parser, without=("workers", "startup-check", "takeover"))

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until told to stop."""
        picker = _picker_settings(arguments)
        if isinstance(picker, str):
            return _refused(picker)
        try:
            from kvparams_proxy.picker.app import create_picker_app
        except ImportError as error:
            return _refused(f"needs gRPC and Envoy's protocol ({error}): pip install 'kvparams[picker]'")
        asked = load_configuration("picker", arguments)
        if asked is None:
            return 2
        needed = sorted(needed_roles(asked.settings))
        if len(needed) > 1 and asked.settings.signing is None and picker.partner_dialect != "llm-d":
            return _refused(
                "sidecars must be told their prefill engine: add --sign-with FILE --audience NAME, or choose "
                "--partner-header llm-d, or --mode aggregated where every engine does both"
            )
        picker = replace(picker, pool=_pool(arguments.discover))
        notes = engine_notes(needed, asked.entries)
        if picker.tls is None and any(entry.credential_sources.key_file is not None for entry in asked.entries):
            notes.append(_PLAIN_KEYS)
        asked = asked._replace(settings=replace(asked.settings, startup_check=False))  # sidecars check their engines
        make = partial(create_picker_app, picker=picker)
        return run_server("picker", asked, notes, arguments=arguments, make=make)


def _pool(discovered: Sequence[str]) -> KubernetesSource | None:
    """Returns the InferencePool among the sources of engines."""
    sources = [parse_discovery_url(text) for text in discovered]
    return next((each for each in sources if isinstance(each, KubernetesSource) and each.pool is not None), None)


def engine_notes(needed: Sequence[Role], entries: Sequence[InstanceSpec]) -> list[str]:
    """Returns what operators should know of their engines. `needed`: the roles of all modes."""
    missing = [role for role in needed if not any(entry.role is role for entry in entries)]
    notes = [f"no {role} engine is given; requests get a 503 until there is one" for role in missing]
    if len(needed) > 1 and any(entry.rank is not None and entry.role is Role.DECODE for entry in entries):
        notes.append(_SIDECAR_RANKS)
    return notes


def _picker_settings(arguments: argparse.Namespace) -> PickerSettings | str:
    """Returns the settings, or what is wrong with the flags."""
    files = [arguments.grpc_certificate, arguments.grpc_key, arguments.grpc_client_ca]
    certificate, key, client_ca = (None if each is None else Path(each) for each in files)
    if (certificate is None) != (key is None):
        return "--grpc-certificate, --grpc-key: TLS needs both"
    if client_ca is not None and certificate is None:
        return "--grpc-client-ca: is used with --grpc-certificate and --grpc-key"
    for path in (certificate, key, client_ca):
        if path is not None and not path.is_file():
            return f"{path} is not a file"
    if arguments.grpc_port not in _PORTS:
        return "--grpc-port: must be from 0 to 65535"
    if not 0 <= arguments.fallbacks <= _MOST_FALLBACKS:
        return f"--fallbacks: must be from 0 to {_MOST_FALLBACKS}"
    try:
        objectives = parse_objectives(arguments.objective)
    except ValueError as error:
        return f"--objective: {error}"
    return PickerSettings(
        host=arguments.grpc_host,
        port=arguments.grpc_port,
        tls=None if certificate is None or key is None else PickerTLS(certificate, key, client_ca),
        fallbacks=arguments.fallbacks,
        objectives=objectives,
        partner_dialect=cast("PartnerDialect", arguments.partner_header),
    )


def _refused(said: str) -> int:
    print(f"kvparams picker: {said}", file=sys.stderr)
    return 2


COMMAND: Final = PickerCommand()
"""The entry point."""
