"""`kvparams explain-route` shows where a running proxy would send a request now, and why."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Examples, for a request in a file and for a prompt:

  kvparams explain-route http://127.0.0.1:8100 --admin-token-file token --request body.json
  kvparams explain-route http://127.0.0.1:8100 --admin-token-file token --model llama --prompt "Who is there?"

The proxy must have an admin API (--admin-token-file). No request is sent to an engine. A policy that draws lots or
takes turns chooses anew for each request, so the next one may go elsewhere.
"""
_TIMEOUT_S: Final = 30.0
_MOST_BYTES: Final = 16 << 20


class ExplainRouteCommand:
    """See `kvparams.cli.Command`."""

    summary = "Show to which engine a running proxy would send a request, and why."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments for the proxy's URL and the request to explain."""
        parser.epilog = _EXAMPLE
        parser.add_argument("proxy", metavar="URL", help="the URL of the proxy, http://host:port")
        parser.add_argument(
            "--request", metavar="FILE", help="a file with the body of a request; - reads standard input"
        )
        parser.add_argument("--prompt", help="the text of a prompt, instead of --request")
        parser.add_argument("--model", help="the model, with --prompt")
        parser.add_argument("--path", default="/v1/completions", help="the endpoint (default: /v1/completions)")
        parser.add_argument("--tenant", help="the tenant of the request, if the proxy has client keys")
        parser.add_argument(
            "--admin-token-file", required=True, metavar="FILE", help="the file with the proxy's admin token"
        )
        parser.add_argument("--json", action="store_true", help="print the proxy's answer as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Asks the proxy and prints its answer."""
        try:
            body = _body(arguments)
            token = Path(arguments.admin_token_file).read_text().strip()
            found = _ask(arguments, token, body)
        except HTTPError as error:
            print(f"kvparams explain-route: {error.code} {_said(error)}", file=sys.stderr)
            return 1
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"{error.filename} cannot be read: {error.strerror}"
            print(f"kvparams explain-route: {reason}", file=sys.stderr)
            return 2
        print(json.dumps(found, indent=1) if arguments.json else _words(found))
        return 0


def _body(arguments: argparse.Namespace) -> bytes:
    if (arguments.request is None) is (arguments.prompt is None):
        raise ValueError("give --request FILE or --prompt TEXT")
    if arguments.prompt is not None:
        document = {"prompt": arguments.prompt, "max_tokens": 1}
        return json.dumps(document | ({} if arguments.model is None else {"model": arguments.model})).encode()
    return sys.stdin.buffer.read() if arguments.request == "-" else Path(arguments.request).read_bytes()


def _ask(arguments: argparse.Namespace, token: str, body: bytes) -> dict[str, Any]:
    if not arguments.proxy.startswith(("http://", "https://")):
        raise ValueError("URL must be http://host:port or https://host:port")
    query = {"path": arguments.path} | ({} if arguments.tenant is None else {"tenant": arguments.tenant})
    url = f"{arguments.proxy.rstrip('/')}/admin/explain-route?{urlencode(query)}"
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with urlopen(Request(url, body, headers), timeout=_TIMEOUT_S) as answer:
        return cast("dict[str, Any]", json.loads(answer.read(_MOST_BYTES)))


def _said(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read(_MOST_BYTES))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.reason


def _words(found: dict[str, Any]) -> str:
    lines = [
        f"{found['decision']}",
        "",
        *(_cache_table(found) if found["candidates"][0].get("cached") is not None else _load_table(found)),
    ]
    if found["ids"] is None:
        lines += [
            "",
            "its token ids are unknown, so engines are chosen by load; give the proxy a --tokenizer",
        ]
    elif found["ids"] == "bytes":
        lines += [
            "",
            f"about {found['tokens']} tokens, estimated from the text's bytes; so is every number of tokens above. "
            "The request log has the engine's own",
        ]
    else:
        lines += ["", f"{found['tokens']} tokens, with ids from {found['ids']}"]
    if found["alarm"]:
        share = f"{100 * found['accuracy']:.0f} %"
        lines += [f"WARNING: only {share} of the tokens that were predicted to be cached were cached"]
    return "\n".join(lines)


def _cache_table(found: dict[str, Any]) -> list[str]:
    lines = [f"{'':2}{'instance':24}{'cached':>8}{'fetched':>9}{'wait':>9}{'fetch':>9}{'compute':>9}{'first':>9}"]
    for one in found["candidates"]:
        times = "".join(f"{1000 * one[name]:>6.0f} ms" for name in ("wait_s", "fetch_s", "compute_s", "first_token_s"))
        whose = "" if one["source"] is None else f"  from {one['source']}"
        lines.append(f"{_mark(found, one):2}{one['id']:24}{one['cached']:>8}{one['fetched']:>9}{times}{whose}")
    return lines


def _load_table(found: dict[str, Any]) -> list[str]:
    lines = [f"{'':2}{'instance':24}{'requests':>10}{'their tokens':>14}"]
    return lines + [
        f"{_mark(found, one):2}{one['id']:24}{one['in_flight']:>10}{one['tokens_in_flight']:>14}"
        for one in found["candidates"]
    ]


def _mark(found: dict[str, Any], candidate: dict[str, Any]) -> str:
    return "->" if candidate["id"] == found["chosen"] else ""


COMMAND: Final = ExplainRouteCommand()
"""The entry point."""
