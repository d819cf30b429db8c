"""Tests how soon engines hear that a client has left, in modes that stub engines cannot play.

These are legs that meet, and apps with the proxy inside. `tests/system/queue` has the test of the broker.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest

from kvparams.instances import Instance, Role
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.settings import Settings, default_spec_rules
from kvparams_proxy.server.app import create_app
from kvparams_proxy.sidecar.middleware import DisaggregatedServerMixin
from tests.support.proxy.acting import Actor
from tests.support.proxy.stage import BODY, COMPLETIONS
from tests.system.sidecar.acted import ActedApp
from tests.system.sidecar.serving import served

NEVER = BreakerLimits(consecutive=1_000_000, window=1_000_000, failures=1_000_000)
BAR_S = 0.05
PREFILL, DECODE = Role.PREFILL, Role.DECODE
LOCAL = "http://127.0.0.1:9"
"""Of an app in this process: nobody listens there."""


class Legs:
    """What some engines have begun, and when each heard of its end."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.left: asyncio.Queue[float] = asyncio.Queue()


class Waiting(Actor):
    """Answers no leg, and says when it has seen its client leave."""

    def __init__(self, role: Role, legs: Legs) -> None:
        super().__init__(role)
        self._legs = legs

    async def _leg(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._legs.begun.put_nowait(None)
        await reader.read()
        self._legs.left.put_nowait(time.perf_counter())
        raise ConnectionResetError


class WaitingApp(ActedApp):
    """The same as an app."""

    def __init__(self, role: Role, legs: Legs) -> None:
        super().__init__(role)
        self._legs = legs

    async def _act(self, asked: dict[str, Any], leaving: "asyncio.Future[None]", send: object) -> None:
        self._legs.begun.put_nowait(None)
        try:
            await asyncio.Event().wait()  # until this is cancelled: the client has left
        finally:
            self._legs.left.put_nowait(time.perf_counter())


@asynccontextmanager
async def ahead_of(mode: str, dialect: str, waits: Sequence[Role], legs: Legs) -> AsyncGenerator[str]:
    """A proxy before one engine of each role; those that wait, and others that answer."""
    async with AsyncExitStack() as stack:
        actors = {role: Waiting(role, legs) if role in waits else Actor(role) for role in (PREFILL, DECODE)}
        for actor in actors.values():
            await actor.begin()
            stack.callback(actor.end)
        instances = tuple(Instance(f"{role}", "1", role, actor.url, dialect) for role, actor in actors.items())
        settings = Settings(instances, modes=(parse_mode_flag(mode),), breaker=NEVER, log_requests="off")
        yield await stack.enter_async_context(served(create_app(settings)))


@asynccontextmanager
async def inside(role: Role, waits: Sequence[Role], legs: Legs) -> AsyncGenerator[str]:
    """An app of this role with the proxy inside, and one engine of the other."""
    async with AsyncExitStack() as stack:
        other = DECODE if role is PREFILL else PREFILL
        remote = Waiting(other, legs) if other in waits else Actor(other)
        await remote.begin()
        stack.callback(remote.end)
        app = WaitingApp(role, legs) if role in waits else ActedApp(role)
        instances = (Instance("here", "1", role, LOCAL, "store"), Instance("there", "1", other, remote.url, "store"))
        settings = Settings(
            instances, local_id="here", spec_rules=default_spec_rules(), breaker=NEVER, log_requests="off"
        )
        yield await stack.enter_async_context(served(DisaggregatedServerMixin(app, settings)))


Place = Callable[[Legs], AbstractAsyncContextManager[str]]
PLACES: dict[str, Place] = {
    "prefill_then_decode, prefill": partial(ahead_of, "prefill_then_decode", "store", [PREFILL]),
    "prefill_then_decode, decode": partial(ahead_of, "prefill_then_decode", "store", [DECODE]),
    "concurrent_legs, both": partial(ahead_of, "concurrent_legs", "store-meet", [PREFILL, DECODE]),
    "concurrent_legs, decode": partial(ahead_of, "concurrent_legs", "store-meet", [DECODE]),
    "middleware beside prefill, prefill": partial(inside, PREFILL, [PREFILL]),
    "middleware beside prefill, decode": partial(inside, PREFILL, [DECODE]),
    "middleware beside decode, prefill": partial(inside, DECODE, [PREFILL]),
    "middleware beside decode, decode": partial(inside, DECODE, [DECODE]),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
async def test_an_engine_hears_soon_that_a_client_has_left(
    place: str, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    """Streams and whole answers in turns. The control: as long as its client stays, no engine hears anything."""
    legs, took_s = Legs(), list[float]()
    number = effort(60, 2_000)
    async with PLACES[place](legs) as url, httpx.AsyncClient(timeout=20, trust_env=False) as client:
        for turn in range(number):
            body = {**BODY, "stream": turn % 2 == 0}
            asking = asyncio.create_task(client.post(url + COMPLETIONS, json=body))
            async with asyncio.timeout(10):
                for _ in range(2 if place.endswith("both") else 1):
                    await legs.begun.get()
            assert legs.left.empty()
            began = time.perf_counter()
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
            async with asyncio.timeout(10):
                seen = [await legs.left.get() for _ in range(2 if place.endswith("both") else 1)]
            took_s.append(max(seen) - began)
    p99_s = statistics.quantiles(took_s, n=100)[98]
    record({"aborts": number, "p50 ms": round(statistics.median(took_s) * 1e3, 2), "p99 ms": round(p99_s * 1e3, 2)})
    assert statistics.median(took_s) < BAR_S
