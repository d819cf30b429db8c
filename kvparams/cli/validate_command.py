"""`kvparams validate`: is this a document, or a message of a dialect, and what is wrong with it."""

import argparse
import sys
from typing import Final

from kvparams.cli.arguments import (
    FILE_FORMS,
    OUR_DOCUMENT_NOTE,
    add_engine,
    add_file,
    add_phase,
    candidate_tables,
    named_table,
    print_problems,
    recognize_document,
    warn_ignored_options,
)
from kvparams.cli.descriptions import unknown_members
from kvparams.cli.input_files import (
    OUR_FORMAT,
    describe_unexamined,
    find_document,
    load_json_file,
)
from kvparams.codec import parse
from kvparams.dialects.carriers import with_original_path
from kvparams.dialects.table import LEGS, validate_message
from kvparams.errors import InvalidParams
from kvparams.versions import find_deprecated

__all__ = ["COMMAND"]

_EPILOG: Final = f"""{FILE_FORMS}
Examples:

  kvparams validate request.json
  kvparams validate --dialect nixl --phase prefill_result --engine 0.14.0 answer.json

Every problem is one line: the file, the path of the member, the problem, and its kind in brackets. The exit status is 0
for a valid message, 1 for an invalid one (also for JSON that the protocol refuses), and 2 if the command cannot tell,
for example because the dialect is not clear. Deprecated members, unknown members, and native keys that were not checked
are named on standard error.
"""


class ValidateCommand:
    """See `kvparams.cli.Command`."""

    summary = "Check a KV-transfer document, or a message that an engine reads or writes."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The file, and what is known about it."""
        parser.epilog = _EPILOG
        add_file(parser)
        parser.add_argument(
            "--dialect", metavar="NAME", help=f"the dialect of FILE, or {OUR_FORMAT} (default: found from the keys)"
        )
        add_phase(parser)
        add_engine(parser, "the release of the engine (default: a key of any release is valid)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it."""
        table = named_table(arguments.dialect)
        try:
            found = load_json_file(arguments.file)
            document = find_document(found)
        except InvalidParams as error:
            return print_problems(error, arguments.file)
        if arguments.dialect == OUR_FORMAT or (table is None and document is not None):
            warn_ignored_options(arguments, ("phase", "engine", "request_id"), OUR_DOCUMENT_NOTE)
            ours = found if document is None else document
            if arguments.dialect is None and (words := describe_unexamined(found, "--dialect")):
                print(words, file=sys.stderr)
            try:
                parse(ours)
            except InvalidParams as error:
                return print_problems(error, arguments.file)
            extensions = {one.extension for one in candidate_tables(None)} if ours.get("extensions") else ()
            for one in (*find_deprecated(ours), *unknown_members(ours, extensions)):
                print(one, file=sys.stderr)
            print("valid: a kvparams document")
            return 0
        given = recognize_document(found, table, arguments)
        for line in given.guessed:
            print(line, file=sys.stderr)
        problems = validate_message(given.table, given.message, LEGS[given.phase], arguments.engine)
        if problems:
            return print_problems(
                InvalidParams(tuple(with_original_path(one, given.carrier) for one in problems)), arguments.file
            )
        print(f"valid: {given.table.title}, {given.phase}")
        return 0


COMMAND: Final = ValidateCommand()
