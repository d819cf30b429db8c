"""Tests engines' KV events: their order over real sockets, and what the proxy makes of them."""

import asyncio
import socket
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from random import Random
from time import sleep
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.kv_events import EventBatch, EventSource
from kvparams.kv_events.model import BlockLocation, BlockStored
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams_proxy.fleet.event_sources import EventSources
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.kv_events.consumer import KVEventConsumer
from kvparams_proxy.fleet.kv_events.ordered_stream import OrderedEventStream
from kvparams_proxy.fleet.kv_events.subscriber import KVEventSubscriber
from kvparams_proxy.fleet.kv_events.subscriber import PublisherEndpoint as PublishedAt
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from kvparams_proxy.secret import Secret
from tests.support.processor import scaled_s
from tests.support.proxy.fixtures import StartProxy
from tests.support.proxy.publisher import Publisher, removed, stored
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

NUMBERS = count(1)
STEPS = ["said", "said", "lost", "replay", "restart", "connect", "forget", "time"]
PROMPT = Random(5).choices(range(1000), k=641)


def ports() -> tuple[int, int]:
    """Two free ones."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < 2:
            port = Random().randrange(20_000, 32_000)
            try:
                one = stack.enter_context(socket.socket())
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found[0], found[1]


# the order


def batch(number: int, life: int = 0) -> EventBatch:
    return EventBatch(EventSource("e"), (), number, mark=1000 * life + number + 1)


class Heard:
    """What a stream tells, and a publisher that can say everything again from `kept` on."""

    def __init__(self, *, replays: bool = True) -> None:
        self.told: list[int | None] = []
        self.stream = OrderedEventStream(self._tell, replays=replays)
        self.said: list[EventBatch] = []
        self.kept = 0

    def _tell(self, batch: EventBatch | None) -> None:
        self.told.append(None if batch is None else batch.sequence)

    def say(self, *, lost: bool = False, life: int = 0) -> None:
        self.said.append(batch(len(self.said), life))
        if not lost:
            self.stream.on_live_batch(self.said[-1])

    def replay(self) -> None:
        wanted, self.stream.replay_wanted_from = self.stream.replay_wanted_from, None
        assert wanted is not None
        for one in self.said[max(wanted, self.kept) :]:
            self.stream.on_replayed_batch(one)
        self.stream.on_replay_end()


def test_whoever_comes_late_hears_what_was_said_before() -> None:
    heard = Heard()
    for _ in range(3):
        heard.say(lost=True)
    heard.stream.on_connected()
    heard.say()
    assert heard.told == []
    heard.replay()
    heard.say()
    assert heard.told == [0, 1, 2, 3, 4]


def test_what_is_lost_is_replayed_and_what_came_meanwhile_follows() -> None:
    heard = Heard()
    heard.say()
    heard.say(lost=True)
    heard.say()
    heard.say()
    assert heard.told == [0]
    heard.replay()
    assert heard.told == [0, 1, 2, 3]
    assert heard.stream.gaps == 0


def test_what_no_replay_brings_clears_what_was_said() -> None:
    """Spec-mandated, 1.0#14.14."""
    for replays in (True, False):
        heard = Heard(replays=replays)
        heard.say()
        heard.say(lost=True)
        heard.kept = 2
        heard.say()
        if replays:
            heard.replay()
        heard.say()
        assert heard.told == [0, None, 2, 3]
        assert heard.stream.gaps == 1


@pytest.mark.parametrize("field", ["tokens", "extras", "salt"])
def test_what_waits_for_a_replay_is_limited_in_bytes_and_not_only_in_number(field: str) -> None:
    """Of few blocks, whatever else they are filled with; the control are as many that are small."""
    full: dict[str, Any] = {
        "tokens": {"tokens": bytes(4 << 20), "block_size": 1 << 20},
        "extras": {"extras": ((("x" * (4 << 20),),),)},
        "salt": {"salt": "x" * (4 << 20)},
    }[field]

    def held(more: dict[str, Any]) -> int:
        heard = Heard()
        heard.say()
        heard.say(lost=True)
        event = BlockStored(BlockLocation("device"), bytes(32), 32, **more)
        for number in range(2, 100):
            heard.stream.on_live_batch(replace(batch(number), events=(event,)))
            if not heard.stream.replaying:
                return number
        return 100

    assert held({}) == 100
    assert held(full) < 20


