"""Shell completion: `kvparams --print-completion SHELL` prints a script that completes commands, options and values.

shtab makes the script from the parsers. The shell reads it once, so completing a word starts no process.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

from kvparams.cli.environment import subparsers_of

__all__ = ["add_completion_option", "suggest_values"]

_SHELLS: Final = ("bash", "zsh", "tcsh")
_FILES: Final = ("FILE", "PATH")
"""Parts of the metavar of an option that takes a file."""
_SUGGESTED: Final = "suggested_values"


def add_completion_option(parser: argparse.ArgumentParser, make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the option. `make_parser` returns a parser with all commands."""
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=_SHELLS,
        make_parser=make_parser,
        help="print a completion script for this shell: bash, zsh or tcsh. It needs pip install 'kvparams[completion]'",
    )


class _PrintCompletion(argparse.Action):
    """Prints the script and exits."""

    def __init__(self, *, make_parser: Callable[[], argparse.ArgumentParser], **others: Any) -> None:
        super().__init__(**others, metavar="SHELL", default=argparse.SUPPRESS)
        self._make_parser = make_parser

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """See `argparse.Action`."""
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs shtab: pip install 'kvparams[completion]'")
        whole = self._make_parser()
        _complete_values(whole._actions, shtab.FILE)
        sys.stdout.write(shtab.complete(whole, cast("str", values)))
        parser.exit()


def suggest_values(action: argparse.Action, values: Sequence[str]) -> None:
    """Has a shell suggest these values for an option. Others may be given, too, unlike with `choices`."""
    setattr(action, _SUGGESTED, values)


def _complete_values(actions: Iterable[argparse.Action], file: object) -> None:
    """Marks the arguments that take one of some values, or the path of a file."""
    for action in actions:
        for parser in subparsers_of(action):
            _complete_values(parser._actions, file)
        if (values := getattr(action, _SUGGESTED, None)) is not None:
            action.choices = values
        elif action.choices is None and any(part in str(action.metavar or action.dest.upper()) for part in _FILES):
            setattr(action, "complete", file)  # noqa: B010  an attribute of shtab's
