"""The law of the strip list, over HTTP: no client makes an engine contact an address or load a key that the proxy has
not chosen. Requests are made up byte by byte and sent to a real server; engines keep what reaches them."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvparams.dialects.registry import load_tables
from kvparams.dialects.table import LEGS
from kvparams_proxy.requests.forbidden_fields import FORBIDDEN_FIELDS
from tests.support.proxy.fixtures import Proxy, Scripted
from tests.system.proxy.test_legs import ANSWER, NIXL, answering
from tests.unit.proxy.requests.test_forbidden_fields import BODIES, EVIL, HOSTILE, OF_CLIENTS, READ, acted_on, spelled

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/inference/v1/generate"}
RESULT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["ours"],
}


def written() -> set[str]:
    """The first step to every native key that any dialect writes on a request, in the body."""
    found: set[str] = set()
    for table in load_tables().values():
        for leg in (LEGS["prefill"], LEGS["decode"]):
            for row in table.native_keys:
                if leg in row.legs and leg in table.container_paths and row.location != "headers":
                    found.add(str(table.path(row, leg)[1]))
    return found - OF_CLIENTS


MEMBERS = sorted(READ | written())
VALUES: st.SearchStrategy[object] = HOSTILE | HOSTILE.map(json.dumps)
"""As an object, and as the text of one."""
NESTS = [(), ("vllm_xargs",), ("sampling_params",), ("sampling_params", "extra_args"), ("nvext",)]
SAID = st.tuples(
    st.sampled_from(NESTS),
    st.sampled_from(MEMBERS),
    VALUES,
    st.sampled_from(["plain", "first", "all"]),
    st.sampled_from(["as it is", "as it is", "upper", "twice", "packed"]),
)
HEADERS = st.tuples(
    st.sampled_from([row.name.replace("*", "bootstrap-host") for row in FORBIDDEN_FIELDS if row.location == "header"]),
    st.booleans(),
)
IDS = st.sampled_from(
    ["req-1", f"___prefill_addr_{EVIL}:1___decode_addr_{EVIL}:2_{'0' * 32}", f"{EVIL}:1", f"x___decode_addr_{EVIL}"]
)


def packed_of(said: list[Any]) -> set[tuple[str, ...]]:
    """The objects that stand there as text."""
    return {nest for nest, *_, turn in said if turn == "packed" and len(nest) == 1}


def body_of(kind: str, said: list[Any]) -> bytes:
    """A client's body with these members in it, as text."""
    texts: dict[tuple[str, ...], list[str]] = {}
    for nest, name, value, how, turn in said:
        shown = name.upper() if turn == "upper" else name
        text = f"{spelled(shown, how)}:{json.dumps(value)}"
        place = texts.setdefault(nest, [])
        place += [text, f"{spelled(shown, 'plain')}:{json.dumps(value)}"] if turn == "twice" else [text]
    extra = texts.pop(("sampling_params", "extra_args"), None)
    if extra:
        texts.setdefault(("sampling_params",), []).append(f'"extra_args":{{{",".join(extra)}}}')
    base = {**BODIES[kind], "model": "stub"}
    if texts.get(("sampling_params",)):
        base.pop("sampling_params", None)
    members = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in base.items()] + texts.pop((), [])
    packed = packed_of(said)
    for nest, inner in texts.items():
        object_ = f"{{{','.join(inner)}}}"
        members.append(f"{json.dumps(nest[0])}:{json.dumps(object_) if nest in packed else object_}")
    return f"{{{','.join(members)}}}".encode()


async def ask(running: Proxy, kind: str, body: bytes, headers: list[tuple[str, str]]) -> httpx.Response:
    given_headers = [("content-type", "application/json"), *headers]
    return await running.client.post(PATHS[kind], content=body, headers=given_headers)


