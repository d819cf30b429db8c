"""Tests `kvparams proxy` as systemd starts it: it says when it serves, that it is alive, and when it stops."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import until

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--log-requests", "off")


@asynccontextmanager
async def started(folder: Path, *argv: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, socket.socket]]:
    """Starts the proxy as systemd does, with a socket for its messages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(folder / "notify"))
        receiver.setblocking(False)
        environment = os.environ | {
            "NOTIFY_SOCKET": str(folder / "notify"),
            "WATCHDOG_USEC": "100000",
            "KVPARAMS_PORT": "0",
            "KVPARAMS_GRACE": "3",
        }
        command = (sys.executable, "-m", "kvparams", "proxy", *ENGINES, *argv)
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            yield process, receiver
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.mark.parametrize("argv", [(), ("--workers", "2")], ids=["one", "workers"])
async def test_systemd_hears_of_the_start_and_of_the_end(argv: tuple[str, ...], tmp_path: Path) -> None:
    found: list[str] = []

    def read(receiver: socket.socket) -> list[str]:
        try:
            while True:
                found.append(receiver.recv(4096).decode())
        except BlockingIOError:
            return found

    async with started(tmp_path, *argv) as (process, receiver):
        await until(lambda: len(read(receiver)) >= 3, 30.0)
        assert found[0].startswith("READY=1\nSTATUS=Serving requests")
        assert set(found[1:]) == {"WATCHDOG=1"}
        assert process.stdout is not None
        assert b"http://127.0.0.1:" in await process.stdout.readline(), "the address is printed before it is ready"
        process.send_signal(signal.SIGTERM)
        await process.wait()
        stops = [message for message in read(receiver) if message != "WATCHDOG=1"][1:]
        assert stops == ["STOPPING=1\nSTATUS=Shutting down\nEXTEND_TIMEOUT_USEC=23000000"]


async def test_a_start_that_fails_is_not_ready(tmp_path: Path) -> None:
    async with started(tmp_path, "--connector", "NixlConnector") as (process, receiver):
        _, said = await process.communicate()
        assert process.returncode == 2
        assert b"did you mean nixl?" in said
        with pytest.raises(BlockingIOError):
            receiver.recv(4096)
