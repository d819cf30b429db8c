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
example:

  kvparams doctor
  kvparams doctor 'file:///dev/shm/kv?size=4GiB' 'valkey://10.0.0.5:6379?password_file=/etc/kv/password'
  kvparams doctor http://127.0.0.1:8100
  kvparams doctor fleet.yaml

For each store: can it be reached, is its version right, which settings will hurt, does a page come back whole, how
fast is it. A few pages are put under keys of its own, and deleted. For each running proxy (http://host:port): does what
it expects to be cached in engines come true. For each file of a fleet: is each engine that runs what is declared of it,
as `kvparams proxy --config FILE --check` says it, which sends one small request through each pair. Every line that is
not `ok` says what to do. The status is 0 if nothing is wrong (warnings may be), 1 if something is.
"""
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:")
_GRADES: Final = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  "}


class DoctorCommand:
    """See `kvparams.cli.Command`."""

    summary = "Examine this machine, its stores, running proxies and engines; every line says what to do."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The stores, proxies and files."""
        parser.epilog = _EXAMPLE
        text = "a store, for example file:///dev/shm/kv?size=4GiB, a running proxy, http://host:port, or a fleet file"
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
            print(f"kvparams doctor: {bad} {'thing is' if bad == 1 else 'things are'} wrong", file=sys.stderr)
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
