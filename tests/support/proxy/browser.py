"""Drives the Chromium of the system, for tests of the live page."""

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from playwright.async_api import Page, async_playwright

from tests.support.waiting import wait_until

__all__ = ["Chromium", "Watched", "browsing"]

_FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--hide-scrollbars", "--disable-component-update", "--disable-sync"),
)


class Watched:
    """A page, and what went wrong in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        """Uncaught errors, and what the console says of errors and of refused scripts and styles."""
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", lambda said: self.problems.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    async def open(self, port: int, token: str) -> None:
        """Opens the live page and waits until it shows a snapshot."""
        await self.page.goto(f"http://127.0.0.1:{port}/ui#token={token}")
        await self.page.wait_for_selector("#summary .figure", timeout=10_000)

    async def text(self, selector: str) -> str:
        """Returns the text of an element."""
        return (await self.page.text_content(selector)) or ""

    async def overflow(self) -> int:
        """Returns by how much the page is wider than its window."""
        root = "document.documentElement"
        return await self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")


class Chromium:
    """A running Chromium. Each test opens a page in a context of its own."""

    def __init__(self, folder: Path) -> None:
        """Starts it. `folder` is an empty directory for its profile."""
        path = shutil.which("chromium")
        assert path is not None, "there is no Chromium here: tests/install_servers.sh installs it"
        flags = (*_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}")
        self._process = subprocess.Popen(
            [path, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._place = folder / "DevToolsActivePort"

    @property
    def url(self) -> str:
        """Where it is driven; waits until it has started."""
        wait_until(lambda: self._place.exists() and "\n" in self._place.read_text(), 30.0)
        return f"http://127.0.0.1:{self._place.read_text().splitlines()[0]}"

    def close(self) -> None:
        """Ends it, and all of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@asynccontextmanager
async def browsing(
    chromium: Chromium, *, width: int = 1280, height: int = 900, dark: bool = False
) -> AsyncGenerator[Watched]:
    """Opens an empty page in a window of this size."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(chromium.url)
        scheme = "dark" if dark else "light"
        context = await browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        try:
            yield Watched(await context.new_page())
        finally:
            await context.close()
            await browser.close()
