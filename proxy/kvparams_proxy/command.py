"""`kvparams proxy`: the global proxy from the command line."""

import argparse
import logging
import re
import sys
from secrets import token_hex
from typing import Final
from urllib.parse import SplitResult, urlsplit

from kvparams import plugins
from kvparams.scheduling import Instance, Role
from kvparams_proxy.app import create_app
from kvparams_proxy.server import listen, serve
from kvparams_proxy.settings import Settings

__all__ = ["COMMAND"]

_NAME: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")
"""What an instance may be called: it stands in documents and headers."""

_EXAMPLE: Final = """
example, two prefill and two decode engines that speak vLLM's NIXL connector:

  kvparams proxy --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000 \\
                 --decode  http://10.0.0.3:8000 --decode  http://10.0.0.4:8000

then send OpenAI requests to http://127.0.0.1:8100/v1/completions or /v1/chat/completions.
Also served: /v1/models, /health (503 while a role is missing), /metrics.
"""


class ProxyCommand:
    """See `kvparams.cli.Command`."""

    summary = "Put a proxy in front of prefill and decode engines."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """One argument for each setting."""
        parser.epilog = _EXAMPLE
        for role in Role:
            parser.add_argument(
                f"--{role}",
                action="append",
                default=[],
                metavar="[NAME=]URL",
                help=f"a {role} engine, http://host:port; repeat it for each (default names: {role}-0, {role}-1, ...)",
            )
        known = ", ".join(plugins.names("dialects"))
        parser.add_argument("--connector", default="nixl", help=f"the engines' KV connector: {known} (default: nixl)")
        known = ", ".join(plugins.names("policies"))
        parser.add_argument("--policy", default="round_robin", help=f"who runs a leg: {known} (default: round_robin)")
        parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
        port = "where to listen; 0 is any free port (default: %(default)s)"
        parser.add_argument("--port", type=_listening_port, default=8100, help=port)
        seconds: tuple[tuple[str, float, str], ...] = (
            ("--prefill-timeout", 300.0, "for a whole prefill leg"),
            ("--decode-timeout", 600.0, "the longest silence of a decode engine"),
            ("--probe", 5.0, "how often each engine is asked whether it lives and what it serves"),
        )
        for name, default, text in seconds:
            parser.add_argument(
                name, type=_seconds, default=default, metavar="S", help=f"{text} (default: {default:g} s)"
            )
        route = "name the instances used in the headers x-kvparams-prefill and x-kvparams-decode"
        parser.add_argument("--expose-route", action="store_true", help=route)
        plain = "write answers through ASGI instead of uvicorn's transport (slower, works the same)"
        parser.add_argument("--plain-asgi", action="store_true", help=plain)

    def run(self, arguments: argparse.Namespace) -> int:
        """Serve until told to stop."""
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        try:
            instances = tuple(
                instance
                for role in Role
                for instance in _instances(role, getattr(arguments, role.value), arguments.connector)
            )
            settings = Settings(
                instances=instances,
                policy=arguments.policy,
                prefill_timeout_s=arguments.prefill_timeout,
                decode_timeout_s=arguments.decode_timeout,
                probe_s=arguments.probe,
                expose_route=arguments.expose_route,
            )
            if not instances:
                raise ValueError("no engine is given; name at least one --prefill URL and one --decode URL")
        except ValueError as error:
            print(f"kvparams proxy: {error}", file=sys.stderr)
            return 2
        app = create_app(settings)
        for role in Role:
            if not any(instance.role is role for instance in instances):
                print(f"kvparams proxy: no --{role} given: requests will be answered 503", file=sys.stderr)
        try:
            listener = listen(arguments.host, arguments.port)
        except OSError as error:
            where = f"{arguments.host}:{arguments.port}"
            print(f"kvparams proxy: cannot listen on {where} ({error}); choose --host or --port", file=sys.stderr)
            return 1
        port = listener.getsockname()[1]
        print(f"kvparams proxy: http://{arguments.host}:{port}, engines: {len(instances)}", flush=True)
        serve(app, listener, direct=not arguments.plain_asgi)
        return 0


def _listening_port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError("must be a port from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def _instances(role: Role, given: list[str], dialect: str) -> list[Instance]:
    found: list[Instance] = []
    for index, text in enumerate(given):
        name, equals, url = text.partition("=")
        if not equals or "://" in name:
            name, url = f"{role}-{index}", text
        parts = urlsplit(url)
        plain = not parts.query and parts.path in ("", "/") and _port(parts)
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise ValueError(f"--{role} {text}: an engine is given as http://host:port or https://host:port")
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"--{role} {text}: a name is 1 to 128 letters, digits and ._~-")
        found.append(Instance(name, token_hex(8), role, url.rstrip("/"), dialect))
    return found


def _port(parts: SplitResult) -> bool:
    """Whether it is one, or is left out."""
    try:
        return parts.port != 0
    except ValueError:
        return False


COMMAND: Final = ProxyCommand()
