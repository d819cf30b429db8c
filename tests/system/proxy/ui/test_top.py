"""Tests `kvparams top` in a pseudo-terminal, and what it prints for scripts."""

import asyncio
import contextlib
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from kvparams.instances import Instance, Role
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.secret import Secret
from kvparams_proxy.ui.terminal_view import SORTS
from tests.support.proxy.fixtures import Proxy, running
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

TOKEN = "secret-of-this-test"
LINES, COLUMNS = 30, 160
SHOWS_SCREEN, HIDES_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return str(path)


@asynccontextmanager
async def served(stub: StubEngines, port: int = 0) -> AsyncGenerator[Proxy]:
    engines = [
        Instance(f"{each.role}-{n}", "boot-1", Role(each.role), each.url, "nixl") for n, each in enumerate(stub.engines)
    ]
    settings = Settings(tuple(engines), viewer_token=Secret(TOKEN), log_requests="off")
    async with running(settings, True, port) as proxy:
        for number in range(3):
            body = {"model": "stub", "prompt": "x", "max_tokens": 2 if number else 0}
            await proxy.client.post("/v1/completions", json=body)
        yield proxy


async def run(*arguments: str) -> tuple[int, str, str]:
    """Runs the command without a terminal; its status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvparams", "top", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


class Terminal:
    """A pseudo-terminal with the command in it."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int, before: list[Any]) -> None:
        self.process = process
        self.descriptor = descriptor
        self.before = before
        self.text = ""

    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self.descriptor)

    def type(self, keys: str) -> None:
        self.text = ""
        os.write(self.descriptor, keys.encode())

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                self.text += os.read(self.descriptor, 1 << 16).decode("utf-8", "replace")
        return self.text

    async def shows(self, *words: str) -> None:
        await until(lambda: all(word in self.read() for word in words), 20.0, seen=lambda: self.text[-3000:])

    async def ended(self) -> int:
        await until(lambda: (self.read(), self.process.poll())[1] is not None, 20.0)
        self.read()
        return self.process.returncode


@contextmanager
def terminal(*arguments: str) -> Generator[Terminal]:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    os.set_blocking(ours, False)
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONWARNINGS": "error"}
    environment.pop("COLUMNS", None)
    environment.pop("LINES", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvparams", "top", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        preexec_fn=_own_terminal,  # Ctrl-C is a signal of the terminal
    )
    try:
        yield Terminal(process, ours, before)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _own_terminal() -> None:
    os.setsid()
    ioctl(0, termios.TIOCSCTTY, 0)


async def test_it_shows_engines_requests_and_errors_and_leaves_the_terminal_as_it_was(
    stub: StubEngines, token: str
) -> None:
    async with served(stub) as proxy:
        with terminal(f"http://127.0.0.1:{proxy.port}", "--token-file", token) as shown:
            await shown.shows(SHOWS_SCREEN, "prefill-0", "decode-2", "ready", "order: state", "requests/s")
            assert not shown.attributes()[3] & termios.ICANON  # single keys
            shown.type("s")
            await shown.shows("order: running")
            shown.type("r")
            await shown.shows("running reversed")
            shown.type("\t")
            await shown.shows("tab requests", "OUTCOME", "refused")
            shown.type("\t")
            await shown.shows("tab errors", "HTTP 400", "not valid")
            shown.type("p")
            await shown.shows("paused")
            shown.type("q")
            assert await shown.ended() == 0
            assert HIDES_SCREEN in shown.text
            assert shown.attributes() == shown.before


async def test_ctrl_c_ends_it_and_leaves_the_terminal_as_it_was(stub: StubEngines, token: str) -> None:
    async with served(stub) as proxy:
        with terminal(f"http://127.0.0.1:{proxy.port}", "--token-file", token) as shown:
            await shown.shows("prefill-0")
            shown.type("\x03")
            assert await shown.ended() == 0
            assert "Traceback" not in shown.text
            assert HIDES_SCREEN in shown.text
            assert shown.attributes() == shown.before


async def test_it_goes_on_when_the_proxy_comes_back(stub: StubEngines, token: str) -> None:
    async with AsyncExitStack() as first:
        proxy = await first.enter_async_context(served(stub))
        with terminal(f"http://127.0.0.1:{proxy.port}", "--token-file", token) as shown:
            await shown.shows("prefill-0")
            await first.aclose()
            await shown.shows("reconnecting", "prefill-0")  # what was seen last stays
            async with served(stub, proxy.port):

                def is_back() -> bool:
                    title = shown.read().rpartition("kvparams top")[2]
                    return "requests/s" in title and "reconnecting" not in title

                await until(is_back, 20.0)
                shown.type("q")
                assert await shown.ended() == 0


async def test_it_prints_once(stub: StubEngines, token: str) -> None:
    async with served(stub) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        status, output, errors = await run(url, "--token-file", token, "--once", "--sort", "id")
        assert (status, errors) == (0, "")
        lines = output.splitlines()
        names = [line.split()[0] for line in lines if line.strip().startswith(("prefill-", "decode-"))]
        assert names == ["decode-2", "decode-3", "prefill-0", "prefill-1"]
        assert "\x1b" not in output
        status, output, errors = await run(url, "--token-file", token, "--once", "--json")
        assert (status, errors) == (0, "")
        snapshot = json.loads(output)
        engine = snapshot["engines"][0]
        assert engine["legs"] == await proxy.metric(f'kvparams_proxy_legs_total{{instance="{engine["id"]}"')
        assert engine["legs_per_s"] == 0.0  # rates are there
        assert snapshot["counters"]['kvparams_proxy_requests_total{outcome="ok"}'] == 2


async def test_errors_say_what_to_do(stub: StubEngines, token: str, tmp_path: Path) -> None:
    async with served(stub) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        wrong = tmp_path / "wrong"
        wrong.write_text("another-token")
        engine = stub.engines[0].url
        for arguments, status, words in (
            ((url, "--token-file", str(wrong), "--once"), 1, ("401", "viewer token")),
            ((url, "--token-file", str(tmp_path / "none"), "--once"), 2, ("--token-file", "cannot be read")),
            ((engine, "--token-file", token, "--once"), 1, ("is no kvparams proxy", "--viewer-token-file")),
            (("http://127.0.0.1:1", "--token-file", token, "--once"), 1, ("cannot be reached",)),
            (("127.0.0.1:8100", "--token-file", token, "--once"), 2, ("http://host:port",)),
            ((url, "--token-file", token), 2, ("--once",)),
            ((url, "--token-file", token, "--json"), 2, ("add --once",)),
            ((url, "--token-file", token, "--interval", "0.1"), 2, ("from 1 to 3600",)),
        ):
            got, output, errors = await run(*arguments)
            assert (got, output) == (status, ""), arguments
            assert all(word in errors for word in words), errors
            assert len(errors.splitlines()) <= 2, errors
            assert "Traceback" not in errors
            assert TOKEN not in errors


def test_every_order_can_be_chosen() -> None:
    from kvparams_proxy.cli import top_command

    assert set(top_command._SORTS) == set(SORTS)  # pyright: ignore[reportPrivateUsage]
