"""Parses command lines, and answers a mistake with one line that names the nearest option or value.

`CommandParser` is `argparse.ArgumentParser` with four differences: no usage text before an error, no abbreviated
options (a later option could make them ambiguous), an unknown option is reported before a missing argument, and each
option can be set by an environment variable (`kvparams.cli.environment`) unless `ignore_variables` was called.

The parsed arguments have `option_sources`: for each option that was given, by its destination, the flag or the variable
that set it.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn, cast

from kvparams.cli.environment import InvalidVariable, option_variables, read_variable, subparsers_of
from kvparams.errors import printable
from kvparams.settings_model import did_you_mean, must_be_one_of

__all__ = ["CommandParser"]

_NUMBER: Final = re.compile(r"-\.?\d")
_MAX_SHOWN: Final = 128
_INVALID: Final = (InvalidVariable, argparse.ArgumentError, argparse.ArgumentTypeError)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line. Its subcommands have parsers of the same class."""

    def __init__(
        self,
        prog: str | None = None,
        *,
        description: str | None = None,
        formatter_class: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter,
        **others: object,
    ) -> None:
        """See `argparse.ArgumentParser`. `others` is what a newer `add_parser` passes."""
        super().__init__(prog, description=description, formatter_class=formatter_class, allow_abbrev=False)
        self.reads_variables = True

    def ignore_variables(self) -> None:
        """Lets no environment variable set an option of this parser or of its subcommands."""
        self.reads_variables = False
        for action in self._actions:
            for parser in subparsers_of(action):
                if isinstance(parser, CommandParser):
                    parser.ignore_variables()

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses arguments. Exits with status 2 and one line if one of them is unknown."""
        argv = list(sys.argv[1:] if args is None else args)
        options = list(self._options_in(argv))
        known = self._option_string_actions
        for option in options:
            if option not in known:
                self.error(self._describe_unknown(option))
        sources = {known[option].dest: option for option in options}
        overridden: dict[str, argparse.Action] = {}
        if self._subparsers is None and self.reads_variables:
            overridden = self._apply_variables(sources)
        found, unknown = cast(
            "tuple[argparse.Namespace, list[str]]",
            super().parse_known_args(argv, namespace),  # pyright: ignore[reportUnknownMemberType]
        )
        if unknown:
            self.error(f"unexpected argument: {printable(' '.join(unknown)[:_MAX_SHOWN])}")
        if self._subparsers is None:
            found.option_sources = sources
        for name, action in overridden.items():
            if self._differs(name, action, getattr(found, action.dest)):
                flag = sources[action.dest]
                sys.stderr.write(f"{self.prog}: {name} has no effect, because {flag} is given\n")
        return found, []

    def _apply_variables(self, sources: dict[str, str]) -> dict[str, argparse.Action]:
        """Makes the values of variables the defaults of their options, and adds them to the sources.

        Returns the variables whose options are on the command line.
        """
        overridden: dict[str, argparse.Action] = {}
        for name, action in option_variables(self._actions).items():
            if action.dest in sources:
                overridden[name] = action
                continue
            try:
                value = self._variable_value(name, action)
            except _INVALID as error:
                said = error.message if isinstance(error, argparse.ArgumentError) else error
                self.error(f"{name}: {said}")
            if value is not None:
                action.default = value
                action.required = False
                sources[action.dest] = name
        return overridden

    def _variable_value(self, name: str, action: argparse.Action) -> object:
        """Returns the value of a variable in the type of its option; None if it is not set."""
        value = read_variable(name, action, os.environ)
        if isinstance(value, str):
            value = self._get_value(action, value)
            self._check_value(action, value)
        return value

    def _differs(self, name: str, action: argparse.Action, given: object) -> bool:
        """Returns whether a variable is set, and not to what the command line says."""
        try:
            value = self._variable_value(name, action)
        except _INVALID:
            return True
        return value is not None and value != given

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with status 2."""
        said = message.removeprefix("argument ").replace("expected one argument", "needs a value")
        said = said.replace("the following arguments are required", "missing")
        self.exit(2, f"{self.prog}: {said}{'' if said.endswith('?') else ';'} see {self.prog} --help\n")

    def _options_in(self, argv: Sequence[str]) -> Iterator[str]:
        """Yields the options of a command line; those behind the name of a subcommand belong to its parser."""
        for text in argv:
            if text == "--":
                return
            name = text.partition("=")[0]
            if name in self._option_string_actions:
                yield name
            elif not text.startswith("-") or text == "-":
                if self._subparsers is not None:
                    return
            elif " " not in text and _NUMBER.match(text) is None:
                yield name if name.startswith("--") or name[:2] not in self._option_string_actions else name[:2]

    def _describe_unknown(self, option: str) -> str:
        """Returns a sentence about an option that this command does not have."""
        actions = self._option_string_actions.items()
        shown = [name for name, action in actions if action.help != argparse.SUPPRESS or name == "--version"]
        nearest = did_you_mean(option, shown)
        return f"no option {printable(option[:_MAX_SHOWN])}{f'; {nearest.rstrip()}' if nearest else ''}"

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Checks a value against the choices of an action, as `argparse` does before every other use of it."""
        if action.choices is None or value in action.choices:
            return
        names = [str(one) for one in action.choices]
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            text = printable(str(value)[:_MAX_SHOWN])
            nearest = did_you_mean(text, names).rstrip() or f"the commands are {', '.join(names)}"
            self.error(f"no command {text}; {nearest}")
        try:
            must_be_one_of(value, names)
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error)) from None
