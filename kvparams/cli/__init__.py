"""The command `kvparams`: a thin door to whatever is registered in the entry-point group `kvparams.commands`.

A command is an object with `summary`, `add_arguments(parser)` and `run(arguments) -> exit status` (see `Command`).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from kvparams import plugins
from kvparams.errors import KVParamsError, PluginError, printable
from kvparams.settings_model import did_you_mean
from kvparams.version import __version__

__all__ = ["Command", "main"]


class Command(Protocol):
    """A `Command` is a subcommand of `kvparams`."""

    summary: str
    """One line for `kvparams --help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say which arguments the command takes."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvparams NAME ...` and return its exit status. Errors of ours are one line on stderr and status 2."""
    parser = argparse.ArgumentParser(
        prog="kvparams",
        description="Move KV cache between prefill and decode engines: with a protocol, a proxy, and stores.",
    )
    parser.add_argument("--version", action="version", version=f"kvparams {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    argv = sys.argv[1:] if argv is None else argv
    broken: dict[str, PluginError] = {}
    for name, found in plugins.load_each_plugin("commands").items():
        if isinstance(found, PluginError):  # one missing extra must not take the other commands away
            broken[name] = found
            continue
        command = cast("Command", found)
        child = subparsers.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if argv and argv[0] == name:  # they take milliseconds, and nobody else's are read
            command.add_arguments(child)
        child.set_defaults(command=command)
    if broken:
        parser.epilog = "not available here: " + "; ".join(f"{name}: {error}" for name, error in broken.items())
    if argv and (error := broken.get(argv[0])) is not None:
        print(f"kvparams: {error}", file=sys.stderr)
        return 2
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_describe_unknown(unknown, argv[0], subparsers.choices[argv[0]]))
    try:
        return cast("Command", arguments.command).run(arguments)
    except KVParamsError as error:
        print(f"kvparams: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 141


def _describe_unknown(unknown: Sequence[str], command: str, parser: argparse.ArgumentParser) -> str:
    """Returns a sentence about the first option that a command does not have, or about arguments too many."""
    option = next((one.partition("=")[0] for one in unknown if one.startswith("--")), None)
    if option is None:
        return f"{command} takes no such arguments: {printable(' '.join(unknown))}"
    actions = parser._option_string_actions.items()  # pyright: ignore[reportPrivateUsage]
    nearest = did_you_mean(option, [name for name, action in actions if action.help != argparse.SUPPRESS])
    return f"{command} has no option {printable(option)}; {nearest}see kvparams {command} --help"
