"""`kvparams conformance`: hold a proxy, an engine, a store or a reader to the specification."""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NoReturn

from kvparams_conformance.answers import Carrier
from kvparams_conformance.checks import Check, CheckResult, select_checks
from kvparams_conformance.engine_checks import engine_checks
from kvparams_conformance.engine_site import Engine, first_model
from kvparams_conformance.proxy_checks import proxy_checks
from kvparams_conformance.proxy_runs import carrier_of, write_signing_keys
from kvparams_conformance.reader_checks import reader_checks
from kvparams_conformance.reports.files import write_html, write_json, write_junit
from kvparams_conformance.reports.model import Report, make_report
from kvparams_conformance.reports.table import write_table
from kvparams_conformance.requirements import Specification, UnknownProfile, load_specification
from kvparams_conformance.runner import run_engine_checks, run_proxy_checks, run_reader_checks
from kvparams_conformance.site import Under
from kvparams_conformance.store_suite import SuiteFailed, run_store_suite

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Examples:

  kvparams conformance proxy --start 'kvparams proxy --port {port} --connector store
      --prefill {prefill0} --prefill {prefill1} --decode {decode0} --decode {decode1}'
  kvparams conformance proxy --profile nixl-proxy --start 'my-router --port {port} ...' --html report.html
  kvparams conformance engine http://127.0.0.1:8000 --profile engine
  kvparams conformance store 'file://{folder}/kv?size=64MiB' --junit report.xml
  kvparams conformance translator --start 'python -m line_reader'
  kvparams conformance events-reader --start 'python -m line_reader'
  kvparams conformance proxy --explain 12.1

The kit tests from outside. For a proxy it starts four engines of its own, which misbehave as each check wants, and
starts the proxy with --start. These words stand for values in the command:

  {port}                                     the port to listen on; {spare_port} is another free one
  {prefill0} {prefill1} {decode0} {decode1}  the URLs of the engines; {prefill0_port} and so on are the ports alone
  {keys} {audience}                          the key file and the pool, for the profile `signed`

