"""Arguments that the three tools share."""

import argparse
import sys
from typing import Final, get_args

from kvparams import plugins
from kvparams.dialects import registry
from kvparams.dialects.table import Table
from kvparams.params import Phase
from kvparams.tools.reading import OURS, Unreadable

__all__ = ["FORMS", "add_engine", "add_file", "add_phase", "candidates", "named"]

FORMS: Final = """
FILE holds one JSON object, which may be
  a document of ours, alone or under kv_transfer_params.kvparams;
  a whole request or answer, as an engine reads or writes it;
  the value of kv_transfer_params alone;
  a message: {"request_id": ..., "body": {...}, "headers": {...}, "phase": ...}, as the vectors of the spec have it.
"""


def add_file(parser: argparse.ArgumentParser) -> None:
    """The file, and the request id that it may not hold."""
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="a JSON file (default: standard input)")
    parser.add_argument("--request-id", metavar="ID", help="X-Request-Id of the request, where FILE does not hold it")


def add_phase(parser: argparse.ArgumentParser) -> None:
    """Which leg it is."""
    parser.add_argument(
        "--phase",
        choices=[phase for phase in get_args(Phase) if phase not in ("release", "cancel")],
        help="which leg it is: the prefill request, its answer, the decode request, its answer (default: what fits)",
    )


def add_engine(parser: argparse.ArgumentParser, says: str) -> None:
    """Which release of the engine."""
    parser.add_argument("--engine", metavar="VERSION", help=says)


def named(name: str | None) -> Table | None:
    """The table of that name; None for our own document, and where nothing is said.

    Raises:
        Unreadable: there is no such dialect; the known ones are listed.
        PluginError: it cannot be loaded, or has no table.
    """
    if name is None or name == OURS:
        return None
    known = plugins.names("dialects")
    if name not in known:
        raise Unreadable(f"no dialect is called {name!r}; known: {', '.join((OURS, *known))}")
    return registry.table(name)


def candidates(table: Table | None) -> list[Table]:
    """The dialects that it can be: the one that was named, else all; what cannot be loaded is told and left out."""
    if table is not None:
        return [table]
    found, broken = registry.each_table()
    for error in broken:
        sys.stderr.write(f"left out: {error}\n")
    return found
