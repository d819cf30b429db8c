"""`kvparams sidecar` starts the proxy beside one engine from the command line.

Its settings have the same names as the proxy's. Its own flags only describe the engine beside it.
"""

import argparse
import sys
from dataclasses import replace
from typing import Final, cast

from kvparams.instances import Role
from kvparams.routing.managers.local_remote import LOCAL_MANAGERS
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.cli.proxy_command import add_fleet_flags, add_option_flags, load_configuration, run_server
from kvparams_proxy.config.spec_fields import check_url

__all__ = ["COMMAND"]

_REMOTE: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_EXAMPLE: Final = """
A sidecar stands before one engine and splits the work that comes to it: one leg runs on its engine, the other on a
remote one. Clients and load balancers talk to sidecars, each as they would to an engine; a connection that is lost ends
the work on both. Engines are reached by sidecars only: keep clients off their ports.

beside a prefill engine; each answer comes from one of two decode engines:

  kvparams sidecar --role prefill --engine http://127.0.0.1:8000 --port 8100 \\
                   --decode http://10.0.0.3:8000 --decode http://10.0.0.4:8000

beside a decode engine, which has prompts computed elsewhere:

  kvparams sidecar --role decode --engine http://127.0.0.1:8000 --port 8100 --prefill http://10.0.0.1:8000

with a RabbitMQ in between, from which decode engines pull work when they have room, and KV in a store:

  kvparams sidecar --role prefill --engine http://127.0.0.1:8000 --port 8100 --connector store --broker amqp://broker
  kvparams sidecar --role decode  --engine http://127.0.0.1:8000 --port 8101 --connector store --broker amqp://broker

all sidecars may follow one file of the whole fleet; each takes the engines of the other role from it:

  kvparams sidecar --role prefill --engine p0=http://127.0.0.1:8000 --config fleet.yaml

Engines tell each other where their KV is. Where --engine has another host than they say, such as 127.0.0.1, declare
that: --engine-address 10.0.0.1. Whether KV gets through: --check.

Also served: /v1/models, /health (503 while the engine here or all remote ones are missing), /metrics, and with a token
/admin, as by `kvparams proxy`; embeddings, /tokenize and the like are answered by the engine here.
"""


class SidecarCommand:
    """See `kvparams.cli.Command`."""

    summary = "Put a proxy beside one engine: it prefills or decodes here, and the other leg runs elsewhere."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags that name engines, and one for each setting of the proxy."""
        parser.epilog = _EXAMPLE
        parser.set_defaults(**{role.value: [] for role in Role})
        group = parser.add_argument_group("engines")
        group.add_argument(
            "--engine",
            required=True,
            metavar="[NAME=]URL",
            help="the engine beside this sidecar, http://host:port",
        )
        group.add_argument(
            "--role",
            required=True,
            choices=[role.value for role in LOCAL_MANAGERS],
            help="what this engine does of a request",
        )
        for local, role in _REMOTE.items():
            group.add_argument(
                f"--{role}",
                action="append",
                metavar="[NAME=]URL",
                help=f"a remote {role} engine, where the one here does {local}; repeat it for each",
            )
        group.add_argument(
            "--broker",
            metavar="URL|FILE",
            help="a RabbitMQ between prefill and decode, amqp://host:port, or a file with its URL where that has a "
            "password: decode engines pull work when they have room (--decode-requests, default 16)",
        )
        group.add_argument(
            "--pool", default="kvparams", metavar="NAME", help="... whose queues have this name (default: kvparams)"
        )
        add_fleet_flags(group)
        add_option_flags(parser, without=("mode",))

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until told to stop."""
        role = Role(arguments.role)
        remote = _REMOTE[role]
        engine = cast("str", arguments.engine)
        if getattr(arguments, role):
            return _refused(f"--{role}: the {role} engine here is --engine; remote engines are --{remote}")
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
        settings = replace(
            asked.settings, local_id=local.id, modes=(ManagerMode(LOCAL_MANAGERS[role]),), modes_are_fixed=True
        )
        known = any(entry.role is remote for entry in asked.entries)
        if not (known or settings.providers or settings.admin_token):
            return _refused(f"no {remote} engine is given; name at least one --{remote} URL, or --config FILE")
        note = f"no {remote} engine is given: requests will be answered 503 until there is one"
        entries = tuple(entry for entry in asked.entries if entry.id == local.id or entry.role is not role)
        asked = asked._replace(settings=settings, entries=entries)
        return run_server("sidecar", asked, () if known else (note,), check=arguments.check)


def _queued(arguments: argparse.Namespace, role: Role) -> int:
    try:
        from kvparams_proxy.cli.queue_sidecar import run_queue_sidecar
    except ImportError as error:
        return _refused(f"--broker needs aio-pika ({error}): pip install 'kvparams[queue]'")
    try:
        return run_queue_sidecar(arguments, role, _REMOTE[role])
    except ValueError as error:
        return _refused(f"--broker: {error}")


def _refused(said: str) -> int:
    print(f"kvparams sidecar: {said}", file=sys.stderr)
    return 2


COMMAND: Final = SidecarCommand()
"""The entry point."""
