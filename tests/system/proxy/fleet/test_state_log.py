"""Tests the log of engine states: each change appears once, with its evidence, whichever part noticed it."""

import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import httpx
import pytest

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.state_log import StateLog
from tests.support.proxy.acting import Actor
from tests.support.proxy.clock import Clock
from tests.support.proxy.stage import Stage, StartStage
from tests.support.waiting import until

LOGGER = "kvparams_proxy.fleet.state_log"
FACTS = RequestFacts("r", "t", None, 1, 1, None, None)
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """The lines about engines so far, each behind the first letter of its level."""
    with caplog.at_level(logging.INFO, LOGGER):
        yield lambda: [f"{one.levelname[0]} {one.getMessage()}" for one in caplog.records if one.name == LOGGER]


class Nobody:
    facts = FACTS

    def granted(self, instance: Instance) -> None:
        raise AssertionError

    refused: Any = None


class Rig:
    """An empty fleet and a clock."""

    def __init__(self, **changes: Any) -> None:
        self.clock = Clock()
        policies = {role: RoundRobin() for role in Role}
        self.fleet = Fleet((), policies, self.clock.now, self.clock.call_later, **changes)

    def add(self, id: str = "d0", role: Role = Role.DECODE) -> Member:
        return self.fleet.add(Instance(id, "b", role, "http://h:1", "nixl"), "named by file")

    def ready(self, id: str = "d0", role: Role = Role.DECODE) -> Member:
        member = self.add(id, role)
        self.learn(member)
        return member

    def learn(self, member: Member, ready: bool = True, why: str = "it answers probes", **more: Any) -> None:
        self.fleet.record_probe(member, ready, None, why=why, **more)

    def take(self) -> Instance:
        taken = self.fleet.acquire(Role.DECODE, FACTS, (), Nobody())
        assert taken is not None
        return taken


def test_the_reason_for_a_state_is_kept_with_the_time_of_its_change() -> None:
    rig = Rig()
    member = rig.ready()
    rig.clock.pass_time(5.0)
    for why in ("no connection to the engine (refused)", "no answer in time"):  # that it is not there is one state
        rig.learn(member, False, why)
        rig.clock.pass_time(2.0)
    assert rig.fleet.cause_of(member) == ("no connection to the engine (refused)", rig.clock.now() - 4.0)
    rig.learn(member)
    assert rig.fleet.cause_of(member) == ("it answers probes, as another incarnation", rig.clock.now())
    rig.fleet.remove(member.instance.id, "removed")
    assert rig.fleet.cause_of(member) is None


def test_an_engine_that_was_never_up_is_told_of_once(lines: Lines) -> None:
    rig = Rig()
    member = rig.add()
    for _ in range(100):
        rig.learn(member, False, "no connection to the engine (refused)")
    assert lines() == [
        "I decode d0 has joined: named by file",
        "W decode d0 is not ready (probe): no connection to the engine (refused)",
    ]


def test_whoever_notices_first_that_an_engine_is_gone_tells_it_and_nobody_else(lines: Lines) -> None:
    for leg_first in (True, False):
        rig = Rig()
        member = rig.ready()
        before = len(lines())
        if leg_first:
            rig.fleet.record_failure(member.instance, connected=False, why="no connection to the engine (refused)")
        rig.learn(member, False, "no connection to the engine (timed out)")
        rig.learn(member, False, "does not answer a probe")
        assert [line[:25] for line in lines()[before:]] == ["W decode d0 is not ready "]
        rig.learn(member)
        assert lines()[before + 1 :] == ["I decode d0 is ready: it answers probes, as another incarnation"]


