"""Reads options from environment variables: `--queue-wait` is `KVPARAMS_QUEUE_WAIT`, and so for every option.

Only commands that serve have variables: one name means one thing in all of them.

An option on the command line takes precedence over its variable. An empty variable counts as not set. An option that
may be repeated has its values separated by spaces; a switch is `true` or `false`. Options that ask for an action
instead of setting something (`--help`, `--check`) have no variable.
"""

import argparse
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, cast

from kvparams.errors import printable
from kvparams.settings_model import did_you_mean

__all__ = [
    "InvalidVariable",
    "describe_unknown_variables",
    "option_variables",
    "read_variable",
    "subparsers_of",
    "variable_name",
]

_PREFIX: Final = "KVPARAMS_"
_NO_SETTINGS: Final = frozenset({"help", "version", "check", "print_config", "about", "print_completion"})
"""The destinations of options that ask for an action."""
_OTHER_USES: Final = frozenset({"KVPARAMS_NATIVE"})
"""Variables that are no options: see `kvparams.native`."""
_SWITCH: Final = {"true": True, "1": True, "false": False, "0": False}
_SERVICE: Final = re.compile(
    r"KVPARAMS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""The variables that Kubernetes and Docker links set for a service whose name begins with `kvparams`. Source:
https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
"""
_SERVICE_URL: Final = re.compile(r"(tcp|udp|sctp)://")
_MAX_SHOWN: Final = 64


class InvalidVariable(ValueError):
    """The value of a variable cannot be used."""


def variable_name(option: str) -> str:
    """Returns the name of the variable that sets an option."""
    return _PREFIX + option.lstrip("-").replace("-", "_").upper()


def option_variables(actions: Iterable[argparse.Action]) -> dict[str, argparse.Action]:
    """Returns the options that have a variable, by the name of the variable. Subcommands are included."""
    found: dict[str, argparse.Action] = {}
    for action in actions:
        for parser in subparsers_of(action):
            if getattr(parser, "reads_variables", True):
                found |= option_variables(parser._actions)
        if action.option_strings and action.dest not in _NO_SETTINGS:
            found[variable_name(action.option_strings[-1])] = action
    return found


def subparsers_of(action: argparse.Action) -> list[argparse.ArgumentParser]:
    """Returns the parsers of the subcommands that an action chooses from; none for an option."""
    if not isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
        return []
    return list(cast("Mapping[str, argparse.ArgumentParser]", action.choices).values())


def read_variable(name: str, action: argparse.Action, environment: Mapping[str, str]) -> object:
    """Returns what a variable sets its option to, before the option's own type; None if it is not set.

    Raises:
        InvalidVariable: a switch has another value than `true` or `false`.
    """
    text = environment.get(name, "").strip()
    if not text or _is_service_variable(name, text):
        return None
    if action.nargs == 0:
        if text.lower() not in _SWITCH:
            raise InvalidVariable("must be true or false")
        return _SWITCH[text.lower()]
    return text.split() if isinstance(action, argparse._AppendAction) else text  # pyright: ignore[reportPrivateUsage]


def describe_unknown_variables(
    own: Collection[str], others: Collection[str], environment: Mapping[str, str]
) -> Iterator[str]:
    """Yields a sentence about each variable that begins like ours and sets nothing.

    Args:
        own: the variables of the options of the command.
        others: those of other commands.
        environment: all variables.
    """
    for name in sorted(environment):
        text = environment[name].strip()
        if not name.startswith(_PREFIX) or name in _OTHER_USES:
            continue
        if _is_service_variable(name, text):
            if name in own:
                yield f"{name} is ignored: its value is an address that Kubernetes sets for a service"
        elif name not in own and name not in others:
            action = next((one for one in _NO_SETTINGS if name == variable_name(one)), None)
            if action is not None:
                yield f"{name} has no effect: --{action.replace('_', '-')} is an action; give it on the command line"
            else:
                nearest = (_nearest(name, own) or _nearest(name, others)).rstrip()
                shown = printable(name[:_MAX_SHOWN])
                yield f"{shown} sets no option and has no effect{f'; {nearest}' if nearest else ''}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """Returns `did_you_mean` of what stands behind the prefix, which makes all names alike."""
    by_rest = [one.removeprefix(_PREFIX) for one in known]
    return did_you_mean(name.removeprefix(_PREFIX), by_rest).replace("mean ", f"mean {_PREFIX}")


def _is_service_variable(name: str, text: str) -> bool:
    """Returns True for a variable that Kubernetes has set. `KVPARAMS_PORT` and the like are only with such a value."""
    if _SERVICE.fullmatch(name) is None:
        return False
    is_plain = name.endswith("_PORT") and not name.endswith(("_SERVICE_PORT", "_TCP_PORT", "_UDP_PORT", "_SCTP_PORT"))
    return not is_plain or _SERVICE_URL.match(text) is not None
