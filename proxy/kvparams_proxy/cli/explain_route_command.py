"""`kvparams explain-route` shows where a running proxy would send a request now, and why."""

import argparse
import json
import sys
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode

from pydantic import ValidationError

from kvparams.errors import printable
from kvparams_proxy.cli.proxy_client import NO_PROXY, ProxyClient, describe_refusal
from kvparams_proxy.secret import Secret, SecretError, secret_from_file
from kvparams_proxy.server.admin_answers import CandidateAnswer, RouteAnswer

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Examples, for a request in a file and for a prompt:

  kvparams explain-route http://127.0.0.1:8100 --admin-token-file token --request body.json
  kvparams explain-route http://127.0.0.1:8100 --admin-token-file token --model llama --prompt "Who is there?"

The proxy must have an admin API (--admin-token-file). No request is sent to an engine. A policy that draws lots or
takes turns chooses anew for each request, so the next one may go elsewhere.
"""


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
        parser.add_argument("--session", metavar="ID", help="the session of the request, as in its header x-session-id")
        parser.add_argument(
            "--admin-token-file", required=True, metavar="FILE", help="the file with the proxy's admin token"
        )
        parser.add_argument("--json", action="store_true", help="print the proxy's answer as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Asks the proxy and prints its answer."""
        url = printable(arguments.proxy)
        try:
            body = _body(arguments)
            token = secret_from_file(Path(arguments.admin_token_file))
            text = _ask(arguments, token, body)
        except HTTPError as error:
            return _refused(describe_refusal(error, url, "has no admin API"), 1)
        except HTTPException:
            return _refused(f"{url} {NO_PROXY}", 1)
        except SecretError as error:
            return _refused(f"--admin-token-file: {error}", 2)
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"{error.filename} cannot be read: {error.strerror}"
            return _refused(f"{reason}", 2)
        try:
            found = RouteAnswer.model_validate_json(text)
        except ValidationError:
            return _refused(f"{url} {NO_PROXY}", 1)
        print(json.dumps(json.loads(text), indent=1) if arguments.json else _words(found))
        return 0


def _refused(said: str, status: int) -> int:
    print(f"kvparams explain-route: {said}", file=sys.stderr)
    return status


def _body(arguments: argparse.Namespace) -> bytes:
    if (arguments.request is None) is (arguments.prompt is None):
        raise ValueError("give --request FILE or --prompt TEXT")
    if arguments.prompt is not None:
        document = {"prompt": arguments.prompt, "max_tokens": 1}
        return json.dumps(document | ({} if arguments.model is None else {"model": arguments.model})).encode()
    return sys.stdin.buffer.read() if arguments.request == "-" else Path(arguments.request).read_bytes()


def _ask(arguments: argparse.Namespace, token: Secret, body: bytes) -> bytes:
    query = {"path": arguments.path} | ({} if arguments.tenant is None else {"tenant": arguments.tenant})
    headers = {"content-type": "application/json"}
    if arguments.session is not None:
        headers["x-session-id"] = arguments.session
    return ProxyClient(arguments.proxy, token).send(f"/admin/explain-route?{urlencode(query)}", body, headers)


def _words(found: RouteAnswer) -> str:
    has_estimates = any(one.cached is not None for one in found.candidates)
    lines = [printable(found.decision), "", *(_cache_table(found) if has_estimates else _load_table(found)), ""]
    lines += [f"mode {printable(found.mode)}, policy {printable(found.policy)}"] if found.mode is not None else []
    if found.ids is None and found.policy == "cache_aware":
        lines += [
            f"about {found.tokens} tokens, estimated from the text's length; the token ids are unknown, so engines "
            "are chosen by load. Give the proxy a --tokenizer"
        ]
    elif found.ids == "bytes":
        lines += [
            f"about {found.tokens} tokens, estimated from the text's bytes; so is every number of tokens above. "
            "The request log has the engine's own",
        ]
    elif found.estimated:
        lines += [f"about {found.tokens} tokens, estimated from the text's length"]
    else:
        lines += [f"{found.tokens} tokens, with ids from {found.ids}"]
    lines += ["it would wait for room; the choice is that among all that could run it"] if found.waits else []
    lines += [f"not looked at: {printable(note)}" for note in found.notes]
    if found.alarm and found.accuracy is not None:
        share = f"{100 * found.accuracy:.0f} %"
        lines += [f"WARNING: only {share} of the tokens that were predicted to be cached were cached"]
    return "\n".join(lines)


def _cache_table(found: RouteAnswer) -> list[str]:
    loads = any(one.load_s for one in found.candidates)  # rare: only of LoRA adapters
    words = ("wait", "fetch", *(("load",) if loads else ()), "compute", "first")
    lines = [f"{'':2}{'instance':24}{'cached':>8}{'fetched':>9}" + "".join(f"{word:>9}" for word in words)]
    for one in found.candidates:
        load_s = (one.load_s,) if loads else ()
        seconds = (one.wait_s, one.fetch_s, *load_s, one.compute_s, one.first_token_s)
        times = "".join(f"{1000 * (each or 0.0):>6.0f} ms" for each in seconds)
        whose = "" if one.source is None else f"  from {printable(one.source)}"
        counts = f"{one.cached or 0:>8}{one.fetched or 0:>9}"
        lines.append(f"{_mark(found, one):2}{printable(one.id):24}{counts}{times}{whose}{_excluded(one)}")
    return lines


def _load_table(found: RouteAnswer) -> list[str]:
    lines = [f"{'':2}{'instance':24}{'requests':>10}{'their tokens':>14}"]
    return lines + [
        f"{_mark(found, one):2}{printable(one.id):24}{one.in_flight:>10}{one.tokens_in_flight:>14}{_excluded(one)}"
        for one in found.candidates
    ]


def _excluded(candidate: CandidateAnswer) -> str:
    return "" if candidate.excluded is None else f"  not now: {printable(candidate.excluded)}"


def _mark(found: RouteAnswer, candidate: CandidateAnswer) -> str:
    return "->" if candidate.id == found.chosen else ""


COMMAND: Final = ExplainRouteCommand()
"""The entry point."""
