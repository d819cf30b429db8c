"""Tests prefill engines with a bootstrap server: probes ask for their identity, and unknown ones get no work."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvparams.instances import Instance, Role
from kvparams_proxy.config.fleet_document import parse_fleet_document
from kvparams_proxy.config.settings import Settings, default_spec_rules
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.secret import secret_from_file
from tests.support.proxy.acting import Actor
from tests.support.proxy.fixtures import Proxy, running
from tests.support.proxy.stage import BODY, COMPLETIONS
from tests.support.waiting import stays_true_for, until
from tests.unit.proxy.cli.test_command import asked, problems


class Bootstrap:
    """A server that answers like that of vLLM's MooncakeConnector, or like none."""

    def __init__(self) -> None:
        self.engine_id = "first"
        self.answer: bytes | None = None
        """Instead of the right one."""
        self.silent = False
        self.asked = 0
        self.heads: list[bytes] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def begin(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def end(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                self.asked += 1
                if self.silent:
                    await reader.read()  # until the proxy leaves
                    return
                ranks = {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://h:1"}}}}
                body = json.dumps(ranks).encode() if self.answer is None else self.answer
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()


class Scene:
    """A proxy before one engine of each role, and the bootstrap server of the first."""

    def __init__(self, proxied: Proxy, prefill: Actor, decode: Actor, bootstrap: Bootstrap) -> None:
        self.proxy, self.prefill, self.decode, self.bootstrap = proxied, prefill, decode, bootstrap

    async def ask(self) -> Any:
        return await self.proxy.client.post(COMPLETIONS, json=BODY)

    async def until(self, true: Callable[[Any], bool]) -> Any:
        """Asks until `true` holds of an answer, and returns that answer."""
        answers: list[Any] = []

        async def holds() -> bool:
            answers.append(await self.ask())
            return true(answers[-1])

        await until(holds, seen=lambda: [each.text for each in answers[-1:]])
        return answers[-1]

    def told(self) -> dict[str, Any]:
        """What the last decode leg was told."""
        return json.loads(self.decode.bodies[-1])["kv_transfer_params"]


StartScene = Callable[..., Awaitable[Scene]]


def _answered(got: Any) -> bool:
    return got.status_code == 200


@pytest.fixture
def scene(stack: AsyncExitStack, direct: bool) -> StartScene:
    async def start(prepare: Callable[[Bootstrap], None] = lambda _: None, **changes: Any) -> Scene:
        prefill, decode, bootstrap = Actor("prefill"), Actor("decode"), Bootstrap()
        for server in (prefill, decode, bootstrap):
            await server.begin()
            stack.callback(server.end)
        prepare(bootstrap)
        instances = (
            Instance("p", "b", Role.PREFILL, prefill.url, "mooncake", bootstrap=bootstrap.url),
            Instance("d", "b", Role.DECODE, decode.url, "mooncake"),
        )
        settings = replace(Settings(instances, probe_interval_s=0.2), **changes)
        return Scene(await stack.enter_async_context(running(settings, direct)), prefill, decode, bootstrap)

    return start


async def test_decode_is_told_what_the_bootstrap_server_said(scene: StartScene) -> None:
    found = await scene(probe_interval_s=60.0)
    for number in range(3):
        assert (await found.ask()).status_code == 200
        asked_for = json.loads(found.prefill.bodies[-1])["kv_transfer_params"]
        document = asked_for.pop("kvparams")
        assert asked_for == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": document["transfer"]["id"],
        }
        told = found.told()
        assert document["mode"] == "rendezvous"
        assert told.pop("kvparams")["transfer"] == document["transfer"]
        assert told == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": document["transfer"]["id"],
            "remote_bootstrap_addr": found.bootstrap.url,
            "remote_engine_id": "first",
        }
        assert found.bootstrap.asked == 1, f"asked for request {number}"
    assert found.bootstrap.heads[0].startswith(b"GET /query HTTP/1.1\r\n")


@pytest.mark.parametrize("broken", ["gone", "empty", "html", "silent"])
async def test_without_it_the_engine_is_given_no_work_and_the_log_says_why(
    scene: StartScene, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(bootstrap: Bootstrap) -> None:
        if broken == "gone":
            bootstrap.end()
        elif broken == "silent":
            bootstrap.silent = True
        else:
            bootstrap.answer = {"empty": b"{}", "html": b"<html>"}[broken]

    found = await scene(spoil)
    got = await found.ask()
    assert (got.status_code, found.prefill.bodies) == (503, [])
    assert "prefill" in got.json()["error"]["message"]
    assert found.bootstrap.url not in got.text
    said = [one for one in caplog.messages if "gets no requests" in one]
    assert len(said) == 1
    await stays_true_for(0.5, lambda: said == [one for one in caplog.messages if "gets no requests" in one])
    if broken == "gone":
        await found.bootstrap.begin()
    found.bootstrap.silent, found.bootstrap.answer = False, None
    await found.until(_answered)
    assert found.told()["remote_engine_id"] == "first"


async def test_an_engine_that_is_called_something_else_has_restarted(scene: StartScene, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-token-of-tests")
    found = await scene(admin_token=secret_from_file(tmp_path / "token"))
    bearer = {"authorization": "Bearer secret-token-of-tests"}

    async def state() -> dict[str, Any]:
        return (await found.proxy.client.get("/admin/instances/p", headers=bearer)).json()

    assert (await found.ask()).status_code == 200
    before = await state()
    assert before["bootstrap"] == found.bootstrap.url
    found.bootstrap.engine_id = "second"
    await found.until(lambda got: _answered(got) and found.told()["remote_engine_id"] == "second")
    assert (await state())["incarnation"] != before["incarnation"]


def test_where_it_is_is_one_setting() -> None:
    rules = default_spec_rules()
    text = """
    defaults: {connector: mooncake}
    instances:
      - {id: p, url: "http://h:1", role: prefill, bootstrap: "http://h:8999/"}
      - {id: q, url: "http://h:2", role: prefill}
      - {id: d, url: "http://h:3", role: decode}
    """.replace("\n    ", "\n")
    entries = parse_fleet_document(text, rules).entries
    assert [entry.bootstrap for entry in entries] == ["http://h:8999", None, None]
    assert [entry.make_instance().bootstrap for entry in entries] == ["http://h:8999", None, None]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('{id: p, url: "http://h:1", role: decode, bootstrap: "http://h:2"}', "is only for prefill engines"),
        (
            '{id: p, url: "http://h:1", role: prefill, connector: nixl, bootstrap: "http://h:2"}',
            "nixl has no bootstrap server",
        ),
        ('{id: p, url: "http://h:1", role: prefill, bootstrap: "h:2"}', "must be http://host:port"),
    ],
)
def test_a_bootstrap_server_that_nobody_would_ask_is_refused(entry: str, said: str) -> None:
    rules = replace(default_spec_rules(), connector="mooncake")
    with pytest.raises(ConfigError, match=said) as caught:
        parse_fleet_document(f"instances: [{entry}]", rules)
    assert caught.value.problems[0].startswith("line 1: instances[0].bootstrap: ")


def test_flags_say_it_by_the_engines_name() -> None:
    engines = (
        "--connector",
        "mooncake",
        "--prefill",
        "http://p:1",
        "--prefill",
        "q=http://p:2",
        "--decode",
        "http://d:1",
    )
    one = asked(*engines, "--bootstrap", "q=http://p:8999")
    assert {entry.id: entry.bootstrap for entry in one.entries} == {
        "prefill-0": None,
        "q": "http://p:8999",
        "decode-0": None,
    }
    assert "there is no --prefill engine with the name 'x'" in problems(*engines, "--bootstrap", "x=http://p:8999")
    assert "--bootstrap: must be NAME=http://host:port" in problems(*engines, "--bootstrap", "http://p:8999")
    assert "nixl has no bootstrap server" in problems("--prefill", "q=http://p:2", "--bootstrap", "q=http://p:8999")


def test_rules_that_know_no_dialects_know_no_bootstrap_servers() -> None:
    assert SpecRules(frozenset(("mooncake",))).bootstrap_connectors == frozenset()
    assert default_spec_rules().bootstrap_connectors == {"mooncake", "sglang"}
