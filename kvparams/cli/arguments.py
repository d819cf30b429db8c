"""Arguments that the three tools share."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from typing import Final, TextIO, get_args

from kvparams import plugins
from kvparams.cli.input_files import OUR_FORMAT, RecognizedMessage, UnreadableInput, recognize_message, to_message
from kvparams.dialects import registry
from kvparams.dialects.table import DialectTable, is_older_release
from kvparams.errors import InvalidParams, printable
from kvparams.params import Phase
from kvparams.settings_model import did_you_mean

__all__ = [
    "FILE_FORMS",
    "OUR_DOCUMENT_NOTE",
    "add_engine",
    "add_file",
    "add_phase",
    "candidate_tables",
    "named_table",
    "print_problems",
    "recognize_document",
    "warn_ignored_options",
]

FILE_FORMS: Final = """
FILE holds one JSON object, which may be
  a kvparams document, alone or under kv_transfer_params.kvparams;
  a whole request or answer, as an engine reads or writes it;
  the value of kv_transfer_params alone;
  a message {"request_id": ..., "body": {...}, "headers": {...}, "phase": ...}, as in the spec's test vectors.
The commands also find kv_transfer_params in sampling_params.extra_args and, as text, in kv_transfer_params_json.
"""

OUR_DOCUMENT_NOTE: Final = "a kvparams document has this information itself"


def add_file(parser: argparse.ArgumentParser) -> None:
    """The file, and the request id that it may not hold."""
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="the path of a JSON file (default: standard input)"
    )
    parser.add_argument("--request-id", metavar="ID", help="the X-Request-Id of the request, if FILE does not have it")


def add_phase(parser: argparse.ArgumentParser) -> None:
    """Adds `--phase`, which names the leg that a message belongs to."""
    parser.add_argument(
        "--phase",
        choices=[phase for phase in get_args(Phase) if phase not in ("release", "cancel")],
        help="whether FILE is the prefill request, its answer, the decode request, or its answer (default: found "
        "from the keys)",
    )


def add_engine(parser: argparse.ArgumentParser, says: str) -> None:
    """Adds `--engine`, which names the release of the engine."""
    parser.add_argument("--engine", metavar="VERSION", type=_release, help=says)


def _release(text: str) -> str:
    try:
        is_older_release(text, "0")
    except InvalidParams as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version; write for example 0.32.0") from error
    return text


def warn_ignored_options(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Say on standard error which of these options were given, and change nothing."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    if given:
        sys.stderr.write(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {why}\n")


def print_problems(error: InvalidParams, file: str, to: TextIO | None = None) -> int:
    """Every problem as one line that begins with the file's name; the status."""
    name = "" if file == "-" else f"{printable(file)}: "
    (to or sys.stdout).writelines(f"{name}{problem}\n" for problem in error.problems)
    return 1


def named_table(name: str | None) -> DialectTable | None:
    """The table of that name; None for our own document, and where nothing is said.

    Raises:
        UnreadableInput: there is no such dialect; the known ones are listed.
        PluginError: it cannot be loaded, or has no table.
    """
    if name is None or name == OUR_FORMAT:
        return None
    known = plugins.plugin_names("dialects")
    if name not in known:
        every = (OUR_FORMAT, *known)
        nearest = did_you_mean(name, every)
        raise UnreadableInput(f"there is no dialect with the name {name!r}; {nearest}known: {', '.join(every)}")
    return registry.get_table(name)


def candidate_tables(table: DialectTable | None) -> list[DialectTable]:
    """The dialects that it can be: the one that was named, else all; what cannot be loaded is told and left out."""
    if table is not None:
        return [table]
    found, broken = registry.load_tables_and_errors()
    for error in broken:
        sys.stderr.write(f"left out: {error}\n")
    return found


def recognize_document(
    found: Mapping[str, object], table: DialectTable | None, arguments: argparse.Namespace
) -> RecognizedMessage:
    """Recognizes the message in a file, and takes the most common dialect if the keys fit it and others.

    Raises:
        UnrecognizedDialect, AmbiguousDialect: see `kvparams.dialects.detection.detect_dialect`.
    """
    message = to_message(found, arguments.request_id)
    return recognize_message(message, candidate_tables(table), table, arguments.phase, found, may_guess=True)
