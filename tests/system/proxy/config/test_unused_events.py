"""Tests that KV events that are declared but have no subscriber are refused or logged, whatever declares them."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from kvparams.instances import Instance, Role, RoundRobin
from kvparams_proxy.config.fleet_file import FleetFileProvider
from kvparams_proxy.config.settings import default_spec_rules
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.kv_events.unused_events_logger import UnusedEventsLogger
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.secret import Secret
from tests.support.proxy.fixtures import Proxy, StartProxy
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer secret"}
LINE = "- {id: %s, url: 'http://127.0.0.1:9', role: prefill, kv_events: 'tcp://127.0.0.1:9'}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"instances:\n{LINE % 'filed'}")
    return path


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if "kv_events" in record.getMessage()]


def rewrite(file: Path, text: str) -> None:
    file.write_text(text)


async def started(
    stub: StubEngines, proxy: StartProxy, file: Path, policy: str, rules: SpecRules | None = None
) -> Proxy:
    urls = [[engine.url for engine in stub.engines if engine.role == role] for role in ("prefill", "decode")]
    rules = rules or default_spec_rules()
    provider = FleetFileProvider(file, rules, every_s=0.02)
    return await proxy(*urls, policy=policy, admin_token=Secret("secret"), providers=(provider,), spec_rules=rules)


async def added(running: Proxy, id: str = "added") -> tuple[int, str]:
    entry = {"id": id, "url": "http://127.0.0.1:10", "role": "prefill", "kv_events": "tcp://127.0.0.1:9"}
    answer = await running.client.post("/admin/instances", json=entry, headers=ADMIN)
    return answer.status_code, answer.text


async def test_a_policy_that_does_not_look_at_them_is_named(
    stub: StubEngines, proxy: StartProxy, file: Path, said: Callable[[], list[str]]
) -> None:
    running = await started(stub, proxy, file, "least_load")
    assert said() == [
        "the kv_events of filed are not used, because the policy least_load does not use engines' caches; "
        "--policy cache_aware does"
    ]
    assert (await added(running))[0] == 201
    assert said()[1].startswith("the kv_events of added are not used")
    rewrite(file, f"instances:\n{LINE % 'filed'}{(LINE % 'later').replace(':9', ':11')}")

    async def third() -> bool:
        return len(said()) == 3

    await until(third)
    assert said()[2].startswith("the kv_events of later are "), "who was there already is not named again"


async def test_a_policy_that_looks_at_them_is_no_matter(
    stub: StubEngines, proxy: StartProxy, file: Path, said: Callable[[], list[str]]
) -> None:
    running = await started(stub, proxy, file, "cache_aware")
    assert (await added(running))[0] == 201
    assert 'kv_events_connected{instance="filed"}' in (await running.client.get("/metrics")).text
    assert said() == []


async def test_without_what_they_need_an_entry_is_refused(
    stub: StubEngines, proxy: StartProxy, file: Path, said: Callable[[], list[str]]
) -> None:
    """The control is an entry without them."""
    deaf = replace(default_spec_rules(), kv_events_installed=False)
    with pytest.raises(ConfigError, match="kv_events: needs pyzmq and msgspec: pip install"):
        FleetFileProvider(file, deaf)
    declared = f"instances:\n{LINE % 'filed'}"
    rewrite(file, declared.replace("kv_events: 'tcp://127.0.0.1:9'", "drain: true"))
    running = await started(stub, proxy, file, "cache_aware", deaf)
    status, text = await added(running)
    assert (status, "kv_events: needs pyzmq and msgspec: pip install" in text) == (400, True)
    assert (await running.client.get("/admin/instances/filed", headers=ADMIN)).status_code == 200
    rewrite(file, declared)

    async def refused() -> bool:
        return len(said()) == 1

    await until(refused)
    assert said()[0].startswith(
        "file is not used; the fleet stays unchanged: line 2: instances[0].kv_events: needs pyzmq"
    )


async def test_who_was_not_asked_first_is_told_in_the_log(
    stub: StubEngines, proxy: StartProxy, file: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvparams_proxy.fleet.kv_events.consumer", None)  # as if pyzmq were not there
    await started(stub, proxy, file, "cache_aware")
    [line] = said()
    assert line.startswith("the kv_events of filed are not used, since that needs pyzmq and msgspec: pip install")


def test_a_large_fleet_is_one_line(said: Callable[[], list[str]]) -> None:
    turns: list[Callable[[], None]] = []

    def later(delay_s: float, call: Callable[[], None]) -> NoReturn:
        raise AssertionError("nobody asks")

    fleet = Fleet((), {role: RoundRobin() for role in Role}, lambda: 0.0, later)
    fleet.add_listener(UnusedEventsLogger(turns.append, "for no reason"))
    for number in range(100):
        events = f"tcp://h:{number + 1}" if number % 2 else None
        fleet.add(Instance(f"p{number}", "1", Role.PREFILL, f"http://h{number}", "nixl", kv_events=events))
    [say] = turns
    say()
    assert said() == ["the kv_events of p1, p3, p5, p7, p9 and 45 more are not used, for no reason"]