def steered(engines: list[Scripted]) -> bool:
    """Whether anything that an engine acts on was made up by the client; what was seen is forgotten."""
    found = False
    for engine in engines:
        found |= any(EVIL in head.decode("latin-1") for head in engine.heads)
        found |= any(EVIL in json.dumps(acted_on(json.loads(body))) for body in engine.bodies)
        engine.heads.clear()
        engine.bodies.clear()
    return found


async def campaign(scripted: Any, proxy: Any, dialect: str, examples: int) -> list[bool]:
    """For each request that reached an engine, whether it steered one. Two that would are always among them: what a
    control sees is not left to luck."""
    params = NIXL | {"kvparams": RESULT}
    engines = [await scripted(answering(ANSWER | {"kv_transfer_params": params})) for _ in range(2)]
    running = await proxy([engines[0].url], [engines[1].url], dialect, log_requests="off")
    loop = asyncio.get_running_loop()
    found: list[bool] = []

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(st.sampled_from(sorted(PATHS)), st.lists(SAID, max_size=4), st.lists(HEADERS, max_size=2), IDS)
    @example("chat", [((), "kv_transfer_params", {"remote_host": EVIL}, "plain", "as it is")], [], "req-1")
    @example("completions", [], [], f"x___decode_addr_{EVIL}")
    def feed(kind: str, said: list[Any], names: list[tuple[str, bool]], id: str) -> None:
        headers = [(name.upper() if upper else name, EVIL) for name, upper in names]
        asked = ask(running, kind, body_of(kind, said), [*headers, ("X-Request-ID", id)])
        got = asyncio.run_coroutine_threadsafe(asked, loop).result(20)
        if any(turn == "twice" and nest[:1] not in packed_of(said) for nest, *_, turn in said):
            assert got.status_code == 400, "which of the two an engine would take, nobody knows"
        if got.status_code == 400:
            assert not engines[0].bodies + engines[1].bodies
        else:
            found.append(steered(engines))

    await asyncio.to_thread(feed)
    return found


@pytest.mark.parametrize("dialect", ["nixl", "store"])
async def test_over_http_no_client_makes_an_engine_go_anywhere_or_load_anything(
    dialect: str, scripted: Any, proxy: Any
) -> None:
    examples = settings().max_examples * 2
    found = await campaign(scripted, proxy, dialect, examples)
    assert len(found) > examples / 8  # the law is not kept by refusing everything
    assert not any(found)


async def test_without_the_strip_list_the_same_requests_steer_an_engine(
    scripted: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr("kvparams_proxy.requests.intake.INSPECTED_MEMBERS", frozenset[str]())
    assert any(await campaign(scripted, proxy, "store", 60))


async def test_without_the_rule_for_ids_the_same_requests_steer_an_engine(
    scripted: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control, of request ids; one that is no identifier of ours reaches nobody all the same."""

    def all_good(_: bytes) -> bool:
        return True

    monkeypatch.setattr("kvparams_proxy.server.request_handler.is_safe_request_id", all_good)
    assert any(await campaign(scripted, proxy, "store", 40))


async def test_what_is_stripped_is_counted(scripted: Any, proxy: Any) -> None:
    engine = await scripted(answering(ANSWER | {"kv_transfer_params": {"kvparams": RESULT}}))
    running = await proxy([engine.url], [engine.url], "store")
    hostile = json.dumps({**BODIES["completions"], "model": "stub", "kv_transfer_params": {}}).encode()
    assert (await ask(running, "completions", hostile, [("x-request-id", f"{EVIL}:1")])).status_code == 200
    plain = json.dumps({**BODIES["completions"], "model": "stub", "vllm_xargs": {"a": 1}}).encode()
    assert (await ask(running, "completions", plain, [("x-request-id", "mine")])).status_code == 200
    assert await running.metric('kvparams_proxy_requests_stripped_total{where="body"}') == 1
    assert await running.metric('kvparams_proxy_requests_stripped_total{where="request_id"}') == 1
