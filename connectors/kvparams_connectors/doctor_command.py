"""`kvparams doctor`: is this machine, and is each store and proxy, as it should be?"""

import argparse
import sys
from collections.abc import Iterable
from typing import Final

from kvparams_connectors.advice import Advice
from kvparams_connectors.settings import shown
from kvparams_connectors.tools.diagnosis import examine_machine, examine_store
from kvparams_connectors.tools.proxy_advice import examine_proxy, is_proxy

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
example:

  kvparams doctor
  kvparams doctor 'file:///dev/shm/kv?size=4GiB' 'valkey://10.0.0.5:6379?password_file=/etc/kv/password'
  kvparams doctor http://127.0.0.1:8100

For each store: can it be reached, is its version right, which settings will hurt, does a page come back whole, how
fast is it. A few pages are put under keys of its own, and deleted. For each running proxy (http://host:port): does what
it expects to be cached in engines come true. Every line that is not `ok` says what to do. The status is 0 if nothing
is wrong (warnings may be), 1 if something is.
"""
_GRADES: Final = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}


class DoctorCommand:
    """See `kvparams.cli.Command`."""

    summary = "Examine this machine, its stores and running proxies; every line says what to do."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The stores and proxies."""
        parser.epilog = _EXAMPLE
        text = "a store, for example file:///dev/shm/kv?size=4GiB, or a running proxy, http://host:port"
        parser.add_argument("urls", metavar="URL", nargs="*", help=text)

    def run(self, arguments: argparse.Namespace) -> int:
        """Examine everything, and count."""
        bad = _show("this machine", examine_machine())
        for url in arguments.urls:
            print()
            bad += _show(shown(url), examine_proxy(url) if is_proxy(url) else examine_store(url))
        if bad:
            print(f"kvparams doctor: {bad} {'thing is' if bad == 1 else 'things are'} wrong", file=sys.stderr)
        return 1 if bad else 0


def _show(what: str, found: Iterable[Advice]) -> int:
    """Print each line as it comes; how many are errors."""
    print(what, flush=True)
    errors = 0
    for one in found:
        errors += one.grade == "error"
        print(f"  {_GRADES[one.grade]} {one.found}{f': {one.todo}' if one.todo else ''}", flush=True)
    return errors


COMMAND: Final = DoctorCommand()
