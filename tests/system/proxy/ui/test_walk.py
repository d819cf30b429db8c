"""Tests the walk in `docs/operations.md`: every step is done by what is on the screen of `make serve`.

With `KVPARAMS_SCREENSHOTS=docs/images` the picture of README.md is made anew.
"""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.processes import SERVE_PORTS, Processes, free_port_block
from tests.support.proxy.browser import Chromium, Watched, browsing
from tests.support.waiting import until, wait_until

ROOT = Path(__file__).parents[4]
SCREENSHOTS = os.environ.get("KVPARAMS_SCREENSHOTS")
WAIT_S = 60.0


def promised() -> set[str]:
    """Returns the words that the section promises to be seen."""
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("\n## A walk in three minutes\n")[2].partition("\n## ")[0]
    words = set(re.findall(r"\*\*(.+?)\*\*", section))
    assert len(words) > 10
    return words


class Serve:
    """`make serve`, and what it has printed."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log

    def behind(self, label: str) -> str:
        """Returns what stands behind a label."""
        found = re.search(rf"^  {label}: +(\S.*)$", self.log.read_text(), re.MULTILINE)
        assert found is not None, self.log.read_text()
        return found[1]

    def proxy_log(self) -> str:
        """Returns the lines of the proxy's log so far."""
        return Path(self.behind("proxy log")).read_text()


@contextmanager
def serve(folder: Path) -> Generator[Serve]:
    log = folder / "serve"
    command = [sys.executable, "-m", "demo", "--serve", "--port", str(free_port_block(SERVE_PORTS)), "--traffic", "4"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: process.poll() is not None or "light traffic" in log.read_text(), WAIT_S)
        yield Serve(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()


class Screen:
    """The page, and all text that it has shown."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.seen = ""

    async def shows(self, *words: str) -> None:
        """Waits until the page shows all of these at a time."""

        async def is_shown() -> bool:
            text = await self.watched.page.inner_text("body")
            if all(word in text for word in words):
                self.seen += text
                return True
            return False

        await until(is_shown, WAIT_S)

    async def click(self, selector: str) -> None:
        await self.watched.page.click(selector)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_step_of_the_walk_is_seen(tmp_path: Path) -> None:
    chromium = Chromium(tmp_path / "chromium")
    try:
        with serve(tmp_path) as served, Processes(tmp_path) as processes:
            async with browsing(chromium, width=1440, height=900) as watched:
                seen = await walk(served, processes, Screen(watched), tmp_path)
            seen += served.proxy_log()
    finally:
        chromium.close()
    assert [words for words in promised() if words not in seen] == []


async def walk(served: Serve, processes: Processes, screen: Screen, folder: Path) -> str:
    """Does what the section says. Returns all that was seen."""
    page = screen.watched.page
    await page.goto(served.behind("look at it"))
    await screen.shows("healthy", "4 engines, 4 ready", "loads", "saves", "tok/s")
    await until(lambda: has_latency(screen), WAIT_S)
    await page.screenshot(path=(Path(SCREENSHOTS) if SCREENSHOTS else folder) / "ui-serve.png")

    assert await printed_by("sh", "-c", served.behind("break it")) == ""
    await screen.shows("1 of 4 engines unhealthy", "not ready", "no connection to the engine (refused)")
    top = await printed_by(*shlex.split(served.behind("terminal")), "--once")
    assert "1 of 4 engines unhealthy" in top
    assert "no connection to the engine (refused)" in top

    command = shlex.split(served.behind("mend it"))
    mended = processes.start("mended", *command, port=int(command[command.index("--port") + 1]))
    await screen.shows("healthy", "4 engines, 4 ready")
    await screen.click("#engines-body .link >> text=d1")
    await screen.shows("answers probes, as another incarnation", "Drain…")

    await screen.click("dialog >> text=Drain…")
    await screen.click("dialog button >> text=Drain")
    await screen.shows("draining")
    await screen.click("#engines-body .link >> text=d1")
    await screen.shows("It can be stopped", "Undrain…")
    processes.stop(mended)
    processes.start("again", *command, port=int(command[command.index("--port") + 1]))
    await screen.click("dialog >> text=Undrain…")
    await screen.click("dialog button >> text=Undrain")
    await screen.shows("4 engines, 4 ready")

    await screen.click("#requests-tools >> text=Slowest")
    await screen.click(".request >> nth=0")
    await screen.shows("Longest step", "Slowest", "Why here?")
    assert screen.watched.problems == []
    return screen.seen


async def has_latency(screen: Screen) -> bool:
    """Whether enough has happened for a picture."""
    return int((await screen.watched.text('[data-figure="Requests"] .more')).split()[0].replace(",", "")) > 60


async def printed_by(*command: str) -> str:
    """Runs a command. Returns what it prints."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(WAIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    return output.decode()
