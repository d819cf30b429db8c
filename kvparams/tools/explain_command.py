"""`kvparams explain`: in words, what a document or a message means, and what is wrong with it."""

import argparse
from typing import Final

from kvparams.codec import parse
from kvparams.errors import InvalidParams
from kvparams.tools.arguments import (
    FORMS,
    OF_OURS,
    add_engine,
    add_file,
    add_phase,
    candidates,
    named,
    without_effect,
)
from kvparams.tools.reading import OURS, document_in, load, message_of, recognise, unexamined
from kvparams.tools.words import explained, given_in_words, told, unknown_in

__all__ = ["COMMAND"]

_EPILOG: Final = f"""{FORMS}
example:

  kvparams explain answer.json
  kvparams explain --dialect mooncake request.json
  echo '{{"do_remote_prefill": true, "remote_port": 0}}' | kvparams explain --dialect nixl --phase decode
  kvparams explain --dialect nixl --about

With --about no file is read: the dialect itself is explained, every key of it.
"""


class ExplainCommand:
    """See `kvparams.cli.Command`."""

    summary = "Say in words what a KV-transfer document of any dialect means, and what is wrong with it."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The file, and what is known about it."""
        parser.epilog = _EPILOG
        add_file(parser)
        parser.add_argument("--dialect", metavar="NAME", help=f"{OURS} for our document (default: what fits)")
        add_phase(parser)
        add_engine(parser, "the release of the engine; keys that it does not know are then said to be unknown")
        parser.add_argument("--about", action="store_true", help="explain the dialect itself")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the status is 1 where something is wrong."""
        table = named(arguments.dialect)
        if arguments.about:
            without_effect(arguments, ("phase", "engine", "request_id"), "--about reads no file")
            for one in candidates(table):
                print("\n".join(explained(one)), end="\n\n")
            return 0
        try:
            found = load(arguments.file)
            document = document_in(found)
        except InvalidParams as error:
            print("\n".join(["What is wrong:", *(f"  {problem}" for problem in error.problems)]))
            return 1
        if arguments.dialect == OURS or (table is None and document is not None):
            without_effect(arguments, ("phase", "engine", "request_id"), OF_OURS)
            ours = found if document is None else document
            extensions = {one.extension for one in candidates(None)} if ours.get("extensions") else ()
            try:
                lines = told(parse(ours), extensions)
            except InvalidParams as error:
                print("This is meant to be a document of ours, and it is not valid:")
                print("\n".join(f"  {line}" for line in (*error.problems, *unknown_in(ours, extensions))))
                return 1
            beside = unexamined(found, "--dialect") if arguments.dialect is None else None
            print("\n".join([*lines, beside] if beside else lines))
            return 0
        given = recognise(message_of(found, arguments.request_id), candidates(table), table, arguments.phase, found)
        lines, right = given_in_words(given, arguments.engine)
        print("\n".join(lines))
        return 0 if right else 1


COMMAND: Final = ExplainCommand()
