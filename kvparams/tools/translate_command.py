"""`kvparams translate`: say in one dialect what was said in another, and name what cannot be said."""

import argparse
import json
import sys
from typing import Final

from kvparams.codec import dump, parse
from kvparams.dialects.carriers import CARRIERS, USUAL, Carrier, lowered, rooted
from kvparams.dialects.table import Table
from kvparams.errors import InvalidParams
from kvparams.params import KVTransferParams
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
from kvparams.translation import LossyTranslation, Translated, decode, encode, rephrase, translate

__all__ = ["COMMAND"]

_EPILOG: Final = f"""{FORMS}
example:

  kvparams translate --from nixl --to {OURS} answer.json       what it says, as our document
  kvparams translate --from {OURS} --to mooncake document.json  and back
  kvparams translate --from nixl --to sglang request.json      the same intent for another engine
  kvparams translate --from nixl --to nixl --engine 0.14.0 answer.json

The message goes to standard output as {{"request_id", "body", "headers"}}. What the other dialect has no words for is
an error that names it (status 1); with --lossy it is written without, and that is named on standard error. A document
that came from B is written back as it was; of another mode it gets that of B, which is told on standard error. Where KV
lies is never translated: block ids and addresses are of use only to the connector that made them.
"""


class TranslateCommand:
    """See `kvparams.cli.Command`."""

    summary = "Translate between our document and what engines read and write."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The file, from what, to what."""
        parser.epilog = _EPILOG
        add_file(parser)
        parser.add_argument(
            "--from", dest="source", metavar="A", help=f"the dialect of FILE, or {OURS} (default: fits)"
        )
        parser.add_argument("--to", dest="target", metavar="B", required=True, help=f"the dialect wanted, or {OURS}")
        add_phase(parser)
        add_engine(parser, "the release of the engine that shall read it")
        parser.add_argument("--lossy", action="store_true", help="write it although something is lost")
        places = "; ".join(f"{one.name}: {one.place}" for one in CARRIERS)
        parser.add_argument(
            "--carrier",
            choices=(USUAL, *(one.name for one in CARRIERS)),
            help=f"where kv_transfer_params shall stand: in the body, or {places} (default: where FILE has them)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it."""
        source, target = named(arguments.source), named(arguments.target)
        carrier: Carrier | None = None
        if target is None:
            without_effect(
                arguments, ("engine", "lossy", "carrier"), "a document of ours is written, which no engine reads"
            )
        try:
            found = load(arguments.file)
            document = document_in(found)
            if arguments.source == OURS or (source is None and document is not None):
                without_effect(arguments, ("phase", "request_id"), OF_OURS)
                params = parse(found if document is None else document)
                if arguments.source is None and (words := unexamined(found, "--from")):
                    print(words, file=sys.stderr)
            else:
                message = message_of(found, arguments.request_id)
                given = recognise(message, candidates(source), source, arguments.phase, found)
                for line in given.guessed:
                    print(line, file=sys.stderr)
                source, carrier = given.table, given.carrier
                try:
                    params = decode(source, given.message, given.phase)
                except InvalidParams as error:
                    raise InvalidParams(tuple(rooted(one, carrier) for one in error.problems)) from error
            if target is None:
                print(json.dumps(dump(params), indent=2, ensure_ascii=False))
                return 0
            if source is None and _was_in(target, params):
                source = target
            if source is None:
                written = rephrase(target, params, arguments.engine)
            else:
                written = translate(source, target, params, arguments.engine)
        except InvalidParams as error:
            return refused(error, arguments.file, sys.stderr)
        if written.params.mode != params.mode:
            print(f"the mode is {written.params.mode}, as {target.name} has it; it was {params.mode}", file=sys.stderr)
        if arguments.carrier is not None:
            carrier = next((one for one in CARRIERS if one.name == arguments.carrier), None)
        return _say(written, target.name, carrier, lossy=arguments.lossy)


def _was_in(table: Table, params: KVTransferParams) -> bool:
    """Whether a document was decoded from this dialect, as far as it shows: then it is written as it is."""
    if params.mode != table.mode:
        return False
    if table.extension in (params.extensions or {}):
        return True
    try:
        encode(table, params)
    except (LossyTranslation, InvalidParams):
        return False
    return True


def _say(written: Translated, name: str, carrier: Carrier | None, *, lossy: bool) -> int:
    if written.lost:
        print(LossyTranslation(name, written.lost), file=sys.stderr)
        if not lossy:
            return 1
    print(json.dumps(lowered(written.message, carrier).to_json(), indent=2, ensure_ascii=False))
    return 0


COMMAND: Final = TranslateCommand()
