"""`kvparams translate`: say in one dialect what was said in another, and name what cannot be said."""

import argparse
import json
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
    warn_ignored_options,
)
from kvparams.cli.input_files import (
    OUR_FORMAT,
    describe_unexamined,
    find_document,
    load_json_file,
    recognize_message,
    to_message,
)
from kvparams.codec import dump, parse
from kvparams.dialects.carriers import CARRIERS, DEFAULT_CARRIER, MessageCarrier, lower_message, with_original_path
from kvparams.dialects.table import DialectTable
from kvparams.dialects.translation import (
    LossyTranslation,
    TranslatedMessage,
    decode_message,
    encode_as_routed,
    encode_message,
    translate_params,
)
from kvparams.errors import InvalidParams
from kvparams.params import KVTransferParams

__all__ = ["COMMAND"]

_EPILOG: Final = f"""{FILE_FORMS}
Examples:

  kvparams translate --from nixl --to {OUR_FORMAT} answer.json                write a kvparams document
  kvparams translate --from {OUR_FORMAT} --to mooncake document.json          read a kvparams document
  kvparams translate --from nixl --to sglang request.json                 write the request for another engine
  kvparams translate --from nixl --to nixl --engine 0.14.0 answer.json    write the answer for an older release

The message goes to standard output as {{"request_id", "body", "headers"}}. If the other dialect cannot express a
member, the command names it and fails (status 1). With --lossy it leaves the member out and names it on standard error.
A document that came from B is written back unchanged. If B has another mode, the document gets the mode of B, which is
reported on standard error. Block ids and addresses are never translated, because only the connector that made them can
use them.
"""


class TranslateCommand:
    """See `kvparams.cli.Command`."""

    summary = "Translate between kvparams documents and the native keys of engines."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The file, from what, to what."""
        parser.epilog = _EPILOG
        add_file(parser)
        parser.add_argument(
            "--from",
            dest="source",
            metavar="A",
            help=f"the dialect of FILE, or {OUR_FORMAT} (default: found from the keys)",
        )
        parser.add_argument(
            "--to", dest="target", metavar="B", required=True, help=f"the dialect of the result, or {OUR_FORMAT}"
        )
        add_phase(parser)
        add_engine(parser, "the release of the engine that will read the result")
        parser.add_argument(
            "--lossy", action="store_true", help="leave out members that B cannot express, instead of failing"
        )
        places = "; ".join(f"{one.name}: {one.place}" for one in CARRIERS)
        parser.add_argument(
            "--carrier",
            choices=(DEFAULT_CARRIER, *(one.name for one in CARRIERS)),
            help=f"where to put kv_transfer_params: in the body, or {places} (default: as in FILE)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it."""
        source, target = named_table(arguments.source), named_table(arguments.target)
        carrier: MessageCarrier | None = None
        if target is None:
            warn_ignored_options(
                arguments, ("engine", "lossy", "carrier"), "the result is a kvparams document, which no engine reads"
            )
        try:
            found = load_json_file(arguments.file)
            document = find_document(found)
            if arguments.source == OUR_FORMAT or (source is None and document is not None):
                warn_ignored_options(arguments, ("phase", "request_id"), OUR_DOCUMENT_NOTE)
                params = parse(found if document is None else document)
                if arguments.source is None and (words := describe_unexamined(found, "--from")):
                    print(words, file=sys.stderr)
            else:
                message = to_message(found, arguments.request_id)
                given = recognize_message(message, candidate_tables(source), source, arguments.phase, found)
                for line in given.guessed:
                    print(line, file=sys.stderr)
                source, carrier = given.table, given.carrier
                try:
                    params = decode_message(source, given.message, given.phase)
                except InvalidParams as error:
                    raise InvalidParams(tuple(with_original_path(one, carrier) for one in error.problems)) from error
            if target is None:
                print(json.dumps(dump(params), indent=2, ensure_ascii=False))
                return 0
            if source is None and _was_in(target, params):
                source = target
            if source is None:
                written = encode_as_routed(target, params, arguments.engine)
            else:
                written = translate_params(source, target, params, arguments.engine)
        except InvalidParams as error:
            return print_problems(error, arguments.file, sys.stderr)
        if written.params.mode != params.mode:
            print(
                f"the mode changes from {params.mode} to {written.params.mode}, the only one of {target.name}",
                file=sys.stderr,
            )
        if arguments.carrier is not None:
            carrier = next((one for one in CARRIERS if one.name == arguments.carrier), None)
        return _say(written, target.name, carrier, lossy=arguments.lossy)


def _was_in(table: DialectTable, params: KVTransferParams) -> bool:
    """Returns True if a document appears to have been decoded from this dialect; it is then encoded as it is."""
    if params.mode != table.mode:
        return False
    if table.extension in (params.extensions or {}):
        return True
    try:
        encode_message(table, params)
    except (LossyTranslation, InvalidParams):
        return False
    return True


def _say(written: TranslatedMessage, name: str, carrier: MessageCarrier | None, *, lossy: bool) -> int:
    if written.lost:
        print(LossyTranslation(name, written.lost), file=sys.stderr)
        if not lossy:
            return 1
    print(json.dumps(lower_message(written.message, carrier).to_json(), indent=2, ensure_ascii=False))
    return 0


COMMAND: Final = TranslateCommand()
