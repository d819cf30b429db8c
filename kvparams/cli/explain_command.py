"""`kvparams explain`: in words, what a document or a message means, and what is wrong with it."""

import argparse
from typing import Final

from kvparams.cli.arguments import (
    FILE_FORMS,
    OUR_DOCUMENT_NOTE,
    add_engine,
    add_file,
    add_phase,
    candidate_tables,
    named_table,
    recognize_document,
    warn_ignored_options,
)
from kvparams.cli.descriptions import describe_dialect, describe_document, describe_message, unknown_members
from kvparams.cli.input_files import (
    OUR_FORMAT,
    describe_unexamined,
    find_document,
    load_json_file,
)
from kvparams.codec import parse
from kvparams.errors import InvalidParams

__all__ = ["COMMAND"]

_EPILOG: Final = f"""{FILE_FORMS}
Examples:

  kvparams explain answer.json
  kvparams explain --dialect mooncake request.json
  echo '{{"do_remote_prefill": true, "remote_port": 0}}' | kvparams explain --dialect nixl --phase decode
  kvparams explain --dialect nixl --about

With --about the command reads no file; it explains every key of the dialect.
"""


class ExplainCommand:
    """See `kvparams.cli.Command`."""

    summary = "Explain what a KV-transfer document of any dialect means, and what is wrong with it."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The file, and what is known about it."""
        parser.epilog = _EPILOG
        add_file(parser)
        parser.add_argument(
            "--dialect", metavar="NAME", help=f"the dialect of FILE, or {OUR_FORMAT} (default: found from the keys)"
        )
        add_phase(parser)
        add_engine(parser, "the release of the engine; keys that this release does not have are then reported")
        parser.add_argument("--about", action="store_true", help="explain the dialect itself, with all of its keys")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the status is 1 where something is wrong."""
        table = named_table(arguments.dialect)
        if arguments.about:
            warn_ignored_options(arguments, ("phase", "engine", "request_id"), "--about does not read a file")
            for one in candidate_tables(table):
                print("\n".join(describe_dialect(one)), end="\n\n")
            return 0
        try:
            found = load_json_file(arguments.file)
            document = find_document(found)
        except InvalidParams as error:
            print("\n".join(["What is wrong:", *(f"  {problem}" for problem in error.problems)]))
            return 1
        if arguments.dialect == OUR_FORMAT or (table is None and document is not None):
            warn_ignored_options(arguments, ("phase", "engine", "request_id"), OUR_DOCUMENT_NOTE)
            ours = found if document is None else document
            extensions = {one.extension for one in candidate_tables(None)} if ours.get("extensions") else ()
            try:
                lines = describe_document(parse(ours), extensions)
            except InvalidParams as error:
                print("This is a kvparams document, but it is not valid:")
                print("\n".join(f"  {line}" for line in (*error.problems, *unknown_members(ours, extensions))))
                return 1
            beside = describe_unexamined(found, "--dialect") if arguments.dialect is None else None
            print("\n".join([*lines, beside] if beside else lines))
            return 0
        given = recognize_document(found, table, arguments)
        lines, right = describe_message(given, arguments.engine)
        print("\n".join(lines))
        return 0 if right else 1


COMMAND: Final = ExplainCommand()
