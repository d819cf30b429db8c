"""The real stores that the demo can run on: their servers, started beside the engines and stopped with them.

A server is started as its own manual says, small, and forgotten at the end.
"""

import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from demo.processes import ProcessError, Processes, Server, free_port

__all__ = ["KINDS", "start_store"]

_SIZE: Final = "256MiB"
_SIZE_BYTES: Final = 256 << 20


def start_store(kind: str, processes: Processes, directory: Path) -> str:
    """Start what a store of this kind needs, wait until it is ready, and return the URL for engines.

    Args:
        kind: one of `KINDS`.
        processes: what is started belongs to it.
        directory: takes files.

    Raises:
        ProcessError: a server is not installed, has ended, or was not ready in time.
    """
    return _STARTS[kind](processes, directory)


def _file(processes: Processes, directory: Path) -> str:
    return f"file://{directory}/store?size={_SIZE}"


def _valkey(processes: Processes, directory: Path) -> str:
    port = free_port()
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(directory),
        "save": "",  # a cache: nothing is written to disk
        "appendonly": "no",
        "maxmemory": str(_SIZE_BYTES),
        "maxmemory-policy": "allkeys-lru",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    server = processes.start("valkey", _program("valkey-server"), *words, port=port)
    processes.wait_until(server, lambda: _listens(port))
    return f"valkey://127.0.0.1:{port}"


def _mooncake(processes: Processes, directory: Path) -> str:
    port, metrics = free_port(), free_port()
    master = processes.start(
        "mooncake-master",
        _program("mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics}",
        "--logtostderr",
        port=metrics,
    )
    processes.wait_ready(master)
    owner = _owner(processes, port)
    processes.wait_until(owner, lambda: "ready\n" in owner.tail())
    return f"mooncake://127.0.0.1:{port}"


def _owner(processes: Processes, port: int) -> Server:
    """A process that lends memory to the store: engines come and go without it."""
    module = "kvparams_connectors.stores.mooncake.owner"
    command = (sys.executable, "-m", module, "--master", f"127.0.0.1:{port}", "--size", _SIZE, "--local", "127.0.0.1")
    return processes.start("mooncake-owner", *command, port=port)


def _lmcache(processes: Processes, directory: Path) -> str:
    """LMCache's `lm://` server, from the environment that LMCache has to itself."""
    own = Path(__file__).parents[2] / ".venv-lmcache" / "bin"
    found = shutil.which("lmcache_server", path=str(own)) or shutil.which("lmcache_server")
    if found is None:
        raise ProcessError("lmcache_server is not installed; `make install-lmcache` does that")
    port = free_port()
    quiet = ("env", "LMCACHE_TRACK_USAGE=false", "LMCACHE_DISABLE_BANNER=1")
    server = processes.start("lmcache", *quiet, found, "127.0.0.1", str(port), port=port)
    processes.wait_until(server, lambda: _listens(port))
    return f"lmcache://127.0.0.1:{port}"


def _peer(processes: Processes, directory: Path) -> str:
    """No server: each engine lets the others read what it has made, from its own memory."""
    return f"peer://127.0.0.1?size={_SIZE}"


def _tiered(processes: Processes, directory: Path) -> str:
    """The engine's own memory first, then Valkey."""
    first, second = quote("memory:?size=64MiB", safe=""), quote(_valkey(processes, directory), safe="")
    return f"tiered:?l1={first}&l2={second}"


_STARTS: Final[Mapping[str, Callable[[Processes, Path], str]]] = {
    "file": _file,
    "valkey": _valkey,
    "mooncake": _mooncake,
    "lmcache": _lmcache,
    "peer": _peer,
    "tiered": _tiered,
}
KINDS: Final = tuple(_STARTS)


def _program(name: str) -> str:
    """Returns the path of a program: beside Python, or on the path."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise ProcessError(f"{name} is not installed; `make servers` and `make install` do that")
    return found


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
        return True
    return False
