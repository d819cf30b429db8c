"""`kvparams proxy` starts the global proxy from the command line."""

import argparse
import asyncio
import logging
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Final

from starlette.applications import Starlette

from kvparams.cli.completion import suggest_values
from kvparams.dialects.registry import routable_dialect_names
from kvparams.instances import Role
from kvparams_proxy.checks.fleet_check import check_fleet
from kvparams_proxy.cli import production_stack_flags
from kvparams_proxy.cli.configuration import Configuration, build_configuration
from kvparams_proxy.cli.effective_settings import describe_effective_settings
from kvparams_proxy.cli.exchange_check import check_exchange
from kvparams_proxy.cli.worker_pool import run_workers
from kvparams_proxy.config.model_parsing import mark_of_models
from kvparams_proxy.config.options import OPTIONS, Option
from kvparams_proxy.config.settings import Settings, known_dialects
from kvparams_proxy.config.signing import ReloadingSigner
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.execution.active_modes import needed_roles
from kvparams_proxy.fleet.registry.instance_spec import spec_of
from kvparams_proxy.listening.activation import ActivationError
from kvparams_proxy.listening.handover import SocketHandover
from kvparams_proxy.listening.takeover import TakeoverError
from kvparams_proxy.server.app import create_app
from kvparams_proxy.server.file_descriptors import raise_descriptor_limit
from kvparams_proxy.server.http_server import listen, serve
from kvparams_proxy.telemetry.logging_setup import is_json, set_up_logging

__all__ = [
    "COMMAND",
    "add_decode_picker_flag",
    "add_engine_flags",
    "add_fleet_flags",
    "add_option_flags",
    "load_configuration",
    "run_server",
]

_log: Final = logging.getLogger(__name__)
_OPTION: Final = re.compile(r"--([a-z][a-z0-9-]*)")
_GRADES: Final = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}
_EXAMPLE: Final = """
Example with two prefill and two decode engines that use vLLM's NIXL connector:

  kvparams proxy --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000 \\
                 --decode  http://10.0.0.3:8000 --decode  http://10.0.0.4:8000

The same from a file, which may change while the proxy runs (examples/fleet.yaml shows all settings):

  kvparams proxy --config fleet.yaml --admin-token-file token

  proxy: {port: 8100, prefill-requests: 64}      # options from `where to listen` on; read only at the start
  instances:
    - {id: p0, url: "http://10.0.0.1:8000", role: prefill}
    - {id: d0, url: "http://10.0.0.3:8000", role: decode}

Every option can be set by an environment variable: --queue-wait is KVPARAMS_QUEUE_WAIT. A flag takes precedence over
its variable, and the variable over the file.

To check that the engines match their declarations and that KV gets from prefill to decode:

  kvparams proxy --config fleet.yaml --check

Then send OpenAI requests to http://127.0.0.1:8100/v1/completions or /v1/chat/completions.
The proxy also serves /v1/models, /health (503 while a role has no engine), /metrics, and with a token /admin:

  curl -H "Authorization: Bearer $(cat token)" http://127.0.0.1:8100/admin/instances
"""


class ProxyCommand:
    """See `kvparams.cli.Command`."""

    summary = "Run a proxy in front of prefill and decode engines."
    reads_variables = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds an argument for each setting, and those that name engines."""
        parser.epilog = _EXAMPLE
        engines = parser.add_argument_group("engines")
        add_engine_flags(engines, "http://host:port")
        add_fleet_flags(engines)
        add_decode_picker_flag(engines)
        add_option_flags(parser)
        production_stack_flags.add_production_stack_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Serves until told to stop."""
        asked = load_configuration("proxy", arguments)
        if asked is None:
            return 2
        needed = sorted(needed_roles(asked.settings))
        missing = [role for role in needed if not any(entry.role is role for entry in asked.entries)]
        notes = [f"no {role} engine is given; requests get a 503 until there is one" for role in missing]
        if asked.workers > 1 and not (arguments.check or arguments.print_config):
            return _run_workers(asked, notes, arguments)
        return run_server("proxy", asked, notes, arguments=arguments)


