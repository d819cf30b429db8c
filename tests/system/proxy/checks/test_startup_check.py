"""Tests that a proxy finds out by itself whether KV gets from prefill to decode, and says so in its log."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvparams.instances import Role
from tests.support.waiting import until
from tests.system.proxy.cli.test_fleet_check import NIXL, Engine

LOGGER = "kvparams_proxy.fleet.state_log"
Lines = Callable[[], list[str]]
Begin = Callable[..., Awaitable[tuple[Engine, Engine]]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvparams_proxy.checks.startup_check._LOOK_S", 0.02)
    monkeypatch.setattr("kvparams_proxy.checks.startup_check._AGAIN_S", 0.2)
    monkeypatch.setattr("kvparams_proxy.checks.pair_check._TELLS_S", 0.05)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """The lines about checks so far, each behind the first letter of its level."""

    def found() -> list[str]:
        records = [one for one in caplog.records if one.name == LOGGER]
        return [
            f"{one.levelname[0]} {one.getMessage()}"
            for one in records
            if one.__dict__["facts"].get("event") in ("pair_check", "engine_check")
        ]

    with caplog.at_level(logging.INFO, LOGGER):
        yield found


@pytest.fixture
def begin(stack: AsyncExitStack, proxy: Any) -> Begin:
    """Starts a proxy before one prefill and one decode engine."""

    async def start(
        prefill: Any, *, dialect: str = "nixl", startup_check: bool = True, **decode: Any
    ) -> tuple[Engine, Engine]:
        engines = Engine(Role.PREFILL, prefill), Engine(Role.DECODE, **decode)
        for engine in engines:
            server = await engine.begin()
            stack.callback(server.close)
        await proxy([engines[0].url], [engines[1].url], dialect, startup_check=startup_check, probe_interval_s=0.1)
        return engines

    return start


async def test_engines_that_work_together_are_told_of_once(begin: Begin, lines: Lines) -> None:
    prefill, decode = await begin(NIXL, loads=49)
    await until(lambda: bool(lines()), 10.0)
    assert lines() == ["I prefill prefill-0 and decode decode-0 work together: decode-0 loaded 49 of 50 prompt tokens"]
    assert (len(prefill.legs), len(decode.legs)) == (1, 1)


@pytest.mark.parametrize(
    ("dialect", "prefill", "decode", "said"),
    [
        ("nixl", {}, {"loads": 9}, "is it started with a NixlConnector"),
        ("content", {}, {"loads": 0}, "decode-0 computed the whole prompt itself"),
        ("content", 500, {"loads": 9}, "the prefill leg failed on prefill-0: it was answered 500"),
    ],
)
async def test_the_wrong_connector_is_found_before_a_client_comes(
    begin: Begin, lines: Lines, dialect: str, prefill: Any, decode: dict[str, Any], said: str
) -> None:
    first, _ = await begin(prefill, dialect=dialect, **decode)
    await until(lambda: len(first.legs) > 2, 10.0)
    (line,) = lines()
    assert line.startswith("W prefill prefill-0 and decode decode-0 do not work together: ")
    assert said in line
    assert "127.0.0.1" not in line
    assert "error" not in line, "these are the words of an engine"


async def test_it_is_told_when_what_was_wrong_is_right(begin: Begin, lines: Lines) -> None:
    prefill, _ = await begin({}, loads=49)
    await until(lambda: len(lines()) == 1, 10.0)
    prefill.params = NIXL
    await until(lambda: len(lines()) == 2, 10.0)
    assert [line[0] for line in lines()] == ["W", "I"]
    assert prefill.legs[-1]["max_tokens"] == 1


async def test_without_the_setting_no_engine_is_asked(begin: Begin, lines: Lines, stack: AsyncExitStack) -> None:
    """The control: an engine that would be found broken."""
    prefill, decode = await begin({}, startup_check=False, loads=9)
    checked, _ = await begin({}, loads=9)
    await until(lambda: bool(checked.legs), 10.0)
    assert prefill.legs == decode.legs == []
