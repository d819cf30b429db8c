"""`kvparams top` shows a running proxy in the terminal: its engines, requests and errors, again and again."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.error import HTTPError, URLError

from kvparams.errors import printable
from kvparams_proxy.cli.proxy_client import NO_PROXY, ProxyClient, describe_refusal
from kvparams_proxy.cli.terminal_keys import TerminalKeys
from kvparams_proxy.secret import SecretError, secret_from_file

if TYPE_CHECKING:
    from kvparams_proxy.ui.terminal_view import ViewState

__all__ = ["COMMAND"]

_SORTS: Final = ("state", "running", "requests", "tokens", "cache", "hits", "queue", "ended", "id")
_EXAMPLE: Final = """
Examples:

  kvparams top http://127.0.0.1:8100 --token-file token
  kvparams top http://127.0.0.1:8100 --token-file token --once --json

The proxy must have been started with --viewer-token-file or --admin-token-file; give either file here.

Keys: q or Ctrl-C quits, tab shows engines, requests or errors, s and S change the order, r reverses it, p pauses.

Columns of engines; rates are those of the last 10 seconds:

  RUN     requests that run there
  REQ/S   requests that ended there, each second
  TOK/S   prompt tokens (prefill) or answer tokens (decode), each second
  ITL     the mean time between two tokens of a stream
  QUEUE   the time until a new prompt would begin to be computed
  CACHE   the share of the KV cache that is used; ~ if the proxy estimates it
  HITS    the share of prompt tokens that were found in a cache
  ENDED   requests that ended there since the proxy started
"""
_PATH: Final = "/ui/state"
_FORMAT: Final = 1
_LEAST_S: Final = 1.0
_LONGEST_S: Final = 3600.0
_WINDOW_S: Final = 60.0
"""Quantiles are those of so many seconds."""
_RETRY_S: Final = 5.0


class TopCommand:
    """See `kvparams.cli.Command`."""

    summary = "Show the engines, requests and errors of a running proxy."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        parser.epilog = _EXAMPLE
        parser.add_argument("proxy", metavar="URL", help="the URL of the proxy, http://host:port")
        parser.add_argument(
            "--token-file", required=True, metavar="FILE", help="the file with the viewer token or the admin token"
        )
        parser.add_argument(
            "--sort", choices=_SORTS, default="state", help="the order of engines (default: state, the worst first)"
        )
        parser.add_argument(
            "--interval",
            type=_interval,
            default=1.0,
            metavar="SECONDS",
            help="seconds between two looks, at least 1 (the default)",
        )
        parser.add_argument("--once", action="store_true", help="print one look and exit; it takes a second")
        parser.add_argument("--json", action="store_true", help="with --once: print all that the proxy knows as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Looks once, or until q or Ctrl-C."""
        if arguments.json and not arguments.once:
            return _refused("--json prints one look; add --once", 2)
        try:
            client = ProxyClient(arguments.proxy, secret_from_file(Path(arguments.token_file)))
        except SecretError as error:
            return _refused(f"--token-file: {error}", 2)
        except ValueError as error:
            return _refused(f"{error}", 2)
        try:
            snapshot = _ask(client)
            if arguments.once:
                sleep(_LEAST_S + 0.1)  # rates need two looks
                return _print_once(_ask(client), arguments)
            if not (sys.stdout.isatty() and sys.stdin.isatty()):
                return _refused("needs a terminal; --once prints one look, and --once --json is for scripts", 2)
            return _watch(client, snapshot, arguments)
        except _NotAnswered as error:
            return _refused(str(error), 1)
        except ImportError as error:
            return _refused(f"needs the package rich ({error}): pip install 'kvparams[top]'", 2)


class _NotAnswered(Exception):
    """The proxy has not answered as it should; the message says why."""


def _refused(said: str, status: int) -> int:
    print(f"kvparams top: {said}", file=sys.stderr)
    return status


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _LEAST_S <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError("must be a number of seconds from 1 to 3600")
    return seconds


def _ask(client: ProxyClient) -> Mapping[str, Any]:
    """Returns a snapshot.

    Raises:
        _NotAnswered: there is none.
    """
    url = printable(client.url)
    try:
        text = client.get(_PATH)
    except HTTPError as error:
        if error.code == 404:
            message = f"{url} has no live page, or {NO_PROXY}; give the proxy a --viewer-token-file"
            raise _NotAnswered(message) from error
        raise _NotAnswered(describe_refusal(error, url, "has no live page")) from error
    except HTTPException as error:
        raise _NotAnswered(f"{url} {NO_PROXY}") from error
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise _NotAnswered(f"{url} cannot be reached: {reason}") from error
    try:
        snapshot: object = json.loads(text)
    except ValueError:
        snapshot = None
    if not isinstance(snapshot, dict) or cast("dict[str, object]", snapshot).get("format") != _FORMAT:
        raise _NotAnswered(f"{url} {NO_PROXY}")
    return cast("dict[str, Any]", snapshot)


def _print_once(snapshot: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    if arguments.json:
        columns = snapshot["columns"]
        engines = [dict(zip(columns, values, strict=True)) for values in snapshot["engines"]]
        print(json.dumps({**snapshot, "engines": engines}, indent=1))
        return 0
    from rich.console import Console

    from kvparams_proxy.ui.terminal_view import ViewState, render

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(render(snapshot, ViewState(printable(arguments.proxy), sort=arguments.sort), None))
    return 0


def _watch(client: ProxyClient, snapshot: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Shows one snapshot after the other until q. Ctrl-C ends it, too, and the terminal is as it was."""
    from rich.console import Console
    from rich.live import Live

    from kvparams_proxy.ui.terminal_view import ViewState, render

    view = ViewState(printable(arguments.proxy), sort=arguments.sort)
    console = Console()
    looks = [(monotonic(), snapshot)]
    interval_s: float = arguments.interval
    next_s = monotonic() + interval_s
    with (
        suppress(KeyboardInterrupt),
        TerminalKeys(sys.stdin) as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(render(looks[-1][1], view, console.height, looks[0][1]["counters"]), refresh=True)
            key = keys.read(max(0.0, next_s - monotonic()))
            if key in ("q", "Q", "\x03", "\x04"):
                break
            if key:
                view = _changed(view, key)
                continue
            next_s = monotonic() + interval_s
            if view.is_paused:
                continue
            try:
                looks.append((monotonic(), _ask(client)))
                view = view._replace(problem="")
            except _NotAnswered as error:
                view = view._replace(problem=str(error))
                next_s = monotonic() + max(interval_s, _RETRY_S)
            while len(looks) > 2 and looks[1][0] < monotonic() - _WINDOW_S:
                del looks[0]
    return 0


def _changed(view: "ViewState", key: str) -> "ViewState":
    """Returns the view after a key."""
    from kvparams_proxy.ui.terminal_view import PANELS

    changes: Mapping[str, Callable[[], ViewState]] = {
        "\t": lambda: view._replace(panel=PANELS[(PANELS.index(view.panel) + 1) % len(PANELS)]),
        "s": lambda: view._replace(sort=_SORTS[(_SORTS.index(view.sort) + 1) % len(_SORTS)]),
        "S": lambda: view._replace(sort=_SORTS[_SORTS.index(view.sort) - 1]),
        "r": lambda: view._replace(is_reversed=not view.is_reversed),
        "p": lambda: view._replace(is_paused=not view.is_paused),
    }
    change = changes.get(key)
    return view if change is None else change()


COMMAND: Final = TopCommand()
"""The entry point."""