def test_a_publisher_that_was_started_anew_is_another_one() -> None:
    """Spec-mandated, 1.0#14.13: what the one before has said is forgotten."""
    heard = Heard()
    for _ in range(3):
        heard.say()
    heard.said.clear()
    heard.say(life=1)
    heard.say(life=1)
    assert heard.told == [0, 1, 2, None, 0, 1]
    assert heard.stream.restarts == 1


def test_one_that_says_as_many_again_before_it_is_heard_is_found_by_its_replay() -> None:
    """The number that comes is the one that is expected; only the batch before it is not the one that was taken."""
    heard = Heard()
    heard.say()
    heard.say()
    heard.said.clear()
    for _ in range(2):
        heard.say(lost=True, life=1)
    heard.stream.on_connected()
    heard.say(life=1)
    heard.replay()
    heard.say(life=1)
    while heard.stream.replay_wanted_from is not None:
        heard.replay()
    assert heard.told[-4:] == [0, 1, 2, 3]
    assert None in heard.told


@given(
    steps=st.lists(
        st.sampled_from(["said", "said", "lost", "replay", "restart", "connect", "forget", "time"]), max_size=60
    ),
    replays=st.booleans(),
)
def test_nothing_is_told_twice_or_out_of_order_whatever_happens(steps: list[str], replays: bool) -> None:
    heard, life = Heard(replays=replays), 0
    for step in steps:
        if step in ("said", "lost"):
            heard.say(lost=step == "lost", life=life)
        elif step == "replay" and heard.stream.replay_wanted_from is not None:
            heard.replay()
        elif step == "restart":
            life += 1
            heard.said.clear()
            heard.kept = 0
        elif step == "connect":
            heard.stream.on_connected()
        elif step == "forget":
            heard.kept = len(heard.said)
        elif step == "time":
            heard.stream.on_replay_end()
    since: list[int] = []
    for number in heard.told:
        if number is None:
            since.clear()
            continue
        assert not since or number == since[-1] + 1
        since.append(number)


# over sockets


