"""Tests `kvparams sidecar`: refusals at the start, one fleet file for all, and a load balancer before sidecars."""

import argparse
import sys
from pathlib import Path

import httpx
import pytest

from demo.client import JSON, ask, ask_stream
from demo.processes import Processes, Server, free_port
from kvparams.cli import main
from kvparams.instances import Role
from kvparams_proxy.cli.proxy_command import COMMAND as PROXY
from kvparams_proxy.cli.sidecar_command import COMMAND
from tests.system.sidecar.places import Place, sidecar
from tests.system.sidecar.test_sidecar_places import ASKS

HERE = ("sidecar", "--role", "prefill", "--engine")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((*HERE, "http://e:1"), "no decode engine is given; add --decode URL or --config FILE"),
        ((*HERE, "http://e:1", "--prefill", "http://p:1"), "--prefill: give the prefill engine here as --engine"),
        ((*HERE, "e:1", "--decode", "http://d:1"), "--engine: [NAME=]URL must be http://host:port"),
        ((*HERE, "http://e:1", "--decode", "d:1"), "--decode number 1: [NAME=]URL must be http"),
        ((*HERE, "a=http://e:1", "--decode", "a=http://d:1"), "two instances are called 'a'"),
        ((*HERE, "http://e:1", "--decode", "http://d:1", "--port", "x"), "--port: must be a port"),
    ],
)
def test_what_cannot_be_started_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1
    assert printed[0].startswith(f"kvparams sidecar: {said}")


def test_its_settings_are_the_proxys_but_for_the_mode() -> None:
    names = [set[str](), set[str]()]
    for at, command in enumerate((PROXY, COMMAND)):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        names[at] = {option for action in parser._actions for option in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    proxys, sidecars = names
    assert sidecars - proxys == {"--engine", "--role", "--broker", "--pool", "--prefill-partner"}
    stack = {name for name in proxys - sidecars if name.startswith(("--static-", "--engine-stats", "--log-"))}
    left_out = {"--mode", "--aggregated"}
    assert left_out < proxys - sidecars
    assert stack
    assert {"--policy", "--queue", "--client-keys", "--port", "--config"} <= sidecars


async def test_all_sidecars_may_follow_one_file_of_the_whole_fleet(
    places: dict[str, Place], processes: Processes, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    here = places["sidecar, prefill"]
    (tmp_path / "token").write_text("the-token")
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "defaults: {connector: store}\n"
        "proxy: {mode: aggregated, admin-token-file: token}\n"
        "instances:\n"
        f"  - {{id: p0, url: '{here.prefill}', role: prefill}}\n"
        "  - {id: p1, url: 'http://127.0.0.1:9', role: prefill}\n"
        f"  - {{id: d0, url: '{here.decode}', role: decode}}\n"
    )
    own = sidecar(processes, Role.PREFILL, f"p0={here.prefill}", [], "--config", str(file), "--probe", "1")
    processes.wait_ready(own)
    try:
        headers = {"authorization": "Bearer the-token"}
        found = (await client.get(f"{own.url}/admin/instances", headers=headers)).json()["data"]
        assert {one["id"]: one["source"] for one in found} == {"p0": "flags", "d0": "file"}
        more = {"id": "p2", "url": "http://127.0.0.1:9", "role": "prefill", "connector": "store"}
        refused = await client.post(f"{own.url}/admin/instances", headers=headers, json=more)
        assert refused.status_code == 400
        assert "the engine beside this sidecar does all prefill" in refused.json()["error"]["message"]
        added = await client.post(f"{own.url}/admin/instances", headers=headers, json={**more, "role": "decode"})
        assert added.status_code == 201
        got = await ask(client, own.url, *ASKS[0])
        assert (got.headers["x-kvparams-prefill"], got.headers["x-kvparams-decode"]) == ("p0", "d0")
    finally:
        processes.stop(own)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("sidecar, prefill", "middleware, prefill"), ("sidecar, decode",)])
async def test_a_proxy_balances_over_sidecars_as_over_engines(
    places: dict[str, Place], processes: Processes, client: httpx.AsyncClient, single: Server, names: tuple[str, ...]
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "kvparams", "proxy", "--mode", "aggregated", "--port", str(port)]
    command += ["--probe", "1", "--log-requests", "off"]
    for name in names:
        command += ["--aggregated", f"{name.replace(', ', '-')}={places[name].server.url}"]
    balancer = processes.start("balancer", *command, port=port)
    processes.wait_ready(balancer)
    try:
        for path, body in ASKS:
            for how in (ask, ask_stream):
                salted: JSON = {**body, "cache_salt": f"balanced {names} {how}"}
                got = await how(client, balancer.url, path, salted)
                assert got.outcome == (await how(client, single.url, path, body)).outcome
    finally:
        processes.stop(balancer)
