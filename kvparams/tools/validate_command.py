"""`kvparams validate`: is this a document, or a message of a dialect, and what is wrong with it."""

import argparse
import sys
from typing import Final

from kvparams.codec import parse
from kvparams.dialects.carriers import rooted
from kvparams.dialects.table import LEGS, judge
from kvparams.errors import InvalidParams
from kvparams.tools.arguments import (
    FORMS,
    OF_OURS,
    add_engine,
    add_file,
    add_phase,
    candidates,
    named,
    refused,
    without_effect,
)
from kvparams.tools.reading import OURS, document_in, load, message_of, recognise, unexamined
from kvparams.tools.words import unknown_in
from kvparams.versions import deprecated_in

__all__ = ["COMMAND"]

_EPILOG: Final = f"""{FORMS}
example:

  kvparams validate request.json
  kvparams validate --dialect nixl --phase prefill_result --engine 0.14.0 answer.json

Every problem is one line: the file, where it is, what it is, and its kind in brackets. The status is 0 for what is
valid, 1 for what is not, JSON that the protocol refuses included, and 2 where that cannot be told. What is valid and
deprecated, or unknown, is told on standard error, and so are native keys beside a document, which are not examined.
"""


class ValidateCommand:
    """See `kvparams.cli.Command`."""

    summary = "Check a KV-transfer document, or what an engine reads or writes."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The file, and what is known about it."""
        parser.epilog = _EPILOG
        add_file(parser)
        parser.add_argument("--dialect", metavar="NAME", help=f"{OURS} for our document (default: what fits)")
        add_phase(parser)
        add_engine(parser, "the release of the engine; without it, what any release accepts is valid")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it."""
        table = named(arguments.dialect)
        try:
            found = load(arguments.file)
            document = document_in(found)
        except InvalidParams as error:
            return refused(error, arguments.file)
        if arguments.dialect == OURS or (table is None and document is not None):
            without_effect(arguments, ("phase", "engine", "request_id"), OF_OURS)
            ours = found if document is None else document
            if arguments.dialect is None and (words := unexamined(found, "--dialect")):
                print(words, file=sys.stderr)
            try:
                parse(ours)
            except InvalidParams as error:
                return refused(error, arguments.file)
            extensions = {one.extension for one in candidates(None)} if ours.get("extensions") else ()
            for one in (*deprecated_in(ours), *unknown_in(ours, extensions)):
                print(one, file=sys.stderr)
            print("valid: a document of ours")
            return 0
        given = recognise(message_of(found, arguments.request_id), candidates(table), table, arguments.phase, found)
        for line in given.guessed:
            print(line, file=sys.stderr)
        problems = judge(given.table, given.message, LEGS[given.phase], arguments.engine)
        if problems:
            return refused(InvalidParams(tuple(rooted(one, given.carrier) for one in problems)), arguments.file)
        print(f"valid: {given.table.title}, {given.phase}")
        return 0


COMMAND: Final = ValidateCommand()