def test_a_breaker_that_opens_and_closes_is_told_with_the_last_failure(lines: Lines) -> None:
    rig = Rig(breaker=BreakerLimits(consecutive=2, open_s=4.0))
    member = rig.ready()
    before = len(lines())
    for _ in range(5):
        rig.fleet.record_failure(member.instance, connected=True, why="a leg was answered 500")
        rig.learn(member)
    rig.clock.pass_time(20.0)
    rig.fleet.record_success(member.instance)
    rig.fleet.record_success(member.instance)
    assert lines()[before:] == [
        "W decode d0 is broken (breaker): its legs fail (a leg was answered 500); others get its work for 4.0 s",
        "I decode d0 is ready: its legs work again",
    ]


def test_what_the_operator_does_is_told_until_the_last_leg_has_ended(lines: Lines) -> None:
    rig = Rig()
    member = rig.ready()
    before = len(lines())
    taken = rig.take()
    rig.fleet.drain("d0", True, "by the admin API")
    rig.learn(member)
    rig.fleet.release(taken, FACTS)
    rig.fleet.drain("d0", False, "its drain was ended by the admin API")
    rig.fleet.drain("d0", True, "by file")
    rig.fleet.drain("d0", False, "its drain was ended by file")
    taken = rig.take()
    rig.fleet.remove("d0", "file no longer has it")
    rig.fleet.release(taken, FACTS)
    assert lines()[before:] == [
        "I decode d0 is draining: by the admin API",
        "I decode d0 is drained: its last leg has ended",
        "I decode d0 is ready: its drain was ended by the admin API",
        "I decode d0 is drained: by file",
        "I decode d0 is ready: its drain was ended by file",
        "I decode d0 is leaving: file no longer has it",
        "I decode d0 has left: its last leg has ended",
    ]


def test_one_that_is_replaced_leaves_and_another_joins(lines: Lines) -> None:
    rig = Rig()
    member = rig.ready()
    before = len(lines())
    rig.fleet.replace(member.instance, "file has changed its entry")
    assert lines()[before:] == [
        "I decode d0 has left: file has changed its entry",
        "I decode d0 has joined: file has changed its entry",
    ]


def test_another_incarnation_is_told_even_where_nobody_has_seen_it_gone(lines: Lines) -> None:
    rig = Rig()
    member = rig.ready()
    before = len(lines())
    rig.learn(member, place={"engine": "another"})
    rig.learn(member, place={"engine": "another"})
    assert lines()[before:] == ["I decode d0 is ready: it answers probes, as another incarnation"]


def test_who_answers_and_gets_no_work_is_told_of_with_each_reason(lines: Lines) -> None:
    rig = Rig()
    member = rig.ready()
    before = len(lines())
    for why in ("it refuses the proxy's API key (401)", "no version of the protocol is spoken by both"):
        rig.learn(member, False, why, answers=True)
        rig.learn(member, False, why, answers=True)
    assert lines()[before:] == [
        "W decode d0 gets no requests (probe): it refuses the proxy's API key (401)",
        "W decode d0 gets no requests (probe): no version of the protocol is spoken by both",
    ]


def test_a_pair_that_fails_is_told_of_once_and_when_it_works(lines: Lines) -> None:
    rig = Rig(breaker=BreakerLimits(consecutive=2, open_s=4.0))
    decode, prefill = rig.ready(), rig.ready("p0", Role.PREFILL)
    rig.ready("p1", Role.PREFILL)
    before = len(lines())
    for _ in range(6):
        rig.fleet.record_failure(decode.instance, connected=True, why="a leg was answered 500", beside=prefill.instance)
    rig.fleet.record_success(decode.instance, prefill.instance)
    assert lines()[before:] == [
        "W decode d0 with the KV of prefill p0 fails (a leg was answered 500); "
        "the two are not paired for 4.0 s if there are others",
        "I decode d0 with the KV of prefill p0 works again",
    ]


# who changes all the time


