"""Tests the proxy beside one engine while legs fail, here or elsewhere, before their answer or in the middle of it.

Two engines are remote and one is here. A failed remote leg goes to the other remote engine. A failed local leg is tried
here once more. The client is always answered, once, and nothing runs on.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import pytest

from kvparams.instances import Instance, Role
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.config.settings import Settings, default_spec_rules
from kvparams_proxy.server.app import create_app
from kvparams_proxy.sidecar.middleware import DisaggregatedServerMixin
from tests.support.proxy.acting import Actor
from tests.support.proxy.acting import answer_to as ids_of
from tests.support.proxy.stage import BODY, COMPLETIONS, PROMPT, text_of
from tests.support.waiting import until
from tests.system.sidecar.acted import FAULTS, ActedApp, AppFault
from tests.system.sidecar.serving import served

NEVER = BreakerLimits(consecutive=1_000_000, window=1_000_000, failures=1_000_000)
RIGHT = "".join(map(chr, ids_of(list(PROMPT.encode()), 8)))
REMOTE: dict[AppFault, Any] = {
    "raises": "reset",
    "ends": "not http",
    "500": "500",
    "garbage": "garbage",
    "silent": "silent",
}
"""The nearest that goes wrong over a socket."""


class Stage:
    """One place, acted."""

    def __init__(self, url: str, ours: str, client: httpx.AsyncClient, local: Actor, remotes: list[Actor]) -> None:
        self.url, self.ours, self.client = url, ours, client
        self.local, self.remotes = local, remotes

    async def ask(self, *, stream: bool = False) -> httpx.Response:
        return await self.client.post(self.url + COMPLETIONS, json={**BODY, "stream": stream})

    async def settled(self) -> bool:
        """Nobody works, and the proxy has no request."""
        return not any(actor.open for actor in (self.local, *self.remotes)) and await self.done()

    async def done(self) -> bool:
        """The proxy has no request."""
        text = (await self.client.get(f"{self.ours}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("kvparams_proxy_in_flight")]
        assert lines
        return not sum(float(line.rpartition(" ")[2]) for line in lines)

    def local_fails(self, fault: AppFault, times: int) -> None:
        self.local.faults = times
        if isinstance(self.local, ActedApp):
            self.local.goes_wrong = fault
        else:
            self.local.fault = REMOTE[fault]


Start = Callable[[str, Role], Awaitable[Stage]]


@pytest.fixture
async def stage() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(kind: str, role: Role) -> Stage:
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            remotes = [Actor(other) for _ in range(2)]
            local = ActedApp(role) if kind == "middleware" else Actor(role)
            for actor in remotes if kind == "middleware" else (local, *remotes):
                await actor.begin()
                stack.callback(actor.end)
            url = local.url if kind == "sidecar" else "http://127.0.0.1:9"
            here = Instance("here", "1", role, url, "store")
            settings = Settings(
                (here, *(Instance(f"r{at}", "1", other, actor.url, "store") for at, actor in enumerate(remotes))),
                local_id="here",
                spec_rules=default_spec_rules(),
                breaker=NEVER,
                log_requests="off",
                prefill_timeout_s=0.5,
                decode_timeout_s=0.5,
            )
            app = DisaggregatedServerMixin(local, settings) if isinstance(local, ActedApp) else create_app(settings)
            where = await stack.enter_async_context(served(app))
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=20, trust_env=False))
            return Stage(where, where + ("/kvparams" if kind == "middleware" else ""), client, local, remotes)

        yield start


EACH = [pytest.param(fault, marks=pytest.mark.slow) if fault == "silent" else fault for fault in FAULTS]
KINDS, ROLES = ("sidecar", "middleware"), (Role.PREFILL, Role.DECODE)
pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("role", ROLES)]


@pytest.mark.parametrize(("fault", "stream"), [*((fault, False) for fault in FAULTS), ("raises", True), ("500", True)])
async def test_a_leg_that_fails_here_is_tried_once_more(
    stage: Start, kind: str, role: Role, fault: AppFault, stream: bool
) -> None:
    play = await stage(kind, role)
    assert text_of(await play.ask(stream=stream), stream) == RIGHT
    legs = len(play.local.bodies)
    play.local_fails(fault, 1)
    assert text_of(await play.ask(stream=stream), stream) == RIGHT
    assert len(play.local.bodies) == legs + 2, "the fault came"
    await until(play.settled)


@pytest.mark.parametrize("fault", EACH)
async def test_an_engine_here_that_fails_again_and_again_is_said(
    stage: Start, kind: str, role: Role, fault: AppFault
) -> None:
    play = await stage(kind, role)
    play.local_fails(fault, 1_000)
    got = await play.ask()
    assert got.status_code in (502, 503, 504)
    assert f"the {role}" in got.json()["error"]["message"]
    await until(play.settled)


@pytest.mark.parametrize("fault", EACH)
async def test_a_leg_that_fails_elsewhere_is_another_engines(
    stage: Start, kind: str, role: Role, fault: AppFault
) -> None:
    play = await stage(kind, role)
    play.remotes[0].fails(REMOTE[fault])
    for _ in range(2):  # one of them begins with the engine that fails
        assert text_of(await play.ask(), False) == RIGHT
    assert play.remotes[0].bodies
    assert len(play.remotes[1].bodies) == 2
    play.remotes[1].fails(REMOTE[fault])
    got = await play.ask()
    assert got.status_code in (502, 503, 504)
    await until(play.settled)


async def test_a_stream_that_breaks_ends_with_an_error_and_leaves_nothing(stage: Start, kind: str, role: Role) -> None:
    play = await stage(kind, role)
    for actor in (play.local, *play.remotes):
        actor.breaks_after = 3
    got = await play.ask(stream=True)
    events = [event for event in got.text.split("\n\n") if event]
    assert len(events) == 4
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "decode_failed"
    await until(play.settled)


@pytest.mark.parametrize("waits", ["here", "elsewhere"])
async def test_a_client_that_leaves_is_not_waited_for(stage: Start, kind: str, role: Role, waits: str) -> None:
    play = await stage(kind, role)
    who = [play.local] if waits == "here" else play.remotes
    held = asyncio.Event()
    for actor in who:
        actor.held = held
    asking = asyncio.create_task(play.ask(stream=True))

    async def runs() -> bool:
        return any(actor.open for actor in who)

    await until(runs)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    await until(play.done)
    assert not isinstance(play.local, ActedApp) or not play.local.open, "an app here has been told by then"
    held.set()
    await until(play.settled)
