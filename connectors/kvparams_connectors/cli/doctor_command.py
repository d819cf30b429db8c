"""Implements `kvparams doctor`, which examines this machine, each store, proxy and declared engine."""

import argparse
import re
import sys
from collections.abc import Iterable
from typing import Final

from kvparams.cli import main
from kvparams_connectors.advice import Advice
from kvparams_connectors.cli.proxy_diagnosis import examine_proxy, is_proxy
from kvparams_connectors.cli.store_diagnosis import examine_machine, examine_store
from kvparams_connectors.store_url import redact_url

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Examples:

  kvparams doctor
  kvparams doctor 'file:///dev/shm/kv?size=4GiB' 'valkey://10.0.0.5:6379?password_file=/etc/kv/password'
  kvparams doctor http://127.0.0.1:8100
  kvparams doctor fleet.yaml

For each store, the command checks the connection, the version, the settings, the speed, and that a page comes back
unchanged. It stores a few pages under keys of its own, and deletes them. For each running proxy (http://host:port), it
checks that tokens that the proxy predicted to be cached were cached. For each fleet file, it checks that each running
engine matches its declaration, as `kvparams proxy --config FILE --check` does, which sends one small request through
each pair of engines. Every line that is not `ok` says what to do. The exit status is 1 if there is an error, and
otherwise 0, also with warnings.
"""
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:")
_GRADES: Final = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}


class DoctorCommand:
    """See `kvparams.cli.Command`."""

    summary = "Check this machine, stores, running proxies and engines, and say what to do about each problem."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The stores, proxies and files."""
        parser.epilog = _EXAMPLE
        text = (
            "a store (for example file:///dev/shm/kv?size=4GiB), a running proxy (http://host:port), or the path "
            "of a fleet file"
        )
        parser.add_argument("urls", metavar="URL", nargs="*", help=text)

    def run(self, arguments: argparse.Namespace) -> int:
        """Examine everything, and count."""
        bad = _show("this machine", examine_machine())
        for url in arguments.urls:
            print(flush=True)
            if _is_file(url):
                bad += _check(url)
            else:
                bad += _show(redact_url(url), examine_proxy(url) if is_proxy(url) else examine_store(url))
        if bad:
            print(f"kvparams doctor: {bad} {'error' if bad == 1 else 'errors'} found", file=sys.stderr)
        return 1 if bad else 0


def _is_file(url: str) -> bool:
    return _SCHEME.match(url) is None and url.endswith((".yaml", ".yml", ".json"))


def _check(path: str) -> int:
    """The engines of a fleet, asked by the proxy that would use them; 1 if something is wrong."""
    print(path, flush=True)
    return int(main(["proxy", "--config", path, "--check"]) != 0)


def _show(what: str, found: Iterable[Advice]) -> int:
    """Print each line as it comes; how many are errors."""
    print(what, flush=True)
    errors = 0
    for one in found:
        errors += one.level == "error"
        print(f"  {_GRADES[one.level]} {one.finding}{f': {one.action}' if one.action else ''}", flush=True)
    return errors


COMMAND: Final = DoctorCommand()