def test_an_engine_that_flaps_does_not_fill_the_log_and_its_last_state_is_told(lines: Lines) -> None:
    rig = Rig()
    member, other = rig.ready(), rig.ready("d1")
    for _ in range(1000):
        rig.learn(member, False, "no connection to the engine (refused)")
        rig.learn(member)
        rig.clock.pass_time(0.01)
    assert len(lines()) <= 2 + 10
    rig.learn(other, False, "does not answer a probe")  # nobody else pays for it
    assert lines()[-1] == "W decode d1 is not ready (probe): does not answer a probe"
    rig.learn(member, False, "no connection to the engine (refused)")
    before = len(lines())
    rig.clock.pass_time(60.0)
    rig.learn(member, False, "no connection to the engine (refused)")  # the next probe
    (line,) = lines()[before:]
    found = re.fullmatch(
        r"W decode d0 is not ready \(probe\): .*\(refused\)( \(\d+ more changes since the last line\))", line
    )
    assert found is not None, line
    rig.clock.pass_time(60.0)
    rig.learn(member)
    assert "more changes" not in lines()[-1]


def test_a_log_remembers_only_so_many_subjects() -> None:
    log = StateLog(lambda: 0.0)
    for number in range(10_000):
        log.log_change(number, "there", "x", good=True)
    assert len(log._subjects) <= 4096  # pyright: ignore[reportPrivateUsage]
    log.forget(9_999)
    assert 9_999 not in log._subjects  # pyright: ignore[reportPrivateUsage]


# as a proxy meets them


async def test_an_engine_that_dies_under_a_request_is_told_of(stage: StartStage, lines: Lines) -> None:
    """The failed leg notices first."""
    found = await stage(probe_interval_s=5.0)
    before = len(lines())
    found.decode[0].end()
    for _ in range(4):
        assert (await found.ask()).status_code == 200
    assert lines()[before:] == ["W decode decode-0 is not ready (failed leg): no connection to the engine (refused)"]
    await found.decode[0].begin()
    await until(partial(_ready, found, 2))
    assert lines()[before + 1 :] == ["I decode decode-0 is ready: it answers probes, as another incarnation"]


async def _ready(found: Stage, count: int) -> bool:
    return await found.running.metric('kvparams_proxy_instances{role="decode",state="ready"}') == count


async def test_engines_that_were_never_there_are_told_of(proxy: Any, lines: Lines) -> None:
    await proxy(["http://127.0.0.1:1"], ["http://127.0.0.1:1"])
    said = [line for line in lines() if line.startswith("W")]
    assert said == [
        f"W {role} {role}-0 is not ready (probe): no connection to the engine (refused)"
        for role in ("prefill", "decode")
    ]


async def test_no_line_has_an_address_or_anything_that_was_said(stage: StartStage, lines: Lines) -> None:
    found = await stage(breaker=BreakerLimits(consecutive=1, open_s=60.0, longest_s=60.0))
    for fault in ("500", "garbage", "not http", "reset", "gone"):
        found.prefill[0].fails(fault)
        for _ in range(2):
            await found.ask(prompt="a secret")
    text = "\n".join(lines())
    assert "is broken" in text
    assert "127.0.0.1" not in text
    assert "secret" not in text
    assert "oops" not in text


@pytest.mark.parametrize("form", ["text", "auto"])
@pytest.mark.parametrize("level", ["INFO", "WARNING"])
async def test_the_command_shows_them_on_stderr(level: str, form: str) -> None:
    """Both levels, without being asked to; as JSON where stderr is no terminal."""
    engines = [Actor("prefill"), Actor("decode")]
    for actor in engines:
        await actor.begin()
    decode = engines[1].url if level == "INFO" else "http://127.0.0.1:1"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvparams", "proxy", "--port", "0"),
        *("--prefill", engines[0].url, "--decode", decode, "--log-requests", "off"),
        *("--log-format", form),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
            where = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert where is not None, line
            async with httpx.AsyncClient(base_url=where[0]) as client:
                assert (await client.get("/health/prefill")).status_code == 200
            process.terminate()
            _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for actor in engines:
            actor.end()
    said = {
        "INFO": "decode decode-0 is ready: it answers probes",
        "WARNING": "decode decode-0 is not ready (probe): no connection",
    }
    text = stderr.decode()
    if form == "text":
        assert re.search(rf" {level} [a-z_.]+: {re.escape(said[level])}", text), text
        return
    documents = [json.loads(line) for line in text.splitlines()]
    (found,) = [one for one in documents if one["message"].startswith(said[level])]
    facts = {"INFO": ("ready", "it answers probes"), "WARNING": ("not_ready", "no connection to the engine (refused)")}
    assert (found["level"], found["event"], found["engine"]) == (level, "engine_state", "decode-0")
    assert (found["state"], found["reason"], found["evidence"]) == (*facts[level], "probe")