The exit status is 0 if the program conforms, 1 if it does not, and 2 if a check could not be judged.
"""


class ConformanceCommand:
    """See `kvparams.cli.Command`."""

    summary = "Hold a proxy, an engine, a store or a reader to the specification, and report each requirement."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds one subcommand for each subject."""
        parser.epilog = _EXAMPLE
        subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
        proxy = subjects.add_parser("proxy", help="test a proxy between scripted engines")
        proxy.add_argument("--start", metavar="COMMAND", help="the command that starts the proxy; see the examples")
        proxy.add_argument("--url", metavar="URL", help="the URL of a proxy that runs already; needs --engine-ports")
        proxy.add_argument(
            "--engine-ports",
            metavar="P0,P1,D0,D1",
            help="the ports of the two prefill and two decode engines that the proxy at --url was given",
        )
        proxy.add_argument(
            "--start-timeout", type=float, default=20.0, metavar="S", help="the time in which it has to answer (20)"
        )
        proxy.add_argument("--lanes", type=int, default=3, metavar="N", help="proxies that run beside one another (3)")
        _add_common(proxy, "store-proxy")
        _add_list(proxy)
        engine = subjects.add_parser("engine", help="test an engine that runs")
        engine.add_argument("url", metavar="URL", nargs="?", help="the URL of the engine")
        engine.add_argument("--model", metavar="NAME", help="the model to ask for (the first of /v1/models)")
        engine.add_argument("--role", choices=("prefill", "decode", "both"), default="both", help="what it does (both)")
        engine.add_argument("--instance", metavar="NAME", help="the engine's own name in the deployment")
        engine.add_argument("--keys", type=Path, metavar="FILE", help="the file of the keys that it believes")
        engine.add_argument("--audience", default="pool", metavar="NAME", help="the pool that it belongs to (pool)")
        _add_common(engine, "engine")
        _add_list(engine)
        store = subjects.add_parser("store", help="test a store (needs pip install 'kvparams[conformance]')")
        store.add_argument(
            "url",
            metavar="URL|PKG.MOD:FACTORY",
            nargs="?",
            help="the store; in a URL, {folder} stands for an empty folder and {name} for a new name for each test",
        )
        store.add_argument("--timeout", type=float, default=300.0, metavar="S", help="the longest time (300)")
        _add_common(store, "store")
        for name, what in (("translator", "a translator of dialects"), ("events-reader", "a reader of KV events")):
            reader = subjects.add_parser(name, help=f"test {what}, which answers questions line by line")
            reader.add_argument(
                "--start",
                metavar="COMMAND",
                help="the program: a question in JSON on each line, an answer on each line",
            )
            _add_common(reader, name)
            _add_list(reader)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the checks, and write the reports."""
        signal.signal(signal.SIGTERM, _end)
        specification = load_specification()
        if arguments.explain is not None:
            return _explain(specification, [*proxy_checks(), *engine_checks(), *reader_checks()], arguments.explain)
        profiles = tuple(arguments.profile or [arguments.default_profile])
        try:
            for name in profiles:
                specification.profile(name, arguments.subject)
        except UnknownProfile as error:
            return _usage(str(error))
        if arguments.subject == "engine":
            return _run_engine(arguments, profiles, specification)
        if arguments.subject == "store":
            return _run_store(arguments, profiles, specification)
        if arguments.subject == "proxy":
            return _run_proxy(arguments, profiles, specification)
        return _run_reader(arguments, profiles, specification)


def _add_common(parser: argparse.ArgumentParser, profile: str) -> None:
    parser.set_defaults(default_profile=profile)
    parser.add_argument(
        "--profile", action="append", metavar="NAME", help=f"the profile to test; repeat for several ({profile})"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ID",
        help="run only this requirement (12.1) or check (12.1/nested)",
    )
    parser.add_argument("--explain", metavar="NUMBER", help="print a requirement and its checks, and test nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the report as JUnit XML")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a static page")
    parser.add_argument("--verbose", action="store_true", help="also say why checks were skipped")


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="list the checks, and test nothing")


def _run_proxy(arguments: argparse.Namespace, profiles: tuple[str, ...], specification: Specification) -> int:
    checks = select_checks(proxy_checks(), profiles, tuple(arguments.only))
    if arguments.list:
        return _list(checks)
    if (arguments.start is None) == (arguments.url is None):
        return _usage("give either --start COMMAND or --url URL")
    if not checks:
        return _usage("no check has this profile and this --only")
    carriers: set[Carrier] = {carrier_of(name) for name in profiles}
    if len(carriers) > 1:
        return _usage("profiles of different carriers need a run each")
    try:
        ports = tuple(map(int, arguments.engine_ports.split(","))) if arguments.engine_ports else ()
    except ValueError:
        return _usage("--engine-ports must be four numbers with commas between them")
    if (arguments.url is not None) != (len(ports) == 4):
        return _usage("--url needs --engine-ports with four numbers, and --start has none")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvparams-conformance-") as folder:
        keys = write_signing_keys(Path(folder) / "signing-keys.json")
        under = Under(
            carrier=carriers.pop(),
            command=arguments.start,
            url=arguments.url,
            engine_ports=ports,
            keys=keys,
            start_s=arguments.start_timeout,
        )
        results = asyncio.run(run_proxy_checks(checks, under, arguments.lanes))
    target = arguments.start or arguments.url
    return _finish(arguments, profiles, specification, target, results, time.monotonic() - begun)


def _run_engine(arguments: argparse.Namespace, profiles: tuple[str, ...], specification: Specification) -> int:
    checks = select_checks(engine_checks(), profiles, tuple(arguments.only))
    if arguments.list:
        return _list(checks)
    if arguments.url is None:
        return _usage("give the URL of the engine")
    if not checks:
        return _usage("no check has this profile and this --only")
    if arguments.keys is not None and not arguments.keys.is_file():
        return _usage(f"--keys: there is no file {arguments.keys}")
    begun = time.monotonic()
    model = arguments.model or asyncio.run(first_model(arguments.url))
    if model is None:
        return _usage(f"{arguments.url}/v1/models does not answer with a model; is the engine up? See also --model")
    engine = Engine(
        url=arguments.url,
        model=model,
        role=arguments.role,
        instance=arguments.instance,
        keys=arguments.keys,
        audience=arguments.audience,
    )
    results = asyncio.run(run_engine_checks(checks, engine))
    return _finish(arguments, profiles, specification, arguments.url, results, time.monotonic() - begun)


def _run_store(arguments: argparse.Namespace, profiles: tuple[str, ...], specification: Specification) -> int:
    if arguments.url is None:
        return _usage("give the URL of the store, or package.module:factory")
    begun = time.monotonic()
    try:
        results = run_store_suite(arguments.url, arguments.timeout)
    except SuiteFailed as error:
        return _usage(str(error))
    chosen = {check.id for check in select_checks((one.check for one in results), profiles, tuple(arguments.only))}
    results = [one for one in results if one.check.id in chosen]
    return _finish(arguments, profiles, specification, arguments.url, results, time.monotonic() - begun)


def _run_reader(arguments: argparse.Namespace, profiles: tuple[str, ...], specification: Specification) -> int:
    checks = select_checks(reader_checks(), profiles, tuple(arguments.only))
    if arguments.list:
        return _list(checks)
    if arguments.start is None:
        return _usage("give --start COMMAND")
    if not checks:
        return _usage("no check has this profile and this --only")
    begun = time.monotonic()
    results = asyncio.run(run_reader_checks(checks, arguments.start))
    return _finish(arguments, profiles, specification, arguments.start, results, time.monotonic() - begun)


def _finish(
    arguments: argparse.Namespace,
    profiles: tuple[str, ...],
    specification: Specification,
    target: str,
    results: Iterable[CheckResult],
    seconds: float,
) -> int:
    report = make_report(arguments.subject, target, profiles, list(results), specification, seconds)
    print(write_table(report, verbose=arguments.verbose), end="")
    writers: list[tuple[Path | None, Callable[[Report, Path], None]]] = [
        (arguments.json, write_json),
        (arguments.junit, write_junit),
        (arguments.html, write_html),
    ]
    for path, write in writers:
        if path is not None:
            try:
                write(report, path)
            except OSError as error:
                return _usage(f"the report cannot be written: {error}")
    return report.exit_status


def _explain(specification: Specification, checks: Iterable[Check], number: str) -> int:
    requirement = number.partition("/")[0].rpartition("#")[2]
    text = specification.texts.get(requirement)
    if text is None:
        return _usage(f"there is no requirement {requirement}")
    profiles = [one.name for one in specification.profiles.values() if requirement in one.requirements]
    print(f"{requirement}  {text}\n\n{specification.link(requirement)}\nprofiles: {', '.join(profiles) or 'none'}")
    for check in checks:
        if check.requirement == requirement:
            print(f"\n{check.id} ({', '.join(check.profiles)})\n  sends    {check.sends}\n  expects  {check.expects}")
    return 0


def _list(checks: Iterable[Check]) -> int:
    for check in checks:
        print(f"{check.id:28} {check.sends}: {check.expects}")
    return 0


def _end(number: int, _: object) -> NoReturn:
    """Ends the run as Ctrl-C does, so that nothing that it has started is left behind."""
    raise SystemExit(128 + number)


def _usage(message: str) -> int:
    print(f"kvparams conformance: {message}", file=sys.stderr)
    return 2


COMMAND: Final = ConformanceCommand()
