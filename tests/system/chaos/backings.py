"""Runs the store under an engine fleet in the chaos tests, and injects its faults.

At the end of `suffer` the store is back, whatever it has lost.
"""

import asyncio
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from kvparams_connectors.stores.file.file_map import open_map
from tests.support.connectors.valkey_server import ValkeyServer
from tests.system.chaos.faults import Fault

__all__ = ["Backing", "FileBacking", "ValkeyBacking"]

_STORE_BYTES: Final = 256 << 20
"""Each process that opens the file makes it where it is lost."""


class Backing(Protocol):
    """What engines share."""

    faults: tuple[str, ...]
    """The kinds that `suffer` knows."""

    @property
    def url(self) -> str:
        """For engines."""
        ...

    async def suffer(self, fault: Fault) -> None:
        """Have it happen, and wait until it is over."""
        ...


class FileBacking:
    """A file has no server that could be killed; this is what its users can see instead.

    damage: bits of a part of the stored pages are flipped. hold: a process takes the store's lock, is stopped with it,
    and then killed in the middle of a change. lose: the file is removed, and whoever comes next begins an empty one.
    """

    faults: tuple[str, ...] = ("damage", "hold", "lose")

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def url(self) -> str:
        return f"file://{self._path}?size={_STORE_BYTES}"

    async def suffer(self, fault: Fault) -> None:
        if fault.kind == "damage":
            await asyncio.to_thread(_flip, self._path, fault.number)
        elif fault.kind == "hold":
            await self._hold(fault.for_s)
        else:
            self._path.unlink(missing_ok=True)

    async def _hold(self, for_s: float) -> None:
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.system.chaos.holder", str(self._path), str(_STORE_BYTES)),
            stdout=subprocess.PIPE,
        )
        try:
            assert holder.stdout is not None
            await holder.stdout.readline()
            holder.send_signal(signal.SIGSTOP)
            await asyncio.sleep(for_s)
        finally:
            holder.kill()
            await holder.wait()


class ValkeyBacking:
    """A server. kill: SIGKILL, and an empty one at once. stop: SIGSTOP, and SIGCONT later. restart: SIGKILL, and an
    empty one after a while, so that connections are refused meanwhile."""

    faults: tuple[str, ...] = ("kill", "stop", "restart")

    def __init__(self, server: ValkeyServer) -> None:
        """`server` runs, and stays the caller's."""
        self._server = server

    @property
    def url(self) -> str:
        return self._server.url

    async def suffer(self, fault: Fault) -> None:
        if fault.kind == "stop":
            self._server.stop()
            try:
                await asyncio.sleep(fault.for_s)
            finally:
                self._server.go_on()
            return
        self._server.kill()
        if fault.kind == "restart":
            await asyncio.sleep(fault.for_s)
        await asyncio.to_thread(self._server.start)


def _flip(path: Path, seed: int) -> None:
    """Flip a bit in every fifth unit that is in use."""
    draw = random.Random(seed)
    with suppress(FileNotFoundError):
        path.stat()
        file = open_map(path, _STORE_BYTES, None, timeout_s=10.0)
        size = file.shape.unit_bytes
        for unit, free in enumerate(file.free.tolist()):
            if not free and draw.random() < 0.2:
                file.data[unit * size + draw.randrange(size)] ^= 1 << draw.randrange(8)
        file.close()
