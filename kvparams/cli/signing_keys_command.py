"""`kvparams signing-keys`: make, change and list the keys that documents are signed with."""

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvparams.signing.keyring import SigningKey, SigningKeyring, SigningKeyringError
from kvparams.signing.keyring_file import change_keyring, create_keyring, read_keyring
from kvparams.signing.signer import MAX_LIFETIME_S

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Example:

  kvparams signing-keys create signing-keys.json
  kvparams signing-keys rotate signing-keys.json --after 10m
  kvparams signing-keys list signing-keys.json

Proxies sign with the newest valid key. Engines accept every key that was valid when a document was signed. Both need
the same file, and read changes by themselves. To change the key, run rotate on one machine, and copy the file to all
others within --after. Everyone who can read the file can sign, so keep it secret.
"""
_SPAN: Final = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_GONE_S: Final = 2 * MAX_LIFETIME_S
"""After its end nothing that a key has signed is good any more."""


class SigningKeysCommand:
    """See `kvparams.cli.Command`."""

    summary = "Make, change and list the keys that documents are signed with."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds one subcommand for each action on a key file."""
        parser.epilog = _EXAMPLE
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        create = actions.add_parser("create", help="make the file, with one key that is valid immediately")
        create.add_argument("file", type=Path, help="the path of the new file; it must not exist")
        rotate = actions.add_parser("rotate", help="add a key that replaces the others, and let the others expire")
        rotate.add_argument("file", type=Path, help="the path of the signing keys file")
        rotate.add_argument(
            "--after",
            type=_span,
            default="10m",
            metavar="TIME",
            help="the time until the new key is used; copy the file to all machines before (default: 10m)",
        )
        rotate.add_argument(
            "--overlap",
            type=_span,
            default="1h",
            metavar="TIME",
            help="how long the old keys stay valid after that, for machines whose clock is wrong (default: 1h)",
        )
        listing = actions.add_parser("list", help="show the names and times of the keys")
        listing.add_argument("file", type=Path, help="the path of the signing keys file")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it."""
        now = int(time.time())
        try:
            if arguments.action == "create":
                return _create(arguments.file, now)
            if arguments.action == "rotate":
                return _rotate(arguments.file, now, arguments.after, arguments.overlap)
            return _list(arguments.file, now)
        except SigningKeyringError as error:
            print(f"kvparams signing-keys: {error}", file=sys.stderr)
            return 2


def _create(path: Path, now: int) -> int:
    key = SigningKey.new(now)
    create_keyring(path, SigningKeyring([key]))
    print(
        f"key {key.kid} is in {path}; give this file to proxies and engines, and keep it secret from all others",
        file=sys.stderr,
    )
    return 0


def _rotate(path: Path, now: int, after_s: int, overlap_s: int) -> int:
    made = SigningKey.new(now + after_s)
    ends = made.not_before + max(1, overlap_s)
    with change_keyring(path) as held:
        kept = [key for key in held[0] if key.not_after is None or key.not_after + _GONE_S > now]
        later = [key.kid for key in kept if key.not_before >= ends]
        if later:
            raise SigningKeyringError(
                f"the key {later[0]} is not in use yet and begins later than a new key would; wait until it is in use"
            )
        kept = [key if key.not_after is not None and key.not_after <= ends else key.with_end(ends) for key in kept]
        held[0] = SigningKeyring([made, *kept])
    print(
        f"key {made.kid} is used from {_text(made.not_before)}; copy {path} to all proxies and engines before",
        file=sys.stderr,
    )
    return 0


def _list(path: Path, now: int) -> int:
    keyring = read_keyring(path)
    signing = keyring.signing_key_at(now)
    rows = [("KID", "FROM", "UNTIL", "")]
    for key in keyring:
        until = "" if key.not_after is None else _text(key.not_after)
        state = (
            "signs"
            if key is signing
            else "later"
            if key.not_before > now
            else "valid"
            if key.is_valid_at(now)
            else "ended"
        )
        rows.append((key.kid, _text(key.not_before), until, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _span(text: str) -> int:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError("must be a time such as 30s, 10m, 2h or 7d")
    return int(found[1]) * _UNITS[found[2]]


def _text(moment: int) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}Z"


COMMAND: Final = SigningKeysCommand()
