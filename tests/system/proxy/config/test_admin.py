"""Tests the admin API on a running proxy: who may use it, what it changes, and that requests follow the change."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvparams.instances import Role
from kvparams_proxy.config.fleet_file import FleetFileProvider
from kvparams_proxy.config.settings import default_spec_rules
from kvparams_proxy.secret import Secret
from tests.support.processor import is_within
from tests.support.proxy.admin_schema import check_answer
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

TOKEN = "admin-token-of-this-test"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
GOOD: dict[str, Any] = {"model": "stub", "prompt": "x", "max_tokens": 2}
ELSEWHERE = "http://127.0.0.1:9"
"""Nobody is there."""


def urls(stub: StubEngines, role: Role) -> list[str]:
    return [engine.url for engine in stub.engines if engine.role == role]


class Admin:
    """Who has the token."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, method: str, path: str, body: object = None, expect: int = 200) -> Any:
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        got = await self._client.request(method, f"/admin{path}", headers=HEADERS, content=content)
        assert got.status_code == expect, got.text
        assert got.headers["cache-control"] == "no-store"
        assert TOKEN not in got.text
        check_answer(method, f"/admin{path}", got)
        return got.json()

    async def refused(self, method: str, path: str, body: object = None, expect: int = 400) -> str:
        error = (await self.ask(method, path, body, expect))["error"]
        assert error["type"] in ("invalid_request_error", "conflict_error", "not_found_error")
        return error["message"]

    async def ready(self, id: str) -> None:
        async def is_ready() -> bool:
            return (await self.ask("GET", f"/instances/{id}"))["state"] == "ready"

        await until(is_ready)

    async def sources(self) -> dict[str, Any]:
        return {source["name"]: source for source in (await self.ask("GET", ""))["sources"]}

    async def ids(self) -> set[str]:
        return {one["id"] for one in (await self.ask("GET", "/instances"))["data"]}


StartAdmin = Callable[..., Awaitable[tuple[Any, Admin]]]


@pytest.fixture
def start(stub: StubEngines, proxy: Any) -> StartAdmin:
    """Start a proxy with one prefill and one decode engine, and an admin API."""

    async def start(**changes: object) -> tuple[Any, Admin]:
        running = await proxy(
            urls(stub, Role.PREFILL)[:1], urls(stub, Role.DECODE)[:1], admin_token=Secret(TOKEN), **changes
        )
        return running, Admin(running.client)

    return start


async def served_by(running: Any, requests: int = 6) -> set[str]:
    """The decode engines that run some requests."""
    found: set[str] = set()
    for _ in range(requests):
        got = await running.client.post("/v1/completions", json=GOOD)
        assert got.status_code == 200, got.text
        found.add(got.headers["x-kvparams-decode"])
    return found


@pytest.mark.parametrize(
    ("header", "path"),
    [
        (None, "/admin"),
        ("", "/admin/instances"),
        ("Bearer", "/admin/instances"),
        ("Bearer wrong", "/admin/instances"),
        (f"Bearer {TOKEN}x", "/admin/instances"),
        (f"Bearer {TOKEN[:-1]}", "/admin/instances"),
        (f"Basic {TOKEN}", "/admin/instances"),
        (TOKEN, "/admin/instances/prefill-0"),
        ("Bearer \xff", "/admin/instances"),
    ],
)
async def test_without_the_token_nothing_is_said_or_done(start: StartAdmin, header: str | None, path: str) -> None:
    running, admin = await start()
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method, target in (("GET", path), ("POST", "/admin/instances"), ("DELETE", "/admin/instances/decode-0")):
        got = await running.client.request(method, target, headers=headers, content=b"{")
        assert got.status_code == 401
        assert got.headers["www-authenticate"].startswith("Bearer")
        assert got.json()["error"]["code"] == "invalid_admin_token"
        assert "decode" not in got.text
    assert await admin.ids() == {"prefill-0", "decode-0"}


async def test_without_a_token_set_there_is_no_admin_api(stubbed: Any) -> None:
    for path in ("/admin", "/admin/instances", "/admin/instances/prefill-0"):
        assert (await stubbed.client.get(path, headers=HEADERS)).status_code == 404


