"""Tests the live page in Chromium: what it shows, and that nothing it shows is ever run.

With `KVPARAMS_SCREENSHOTS=docs/images` the pictures of the documentation are made anew.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvparams.instances import Instance, Role
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.secret import Secret
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from kvparams_proxy.ui import live_page
from kvparams_proxy.ui.worker_part import StoreFacts, WorkerPart
from tests.support.proxy.browser import Chromium, Watched, browsing
from tests.support.proxy.fixtures import Proxy, running
from tests.support.proxy.lively_load import CachingWork, lively_load
from tests.support.stub_connection import Delays
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

ADMIN, VIEWER = "admin-token", "viewer-token"
CONTRAST = (Path(__file__).parents[3] / "support" / "proxy" / "contrast.js").read_text()
SCREENSHOTS = os.environ.get("KVPARAMS_SCREENSHOTS")
HOSTILE = "\"><img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Generator[Chromium]:
    started = Chromium(tmp_path_factory.mktemp("chromium"))
    try:
        yield started
    finally:
        started.close()


@asynccontextmanager
async def fleet(engines: int = 2, groups: int = 2, port: int = 0, **changes: Any) -> AsyncGenerator[Proxy]:
    """Runs a proxy before so many stub engines of each role."""
    delays = Delays(ttft_ms=15, itl_ms=8, prefill_ms=20)
    async with await StubEngines.start(prefill=[0] * engines, decode=[0] * engines, delays=delays) as stub:
        instances: list[Instance] = []
        for number, engine in enumerate(stub.engines):
            if engine.role == "prefill":
                engine.work = CachingWork()
            place = number % engines
            group = ("east", "west")[place % 2] if groups == 2 else f"rack-{place % groups:02}"
            role = Role(engine.role)
            instances.append(Instance(f"{role}-{place}", "boot-1", role, engine.url, "nixl", group=group))
        settings = Settings(
            tuple(instances),
            policy="cache_aware",
            tokenizers={None: TokenizationMethod.BYTES},
            admin_token=Secret(ADMIN),
            viewer_token=Secret(VIEWER),
            log_requests="off",
            slow_start_s=0.0,
        )
        async with running(replace(settings, **changes), True, port) as proxy:
            yield proxy


async def ask(proxy: Proxy, **more: Any) -> None:
    body = {"model": "stub", "prompt": "Who is there? " * 40, "max_tokens": 3, "stream": True}
    await proxy.client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}, **more})


def number(text: str) -> float:
    found = re.search(r"[\d,.]+", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


async def column(watched: Watched, name: str) -> dict[str, str]:
    """Returns a column of the table of engines, by id."""
    cell = f'td[data-column="{name}"]'
    script = f"""rows => rows.map(row => [row.querySelector(".link").textContent,
        (row.querySelector('{cell} .amount') ?? row.querySelector('{cell}')).textContent])"""
    return dict(await watched.page.eval_on_selector_all("#engines-body tbody tr", script))


async def test_the_numbers_are_those_of_metrics(chromium: Chromium) -> None:
    async with fleet() as proxy, browsing(chromium) as watched:
        for _ in range(6):
            await ask(proxy)
        await ask(proxy, max_tokens=0)
        await watched.open(proxy.port, VIEWER)

        async def all_are_shown() -> bool:
            return "7 in all" in await watched.text('[data-figure="Requests"]')

        await until(all_are_shown)
        shown = {
            name: await watched.text(f'[data-figure="{name}"] .more') for name in ("Requests", "Errors", "Answers")
        }
        assert number(shown["Requests"]) == await proxy.metric("kvparams_proxy_requests_total{")
        assert number(shown["Errors"]) == await proxy.metric('kvparams_proxy_requests_total{outcome="refused"}') == 1
        assert number(shown["Answers"]) == await proxy.metric("kvparams_proxy_completion_tokens_sum")
        for id, text in (await column(watched, "legs")).items():
            assert number(text) == await proxy.metric(f'kvparams_proxy_legs_total{{instance="{id}"'), id
        for id, text in (await column(watched, "in_flight")).items():
            assert number(text) == await proxy.metric(f'kvparams_proxy_in_flight{{instance="{id}"') == 0
        await watched.page.click("text=Since start")
        count = await watched.text("#latency .histogram .hint >> nth=0")
        assert number(count) == await proxy.metric("kvparams_proxy_time_to_first_byte_seconds_count") == 6
        error = await watched.text("#errors-body li .count")
        assert number(error) == await proxy.metric('kvparams_proxy_refusals_total{status="400"}')
        assert watched.problems == []


async def test_a_viewer_sees_no_address_and_has_no_buttons(chromium: Chromium) -> None:
    async with fleet() as proxy, browsing(chromium) as watched:
        await ask(proxy)
        await watched.open(proxy.port, VIEWER)
        assert await watched.text("#access") == "viewer"
        assert await watched.page.is_hidden("text=Add an engine")
        await watched.page.click("#engines-body .link >> nth=0")
        assert await watched.page.is_visible("dialog >> text=Connector")
        text = await watched.page.inner_text("body")
        assert "127.0.0.1" not in text
        assert "Drain" not in text
        assert "token" not in watched.page.url  # the link's token does not stay in the address bar


async def test_an_admin_drains_adds_and_removes_an_engine_after_a_question(chromium: Chromium) -> None:
    async with fleet() as proxy, browsing(chromium) as watched:
        await watched.open(proxy.port, ADMIN)
        page = watched.page
        await page.click("#engines-body .link >> text=decode-1")
        await page.wait_for_selector("dialog >> text=127.0.0.1")
        await page.click("dialog >> text=Drain…")
        assert await proxy.metric('kvparams_proxy_draining{instance="decode-1"') == 0  # it only asks
        await page.click("dialog button >> text=Drain")
        await page.wait_for_selector("tr:has-text('decode-1') .pill[data-state=draining]")
        assert await proxy.metric('kvparams_proxy_draining{instance="decode-1"') == 1
        await page.click("text=Add an engine")
        await page.fill("#field-id", "late")
        await page.fill("#field-url", "nonsense")
        await page.click("dialog button >> text=Add")
        await page.wait_for_selector("dialog .problem:visible")
        await page.fill("#field-url", "http://127.0.0.1:9")
        await page.fill("#field-connector", "nixl")
        await page.click("dialog button >> text=Add")
        await page.wait_for_selector("tr:has-text('late')")
        await page.click("#engines-body .link >> text=late")
        await page.click("dialog >> text=Remove…")
        assert await page.locator("tr:has-text('late')").count() == 1  # it only asks
        await page.click("dialog button >> text=Remove")
        await page.wait_for_selector("tr:has-text('late')", state="detached")
        assert 'instance="late"' not in (await proxy.client.get("/metrics")).text
        await page.click("text=Switch mode")
        await page.select_option("#field-mode", "aggregated")
        await page.click("dialog >> text=Go on")
        await page.click("dialog button >> text=Switch")
        await page.wait_for_selector("#facts:has-text('aggregated')")
        refused = [problem for problem in watched.problems if "400" not in problem]  # of the URL that was none
        assert refused == []


def hostile_engines(part: WorkerPart) -> WorkerPart:
    """No id that can be declared has such characters. The page does not rely on it."""
    part["engines"] = [each._replace(id=HOSTILE, public_id=HOSTILE, group=HOSTILE) for each in part["engines"]]
    return part


def hostile_words(part: WorkerPart) -> WorkerPart:
    for row in part["failed"]:
        row.update(error=HOSTILE, tenant=HOSTILE, id=HOSTILE, outcome=HOSTILE)
    part["policy"] = HOSTILE
    part["prefixes"] = [[HOSTILE, "", 1, 2, 1]]
    part["stores"] = [StoreFacts(HOSTILE, 1, 1, 1, 1, 1)]
    return part


def unchanged(part: WorkerPart) -> WorkerPart:
    return part


@pytest.mark.parametrize(
    ("change", "model", "request_id"),
    [
        pytest.param(hostile_engines, "stub", "r", id="engine"),
        pytest.param(hostile_words, "stub", "r", id="error"),
        pytest.param(unchanged, HOSTILE, "r", id="model"),
        pytest.param(unchanged, "stub", "<img/src=x/onerror=alert(1)>", id="request"),
    ],
)
async def test_what_others_choose_is_shown_as_it_is_and_never_run(
    chromium: Chromium,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[WorkerPart], WorkerPart],
    model: str,
    request_id: str,
) -> None:
    real = live_page.collect_part
    monkeypatch.setattr(live_page, "collect_part", lambda sources: change(real(sources)))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    async with fleet() as proxy, browsing(chromium) as watched:
        for tokens in (3, 0):
            body = {"model": model, "prompt": "x", "max_tokens": tokens}
            await proxy.client.post("/v1/completions", json=body, headers={"x-request-id": request_id})
        await watched.open(proxy.port, ADMIN)
        await watched.page.click("#requests-tools >> text=Failed")
        await watched.page.click(".request >> nth=0")
        await watched.page.wait_for_selector("dialog[open]")
        text = await watched.page.inner_text("body")
        assert ("onerror=" in text) is (HOSTILE in (model,) or change is not unchanged)
        assert await watched.page.title() != "run"
        assert await watched.page.query_selector("img[src=x], main script, dialog script") is None
        assert watched.problems == []


async def test_a_lost_connection_is_said_and_comes_back(chromium: Chromium) -> None:
    async with browsing(chromium) as watched:
        async with fleet() as proxy:
            port = proxy.port
            await ask(proxy)
            await watched.open(port, VIEWER)
            assert await watched.text("#status") == "healthy"
        await watched.page.wait_for_selector("#banner:visible")
        assert "Reconnecting" in await watched.text("#banner")
        assert await watched.text("#status") == "reconnecting"
        assert await watched.page.get_attribute("#page", "data-stale") == "true"
        assert "1 in all" in await watched.text('[data-figure="Requests"]')  # what was seen last stays
        async with fleet(port=port) as proxy:
            assert proxy.port == port
            await watched.page.click("#banner >> text=Try now")
            await watched.page.wait_for_selector("#page[data-stale=false]", timeout=15_000)
            assert await watched.page.is_hidden("#banner")
            assert await watched.text("#status") == "healthy"


async def test_a_wrong_token_is_refused_and_a_right_one_can_be_given(chromium: Chromium) -> None:
    async with fleet() as proxy, browsing(chromium) as watched:
        await watched.page.goto(f"http://127.0.0.1:{proxy.port}/ui#token=wrong")
        await watched.page.wait_for_selector("#login-error:visible")
        assert await watched.page.is_hidden("#page")
        await watched.page.fill("#token", VIEWER)
        await watched.page.keyboard.press("Enter")
        await watched.page.wait_for_selector("#summary .figure")
        await watched.page.reload()  # the tab keeps it
        await watched.page.wait_for_selector("#summary .figure")
        await watched.page.click("text=Sign out")
        await watched.page.wait_for_selector("#login:visible")
        assert await watched.page.is_hidden("#page")


@pytest.mark.parametrize(("width", "engines"), [(400, 2), (2560, 2), (400, 250), (2560, 250)])
async def test_the_page_fits_its_window(chromium: Chromium, width: int, engines: int) -> None:
    async with fleet(engines, 2 if engines < 10 else 12) as proxy, browsing(chromium, width=width) as watched:
        await asyncio.gather(*(ask(proxy) for _ in range(8)))
        await watched.open(proxy.port, ADMIN)
        assert await watched.overflow() == 0
        cells = await watched.page.locator("#engines-body .cell[aria-label]").count()
        assert cells == (2 * engines if engines > 10 else 0)
        await watched.page.click("#engines-tools >> text=Table")
        rows = await watched.page.locator("#engines-body tbody tr").count()
        assert rows == min(25, 2 * engines)
        await watched.page.click("#engines-body .link >> nth=0")
        await watched.page.wait_for_selector("dialog[open]")
        assert await watched.overflow() == 0
        assert watched.problems == []


async def test_everything_can_be_reached_with_the_keyboard(chromium: Chromium) -> None:
    async with fleet() as proxy, browsing(chromium) as watched:
        await ask(proxy)
        await watched.open(proxy.port, ADMIN)
        page = watched.page
        focusable = "a[href], button:not([disabled]), input:not([type=hidden]), select, summary, [tabindex='0']"
        visible = "all => all.filter(each => each.checkVisibility() && each.tabIndex >= 0).length"
        wanted: int = await page.eval_on_selector_all(focusable, visible)
        reached: set[str] = set()
        await page.evaluate("document.activeElement.blur()")
        for _ in range(2 * wanted):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate("(document.activeElement.idForTest ??= String(Math.random()))"))
            outline: str = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            tag: str = await page.evaluate("document.activeElement.tagName")
            assert outline != "none" or tag == "BODY", "the focus cannot be seen"
        assert len(reached) >= wanted
        await page.focus("#requests-body .request")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog[open]")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("dialog", state="hidden")
        await page.focus("#engines-tools >> text=Map")
        await page.keyboard.press("Enter")
        await page.focus(".cell[tabindex='0']")
        before = await page.evaluate("document.activeElement.ariaLabel")
        await page.keyboard.press("ArrowRight")
        assert await page.evaluate("document.activeElement.ariaLabel") != before
        assert await page.locator(".cell[tabindex='0']").count() == 1


@pytest.mark.parametrize("dark", [False, True])
async def test_text_can_be_read_in_both_themes(chromium: Chromium, dark: bool) -> None:
    async with fleet() as proxy, browsing(chromium, dark=dark) as watched:
        await ask(proxy)
        await ask(proxy, max_tokens=0)
        await watched.open(proxy.port, ADMIN)
        theme = await watched.page.get_attribute("html", "data-theme")
        assert theme == ("dark" if dark else "light")
        for choice in ("light", "dark", "system"):  # the button goes round
            await watched.page.click("#theme")
            assert await watched.page.get_attribute("#theme", "aria-label") == f"Theme: {choice}"
            ratios: list[list[Any]] = await watched.page.evaluate(CONTRAST)
            assert len(ratios) > 50
            assert [each for each in ratios if each[0] < 4.5] == []


async def test_landmarks_names_and_live_regions_are_there(chromium: Chromium) -> None:
    async with fleet() as proxy, browsing(chromium) as watched:
        await ask(proxy)
        await watched.open(proxy.port, ADMIN)
        unnamed = await watched.page.evaluate(
            """[...document.querySelectorAll("button, a, input, select")].filter(e => e.checkVisibility()
            && !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map(e => e.outerHTML)"""
        )
        assert unnamed == []
        for landmark in ("header", "main", "nav[aria-label]", "[role=status]", "section[aria-labelledby]"):
            assert await watched.page.locator(landmark).count() >= 1, landmark
        assert await watched.page.locator("th[aria-sort]").count() == 1
        await watched.page.click("#engines th >> text=Ended")
        assert await watched.page.get_attribute("th:has-text('Ended')", "aria-sort") == "descending"
        await until(lambda: announced(watched))
        assert await watched.page.locator("svg[role=img]:not([aria-label])").count() == 0


async def announced(watched: Watched) -> bool:
    return "engines are well" in await watched.text("#announcer")


PICTURES: Mapping[str, tuple[int, int, bool, int]] = {
    "ui-light": (1440, 1000, False, 3),
    "ui-dark": (1440, 1000, True, 3),
    "ui-phone": (400, 860, False, 3),
    "ui-500": (1920, 1080, True, 250),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
async def test_pictures_for_the_documentation(chromium: Chromium, name: str, tmp_path: Path) -> None:
    width, height, dark, engines = PICTURES[name]
    many = engines > 10
    folder = Path(SCREENSHOTS) if SCREENSHOTS else tmp_path
    async with (
        fleet(engines, 12 if many else 2) as proxy,
        browsing(chromium, width=width, height=height, dark=dark) as watched,
        lively_load(proxy.client, 30.0 if many else 7.0, refused=0.01),
    ):
        await watched.open(proxy.port, ADMIN)

        async def is_lively() -> bool:
            return await proxy.metric("kvparams_proxy_requests_total{") > (200 if many else 60)

        await until(is_lively, 30.0)
        await watched.page.evaluate("window.scrollTo(0, 0)")
        await watched.page.screenshot(path=folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size > 20_000
        assert watched.problems == []
