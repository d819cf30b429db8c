"""Tests acted SGLang engines, which wait for each other in a room of prefill's bootstrap server.

In every mode both legs are sent at once, with equal parameters.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from kvparams.dialects.sglang import SGLangDialect
from kvparams.instances import Instance, Role
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.settings import Settings
from tests.support.proxy.acting import Actor, answer_to
from tests.support.proxy.fixtures import running
from tests.support.proxy.stage import BODY, COMPLETIONS, PROMPT, text_of
from tests.support.waiting import until
from tests.system.proxy.config.test_bootstraps import Bootstrap

NEVER = BreakerLimits(consecutive=1_000_000, window=1_000_000, failures=1_000_000)
MODES = (
    "prefill_then_decode",
    "prefill_then_decode,decode_first=true",
    "concurrent_legs",
    "conditional,remote_tokens=1",
)
RANKS = b'{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "follow_bootstrap_room": true}'
RIGHT = "".join(map(chr, answer_to(list(PROMPT.encode()), 8)))
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


Place = tuple[Any, Any, Any]


class Rooms:
    """Where legs meet."""

    def __init__(self) -> None:
        self._both: dict[Place, set[str]] = {}
        self._changed = asyncio.Event()

    def enter(self, place: Place, role: str) -> None:
        self._both.setdefault(place, set()).add(role)
        self._changed.set()
        self._changed = asyncio.Event()

    async def met(self, place: Place) -> None:
        while len(self._both[place]) < 2:
            await self._changed.wait()


class Meeting(Actor):
    """Answers when its leg has met the other one; prefill's answer says nothing of KV."""

    def __init__(self, role: Role, rooms: Rooms) -> None:
        super().__init__(role)
        self._rooms = rooms
        self.left = 0
        """Legs whose client left before they had met."""

    async def _leg(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.faults > 0:
            await super()._leg(asked, reader, writer)
            return
        host, port, room = (asked.get(name) for name in FIELDS)
        if room is None and self.role is Role.DECODE:
            body = b'{"error":{"message":"it has no bootstrap room","code":400}}'
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return
        self._rooms.enter((host, port, room), self.role)
        met, gone = asyncio.ensure_future(self._rooms.met((host, port, room))), asyncio.ensure_future(reader.read(1))
        await asyncio.wait((met, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            met.cancel()
            self.left += 1
            raise ConnectionResetError
        gone.cancel()
        await asyncio.wait([gone])
        await super()._leg(asked, reader, writer)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = super()._answer(asked)
        found.pop("kv_transfer_params", None)
        return found


class Pairs:
    """A proxy before two engines of each role."""

    def __init__(self, proxy: Any, actors: dict[Role, list[Meeting]], servers: list[Bootstrap]) -> None:
        self.proxy, self.actors, self.servers = proxy, actors, servers

    async def ask(self, **more: Any) -> Any:
        return await self.proxy.client.post(COMPLETIONS, json=BODY | more)

    def legs(self, role: Role) -> list[dict[str, Any]]:
        return [json.loads(body) for actor in self.actors[role] for body in actor.bodies]

    async def settled(self) -> bool:
        if any(actor.open for each in self.actors.values() for actor in each):
            return False
        return await self.proxy.metric("kvparams_proxy_in_flight") == 0


Start = Callable[..., Awaitable[Pairs]]


@pytest.fixture
async def pairs() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(mode: str, **changes: Any) -> Pairs:
            rooms, servers = Rooms(), [Bootstrap() for _ in range(2)]
            actors = {role: [Meeting(role, rooms) for _ in range(2)] for role in (Role.PREFILL, Role.DECODE)}
            for server in servers:
                server.answer = RANKS
            for one in (*servers, *actors[Role.PREFILL], *actors[Role.DECODE]):
                await one.begin()
                stack.callback(one.end)
            instances = (
                *(
                    Instance(f"p{at}", "1", Role.PREFILL, actor.url, "sglang", bootstrap=servers[at].url)
                    for at, actor in enumerate(actors[Role.PREFILL])
                ),
                *(
                    Instance(f"d{at}", "1", Role.DECODE, one.url, "sglang")
                    for at, one in enumerate(actors[Role.DECODE])
                ),
            )
            made = Settings(
                instances, modes=(parse_mode_flag(mode),), breaker=NEVER, probe_interval_s=0.2, log_requests="off"
            )
            return Pairs(await stack.enter_async_context(running(replace(made, **changes), True)), actors, servers)

        yield start


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("mode", MODES)
async def test_both_legs_are_sent_at_once_and_meet(pairs: Start, mode: str, stream: bool) -> None:
    found = await pairs(mode)
    for _ in range(4):
        got = await found.ask(stream=stream)
        assert got.status_code == 200, got.text
        assert text_of(got, stream) == RIGHT
    prefills, decodes = found.legs(Role.PREFILL), found.legs(Role.DECODE)
    rooms = {leg["bootstrap_room"] for leg in prefills}
    assert len(rooms) == len(prefills) == len(decodes) == 4
    assert {tuple(leg[name] for name in FIELDS) for leg in prefills} == {
        tuple(leg[name] for name in FIELDS) for leg in decodes
    }
    assert {(leg["bootstrap_host"], leg["bootstrap_port"]) for leg in decodes} == {
        ("127.0.0.1", server.port) for server in found.servers
    }
    assert all(0 < room < 2**62 + 1 for room in rooms)
    assert {leg["max_tokens"] for leg in (*prefills, *decodes)} == {8}
    assert {leg.get("stream", False) for leg in prefills} == {False}
    assert all(leg["kv_transfer_params"].keys() == {"kvparams"} for leg in (*prefills, *decodes))
    await until(found.settled)


async def test_prefill_which_gives_the_first_token_is_told_all_of_it(pairs: Start) -> None:
    found = await pairs(MODES[0])
    said = {"min_tokens": 4, "stop": ["x"], "response_format": {"type": "json_object"}, "ignore_eos": False}
    assert (await found.ask(**said)).status_code == 200
    (first,), (second,) = found.legs(Role.PREFILL), found.legs(Role.DECODE)
    for leg in (first, second):
        assert {name: leg[name] for name in said} == said
    assert first["bootstrap_room"] == second["bootstrap_room"]


async def test_several_answers_to_one_prompt_share_no_room(pairs: Start) -> None:
    """Only one of them could meet its prefill. A decode engine alone refuses it in words."""
    found = await pairs(MODES[0])
    got = await found.ask(n=2)
    assert (got.status_code, got.json()["error"]["message"]) == (400, "it has no bootstrap room")
    (leg,) = found.legs(Role.DECODE)
    assert "bootstrap_room" not in leg
    assert not found.legs(Role.PREFILL)


async def test_engines_that_wait_for_one_another_are_not_asked_one_after_the_other(
    pairs: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: prefill alone never ends."""
    monkeypatch.setattr(SGLangDialect, "sends_legs_together", False)
    found = await pairs("prefill_then_decode", prefill_timeout_s=0.4, retries=0)
    got = await found.ask()
    assert (got.status_code, got.json()["error"]["code"]) == (504, "prefill_timeout")
    assert not found.legs(Role.DECODE)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("fault", ["500", "reset", "garbage"])
@pytest.mark.parametrize("mode", MODES)
async def test_where_one_fails_both_are_sent_again_to_meet_elsewhere(
    pairs: Start, mode: str, fault: Any, role: Role
) -> None:
    found = await pairs(mode, retries=1)
    found.actors[role][0].fails(fault)
    for number in range(4):
        got = await found.ask(stream=number % 2 == 1)
        assert got.status_code == 200, got.text
        assert text_of(got, number % 2 == 1) == RIGHT
    assert found.actors[role][0].bodies
    legs = [*found.legs(Role.PREFILL), *found.legs(Role.DECODE)]
    tries = {(leg["kv_transfer_params"]["kvparams"]["transfer"]["id"], leg["bootstrap_room"]) for leg in legs}
    assert len({room for _, room in tries}) == len({id for id, _ in tries}) == len(tries), "each try has its own room"
    assert len(tries) > 4
    await until(found.settled)


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_ends_both(pairs: Start, mode: str) -> None:
    found = await pairs(mode)
    for actor in found.actors[Role.DECODE]:
        actor.fails("silent")
    asking = asyncio.create_task(found.ask())

    async def both_run() -> bool:
        return all(any(actor.open for actor in each) for each in found.actors.values())

    await until(both_run)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    await until(found.settled)
    assert sum(actor.left for actor in found.actors[Role.PREFILL]) == 1


async def test_what_a_client_says_of_rooms_reaches_no_engine(pairs: Start) -> None:
    found = await pairs("prefill_then_decode")
    got = await found.ask(bootstrap_host="10.0.0.1", bootstrap_port=1, bootstrap_room=7, routed_dp_rank=3)
    assert got.status_code == 200, got.text
    for leg in (*found.legs(Role.PREFILL), *found.legs(Role.DECODE)):
        assert leg["bootstrap_host"] == "127.0.0.1"
        assert leg["bootstrap_room"] != 7
        assert "routed_dp_rank" not in leg


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"0": {"engine_id": "a"}}', "is it that of an SGLang prefill engine"),
        (b"[]", "is it that of an SGLang prefill engine"),
        (b"Missing inputs", "does not answer with JSON"),
    ],
)
async def test_an_engine_whose_bootstrap_server_says_otherwise_is_given_no_work(
    pairs: Start, answer: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = await pairs("concurrent_legs")
    assert (await found.ask()).status_code == 200
    for server in found.servers:
        server.answer = answer

    async def refused() -> bool:
        return (await found.ask()).status_code == 503

    await until(refused)
    assert said in caplog.text
    asked = len(found.legs(Role.PREFILL))
    await found.ask()
    assert len(found.legs(Role.PREFILL)) == asked