async def test_an_instance_is_added_drained_and_removed_while_requests_run(
    stub: StubEngines, start: StartAdmin
) -> None:
    running, admin = await start()
    assert await served_by(running) == {"decode-0"}
    added = await admin.ask(
        "POST",
        "/instances",
        {"id": "extra", "url": urls(stub, Role.DECODE)[1], "role": "decode", "labels": {"rack": "b"}},
        expect=201,
    )
    assert (added["source"], added["labels"], added["connector"]) == ("admin", {"rack": "b"}, "nixl")
    await admin.ready("extra")

    async def both_serve() -> bool:
        return await served_by(running) == {"decode-0", "extra"}

    await until(both_serve, 20.0)  # the new one is given little at first
    assert (await admin.ask("POST", "/instances/extra/drain"))["state"] == "draining"
    assert await served_by(running) == {"decode-0"}
    assert (await admin.ask("POST", "/instances/extra/undrain"))["draining"] is False
    assert (await admin.ask("POST", "/instances/decode-0/drain"))["state"] == "draining"
    assert await served_by(running) == {"extra"}
    assert (await admin.ask("PATCH", "/instances/decode-0", {"drain": False}))["draining"] is False
    assert await admin.ask("DELETE", "/instances/extra") == {"object": "instance", "id": "extra", "deleted": True}
    assert await admin.ids() == {"prefill-0", "decode-0"}
    assert await served_by(running) == {"decode-0"}


async def test_a_change_makes_another_incarnation_of_it(stub: StubEngines, start: StartAdmin) -> None:
    running, admin = await start()
    first, second = urls(stub, Role.DECODE)
    one = await admin.ask("POST", "/instances", {"id": "x", "url": ELSEWHERE, "role": "decode"}, expect=201)
    assert one["state"] == "not_ready"
    two = await admin.ask("PATCH", "/instances/x", {"url": second, "labels": {"a": "b"}})
    assert (two["url"], two["labels"], two["role"]) == (second, {"a": "b"}, "decode")
    assert two["incarnation"] != one["incarnation"]
    await admin.ready("x")
    same = await admin.ask("PATCH", "/instances/x", {"url": second})
    assert same["incarnation"] == two["incarnation"], "nothing has changed"
    assert same["in_flight"] == 0
    assert await admin.ask("PATCH", "/instances/x", {}) == same
    told = {"id": "p", "url": ELSEWHERE, "role": "prefill", "kv_events": "tcp://h:1", "store": "west"}
    assert (await admin.ask("POST", "/instances", told, expect=201))["kv_events"] == "tcp://h:1"
    kept = await admin.ask("PATCH", "/instances/p", {"kv_events_replay": "tcp://h:2"})
    assert [kept[name] for name in ("kv_events", "kv_events_replay", "store")] == ["tcp://h:1", "tcp://h:2", "west"]
    assert first not in json.dumps(same)
    assert (await running.client.post("/v1/completions", json=GOOD)).status_code == 200


async def test_what_is_wrong_with_an_instance_is_said_at_once(start: StartAdmin) -> None:
    _, admin = await start()
    good = {"id": "x", "url": ELSEWHERE, "role": "decode"}
    message = await admin.refused("POST", "/instances", {"url": "nowhere", "role": "both", "connector": "x", "a": 1})
    for said in ("id: is missing", "url: must be http", "role: must be", "connector: must be", "a: is not known"):
        assert said in message
    for member, value in (("key_file", "/etc/passwd"), ("tls", {"ca": "/etc/passwd"})):
        message = await admin.refused("POST", "/instances", good | {member: value})
        assert f"{member}: is not accepted by the admin API" in message
    for body in (b"", b"[]", b"{", b'{"id":"a","id":"b"}', b'{"id":NaN}', b"[" * 50_000):
        await admin.refused("POST", "/instances", body)
    assert "65536 bytes" in await admin.refused("POST", "/instances", b" " * 70_000, expect=413)
    await admin.ask("POST", "/instances", good, expect=201)
    assert "from admin exists already" in await admin.refused("POST", "/instances", good, expect=409)
    assert "id: cannot be changed" in await admin.refused("PATCH", "/instances/x", {"id": "y"})
    assert "drain: must be" in await admin.refused("PATCH", "/instances/x", {"drain": "yes"})
    assert "role: must be" in await admin.refused("PATCH", "/instances/x", {"role": None, "url": ELSEWHERE})
    assert await admin.ids() == {"prefill-0", "decode-0", "x"}


