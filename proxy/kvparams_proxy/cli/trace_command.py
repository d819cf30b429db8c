"""`kvparams trace` shows where the time of one request went, as a waterfall."""

import argparse
import json
import sys
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote

from pydantic import ValidationError

from kvparams.errors import printable
from kvparams_proxy.cli.proxy_client import NO_PROXY, ProxyClient, describe_refusal
from kvparams_proxy.secret import SecretError, secret_from_file
from kvparams_proxy.server.admin_answers import RequestAnswer
from kvparams_proxy.server.admin_api import WORKER_HEADER

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Example, with the X-Request-Id of an answer (the request log has it, too):

  kvparams trace 6e2185772825ef4805870039-4 http://127.0.0.1:8100 --admin-token-file token

ID may also be a trace id or the id of a transfer. The proxy must have an admin API (--admin-token-file); it remembers
the last 512 requests that have ended, and with several workers that many for each. Several proxies are asked one by
one: each knows its own requests.
"""
_WIDTH: Final = 48
"""Characters of a bar that is as long as the request."""
_ATTEMPTS: Final = 300
"""Connections that are made to find the worker that knows the request: each reaches one of them at random."""
_WORDS: Final = {
    "created": "reading",
    "queued": "queue",
    "encode": "encode",
    "prefill": "prefill",
    "result": "handoff",
    "decode": "first token",
    "first_byte": "decode",
}
"""What happens in a state."""


class TraceCommand:
    """See `kvparams.cli.Command`."""

    summary = "Show where the time of one request went."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments for the request and the proxy's URL."""
        parser.epilog = _EXAMPLE
        parser.add_argument("id", metavar="ID", help="the id of a request, a transfer or a trace")
        parser.add_argument("proxy", metavar="URL", help="the URL of the proxy, http://host:port")
        parser.add_argument(
            "--admin-token-file", required=True, metavar="FILE", help="the file with the proxy's admin token"
        )
        parser.add_argument("--json", action="store_true", help="print the proxy's answer as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Asks the proxy and prints its answer."""
        url = printable(arguments.proxy)
        try:
            client = ProxyClient(arguments.proxy, secret_from_file(Path(arguments.admin_token_file)))
            text = _ask(client, arguments.id)
            found = RequestAnswer.model_validate_json(text)
        except HTTPError as error:
            return _refused(describe_refusal(error, url, "has no admin API"), 1)
        except (HTTPException, ValidationError):
            return _refused(f"{url} {NO_PROXY}", 1)
        except SecretError as error:
            return _refused(f"--admin-token-file: {error}", 2)
        except (OSError, ValueError) as error:
            return _refused(f"{error.reason if isinstance(error, URLError) else error}", 2)
        print(json.dumps(json.loads(text), indent=1) if arguments.json else "\n".join(_lines(found)))
        return 0


def _refused(said: str, status: int) -> int:
    print(f"kvparams trace: {said}", file=sys.stderr)
    return status


def _ask(client: ProxyClient, id: str) -> bytes:
    """Returns the answer of the worker that knows the request.

    Raises:
        HTTPError: no worker knows it.
    """
    asked: set[str] = set()
    for attempt in range(_ATTEMPTS):
        try:
            return client.get(f"/admin/requests/{quote(id, safe='')}")
        except HTTPError as error:
            number, _, count = error.headers.get(WORKER_HEADER, "").partition("/")
            asked.add(number)
            if not count.isdecimal() or len(asked) >= int(count) or attempt == _ATTEMPTS - 1:
                raise
            error.close()
    raise AssertionError


def _lines(found: RequestAnswer) -> Iterator[str]:
    status = "no answer" if found.status is None else str(found.status)
    failure = "" if found.error is None else f", {printable(found.error)}"
    yield f"{printable(found.id)}  {printable(found.endpoint)}  {found.outcome} ({status}{failure})"
    known = (
        ("prompt tokens", found.prompt_tokens),
        ("cached", found.cached_tokens),
        ("completion tokens", found.completion_tokens),
        ("retries", found.retries or None),
    )
    facts = [f"{name}: {value}" for name, value in known if value is not None]
    names = (("model", found.model), ("tenant", found.tenant), ("trace", found.trace_id))
    facts += [f"{name}: {printable(value)}" for name, value in names if value]
    if facts:
        yield "; ".join(facts)
    yield ""
    width = max([8, *(len(printable(one.instance or "")) for one in found.states)])
    yield f"{'':13}{'engine':{width}}{'begin':>12}{'time':>12}  0{f'{found.total_ms:,.1f} ms':>{_WIDTH - 1}}"
    for one in found.states:
        if one.state == "done":
            continue
        begin = _place(one.start_ms, found.total_ms)
        length = max(1, _place(one.start_ms + one.duration_ms, found.total_ms) - begin)
        bar = " " * min(begin, _WIDTH - 1) + "█" * length
        yield (
            f"{_WORDS.get(one.state, one.state):13}{printable(one.instance or ''):{width}}"
            f"{one.start_ms:>9,.1f} ms{one.duration_ms:>9,.1f} ms  {bar}"
        )


def _place(at_ms: float, total_ms: float) -> int:
    return round(at_ms / total_ms * _WIDTH) if total_ms else 0


COMMAND: Final = TraceCommand()
"""The entry point."""
