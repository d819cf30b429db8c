"""`kvparams keys` makes, lists and revokes the API keys of clients."""

import argparse
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from kvparams_proxy.requests.api_keys_file import APIKeysError, create_api_key, edit_api_keys, read_api_keys

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Example:

  kvparams keys create keys.jsonl --tenant acme --expires 90d
  kvparams keys list keys.jsonl
  kvparams keys revoke keys.jsonl 3f9a0c41d2e7

A key is shown only once, when it is made, because the file holds hashes. A running proxy reads changes by itself.
"""
_DAYS: Final = re.compile(r"([1-9][0-9]{0,4})d")


class KeysCommand:
    """See `kvparams.cli.Command`."""

    summary = "Make, list and revoke the API keys of clients."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds one subcommand for each action."""
        parser.epilog = _EXAMPLE
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        create = actions.add_parser("create", help="make a key and print it once")
        create.add_argument("file", type=Path, help="the keys file; it is created if it does not exist")
        create.add_argument("--tenant", required=True, help="the tenant that the key belongs to")
        create.add_argument(
            "--priority",
            type=int,
            default=0,
            help="the priority of the key's requests in the queue; higher goes first (default: 0)",
        )
        create.add_argument(
            "--expires",
            type=_expiry,
            metavar="WHEN",
            help="when the key expires, as 90d or 2027-01-31 (default: never)",
        )
        listing = actions.add_parser("list", help="show the ids, tenants and dates of the keys")
        listing.add_argument("file", type=Path, help="the keys file")
        revoke = actions.add_parser("revoke", help="revoke a key")
        revoke.add_argument("file", type=Path, help="the keys file")
        revoke.add_argument("id", help="the id of the key, as `list` shows it")

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the chosen action."""
        try:
            if arguments.action == "create":
                return _create(arguments.file, arguments.tenant, arguments.priority, arguments.expires)
            if arguments.action == "list":
                return _list(arguments.file)
            return _revoke(arguments.file, arguments.id)
        except APIKeysError as error:
            print(f"kvparams keys: {error}", file=sys.stderr)
            return 2


def _create(path: Path, tenant: str, priority: int, expires: datetime | None) -> int:
    key, record = create_api_key(tenant, datetime.now(UTC), priority=priority, expires=expires)
    with edit_api_keys(path) as records:
        records[record.id] = record
    print(key)
    print(f"key {record.id} of {tenant} is in {path}; it is not shown again", file=sys.stderr)
    return 0


def _list(path: Path) -> int:
    records, _ = read_api_keys(path)
    now = datetime.now(UTC)
    rows = [("ID", "TENANT", "PRIORITY", "CREATED", "EXPIRES")]
    for record in records.values():
        expires = "never" if record.expires is None else f"{record.expires:%Y-%m-%d %H:%M}"
        if record.expires is not None and record.expires <= now:
            expires += " (expired)"
        rows.append((record.id, record.tenant, str(record.priority), f"{record.created:%Y-%m-%d %H:%M}", expires))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(path: Path, id: str) -> int:
    read_api_keys(path)  # a file that is not there is not made here
    with edit_api_keys(path) as records:
        record = records.pop(id, None)
        if record is None:
            raise APIKeysError(f"{path} has no key {id[:64]!r}; `kvparams keys list {path}` shows them")
    print(f"key {id} of {record.tenant} is revoked", file=sys.stderr)
    return 0


def _expiry(text: str) -> datetime:
    now = datetime.now(UTC)
    if (days := _DAYS.fullmatch(text)) is not None:
        moment = now + timedelta(days=int(days[1]))
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise argparse.ArgumentTypeError("must be a number of days (90d) or a date (2027-01-31)") from None
        moment = moment.replace(tzinfo=moment.tzinfo or UTC)
    if moment <= now:
        raise argparse.ArgumentTypeError("must be in the future")
    return moment


COMMAND: Final = KeysCommand()
