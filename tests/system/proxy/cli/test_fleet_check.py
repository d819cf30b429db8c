"""Tests that `kvparams proxy --check` finds each fault of a fleet and describes it."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Processes, Server, free_port, proxy_command
from kvparams.cli import main
from kvparams.instances import Role
from kvparams_proxy.checks.engine_check import CheckFinding, fetch
from kvparams_proxy.checks.fleet_check import check_fleet
from kvparams_proxy.config.settings import known_dialects
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.system.proxy.config.test_bootstraps import Bootstrap

NIXL = {"remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "127.0.0.1", "remote_port": 1}
SERVES = {"data": [{"id": "tiny", "max_model_len": 100}]}
Answer = dict[str, Any] | int
"""An object, or a status that stands for a failure."""


class Engine:
    """It serves what it is told to, and counts prompt tokens from outside as it is told to."""

    def __init__(self, role: Role, params: Answer | None = None, *, loads: int | None = 0) -> None:
        self.role = role
        self.params = params
        """What it answers a leg with."""
        self.loads = loads
        """Prompt tokens that each leg counts as external; None: it has no metrics."""
        self.models: Answer = SERVES
        self.external = 1000
        self.legs: list[dict[str, Any]] = []
        self.meets: asyncio.Barrier | None = None
        """Where it is set, legs wait there before they are answered."""
        self.url = ""

    async def begin(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models"):
                    self._say(writer, self.models)
                elif head.startswith(b"GET"):
                    self._metrics(writer)
                else:
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    self.legs.append(json.loads(await reader.readexactly(length)))
                    self.external += self.loads or 0
                    if self.meets is not None:
                        await self.meets.wait()
                    answer = self.params
                    whole: Answer = answer if isinstance(answer, int) else {"kv_transfer_params": answer}
                    self._say(writer, whole)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _metrics(self, writer: asyncio.StreamWriter) -> None:
        if self.loads is None:
            self._say(writer, 404)
            return
        line = 'vllm:prompt_tokens_by_source_total{engine="0",source="%s"} %d\n'
        text = (line % ("local_compute", 5) + line % ("external_kv_transfer", self.external)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))

    def _say(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        body = b'{"error": "no"}' if isinstance(answer, int) else json.dumps(answer).encode()
        status = b"%d X" % answer if isinstance(answer, int) else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


Look = Callable[..., Awaitable[list[CheckFinding]]]


@pytest.fixture
def look(stack: AsyncExitStack) -> Look:
    """Check these engines; what was found."""

    async def check(connector: str, *engines: Engine, bootstrap: str | None = None) -> list[CheckFinding]:
        entries: list[InstanceSpec] = []
        for number, engine in enumerate(engines):
            server = await engine.begin()
            stack.callback(server.close)
            place = bootstrap if engine.role is Role.PREFILL else None
            entries.append(
                InstanceSpec(f"{engine.role[0]}{number}", engine.url, engine.role, connector, bootstrap=place)
            )
        return [one async for one in check_fleet(entries, known_dialects(), UpstreamLimits())]

    return check


def grades(found: list[CheckFinding]) -> list[str]:
    return [one.grade for one in found]


async def test_engines_that_hand_kv_over_are_found_good(look: Look) -> None:
    prefill, decode = Engine(Role.PREFILL, NIXL), Engine(Role.DECODE, loads=49)
    found = await look("nixl", prefill, decode)
    assert grades(found) == ["ok", "ok", "ok"]
    assert found[0].message == "(prefill, nixl) answers and serves tiny"
    assert found[2] == CheckFinding("ok", "p0 -> d1", "d1 loaded 49 of 50 prompt tokens")
    (asked,), (told,) = prefill.legs, decode.legs
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert told["kv_transfer_params"].items() >= NIXL.items()
    assert (asked["prompt"], asked["model"], len(asked["prompt"])) == (told["prompt"], "tiny", 50)


async def test_every_engine_is_tried(look: Look) -> None:
    prefill = Engine(Role.PREFILL, NIXL)
    decode = [Engine(Role.DECODE, loads=1) for _ in range(3)]
    found = await look("nixl", prefill, *decode)
    assert [one.who for one in found[4:]] == ["p0 -> d1", "p0 -> d2", "p0 -> d3"]
    assert len({json.dumps(leg["prompt"]) for leg in prefill.legs}) == 3, "no engine's own cache may help"


@pytest.mark.parametrize(
    ("connector", "prefill", "decode", "said"),
    [
        ("nixl", {}, {"loads": 9}, "is it started with a NixlConnector"),
        ("store", {}, {"loads": 9}, "does its connector speak kvparams"),
        ("store", {"kvparams": {"version": "9.0"}}, {"loads": 9}, "answer breaks the protocol"),
        ("content", {}, {"loads": 0}, "computed the whole prompt itself: it did not get the KV of p0"),
        ("content", 500, {"loads": 9}, 'the prefill leg failed on p0: 500 {"error": "no"}'),
        ("content", {}, {"params": 500}, "the decode leg failed on d1: 500"),
    ],
)
async def test_what_is_wrong_is_said_in_words(
    look: Look, monkeypatch: pytest.MonkeyPatch, connector: str, prefill: Answer, decode: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("kvparams_proxy.checks.pair_check._TELLS_S", 0.2)
    found = await look(connector, Engine(Role.PREFILL, prefill), Engine(Role.DECODE, **decode))
    assert grades(found) == ["ok", "ok", "error"]
    assert said in found[2].message


async def test_an_engine_that_does_not_tell_is_said_to_be_one(look: Look) -> None:
    prefill, decode = Engine(Role.PREFILL), Engine(Role.DECODE, loads=None)
    prefill.models = 404
    found = await look("content", prefill, decode)
    assert grades(found) == ["warning", "ok", "warning"]
    assert "does not name its models" in found[0].message
    assert "does not report whether it loaded the prompt's KV" in found[2].message


async def test_engines_that_are_not_there_or_refuse_are_not_tried(look: Look) -> None:
    prefill, decode = Engine(Role.PREFILL, NIXL), Engine(Role.DECODE, loads=9)
    decode.models = 401
    found = await look("nixl", prefill, decode)
    assert grades(found) == ["ok", "error"]
    assert "refuses the proxy's API key (401)" in found[1].message
    assert prefill.legs == []


async def test_an_engine_with_which_no_version_is_common_is_not_tried(look: Look) -> None:
    """The control is its decode engine, which speaks a later minor version."""
    prefill, decode = Engine(Role.PREFILL, NIXL), Engine(Role.DECODE)
    prefill.models = {**SERVES, "kvparams_versions": ["2.0"]}
    decode.models = {**SERVES, "kvparams_versions": ["1.3"]}
    wrong, right = await look("nixl", prefill, decode)
    assert (wrong.grade, wrong.who, right.grade) == ("error", "p0", "ok")
    assert wrong.message.endswith("is spoken by both: here 1.0, there 2.0")
    assert prefill.legs == decode.legs == []


async def test_a_prefill_engine_without_a_decode_engine_is_an_error(look: Look) -> None:
    found = await look("nixl", Engine(Role.PREFILL, NIXL))
    assert "no decode engine has the connector nixl" in found[1].message


async def test_bootstrap_servers_are_asked(look: Look, stack: AsyncExitStack) -> None:
    server = Bootstrap()
    await server.begin()
    stack.callback(server.end)
    decode = Engine(Role.DECODE, loads=9)
    found = await look("mooncake", Engine(Role.PREFILL), decode, bootstrap=server.url)
    assert grades(found) == ["ok"] * 4
    assert decode.legs[0]["kv_transfer_params"]["remote_engine_id"] == "first"
    server.answer = b"{}"
    found = await look("mooncake", Engine(Role.PREFILL), Engine(Role.DECODE), bootstrap=server.url)
    assert grades(found) == ["ok", "error", "ok"]
    assert "set --bootstrap" in found[1].message


async def test_engines_that_wait_for_one_another_are_tried_together(look: Look, stack: AsyncExitStack) -> None:
    """And where one refuses, the other, which waits for it, is not waited for."""
    server = Bootstrap()
    server.answer = b'{"dp_size": 1}'
    await server.begin()
    stack.callback(server.end)
    prefill, decode = Engine(Role.PREFILL), Engine(Role.DECODE, loads=49)
    prefill.meets = decode.meets = asyncio.Barrier(2)
    async with asyncio.timeout(10):
        found = await look("sglang", prefill, decode, bootstrap=server.url)
    assert grades(found) == ["ok"] * 4
    assert prefill.legs[0]["bootstrap_room"] == decode.legs[0]["bootstrap_room"]
    alone = Engine(Role.PREFILL)
    alone.meets = asyncio.Barrier(2)
    async with asyncio.timeout(10):
        found = await look("sglang", alone, Engine(Role.DECODE, 500), bootstrap=server.url)
    assert grades(found)[-1] == "error"
    assert "500" in found[-1].message


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert main(["proxy", "--prefill", nowhere, "--decode", nowhere, "--check"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("ERROR   ") == 2
    assert shown.out.count("does not answer at") == 2
    assert "2 checks failed" in shown.err


def check(prefill: Server, decode: Server) -> "subprocess.CompletedProcess[str]":
    command = [*proxy_command([prefill], [decode], "store"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_engines_that_share_a_store_are_found_good_and_others_are_not(tmp_path: Path) -> None:
    one, other = (f"file://{tmp_path}/{name}?size=16MiB" for name in ("one", "other"))
    with Processes(tmp_path) as processes:
        prefill = processes.engine("p0", "prefill", one)
        good, bad = processes.engine("d0", "decode", one), processes.engine("d1", "decode", other)
        processes.wait_ready(prefill, good, bad)
        found = check(prefill, good)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "of 520 prompt tokens" in found.stdout
        found = check(prefill, bad)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "d1 computed the whole prompt itself: it did not get the KV of p0" in found.stdout
    assert "1 check failed" in found.stderr


async def test_a_leg_that_nobody_waits_for_any_more_is_ended() -> None:
    """The other one of a pair has failed: its engine sees the client leave, and what it says then harms nobody."""
    begun, left = asyncio.Event(), asyncio.Event()
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        if not await reader.read(1):
            left.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = UpstreamConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", UpstreamLimits())
    leg = asyncio.create_task(fetch(pool, pool.get(b"/v1/models")))
    async with asyncio.timeout(10):
        await begun.wait()
        leg.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leg
        await left.wait()
    pool.close()
    server.close()
    await server.wait_closed()
    assert not wrong
