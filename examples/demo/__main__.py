"""`python -m demo`: two prefill and two decode engines, a store and a proxy, against one engine that does all the work.

The engines are the reference engine's, or vLLM's (`--engine vllm`). The exit status is 0 only if every answer was the
same, every prompt was handed over, and the negative controls came out as they must.
"""

import argparse
import asyncio
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from secrets import token_urlsafe
from types import FrameType
from typing import Final, cast

import httpx

from demo.client import JSON, AnswerError, ask_stream, new_client
from demo.control import damage_unchecked, damage_verified
from demo.conversations import Fleet, hold_conversations
from demo.display import Display
from demo.folder import own_folder
from demo.light_traffic import drive_traffic
from demo.processes import SERVE_PORTS, ProcessError, Processes, is_free
from demo.stores import KINDS, start_store
from demo.texts import MAX_TURNS
from demo.vllm_demo import NIXL, run_controls, start_vllm_fleet
from kvparams.errors import KVParamsError
from kvparams_connectors.store import open_store
from kvparams_connectors.store_url import StoreURL, parse_size, redact_url

__all__ = ["main"]

_LAST_PORT: Final = 65_535
_MEMORY_DISK: Final = Path("/dev/shm")
_LEAST_STORE_BYTES: Final = 4 << 20
"""The pages of the longest prompt, several times over."""
_TOKEN: Final = "admin-token"
"""The name of its file."""
_PATH: Final = "/v1/chat/completions"
_TRY: Final[JSON] = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 40,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, or serve; everything that was started is stopped on every way out. Returns the exit status."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    arguments = _parser().parse_args(argv)
    display = Display()
    try:
        vllm = arguments.engine == "vllm"
        port = cast("int | None", arguments.port)
        refusal = _refusal(cast("str", arguments.store), port, vllm=vllm)
        if refusal is None and port is not None:
            refusal = _taken_port(range(port, port + (SERVE_PORTS if arguments.serve and not vllm else 1)))
        if refusal is not None:
            print(f"demo: {refusal}", file=sys.stderr)
            return 2
        with own_folder(_MEMORY_DISK if _MEMORY_DISK.is_dir() else Path(tempfile.gettempdir())) as directory:
            asyncio.run(_run_vllm(arguments, directory, display) if vllm else _run(arguments, directory, display))
    except KeyboardInterrupt:
        display.step("stopped")
        return 130
    except (ProcessError, AnswerError, httpx.HTTPError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    for failure in display.failures:
        print(f"WRONG: {failure}", file=sys.stderr)
    return 1 if display.failures else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop now. Python's own handler would be replaced by asyncio's, which waits for the next `await`."""
    raise KeyboardInterrupt


def _refusal(store: str, port: int | None, *, vllm: bool = False) -> str | None:
    """Why the demo cannot be run like this, in one line."""
    if port is not None and not 1 <= port <= 65_535:
        return f"--port {port} is no port; choose one from 1 to 65535"
    if store in KINDS or (vllm and store == NIXL):
        return None
    if store == NIXL:
        return "--store nixl is no store: only vLLM engines move KV like that (--engine vllm)"
    try:
        size_bytes = _size_bytes(StoreURL.parse(store))
        if size_bytes is not None and size_bytes < _LEAST_STORE_BYTES:
            least = f"{_LEAST_STORE_BYTES >> 20}MiB"
            return (
                f"--store {redact_url(store)} is too small for the conversations: {size_bytes} bytes; "
                f"choose size={least} or more"
            )
        opened = open_store(store)
    except KVParamsError as error:
        return f"--store cannot be used: {error}"
    shared = opened.capabilities.shared
    opened.close()
    if not shared:
        return (
            f"--store {redact_url(store)} is not shared between processes; "
            "choose one that is, e.g. file:///dev/shm/kv?size=1GiB"
        )
    return None


def _taken_port(ports: range) -> str | None:
    """Why these ports cannot be used, in one line."""
    if ports[-1] > _LAST_PORT:
        return f"there is no port {ports[-1]}; choose a lower one: PORT= or --port"
    taken = next((port for port in ports if not is_free(port)), None)
    return None if taken is None else f"port {taken} is in use; choose another one: PORT= or --port"


def _size_bytes(url: StoreURL) -> int | None:
    """Returns the size that the URL names, or that of an existing file.

    A new store is not made only to find out that it is too small.
    """
    path = Path(url.path)
    if "size" not in url.settings and url.scheme == "file" and path.is_file():
        return path.stat().st_size
    return parse_size(url.settings["size"]) if "size" in url.settings else None


async def _run(arguments: argparse.Namespace, directory: Path, display: Display) -> None:
    wanted = cast("str", arguments.store)
    with Processes(directory) as processes:
        store = start_store(wanted, processes, directory) if wanted in KINDS else wanted
        display.step(
            f"starting 2 prefill engines, 2 decode engines and 1 that does all the work; store {redact_url(store)}"
        )
        flags = _make_token(directory) if arguments.serve else ()
        fleet = _start(processes, store, cast("int | None", arguments.port), flags, fixed=arguments.serve)
        for server in (*fleet.prefill, *fleet.decode, fleet.single, fleet.proxy):
            processes.wait_ready(server)
            display.step(f"{server.name} is ready at {server.url}")
        async with new_client() as client:
            if arguments.serve:
                await _serve(client, fleet, display, cast("float", arguments.traffic), directory)
                return
            display.step("the model is real, its weights are random: answers mean nothing, but depend on every token")
            await hold_conversations(client, fleet, display, cast("int", arguments.turns))
            display.step("negative control: one stored byte is flipped between prefill and decode")
            await damage_verified(client, fleet.prefill[0], fleet.decode[1], fleet.single, store, display)
            # A store of their own: what engines compute from unchecked pages must not reach the others.
            careless_store = f"file://{directory}/careless?size=64MiB"
            display.step("starting a prefill and a decode engine that do not verify")
            prefill = processes.engine("careless-p", "prefill", careless_store, "--no-verify")
            decode = processes.engine("careless-d", "decode", careless_store, "--no-verify")
            processes.wait_ready(prefill, decode)
            await damage_unchecked(client, prefill, decode, fleet.single, careless_store, display)
        display.step("stopping everything")
    display.step("nothing is left running")


async def _run_vllm(arguments: argparse.Namespace, directory: Path, display: Display) -> None:
    with Processes(directory) as processes:
        wanted, port = cast("str", arguments.store), cast("int | None", arguments.port)
        each = cast("int | None", arguments.each)
        controls = not arguments.serve
        flags = _make_token(directory) if arguments.serve else ()
        started = start_vllm_fleet(
            processes, directory, wanted, port, display, each, controls=controls, proxy_flags=flags
        )
        async with new_client() as client:
            if arguments.serve:
                await _serve(client, started.fleet, display, cast("float", arguments.traffic), directory)
                return
            await hold_conversations(client, started.fleet, display, cast("int", arguments.turns))
            await run_controls(client, started, display)
        display.step("stopping everything")
    display.step("nothing is left running")


def _start(processes: Processes, store: str, port: int | None, flags: Sequence[str] = (), *, fixed: bool) -> Fleet:
    """Starts everything. `fixed`: the engines have the ports after the proxy's, if that is given."""

    def place(number: int) -> int | None:
        return port + number if fixed and port is not None else None

    prefill = (
        processes.engine("p0", "prefill", store, port=place(1)),
        processes.engine("p1", "prefill", store, port=place(2)),
    )
    decode = (
        processes.engine("d0", "decode", store, port=place(3)),
        processes.engine("d1", "decode", store, port=place(4)),
    )
    single = processes.engine("single", port=place(5))
    return Fleet(prefill, decode, single, processes.proxy(prefill, decode, *flags, port=port))


def _make_token(directory: Path) -> tuple[str, ...]:
    """Makes the token of the admin API, and returns the proxy's flags that name it and let it look at caches."""
    path = directory / _TOKEN
    path.touch(0o600)
    path.write_text(token_urlsafe(24))
    return "--admin-token-file", str(path), "--tokenizer", "bytes"


async def _serve(
    client: httpx.AsyncClient, fleet: Fleet, display: Display, traffic_per_s: float, directory: Path
) -> None:
    """Keep everything up until Ctrl-C, and say how to try it."""
    reply = await ask_stream(client, fleet.proxy.url, _PATH, _TRY)
    route = f"{reply.headers.get('x-kvparams-prefill')}, then {reply.headers.get('x-kvparams-decode')}"
    display.step(f"tried it: {reply.count('completion_tokens')} tokens by way of {route}; try it yourself:")
    body = shlex.quote(json.dumps(_TRY))
    print(f"\n  curl -N {fleet.proxy.url}{_PATH} -H 'content-type: application/json' -d {body}\n")
    token = directory / _TOKEN
    kvparams = Path(sys.executable).with_name("kvparams")
    print(f"  look at it: {fleet.proxy.url}/ui#token={token.read_text()}")
    print(f"  terminal:   {kvparams} top {fleet.proxy.url} --token-file {token}")
    print(f"  metrics:    {fleet.proxy.url}/metrics")
    print(f'  admin API:  curl -H "Authorization: Bearer $(cat {token})" {fleet.proxy.url}/admin')
    print(f"  proxy log:  {fleet.proxy.log}")
    broken = fleet.decode[-1]
    print(f"  break it:   kill {broken.process.pid}  # {broken.name}")
    shown = [redact_url(each) if "://" in each else each for each in broken.command]
    is_whole = shown and tuple(shown) == broken.command  # else it has a secret
    print(f"  mend it:    {shlex.join(shown)}\n" if is_whole else "")
    display.step("Ctrl-C stops everything")
    if traffic_per_s > 0:
        display.step(f"light traffic: {traffic_per_s:g} requests per second (--traffic 0 turns it off)")
        await drive_traffic(client, fleet.proxy.url, traffic_per_s, display, fleet.more)
    await asyncio.Event().wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description="KV cache made by one process, used by another.")
    parser.add_argument(
        "--store",
        metavar="KIND|URL",
        default="file",
        help=f"the store between the engines: {', '.join(KINDS)} (its server is started too), or the URL of one that "
        "runs already (default: file, in memory); with vLLM also nixl: its own connector, and no store",
    )
    parser.add_argument(
        "--engine",
        choices=("reference", "vllm"),
        default="reference",
        help="whose engines: the reference engine's, or vLLM's with a tiny model, without a GPU (default: reference)",
    )
    parser.add_argument(
        "--each",
        type=int,
        choices=(1, 2),
        help="vLLM engines of each role (default: 2, or 1 where less than 8 GiB of memory are free)",
    )
    parser.add_argument(
        "--turns", type=int, choices=range(1, MAX_TURNS + 1), default=MAX_TURNS, help="per conversation"
    )
    parser.add_argument(
        "--serve", "--keep", action="store_true", help="keep everything up, with light traffic, and print where to look"
    )
    parser.add_argument(
        "--port",
        type=int,
        help="the proxy's port (default: a free one); with --serve, the reference engines have the next five",
    )
    parser.add_argument(
        "--traffic",
        type=float,
        default=2.0,
        metavar="N",
        help="with --serve, requests per second (default: 2; 0: none)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