def add_engine_flags(group: "argparse._ArgumentGroup", url: str, ranks: str = "") -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the flags that name engines. `url` and `ranks` say more about the URL, and about ranks behind it."""
    for role in Role:
        group.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="[NAME=]URL",
            help=f"the URL of an engine with the role {role}, {url}; repeat the option for each engine (default names: "
            f"{role}-0, {role}-1, ...). With ?ranks=N at its end, each of N data-parallel ranks behind it is an engine "
            f"of its own{ranks}",
        )


def add_fleet_flags(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the flags that describe engines beyond their URLs."""
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file with engines and settings; the proxy follows changes of its engines while it runs",
    )
    group.add_argument(
        "--discover",
        action="append",
        default=[],
        metavar="URL",
        help="find engines instead of listing them, and follow what changes: "
        "kubernetes://NAMESPACE?selector=app%%3Dvllm for pods with these labels, kubernetes://NAMESPACE?pool=NAME for "
        "those of an InferencePool, dns://HOST:PORT?role=prefill for the "
        "addresses of a name, dns+srv://NAME?role=decode for SRV records. Repeat the option for each source; see "
        "docs/kubernetes.md",
    )
    known = routable_dialect_names()
    connector = group.add_argument(
        "--connector",
        default="nixl",
        metavar="NAME",
        help=f"the KV connector of engines that have none in the file: {', '.join(known)} (default: nixl)",
    )
    suggest_values(connector, known)
    group.add_argument(
        "--bootstrap",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="the URL of the bootstrap server of the prefill engine NAME, for connectors that use one, such as "
        "mooncake (default: the engine's host, port 8998)",
    )
    group.add_argument(
        "--engine-address",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="another address at which engines may offer their KV, besides the host of their URL: a host, "
        "host:port or a network such as 10.1.0.0/16. It holds for engines without `addresses` in the file",
    )
    for role in Role:
        group.add_argument(
            f"--{role}-labels",
            metavar="LABEL=VALUE",
            help=f"the labels that give an engine without a role the role {role}; separate several by commas",
        )
    group.add_argument(
        "--engine-key-file", metavar="FILE", help="a file with the API key for engines that have none in the file"
    )
    group.add_argument(
        "--engine-ca",
        metavar="FILE",
        help="a PEM file of the authorities that may have issued the certificates of https engines, for engines "
        "that have none in the file (default: those of the system)",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="check the engines and exit: compare each engine with its declaration, and send one small request "
        "through each pair. The exit status is 1 if a check fails. Run it while the engines are idle",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="print the effective settings, each with its source: a flag, an environment variable, the file or the "
        "default; and exit. Secrets are not printed",
    )


