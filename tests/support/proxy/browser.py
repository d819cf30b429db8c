"""Drives the Chromium of the system, for tests of the live page."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

from playwright.async_api import Browser, Page, async_playwright

__all__ = ["Watched", "browsing"]

_FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
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

    async def width(self) -> int:
        """Returns how wide the page is, whatever its window is."""
        return await self.page.evaluate("document.documentElement.scrollWidth")


@asynccontextmanager
async def browsing(
    *, width: int = 1280, height: int = 900, dark: bool = False, browser: Browser | None = None
) -> AsyncGenerator[Watched]:
    """Opens a page in a Chromium of its own, or in `browser`."""
    if browser is not None:
        context = await browser.new_context(**_context(width, height, dark))
        try:
            yield Watched(await context.new_page())
        finally:
            await context.close()
        return
    path = shutil.which("chromium")
    assert path is not None, "there is no Chromium here: tests/install_servers.sh installs it"
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            async with browsing(width=width, height=height, dark=dark, browser=started) as watched:
                yield watched
        finally:
            await started.close()


def _context(width: int, height: int, dark: bool) -> dict[str, Any]:
    scheme = "dark" if dark else "light"
    return {"viewport": {"width": width, "height": height}, "color_scheme": scheme, "reduced_motion": "reduce"}