async def longest_turn_s(while_it_runs: Awaitable[object]) -> float:
    """The longest time of this thread between two turns of the event loop, in seconds."""
    task, longest_s = asyncio.ensure_future(while_it_runs), 0.0
    while not task.done():
        began = time.thread_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.thread_time() - began)
    await task
    return longest_s


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"":{}},', b'"",', b"1e1,", b'{"a":1},', b'"\\"",'])
@pytest.mark.parametrize(("method", "path"), [("POST", "/instances"), ("PATCH", "/instances/x"), ("PUT", "/modes")])
async def test_no_body_keeps_the_event_loop_busy(start: StartAdmin, method: str, path: str, unit: bytes) -> None:
    """Up to three times: a processor that is shared may be slow once."""
    _, admin = await start()
    await admin.ask("POST", "/instances", {"id": "x", "url": ELSEWHERE, "role": "decode"}, expect=201)
    body, costs = b'{"x":[' + unit * (65_000 // len(unit)) + b"1]}", list[float]()
    for _ in range(3):
        costs.append(await longest_turn_s(admin.refused(method, path, body)))
        if costs[-1] < 0.02:
            break
    assert is_within(min(costs), 0.02), costs


async def test_nobody_is_found_under_a_wrong_id(start: StartAdmin) -> None:
    running, admin = await start()
    for method, path in (
        *(("GET", "/instances/nobody"), ("DELETE", "/instances/nobody"), ("PATCH", "/instances/nobody")),
        *(("POST", "/instances/nobody/drain"), ("GET", "/instances/%00%ff")),
    ):
        assert "there is no instance" in await admin.refused(method, path, {}, expect=404)
    for method, path in (("PUT", "/admin/instances"), ("GET", "/admin/instances/prefill-0/drain"), ("GET", "/admin/x")):
        assert (await running.client.request(method, path, headers=HEADERS)).status_code in (404, 405)


async def test_what_others_have_named_is_theirs(start: StartAdmin) -> None:
    _, admin = await start()
    mine = {"id": "prefill-0", "url": ELSEWHERE, "role": "prefill"}
    assert "from flags exists already" in await admin.refused("POST", "/instances", mine, expect=409)
    assert "belongs to flags" in await admin.refused("DELETE", "/instances/prefill-0", expect=409)
    assert "belongs to flags" in await admin.refused("PATCH", "/instances/prefill-0", {"url": ELSEWHERE}, expect=409)
    assert (await admin.ask("GET", "/instances/prefill-0"))["url"] != ELSEWHERE


async def test_the_file_is_followed_and_its_troubles_are_shown(
    stub: StubEngines, start: StartAdmin, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    (tmp_path / "key").write_text("sk-engine-secret")
    text = "defaults: {key_file: key}\ninstances:\n- {id: filed, url: '%s', role: decode}\n"
    path.write_text(text % ELSEWHERE)
    provider = FleetFileProvider(path, default_spec_rules(), every_s=0.02)
    _, admin = await start(providers=(provider,))
    filed = await admin.ask("GET", "/instances/filed")
    assert (filed["source"], filed["has_key"], filed["state"]) == ("file", True, "not_ready")
    path.write_text(text % urls(stub, Role.DECODE)[1])
    await admin.ready("filed")
    path.write_text("instances: [")

    async def is_refused() -> bool:
        return bool((await admin.sources())["file"]["problems"])

    await until(is_refused)
    sources = await admin.sources()
    assert "not valid YAML" in sources["file"]["problems"][0]
    assert (sources["file"]["applied"], sources["file"]["refused"]) == (2, 1)
    assert "filed" in await admin.ids()
    added = {"id": "added", "url": urls(stub, Role.DECODE)[1], "role": "decode"}
    shown = await admin.ask("POST", "/instances", added, expect=201)
    assert shown["has_key"], "what the file says of all instances holds for this one too"
    everything = json.dumps([await admin.ask("GET", ""), await admin.ask("GET", "/instances"), shown])
    assert "sk-" not in everything


async def test_a_stream_outlives_the_removal_of_its_engine(start: StartAdmin, scripted: Any) -> None:
    """Whoever is removed ends what it has begun, and is not asked again."""
    go_on = asyncio.Event()

    async def slow(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        event = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await go_on.wait()
        done = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(event), event, len(done), done))

    running, admin = await start()
    engine = await scripted(slow)
    await admin.ask("POST", "/instances", {"id": "slow", "url": engine.url, "role": "decode"}, expect=201)
    await admin.ready("slow")
    await admin.ask("POST", "/instances/decode-0/drain")
    async with running.client.stream("POST", "/v1/completions", json=GOOD | {"stream": True}) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_text()
        assert "choices" in await anext(pieces)
        assert (await admin.ask("GET", "/instances/slow"))["in_flight"] == 1
        await admin.ask("POST", "/instances/decode-0/undrain")
        await admin.ask("DELETE", "/instances/slow")
        assert await served_by(running) == {"decode-0"}
        go_on.set()
        rest = "".join([piece async for piece in pieces])
    assert rest.endswith("data: [DONE]\n\n")
    assert len(engine.bodies) == 1


async def test_an_entry_with_ranks_adds_an_instance_for_each(start: StartAdmin) -> None:
    _, admin = await start()
    entry = {"id": "p9", "url": ELSEWHERE, "role": "prefill", "ranks": "4-6"}
    added = await admin.ask("POST", "/instances", entry, expect=201)
    assert (added["id"], added["rank"], added["url"]) == ("p9-dp4", 4, ELSEWHERE)
    assert await admin.ids() == {"prefill-0", "decode-0", "p9-dp4", "p9-dp5", "p9-dp6"}
    changed = await admin.ask("PATCH", "/instances/p9-dp5", {"id": "p9-dp5", "labels": {"a": "b"}, "drain": True})
    assert (changed["rank"], changed["labels"], changed["draining"]) == (5, {"a": "b"}, True)
    other = await admin.ask("GET", "/instances/p9-dp6")
    assert (other["rank"], other["labels"], other["draining"]) == (6, {}, False)
    assert "ranks: cannot be changed" in await admin.refused("PATCH", "/instances/p9-dp5", {"ranks": 2})
    await admin.refused("POST", "/instances", {"id": "p9-dp6", "url": ELSEWHERE, "role": "decode"}, 409)
    await admin.ask("DELETE", "/instances/p9-dp4")
    await admin.refused("POST", "/instances", entry, 409)  # two of the three are there
    assert await admin.ids() == {"prefill-0", "decode-0", "p9-dp5", "p9-dp6"}
    assert (await admin.ask("GET", "/instances/prefill-0"))["rank"] is None  # the control


async def test_the_id_of_an_entry_with_ranks_stands_for_all_of_them(start: StartAdmin) -> None:
    _, admin = await start()
    ids = ["p9-dp0", "p9-dp1", "p9-dp2"]
    await admin.ask("POST", "/instances", {"id": "p9", "url": ELSEWHERE, "role": "prefill", "ranks": 3}, expect=201)
    await admin.ask("POST", "/instances", {"id": "p9-dp3", "url": ELSEWHERE, "role": "decode"}, expect=201)

    async def drained() -> list[str]:
        return [each["id"] for each in (await admin.ask("GET", "/instances"))["data"] if each["draining"]]

    answer = await admin.ask("POST", "/instances/p9/drain")
    assert (answer["id"], answer["draining"]) == ("p9-dp0", True)
    assert await drained() == ids
    await admin.ask("POST", "/instances/p9-dp1/undrain")
    assert await drained() == ["p9-dp0", "p9-dp2"]
    await admin.ask("POST", "/instances/p9/undrain")
    assert await drained() == []
    await admin.refused("GET", "/instances/p9", expect=404)
    assert (await admin.ask("DELETE", "/instances/p9"))["id"] == "p9"
    assert await admin.ids() == {"prefill-0", "decode-0", "p9-dp3"}  # it only has such a name
    await admin.refused("DELETE", "/instances/p9", expect=404)