# whatever happens


def test_another_incarnation_is_told_of_an_engine_that_gets_no_new_legs(lines: Lines) -> None:
    rig = Rig(breaker=BreakerLimits(consecutive=1, open_s=15.0))
    draining, broken = rig.ready(), rig.ready("d1")
    rig.fleet.drain("d0", True, "by the admin API")
    rig.fleet.record_failure(broken.instance, connected=True, why="a leg was answered 500")
    before = len(lines())
    for member in (draining, broken):
        for _ in range(2):
            rig.learn(member, place={"engine": "another"})
    why = "it answers probes, as another incarnation"
    assert lines()[before:] == [f"I decode d0 is drained: {why}", f"W decode d1 is broken (probe): {why}"]


@pytest.mark.parametrize("seed", range(20))
def test_the_last_line_about_an_engine_is_its_state_whatever_changed_it(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Probes, legs, breakers, operators and other proxies, in any order."""
    random = Random(seed)
    rig = Rig(breaker=BreakerLimits(consecutive=2, open_s=4.0))
    rig.fleet.add(Instance("p0", "b", Role.PREFILL, "http://h:1", "nixl"))
    taken: list[tuple[Instance, RequestFacts]] = []

    def last_told(id: str) -> tuple[object, object]:
        facts = [one.__dict__["facts"] for one in caplog.records if one.name == LOGGER]
        mine = [one for one in facts if one.get("engine") == id and one["state"] != "left"]  # an earlier one may leave
        return mine[-1]["state"], mine[-1]["incarnation"]

    with caplog.at_level(logging.INFO, LOGGER):
        for id in ("d0", "d1"):
            rig.ready(id)
        for _ in range(300):
            member = random.choice([one for one in rig.fleet.members if one.instance.role is Role.DECODE])
            instance = member.instance
            act = random.randrange(10)
            if act == 0:
                rig.learn(member, False, "does not answer a probe")
            elif act == 1:
                rig.learn(member, place={"engine": random.randrange(2)} if random.random() < 0.5 else None)
            elif act == 2:
                rig.fleet.record_failure(instance, connected=False, why="no connection to the engine (refused)")
            elif act == 3:
                rig.fleet.record_failure(instance, connected=True, why="a leg was answered 500")
            elif act == 4:
                rig.fleet.record_success(instance)
            elif act == 5:
                rig.fleet.drain(instance.id, random.random() < 0.4, "by the admin API")
            elif act == 6:
                rig.fleet.record_failure_elsewhere(member, "a leg was answered 500")
            elif act == 7:
                rig.fleet.record_restart_elsewhere(member)
            elif act == 8:
                rig.fleet.replace(instance, "file has changed its entry")
            elif taken and random.random() < 0.5:
                rig.fleet.release(*taken.pop())
            else:
                facts = RequestFacts("r", "t", None, 1, 1, None, None)
                with suppress(ProxyError):
                    found = rig.fleet.acquire(Role.DECODE, facts, (), Nobody())
                    if found is not None:
                        taken.append((found, facts))
            rig.clock.pass_time(30.0)  # nothing is left out because there was so much
            for one in rig.fleet.members:
                if one.instance.role is Role.DECODE and one.was_ever_ready:
                    state, incarnation = last_told(one.instance.id)
                    assert state == one.state
                    assert incarnation == one.instance.incarnation or one.state == "not_ready"