def add_decode_picker_flag(group: "argparse._ArgumentGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the flag that names an external picker."""
    group.add_argument(
        "--decode-picker",
        metavar="URL",
        help="ask an external endpoint picker (Gateway API Inference Extension) for the decode engine of each request: "
        "grpc://host:port?timeout=0.5, or grpcs:// for TLS. If it names none in time, the policy chooses",
    )


def add_option_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds a flag for each setting, except those that a command decides itself."""
    parser.set_defaults(decided_options=tuple(without))
    groups: dict[str, argparse._ArgumentGroup] = {}  # pyright: ignore[reportPrivateUsage]
    for option in OPTIONS:
        if option.name in without:
            parser.set_defaults(**{option.attribute: None})
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)


def load_configuration(command: str, arguments: argparse.Namespace) -> Configuration | None:
    """Loads the configuration. Returns None if it is invalid, after printing the reason."""
    set_up_logging()
    raise_descriptor_limit()
    try:
        asked = build_configuration(arguments)
    except ConfigError as error:
        for problem in error.problems:
            print(f"kvparams {command}: {_name_variable(problem, arguments)}", file=sys.stderr)
        return None
    set_up_logging(asked.options.log_level, asked.options.log_format)
    return asked


def _name_variable(problem: str, arguments: argparse.Namespace) -> str:
    """Returns a problem with the name of the environment variable instead of the option that it sets."""
    sources: Mapping[str, str] = getattr(arguments, "option_sources", {})
    found = _OPTION.match(problem)
    source = "" if found is None else sources.get(found[1].replace("-", "_"), "")
    return problem if found is None or not source or source.startswith("-") else source + problem[found.end() :]


def run_server(
    command: str,
    asked: Configuration,
    notes: Iterable[str] = (),
    *,
    arguments: argparse.Namespace | None = None,
    make: Callable[[Settings], Starlette] = create_app,
) -> int:
    """Serves the app that `make` makes until told to stop. Returns the exit status.

    With `--print-config` or `--check` among the arguments it prints the settings or checks the engines instead.
    """
    if arguments is not None and arguments.print_config:
        _print_notes(command, (*asked.notes, *notes))
        print(describe_effective_settings(command, arguments, asked))
        return 0
    if arguments is not None and arguments.check:
        return asyncio.run(_check(command, asked))
    app = make(asked.settings)
    _report_notes(command, asked, notes)
    try:
        handover = SocketHandover.prepare(asked.options.takeover)
        listener = handover.inherited[0] if handover.inherited else listen(asked.host, asked.port)
    except OSError as error:
        return _cannot_listen(command, asked, error)
    if len(handover.inherited) > 1:
        return _cannot_listen(
            command,
            asked,
            ActivationError(f"{len(handover.inherited)} sockets are given for one process: pass one, or set --workers"),
        )
    with handover:
        handover.note_address(asked.host, asked.port)
        _print_address(command, asked, listener.getsockname()[1])
        told = serve(app, listener, asked.server, handover)
    logging.shutdown()
    if told is not None:
        signal.raise_signal(told)
    return 0


def _run_workers(asked: Configuration, notes: Iterable[str], arguments: argparse.Namespace) -> int:
    """Serves with several workers until SIGINT or SIGTERM. Returns the exit status."""
    _report_notes("proxy", asked, notes)
    try:
        with SocketHandover.prepare(asked.options.takeover) as handover:
            handover.note_address(asked.host, asked.port)
            end = run_workers(asked, arguments, handover, partial(_print_address, "proxy", asked))
    except OSError as error:
        return _cannot_listen("proxy", asked, error)
    logging.shutdown()
    if end.message is not None:
        print(end.message, file=sys.stderr)
    if end.signal is not None:
        signal.raise_signal(end.signal)
    return end.status


def _print_notes(command: str, notes: Iterable[str]) -> None:
    for note in notes:
        print(f"kvparams {command}: {note}", file=sys.stderr)


def _report_notes(command: str, asked: Configuration, notes: Iterable[str]) -> None:
    """Tells what the operator should know of the start: in the log if programs read it, otherwise in plain words."""
    if not is_json(asked.options.log_format):
        _print_notes(command, (*asked.notes, *notes))
        return
    for note in (*asked.notes, *notes):
        _log.warning("%s", note.removeprefix("WARNING: "), extra={"facts": {"event": "configuration"}})


def _print_address(command: str, asked: Configuration, port: int) -> None:
    scheme = "http" if asked.server.tls is None else "https"
    more = f", workers: {asked.workers}" if asked.workers > 1 else ""
    print(f"kvparams {command}: {scheme}://{asked.host}:{port}, engines: {len(asked.entries)}{more}", flush=True)


def _cannot_listen(command: str, asked: Configuration, error: OSError) -> int:
    where = f"{asked.host}:{asked.port}"
    said = f"cannot listen on {where} ({error}); choose --host or --port"
    if isinstance(error, TakeoverError | ActivationError):  # which say themselves what to do
        said = str(error)
    print(f"kvparams {command}: {said}", file=sys.stderr)
    return 1


async def _check(command: str, asked: Configuration) -> int:
    """Checks all engines and returns the exit status."""
    settings = asked.settings
    given = [spec_of(instance, settings.spec_rules) for instance in settings.instances]
    entries = [*given, *asked.entries[len(given) :]]  # those of the file have been read with their keys
    errors = 0
    signer = None if settings.signing is None else ReloadingSigner(settings.signing).signer
    findings = [check_fleet(entries, known_dialects(), settings.upstream_limits, signer, settings)]
    if settings.sharing is not None:
        findings.append(check_exchange(settings.sharing, settings.policy, mark_of_models(settings.models)))
    for found in findings:
        async for one in found:
            errors += one.grade == "error"
            print(f"{_GRADES[one.grade]} {one.who}: {one.message}", flush=True)
    if errors:
        print(f"kvparams {command}: {errors} {'check' if errors == 1 else 'checks'} failed", file=sys.stderr)
    return 1 if errors else 0


def _add(group: "argparse._ArgumentGroup", option: Option) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the flag of one setting. Its default is None, so that the fleet file can set the value."""
    flag = option.flag
    text = option.help if flag.known is None else f"{option.help}: {', '.join(flag.known())}"
    if not flag.metavar:
        group.add_argument(f"--{option.name}", action="store_const", const=True, help=text)
        return
    if option.default is not None:
        unit = " s" if isinstance(option.default, float) else ""
        shown = f"{option.default:g}" if isinstance(option.default, float) else option.default
        text = f"{text} (default: {shown}{unit})"
    action = group.add_argument(f"--{option.name}", metavar=flag.metavar, help=text)
    if flag.known is not None:
        suggest_values(action, flag.known())


COMMAND: Final = ProxyCommand()
"""The entry point."""
