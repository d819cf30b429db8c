"""The command `kvparams`: a thin door to whatever is registered in the entry-point group `kvparams.commands`.

A command is an object with `summary`, `add_arguments(parser)` and `run(arguments) -> exit status` (see `Command`).
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

from kvparams import plugins
from kvparams.cli.command_parser import CommandParser
from kvparams.cli.completion import add_completion_option
from kvparams.cli.environment import describe_unknown_variables, option_variables
from kvparams.errors import KVParamsError, PluginError
from kvparams.version import __version__

__all__ = ["Command", "main", "make_parser"]

_VERSION: Final = f"kvparams {__version__}"
_OPTIONS_ALONE: Final = ("-V", "--version")
"""Options that need no command, and so none is loaded."""


class Command(Protocol):
    """A `Command` is a subcommand of `kvparams`."""

    summary: str
    """One line for `kvparams --help`.

    A command may have a second attribute, `reads_variables = True`: environment variables set its options.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say which arguments the command takes."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvparams NAME ...` and return its exit status. Errors of ours are one line on stderr and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser, broken = make_parser(argv[0] if argv else "")
    if argv and (error := broken.get(argv[0])) is not None:
        print(f"kvparams: {error}", file=sys.stderr)
        return 2
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        print("kvparams: give a command; kvparams --help lists them", file=sys.stderr)
        return 2
    _print_unknown_variables(arguments.known_variables)
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


def make_parser(name: str | None) -> tuple[CommandParser, Mapping[str, PluginError]]:
    """Returns the parser of `kvparams`, and the commands that cannot be loaded.

    Args:
        name: the only command to load, if there is one of this name. Otherwise all are loaded, without their arguments.
            With None all are loaded, with their arguments.
    """
    parser = CommandParser(
        prog="kvparams",
        description="Move KV cache between prefill and decode engines: with a protocol, a proxy, and stores.",
    )
    parser.add_argument("-V", "--version", action="version", version=_VERSION)
    add_completion_option(parser, lambda: make_parser(None)[0])
    parser.set_defaults(command=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    broken: dict[str, PluginError] = {}
    if name in _OPTIONS_ALONE:
        return parser, broken
    found = plugins.load_each_plugin("commands", name) if name is not None else {}
    for each, loaded in (found or plugins.load_each_plugin("commands")).items():
        if isinstance(loaded, PluginError):  # one missing extra must not take the other commands away
            broken[each] = loaded
            continue
        command = cast("Command", loaded)
        child = subparsers.add_parser(each, help=command.summary, description=command.summary)
        child.add_argument("--version", action="version", version=_VERSION, help=argparse.SUPPRESS)
        if name in (each, None):  # they take milliseconds
            command.add_arguments(child)
        if not getattr(command, "reads_variables", False):
            child.ignore_variables()
        variables = option_variables(child._actions) if each == name and child.reads_variables else {}
        child.set_defaults(command=command, known_variables=tuple(variables))
    if broken:
        parser.epilog = "not available here: " + "; ".join(f"{each}: {error}" for each, error in broken.items())
    return parser, broken


def _print_unknown_variables(known: Sequence[str]) -> None:
    """Prints a line for each variable that begins like ours and sets no option of any command."""
    if not any(describe_unknown_variables(known, (), os.environ)):
        return
    every = option_variables(make_parser(None)[0]._actions)  # those of other commands may be set for these
    for line in describe_unknown_variables(known, every, os.environ):
        print(f"kvparams: {line}", file=sys.stderr)
