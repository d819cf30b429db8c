"""`python -m demo`: two prefill and two decode engines, a store and a proxy, against one engine that does all the work.

The exit status is 0 only if every answer was the same and both negative controls came out as they must.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import httpx

from demo.client import AnswerError, ask, new_client
from demo.control import damage_unchecked, damage_verified
from demo.conversations import Fleet, hold_conversations
from demo.display import Display
from demo.processes import ProcessError, Processes
from demo.texts import MAX_TURNS

__all__ = ["main"]

_MEMORY_DISK: Final = Path("/dev/shm")
_STORE_SETTINGS: Final = "size=256MiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, or serve; everything that was started is stopped on every way out. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    display = Display()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background jobs ignore it otherwise
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    base = _MEMORY_DISK if _MEMORY_DISK.is_dir() else None
    try:
        with tempfile.TemporaryDirectory(prefix="kvparams-demo-", dir=base) as directory:
            asyncio.run(_run(arguments, Path(directory), display))
    except KeyboardInterrupt:
        display.step("stopped")
        return 130
    except (ProcessError, AnswerError, httpx.HTTPError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    for failure in display.failures:
        print(f"WRONG: {failure}", file=sys.stderr)
    return 1 if display.failures else 0


async def _run(arguments: argparse.Namespace, directory: Path, display: Display) -> None:
    own_store = f"file://{directory}/store?{_STORE_SETTINGS}"
    store = cast("str", arguments.store or own_store)
    with Processes(directory) as processes:
        display.step(f"starting 2 prefill engines, 2 decode engines and 1 that does all the work; store {store}")
        fleet = _start(processes, store, cast("int", arguments.port))
        for server in (*fleet.prefill, *fleet.decode, fleet.single, fleet.proxy):
            processes.wait_ready(server)
            display.step(f"{server.name} is ready at {server.url}")
        async with new_client() as client:
            if arguments.serve:
                await _serve(client, fleet, display)
                return
            display.step("the model is real, its weights are random: answers mean nothing, but depend on every token")
            await hold_conversations(client, fleet, display, cast("int", arguments.turns))
            if not store.startswith("file:"):
                display.step("no negative control: a byte can only be flipped in a file store")
                return
            display.step("negative control: one stored byte is flipped between prefill and decode")
            await damage_verified(client, fleet.prefill[0], fleet.decode[1], fleet.single, store, display)
            # A store of their own: what engines compute from unchecked pages must not reach the others.
            careless_store = f"file://{directory}/careless?{_STORE_SETTINGS}"
            display.step("starting a prefill and a decode engine that do not verify")
            prefill = processes.engine("careless-p", "prefill", careless_store, "--no-verify")
            decode = processes.engine("careless-d", "decode", careless_store, "--no-verify")
            processes.wait_ready(prefill, decode)
            await damage_unchecked(client, prefill, decode, fleet.single, careless_store, display)
        display.step("stopping everything")
    display.step("nothing is left running")


def _start(processes: Processes, store: str, port: int | None) -> Fleet:
    prefill = (processes.engine("p0", "prefill", store), processes.engine("p1", "prefill", store))
    decode = (processes.engine("d0", "decode", store), processes.engine("d1", "decode", store))
    single = processes.engine("single")
    return Fleet(prefill, decode, single, processes.proxy(prefill, decode, port=port))


async def _serve(client: httpx.AsyncClient, fleet: Fleet, display: Display) -> None:
    """Keep everything up until Ctrl-C, and say how to try it."""
    body = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40, "stream": true}'
    path = "/v1/chat/completions"
    reply = await ask(client, fleet.proxy.url, path, {"messages": [{"role": "user", "content": "Hello!"}]})
    route = f"{reply.headers.get('x-kvparams-prefill')}, then {reply.headers.get('x-kvparams-decode')}"
    display.step(f"tried it: {reply.count('completion_tokens')} tokens by way of {route}; try it yourself:")
    print(f"\n  curl -N {fleet.proxy.url}{path} -H 'content-type: application/json' -d {shlex.quote(body)}\n")
    display.step("Ctrl-C stops everything")
    await asyncio.Event().wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description="KV cache made by one process, used by another.")
    parser.add_argument("--store", metavar="URL", help="the store between the engines (default: a file in memory)")
    parser.add_argument(
        "--turns", type=int, choices=range(1, MAX_TURNS + 1), default=MAX_TURNS, help="per conversation"
    )
    parser.add_argument("--serve", "--keep", action="store_true", help="keep everything up and print a curl line")
    parser.add_argument("--port", type=int, help="the proxy's port (default: a free one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
