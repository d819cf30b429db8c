"""Tests that modes are switched under load, by the admin API and the fleet file, without a failed request."""

import asyncio
from pathlib import Path
from typing import Any

from kvparams_proxy.config.fleet_file import FleetFileProvider
from kvparams_proxy.config.settings import default_spec_rules
from kvparams_proxy.secret import Secret
from tests.support.proxy.stage import text_of
from tests.support.waiting import until
from tests.system.modes.conftest import StartMode, Way
from tests.system.modes.test_conformance import EXPECTED

TOKEN = "admin-token-of-this-test"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
ROUNDS: tuple[list[dict[str, Any]], ...] = (
    [{"use": "aggregated"}],
    [{"use": "prefill_then_decode", "options": {"decode_first": True}}],
    [{"use": "concurrent_legs", "when": {"stream": True}, "priority": 1}, {"use": "aggregated"}],
    [{"use": "conditional", "options": {"remote_tokens": 0}}],
    [{"use": "recompute"}],
    [{"use": "prefill_then_decode"}],
)


async def test_no_request_fails_while_modes_are_switched(staged: StartMode, effort: Any, record: Any) -> None:
    stage = await staged(Way("prefill_then_decode", "store-meet"), admin_token=Secret(TOKEN), log_requests="off")
    for actor in (actor for actors in stage.of.values() for actor in actors):
        actor.pause_s = 0.05
    streams: int = effort(16, 64)
    whole = streams // 8
    """Clients beside these, who want their answers whole."""
    answered = switched = 0
    enough = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal answered
        while not enough.is_set():
            stream = number < streams
            got = await stage.ask(stream=stream)
            assert got.status_code == 200, got.text
            assert text_of(got, stream) == EXPECTED
            answered += 1

    clients = [asyncio.create_task(client(number)) for number in range(streams + whole)]
    for modes in ROUNDS * effort(1, 10):
        failed, _ = await asyncio.wait(clients, timeout=effort(0.3, 1.0), return_when=asyncio.FIRST_COMPLETED)
        if failed:
            break
        got = await stage.running.client.put("/admin/modes", json={"modes": modes}, headers=HEADERS)
        assert got.status_code == 200, got.text
        assert [mode["use"] for mode in got.json()["modes"]] == [mode["use"] for mode in modes]
        switched += 1
    await asyncio.wait(clients, timeout=effort(0.3, 1.0), return_when=asyncio.FIRST_COMPLETED)
    enough.set()
    await asyncio.gather(*clients)
    assert switched >= len(ROUNDS)
    assert answered > streams
    for actors in stage.of.values():
        assert all(actor.bodies for actor in actors)  # the control: every role has had its turn
    for outcome in ("failed", "refused", "midway", "gone"):
        assert await stage.running.metric(f'kvparams_proxy_requests_total{{outcome="{outcome}"}}') == 0
    await until(stage.settled)
    record({"streams": streams, "whole": whole, "requests": answered, "switches": switched, "failed": 0})


async def test_what_cannot_be_used_changes_nothing(staged: StartMode) -> None:
    stage = await staged(Way("prefill_then_decode"), admin_token=Secret(TOKEN))
    admin = stage.running.client
    before = (await admin.get("/admin/modes", headers=HEADERS)).json()
    for modes, said in (
        ([{"use": "nobody"}], "modes[0].use: must be one of"),
        ([{"use": "aggregated", "when": {"stream": True}}], "one mode must be for all requests"),
    ):
        got = await admin.put("/admin/modes", json={"modes": modes}, headers=HEADERS)
        assert got.status_code == 400
        assert said in got.json()["error"]["message"]
        assert got.json()["error"]["code"] == "invalid_modes"
    assert (await admin.put("/admin/modes", json={"modes": []})).status_code == 401
    assert (await admin.get("/admin/modes", headers=HEADERS)).json() == before


async def test_a_changed_file_switches_and_health_asks_for_what_is_needed(staged: StartMode, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("modes: [{use: aggregated}]\n")
    provider = FleetFileProvider(path, default_spec_rules(), every_s=0.02)
    stage = await staged(Way("aggregated"), providers=(provider,), modes=provider.document.modes)
    assert set((await stage.ask()).headers) & {"x-kvparams-aggregated", "x-kvparams-prefill"} == {
        "x-kvparams-aggregated"
    }
    new = path.with_suffix(".new")
    new.write_text("modes: [{use: prefill_then_decode}]\n")
    new.replace(path)

    async def split() -> bool:
        return "x-kvparams-prefill" in (await stage.ask()).headers

    await until(split)
    new.write_text("modes: [{use: nobody}]\n")  # it changes nothing
    new.replace(path)
    health = (await stage.running.client.get("/health")).json()
    assert health["status"] == "ok"
    assert set(health["roles"]) == {"prefill", "decode", "aggregated"}
