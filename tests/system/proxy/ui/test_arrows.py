"""Tests the arrows of the live page in Chromium: what goes from one group of engines to another."""

import re
import time
from typing import Any

import pytest

from kvparams_proxy.ui import live_page
from kvparams_proxy.ui.worker_part import WorkerPart
from tests.support.proxy.browser import Chromium, browsing
from tests.support.waiting import until
from tests.system.proxy.ui.test_page import VIEWER, ask, chromium, fleet

__all__ = ["chromium"]


async def test_arrows_show_rates_tokens_and_the_bytes_that_engines_count(
    chromium: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = live_page.collect_part
    began_s = time.monotonic()
    says = True

    def moving(sources: Any) -> WorkerPart:
        """Each decode engine fetches a mebibyte each second."""
        part = real(sources)
        moved = {"decode": (time.monotonic() - began_s) * (1 << 20), "prefill": 0.0} if says else {}
        part["engines"] = [each._replace(transferred=moved.get(each.role)) for each in part["engines"]]
        return part

    monkeypatch.setattr(live_page, "collect_part", moving)
    async with fleet(groups=1) as proxy, browsing(chromium, width=1440) as watched:
        for _ in range(4):
            await ask(proxy)
        await watched.open(proxy.port, VIEWER)

        async def label() -> str:
            """Returns what stands at the arrow between the groups, for those who do not see it."""
            rows = await watched.page.locator("#flow-body tr", has_text="rack-00").all_inner_texts()
            return next((row for row in rows if row.count("rack-00") == 2), "")

        async def is_shown(wanted: str) -> bool:
            return re.search(wanted, await label()) is not None

        await until(lambda: is_shown(r"\d\t[\d,.]+\t(1\.[89]|2\.[0-3]) MiB"))  # of two engines
        assert await watched.page.locator("#flow-body .rate", has_text="MiB/s").count() == 1
        says = False
        await until(lambda: is_shown(r"\d\t[\d,.]+\t\u2013"))  # unknown is not nought
        assert await watched.page.locator("#flow-body .rate", has_text="MiB/s").count() == 0
        assert watched.problems == []
