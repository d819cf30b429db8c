"""`kvparams sidecar` starts the proxy beside one engine from the command line.

Its settings have the same names as the proxy's. Its own flags only describe the engine beside it.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, cast, get_args

from kvparams.instances import Role
from kvparams.routing.managers.local_remote import LOCAL_MANAGERS
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.cli.proxy_command import (
    add_decode_picker_flag,
    add_fleet_flags,
    add_option_flags,
    load_configuration,
    run_server,
)
from kvparams_proxy.config.settings import PrefillPartnerMode
from kvparams_proxy.config.spec_fields import check_url

__all__ = ["COMMAND"]

_REMOTE: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_EXAMPLE: Final = """
A sidecar stands in front of one engine and splits each request: its engine does one part (prefill or decode), and a
remote engine does the other. Clients and load balancers talk to the sidecar as they would to an engine. When a client
disconnects, both engines stop its work. Only sidecars may reach the engines: keep clients off the engines' ports.

Beside a prefill engine, with two decode engines:

  kvparams sidecar --role prefill --engine http://127.0.0.1:8000 --port 8100 \\
                   --decode http://10.0.0.3:8000 --decode http://10.0.0.4:8000

Beside a decode engine, with a remote prefill engine:

  kvparams sidecar --role decode --engine http://127.0.0.1:8000 --port 8100 --prefill http://10.0.0.1:8000

With RabbitMQ in between, from which decode engines pull requests, and a store for the KV:

  kvparams sidecar --role prefill --engine http://127.0.0.1:8000 --port 8100 --connector store --broker amqp://broker
  kvparams sidecar --role decode  --engine http://127.0.0.1:8000 --port 8101 --connector store --broker amqp://broker

All sidecars may follow one file of the whole fleet; each uses the engines of the other role:

  kvparams sidecar --role prefill --engine p0=http://127.0.0.1:8000 --config fleet.yaml

Engines tell each other the address of their KV. If that address has another host than --engine (such as 127.0.0.1),
declare it: --engine-address 10.0.0.1. To check that KV gets through, use --check.

The sidecar also serves /v1/models, /health (503 while the engine here or all remote engines are missing), /metrics, and
with a token /admin, as `kvparams proxy` does. The engine here answers embeddings, /tokenize and the like.
"""


class SidecarCommand:
    """See `kvparams.cli.Command`."""

    summary = "Run a proxy beside one engine, which prefills or decodes; a remote engine does the other part."
    reads_variables = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags that name engines, and one for each setting of the proxy."""
        parser.epilog = _EXAMPLE
        parser.set_defaults(**{role.value: [] for role in Role})
        group = parser.add_argument_group("engines")
        group.add_argument(
            "--engine",
            required=True,
            metavar="[NAME=]URL",
            help="the URL of the engine beside this sidecar, http://host:port",
        )
        group.add_argument(
            "--role",
            required=True,
            choices=[role.value for role in LOCAL_MANAGERS],
            help="the part of a request that this engine does",
        )
        for local, role in _REMOTE.items():
            group.add_argument(
                f"--{role}",
                action="append",
                metavar="[NAME=]URL",
                help=f"the URL of a remote {role} engine, if the engine here does {local}; repeat the option for "
                "each engine",
            )
        group.add_argument(
            "--broker",
            metavar="URL|FILE",
            help="the RabbitMQ between prefill and decode: amqp://host:port, or a file with its URL if that has a "
            "password. Decode engines pull requests from it, as many as --decode-requests (default there: 16)",
        )
        group.add_argument(
            "--pool",
            default="kvparams",
            metavar="NAME",
            help="the name of the queues at the broker (default: kvparams)",
        )
        group.add_argument(
            "--prefill-partner",
            choices=get_args(PrefillPartnerMode),
            default="off",
            help="what to make of the prefill engine that `kvparams picker` names in a signed header, beside a decode "
            "engine: prefer it; require it (other requests get a 403); llm-d: prefer what llm-d's header names, which "
            "is not signed; off (default: off). docs/gateway.md has more",
        )
        add_fleet_flags(group)
        add_decode_picker_flag(group)
        add_option_flags(parser, without=("mode", "workers"))

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until told to stop."""
        role = Role(arguments.role)
        remote = _REMOTE[role]
        engine = cast("str", arguments.engine)
        if getattr(arguments, role):
            return _refused(f"--{role}: give the {role} engine here as --engine, and remote engines as --{remote}")
        try:
            check_url(engine.rpartition("=")[2])
        except ValueError as error:
            return _refused(f"--engine: [NAME=]URL {error}")
        setattr(arguments, role, [engine])
        if arguments.broker is not None:
            return _queued(arguments, role)
        asked = load_configuration("sidecar", arguments)
        if asked is None:
            return 2
        local = next(instance for instance in asked.settings.instances if instance.role is role)
        partner: PrefillPartnerMode = arguments.prefill_partner
        if partner != "off" and role is not Role.DECODE:
            return _refused("--prefill-partner: is for sidecars beside decode engines")
        if partner in ("prefer", "require") and asked.settings.signing is None:
            return _refused("--prefill-partner: the header is signed; add --sign-with FILE --audience NAME")
        settings = replace(
            asked.settings,
            prefill_partner=partner,
            local_id=local.id,
            modes=(ManagerMode(LOCAL_MANAGERS[role]),),
            modes_are_fixed=True,
        )
        known = any(entry.role is remote for entry in asked.entries)
        if not (known or settings.providers or settings.admin_token):
            return _refused(f"no {remote} engine is given; add --{remote} URL or --config FILE")
        note = f"no {remote} engine is given; requests get a 503 until there is one"
        entries = tuple(entry for entry in asked.entries if entry.id == local.id or entry.role is not role)
        asked = asked._replace(settings=settings, entries=entries)
        return run_server("sidecar", asked, () if known else (note,), arguments=arguments)


def _queued(arguments: argparse.Namespace, role: Role) -> int:
    try:
        from kvparams_proxy.cli.queue_sidecar import run_queue_sidecar
    except ImportError as error:
        return _refused(f"--broker needs aio-pika ({error}): pip install 'kvparams[queue]'")
    try:
        return run_queue_sidecar(arguments, role, _REMOTE[role])
    except ValueError as error:
        sources: Mapping[str, str] = getattr(arguments, "option_sources", {})
        return _refused(f"{sources.get('broker', '--broker')}: {error}")


def _refused(said: str) -> int:
    print(f"kvparams sidecar: {said}", file=sys.stderr)
    return 2


COMMAND: Final = SidecarCommand()
"""The entry point."""