class Site:
    """Two prefill engines, the first of which publishes."""

    def __init__(self, at: tuple[int, int], *, replays: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.prefixes = PrefixCacheModel(loop.time, seed=1)
        policies = {role: CacheAware() for role in Role}
        self.fleet = Fleet((), policies, loop.time, loop.call_later, prefixes=self.prefixes)
        self.events = KVEventConsumer(loop, self.prefixes)
        self.fleet.add_listener(self.events)
        silent, heard = (Instance(id, "1", Role.PREFILL, f"http://{id}", "nixl") for id in ("p1", "p0"))
        live, replay = (f"tcp://127.0.0.1:{port}" for port in at)
        heard = replace(heard, kv_events=live, kv_events_replay=replay if replays else None)
        self.members = [self.fleet.add(heard), self.fleet.add(silent)]
        for member in self.members:
            self.fleet.record_probe(member, True, frozenset(("m", "sql")), None, None, "m")

    def cached(self, tokens: list[int], model: str = "m", salt: str | None = None) -> list[int]:
        """Tokens that each is believed to have."""
        name = f"r{next(NUMBERS)}"
        facts = RequestFacts(name, name, model, 1, 1, array("I", tokens), salt, prompt_tokens=len(tokens))
        decision = self.prefixes.explain(CacheAware(), self.members, facts, 0).decision
        return [decision.cached_tokens.get(member.instance, 0) for member in self.members]

    async def becomes(self, wanted: int, tokens: list[int] = PROMPT, **more: Any) -> None:
        async def so() -> bool:
            return self.cached(tokens, **more) == [wanted, 0]

        await until(so)

    async def connected(self) -> None:
        async def so() -> bool:
            return self.events.stats()["p0"].connected

        await until(so)


@pytest.fixture
def at() -> tuple[int, int]:
    return ports()


@asynccontextmanager
async def a_site(at: tuple[int, int], *, replays: bool = True) -> AsyncGenerator[Site]:
    site = Site(at, replays=replays)
    try:
        yield site
    finally:
        site.events.close()
        site.fleet.close()


@pytest.mark.parametrize("block", [1, 16, 64, 128])
async def test_what_an_engine_says_is_believed_until_it_takes_it_back(at: tuple[int, int], block: int) -> None:
    with Publisher(at) as publisher:
        publisher.say(stored(PROMPT[:640], block=block))  # before anybody hears it
        async with a_site(at) as site:
            await site.becomes(640)
            assert site.cached(PROMPT, salt="s") == [0, 0]
            assert site.cached(PROMPT, model="sql") == [0, 0]
            publisher.say(removed(PROMPT[:640]))
            await site.becomes(576)
            publisher.say(stored(PROMPT[:640], block=block, lora_name="sql", lora_id=1))
            await site.becomes(640, model="sql")
            publisher.say({"type": "AllBlocksCleared"})
            await site.becomes(0)
            assert site.events.unplaced_blocks == 0


async def test_blocks_of_an_adapter_are_never_those_of_the_base_model_or_another_one(
    at: tuple[int, int],
) -> None:
    extras = [["sql"]] * (640 // 16)
    with Publisher(at) as publisher:
        async with a_site(at) as site:
            await site.connected()
            publisher.say(stored(PROMPT[:640], lora_name="sql", lora_id=1, extra_keys=extras))  # as vLLM 0.32.0
            await site.becomes(640, model="sql")
            assert site.cached(PROMPT) == [0, 0]
            assert site.cached(PROMPT, model="chat") == [0, 0]
            publisher.say({"type": "AllBlocksCleared"})
            publisher.say(stored(PROMPT[:640], lora_id=7))  # an adapter that nobody can name: whose blocks are they?
            publisher.say(stored(PROMPT[:320], lora_name="sql", lora_id=1))
            await site.becomes(320, model="sql")
            assert site.cached(PROMPT) == [0, 0]
            assert site.events.unplaced_blocks == 640 // 16
            publisher.say(stored(PROMPT[:640]))
            await site.becomes(640)  # the control


async def test_an_adapter_of_sglang_is_found_by_the_name_that_requests_use(at: tuple[int, int]) -> None:
    with Publisher(at) as publisher:
        async with a_site(at) as site:
            for member in site.members:
                models = frozenset(("m", "m:sql"))
                site.fleet.record_probe(member, True, models, None, None, "m", ("m:sql",))
            await site.connected()
            publisher.say(stored(PROMPT[:640], lora_name="sql"))
            await site.becomes(640, model="m:sql")
            assert site.cached(PROMPT) == [0, 0]


async def test_what_is_lost_on_the_way_is_asked_for_again(at: tuple[int, int]) -> None:
    with Publisher(at) as publisher:
        async with a_site(at) as site:
            await site.connected()
            publisher.say(stored(PROMPT[:320]))
            await site.becomes(320)
            publisher.say(stored(PROMPT[320:480], front=PROMPT[:320]), lost=True)
            publisher.say(stored(PROMPT[480:640], front=PROMPT[:480]))
            await site.becomes(640)
            assert publisher.replays >= 2
            assert site.events.stats()["p0"].gaps == 0


async def test_without_a_replay_a_loss_forgets_what_was_said(at: tuple[int, int]) -> None:
    """The control: what was said first is believed before, and no longer."""
    with Publisher(at) as publisher:
        async with a_site(at, replays=False) as site:
            await site.connected()
            publisher.say()
            publisher.say(stored(PROMPT[:320]))

            async def heard() -> bool:
                publisher.say(stored(PROMPT[:320]))
                return site.cached(PROMPT) == [320, 0]

            await until(heard)
            publisher.say(lost=True)
            publisher.say(stored(PROMPT[:64], cache_salt="x"))
            await site.becomes(0)
            assert site.events.stats()["p0"].gaps >= 1


async def test_an_engine_that_restarts_is_believed_to_have_only_what_it_says_since(at: tuple[int, int]) -> None:
    async with a_site(at) as site:
        with Publisher(at) as publisher:
            publisher.say(stored(PROMPT[:640]))
            await site.becomes(640)
        other = PROMPT[::-1]
        with Publisher(at) as publisher:
            publisher.say(stored(other[:128]))
            await site.becomes(128, other)
            assert site.cached(PROMPT) == [0, 0]
            site.fleet.record_probe(site.members[0], False, None)
            site.fleet.record_probe(site.members[0], True, frozenset(("m",)))  # the probe has seen it, too
            await site.becomes(128, other)
            publisher.forget()
            site.fleet.remove("p0")
            assert site.cached(other) == [0, 0]
            assert not site.events.stats()


async def test_what_is_no_event_costs_itself_alone(at: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(at) as publisher:
        async with a_site(at) as site:
            await site.connected()
            publisher.say(stored(PROMPT[:320]))
            await site.becomes(320)
            publisher.garble()
            publisher.say(stored(PROMPT[320:640], front=PROMPT[:320]))
            await until(lambda: site.events.stats()["p0"].refused, 20.0)
            assert "invalid KV events" in caplog.text
            publisher.say(stored(PROMPT[:640]))
            await site.becomes(640)


async def test_very_much_at_once_holds_up_nobody(at: tuple[int, int]) -> None:
    """Half a million tokens in one message take much longer than any turn of the event loop."""
    tokens = Random(1).choices(range(100_000), k=500_000)
    turns_s: list[float] = []

    async def beside() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            turns_s.append(time.thread_time() - began)

    with Publisher(at) as publisher:
        async with a_site(at) as site:
            await site.connected()
            task = asyncio.create_task(beside())
            publisher.say(stored(tokens, block=16))
            start = tokens[: 1 << 17]
            await until(lambda: site.cached(start)[0] >= (1 << 17) - 64, 20.0, pause_s=0.001)
            task.cancel()
    assert max(turns_s) < scaled_s(0.008) < sum(turns_s)


async def test_what_keeps_coming_is_entered_in_one_place(at: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes while a message is being entered waits behind it: a turn of the loop is no longer for that."""
    told = beside = most = 0

    with Publisher(at) as publisher:

        def slow(*_: object) -> None:
            nonlocal told, beside, most
            if told % 5 == 0:  # the first event of a message: the next one comes while this one is entered
                publisher.say(*(stored(PROMPT[:16]) for _ in range(5)))
            told, beside = told + 1, beside + 1
            most = max(most, beside)
            sleep(0.003)

        monkeypatch.setattr(EventSources, "apply", slow)
        async with a_site(at) as site:
            await site.connected()
            publisher.say(*(stored(PROMPT[:16]) for _ in range(5)))
            async with asyncio.timeout(20):
                while told < 100:
                    beside = 0
                    await asyncio.sleep(0)
    assert most <= 2  # the last one of a turn, and the first one of the next


async def test_an_engine_that_cannot_be_asked_again_keeps_nobody_else_from_being_heard(
    at: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(at) as publisher:
        async with a_site(at) as site:
            await site.connected()
            other = replace(site.members[1].instance, id="p2", kv_events=f"tcp://127.0.0.1:{at[0]}")
            member = site.fleet.add(replace(other, kv_events_replay="tcp://-:1"))
            site.fleet.record_probe(member, True, frozenset(("m",)), None, None, "m")

            async def tried() -> bool:
                return "cannot request lost KV events" in caplog.text

            await until(tried)
            publisher.say(stored(PROMPT[:320]))
            await site.becomes(320)


async def test_places_that_cannot_be_listened_to_use_nothing_up(at: tuple[int, int]) -> None:
    """A process has some thousand sockets for this."""
    with Publisher(at) as publisher:
        async with a_site(at) as site:
            await site.connected()
            for number in range(1100):
                wrong = replace(site.members[1].instance, id=f"w{number}", kv_events="tcp://-:1")
                site.fleet.record_probe(site.fleet.add(wrong), True, frozenset(("m",)), None, None, "m")
            right = replace(site.members[1].instance, id="p2", kv_events=f"tcp://127.0.0.1:{at[0]}")
            site.fleet.record_probe(site.fleet.add(right), True, frozenset(("m",)), None, None, "m")

            async def heard() -> bool:
                return site.events.stats()["p2"].connected

            await until(heard)
            publisher.say(stored(PROMPT[:320]))
            await site.becomes(320)


async def test_a_fault_in_entering_costs_that_event_alone(
    at: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter = EventSources.apply
    fails = iter((True,))

    def told(self: EventSources, *said: Any) -> None:
        if next(fails, False):
            raise RuntimeError("a fault of ours")
        enter(self, *said)

    monkeypatch.setattr(EventSources, "apply", told)
    with Publisher(at) as publisher:
        async with a_site(at) as site:
            await site.connected()
            publisher.say(stored(PROMPT[:64]))

            async def failed() -> bool:
                return "could not be processed" in caplog.text

            await until(failed)
            publisher.say(stored(PROMPT[:320]))
            await site.becomes(320)


async def test_an_engine_that_leaves_when_nobody_listens_any_more_is_no_matter(at: tuple[int, int]) -> None:
    """Files are open in place of those that were closed: nothing is written to them."""
    with Publisher(at), ExitStack() as stack:
        site = Site(at)
        try:
            await site.connected()
        finally:
            site.events.close()
        stack.callback(site.fleet.close)
        ends = [end for _ in range(8) for end in socket.socketpair()]
        for one in ends:
            stack.enter_context(one)
            one.setblocking(False)
        site.fleet.remove("p0")
        for one in ends:
            with pytest.raises(BlockingIOError):
                one.recv(1)


# through the whole proxy


async def test_a_prompt_goes_where_an_engine_says_that_it_has_it(
    stub: StubEngines, proxy: StartProxy, at: tuple[int, int]
) -> None:
    urls = {role: [engine.url for engine in stub.engines if engine.role == role] for role in ("prefill", "decode")}
    running = await proxy(
        urls["prefill"][:1], urls["decode"], policy="cache_aware", admin_token=Secret("t"), slow_start_s=0.0
    )
    entry = {"id": "said", "url": urls["prefill"][1], "role": "prefill", "connector": "nixl"}
    entry |= {"kv_events": f"tcp://127.0.0.1:{at[0]}", "kv_events_replay": f"tcp://127.0.0.1:{at[1]}"}
    with Publisher(at) as publisher:
        publisher.say(stored(PROMPT[:640]))
        admin = {"authorization": "Bearer t"}
        assert (await running.client.post("/admin/instances", json=entry, headers=admin)).status_code == 201

        async def heard() -> bool:
            return await running.metric('kvparams_proxy_kv_events_batches_total{instance="said"') == 1

        await until(heard)
        body = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}
        answer = await running.client.post("/v1/completions", json=body)
    assert answer.headers["x-kvparams-prefill"] == "said"
    assert "said: 640 of 641 tokens cached" in answer.headers["x-kvparams-decision"]
    assert await running.metric('kvparams_proxy_kv_events_gaps_total{instance="said"') == 0


async def test_a_flood_is_held_back_and_not_kept(at: tuple[int, int]) -> None:
    """Nobody takes what comes: so much is decoded, and the rest waits in ZMQ or is lost. Blocks are few, but large."""
    listening = KVEventSubscriber(lambda: None)
    try:
        with Publisher(at) as publisher:
            listening.subscribe("p0", PublishedAt(f"tcp://127.0.0.1:{at[0]}", None))
            await until(lambda: listening.counts("p0")[0], 20.0)
            large = stored([7] * 700_000, block=700_000)

            def is_full() -> bool:
                if listening.pending_weight < 1 << 17:
                    publisher.say(large)
                return listening.pending_weight >= 1 << 17

            await until(is_full, 20.0, pause_s=0.01)
            for _ in range(20):
                publisher.say(large)
            before = listening.counts("p0")[1]
            assert 8 <= before <= 40
            assert listening.pending_weight < 2 << 17
            while listening.pending_weight >= 1 << 17:  # the control: there is room again, and it goes on
                assert listening.take_batch() is not None

            def goes_on() -> bool:
                publisher.say(large)
                return listening.counts("p0")[1] != before

            await until(goes_on, 20.0, pause_s=0.01)
    finally:
        listening.close()
