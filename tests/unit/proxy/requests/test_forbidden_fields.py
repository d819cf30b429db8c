"""Tests that a client's members that steer an engine's KV never reach an engine.

The table is tested row by row. A law covers generated bodies and headers: legs are prepared as the proxy prepares them,
and the members that an engine would act on are compared with the proxy's own.
"""

import json
import re
from dataclasses import replace
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams.dialects.interface import Dialect
from kvparams.dialects.mooncake import MOONCAKE
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.registry import load_tables
from kvparams.dialects.store import STORE
from kvparams.dialects.table import LEGS
from kvparams.jsontext.document import JSONLimits
from kvparams.routing.managers.aggregated import Aggregated
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import LegResult
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.leg_requests import build_leg_request
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.requests.endpoints import ENDPOINTS, APIEndpoint
from kvparams_proxy.requests.forbidden_fields import (
    FORBIDDEN_FIELDS,
    FORBIDDEN_MEMBERS,
    FORWARDED_HEADERS,
    NESTED_CARRIERS,
    ForbiddenField,
    is_safe_request_id,
)
from kvparams_proxy.requests.one_token_changes import one_token_changes
from kvparams_proxy.requests.response_ids import ResponseIds
from kvparams_proxy.server.request_handler import RequestHandler
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.upstream.types import join_body
from tests.support.kvparams.planning import Table
from tests.support.proxy.steps import read_all

COMPLETIONS = ENDPOINTS[0]
ONE_OF_EACH = list({each.kind: each for each in ENDPOINTS}.values())
EVIL = "evil-7f3c.example"
"""Stands in everything that must not come through, and in nothing else."""
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"model": "m", "prompt": "Who", "max_tokens": 9},
    "chat": {"model": "m", "messages": [{"role": "user", "content": "Who"}]},
    "generate": {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 9}},
    "messages": {"model": "m", "messages": [{"role": "user", "content": "Who"}], "max_tokens": 9},
    "responses": {"model": "m", "input": "Who"},
    "other": {"model": "m", "input": "Who"},
}
BENIGN = {
    "temperature": 0.5,
    "user": "me",
    "kv": 1,
    "cache": {"kv_transfer_params": "a client's own word"},
    "ünïcode": None,
}
HANDOFF = {
    "remote_engine_id": "e",
    "remote_request_id": "q",
    "remote_block_ids": [[1]],
    "remote_host": "h",
    "remote_port": 5,
}
RESULT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["ours"],
}
IDS = ResponseIds(b"secret")
PLACE = {"remote_engine_id": "e", "remote_bootstrap_addr": "http://h:1"}


def admitted(headers: list[tuple[bytes, bytes]]) -> Any:
    """What the proxy takes of a request's headers."""
    limits = SimpleNamespace(body=JSONLimits())
    resources = SimpleNamespace(settings=limits, new_id=lambda: "minted-1", metrics=Metrics())
    return RequestHandler(cast("Any", resources), cast("Any", None), None, COMPLETIONS, BodyBudget(1)).admit(headers)


def legs(endpoint: APIEndpoint, body: bytes, dialect: Dialect, request_id: str = "req") -> list[bytes]:
    """The bodies of all legs of a request."""
    inbound = read_all(endpoint.kind, body, request_id, "tra", JSONLimits())
    cut = one_token_changes(endpoint.kind, inbound.body, inbound.member_spans)
    if endpoint.role is not None:
        return [join_body(build_leg_request(endpoint, inbound, leg, None, IDS)[1]) for leg in _alone(endpoint, inbound)]
    table = Table(dialect, one_token=cut)
    table.found = PLACE
    made = PrefillThenDecode().legs(inbound.facts, table)
    sent = table.run(made, lambda leg: LegResult({} if leg.answers_client else HANDOFF | {"kvparams": RESULT}))
    return [join_body(build_leg_request(endpoint, inbound, leg, None, IDS)[1]) for leg in sent]


def _alone(endpoint: APIEndpoint, inbound: Any) -> Any:
    assert endpoint.role is not None
    table = Table(STORE)
    return table.run(Aggregated(role=endpoint.role).legs(inbound.facts, table), lambda _: LegResult({}))


def nothing(_: object) -> list[str]:
    return []


def names_of(row: ForbiddenField) -> list[str]:
    """Names that a row speaks of."""
    return (
        [row.name.replace("*", filling) for filling in ("", "decode_", "bootstrap-host")]
        if "*" in row.name
        else [row.name]
    )


def where_of(where: str) -> list[tuple[str, ...]]:
    """The objects of a body in which a member of this kind is looked for."""
    if where == "nvext":
        return [("nvext",)]
    return [(), *((name, *path[:depth]) for name, path in NESTED_CARRIERS.items() for depth in range(len(path) + 1))]


def placed(body: dict[str, Any], path: tuple[str, ...], name: str, value: object) -> dict[str, Any]:
    made = json.loads(json.dumps(body))
    at = made
    for step in path:
        at = at.setdefault(step, {})
    at[name] = value
    return made


ROWS = [row for row in FORBIDDEN_FIELDS if row.location in ("body", "nvext")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.location} {row.name}")
def test_a_member_is_taken_out_wherever_engines_look_for_it(row: ForbiddenField) -> None:
    for endpoint in ONE_OF_EACH:
        for path in where_of(row.location):
            for name in names_of(row):
                for value in (EVIL, {"deep": {"er": [EVIL]}}):
                    body = placed(BODIES[endpoint.kind], path, name, value)
                    body = placed(body, path, "kept", "word")
                    for leg in legs(endpoint, json.dumps(body).encode(), STORE):
                        assert EVIL.encode() not in leg
                        assert b'"kept": "word"' in leg or b'"kept":"word"' in leg


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.location} {row.name}")
def test_without_its_row_a_member_would_reach_the_engine(row: ForbiddenField, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, row by row: it is this row that keeps the member back."""
    if row.location == "nvext":
        monkeypatch.setattr("kvparams_proxy.requests.body_stripping.forbidden_nvext_members", nothing)
    else:
        monkeypatch.setattr("kvparams_proxy.requests.body_stripping.FORBIDDEN_MEMBERS", FORBIDDEN_MEMBERS - {row.name})
    path = ("nvext" if row.location == "nvext" else "vllm_xargs",)
    body = json.dumps(placed(BODIES["completions"], path, names_of(row)[0], {"remote_host": EVIL})).encode()
    assert EVIL.encode() in b"".join(legs(COMPLETIONS, body, STORE))


def test_a_name_that_is_spelled_with_escapes_is_the_same_name() -> None:
    for name in ("kv_transfer_params", "vllm_xargs"):
        spelled = "".join(f"\\u{ord(character):04x}" for character in name)
        body = b'{"model":"m","prompt":"Who","%b":{"kv_transfer_params":{"remote_host":"%b"}}}' % (
            spelled.encode(),
            EVIL.encode(),
        )
        for leg in legs(COMPLETIONS, body, STORE):
            assert EVIL.encode() not in leg


@pytest.mark.parametrize("depth", [(), ("vllm_xargs",), ("sampling_params", "extra_args"), ("anything",)])
def test_a_member_that_stands_twice_is_refused(depth: tuple[str, ...]) -> None:
    """Which of the two an engine would take, nobody knows."""
    inner = f'{{"kv_transfer_params":1,"kv_transfer_params":{{"remote_host":"{EVIL}"}}}}'
    for step in reversed(depth):
        inner = f'{{"{step}":{inner}}}'
    with pytest.raises(ProxyError) as caught:
        legs(COMPLETIONS, f'{{"model":"m","prompt":"Who",{inner[1:]}'.encode(), STORE)
    assert caught.value.status == 400


@pytest.mark.parametrize("row", [row for row in FORBIDDEN_FIELDS if row.location == "header"], ids=lambda row: row.name)
def test_a_header_is_kept_back(row: ForbiddenField) -> None:
    for name in names_of(row):
        found = admitted([(name.encode(), EVIL.encode()), (b"traceparent", b"00-1-2-3")])
        assert found.forwarded == [b"traceparent: 00-1-2-3\r\n"]  # the control: some headers are let through
        assert EVIL not in repr(replace(found, session_id=""))  # that one the proxy keeps to itself
        assert name.encode() not in FORWARDED_HEADERS


@pytest.mark.parametrize(
    "row", [row for row in FORBIDDEN_FIELDS if row.location == "request id"], ids=lambda row: row.name
)
def test_an_address_in_a_request_id_is_not_handed_on(row: ForbiddenField) -> None:
    for id in (f"{row.name}10.0.0.1:5", f"{row.name}h", f"a{row.name}h", f"x-{row.name}", f"{row.name}"):
        assert not is_safe_request_id(id.encode())
        assert admitted([(b"x-request-id", id.encode())]).request_id == "minted-1"
    assert admitted([(b"x-request-id", b"req-7_a.b")]).request_id == "req-7_a.b"
    for odd in (b"", b"a b", b"a\nb", b"h:1", b"\xe9", b"[::1]", b"a/b", b"-a", b"_a", b"a" * 129):
        assert not is_safe_request_id(odd)


def test_the_table_says_each_thing_once_and_where_it_comes_from() -> None:
    rows = [(row.location, row.name) for row in FORBIDDEN_FIELDS]
    assert len(rows) == len(set(rows))
    assert all(row.source and row.name == row.name.lower() for row in FORBIDDEN_FIELDS)


OF_CLIENTS = {"cache_salt", "extra_key", "input_ids", "prompt_token_ids", "token_ids"}
"""Native keys of some dialects that are a client's to say: its prompt, and what divides its own cache."""


def test_what_dialects_write_on_a_request_no_client_may_write() -> None:
    """Every key of every dialect that is registered, wherever it is carried."""
    headers = [row.name for row in FORBIDDEN_FIELDS if row.location == "header"]
    seen = 0
    for table in load_tables().values():
        for leg in (LEGS["prefill"], LEGS["decode"]):
            for row in (row for row in table.native_keys if leg in row.legs and leg in table.container_paths):
                kind, first = table.path(row, leg)[:2]
                seen += 1
                if kind == "headers":
                    assert any(fnmatch(str(first), name) for name in headers), first
                else:
                    assert first in FORBIDDEN_MEMBERS | OF_CLIENTS, (table.name, first)
    assert seen > 20


# the law

READ = {
    *("kv_transfer_params", "ec_transfer_params", "kv_hints", "kv_hint", "disaggregated_params", "disagg_prefill_resp"),
    *(
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "routed_dp_rank",
        "data_parallel_rank",
    ),
    *("disagg_prefill_dp_rank", "decode_tp_size", "cache_hit_threshold", "rid", "request_id", "session_params"),
    *("kvcache_load_keys", "kvcache_store_keys", "prefix_prompt_ids"),
}
"""What engines read, from their own sources, not from the table."""
DYNAMO = {"backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank", "token_data"}
SPELLINGS = st.sampled_from(["plain", "first", "all"])
HOSTILE: st.SearchStrategy[object] = st.sampled_from(
    [
        EVIL,
        7,
        None,
        [EVIL],
        {"remote_host": EVIL, "remote_port": 1},
        {"kvparams": {"load_keys": [EVIL]}},
        {"a": {"b": EVIL}},
    ]
)
PLACES = [(), *((name,) for name in NESTED_CARRIERS), ("sampling_params", "extra_args"), ("vllm_xargs", "deeper")]


def spelled(name: str, how: str) -> str:
    """A member's name as JSON text: plain, or with escapes."""
    if how == "plain":
        return json.dumps(name)
    shown = name[:1] if how == "first" else name
    return '"' + "".join(f"\\u{ord(c):04x}" for c in shown) + name[len(shown) :] + '"'


@st.composite
def bodies(draw: st.DrawFn, kind: str) -> bytes:
    """A client's body with members in it that engines act on, spelled and placed in many ways."""
    inside: dict[tuple[str, ...], list[str]] = {}
    for place in draw(st.lists(st.sampled_from(PLACES[:5]), max_size=4)):
        names = READ | DYNAMO if place == ("nvext",) else READ
        name = draw(st.sampled_from(sorted(names)))
        text = f"{spelled(name, draw(SPELLINGS))}:{draw(st.sampled_from(['', ' ']))}{json.dumps(draw(HOSTILE))}"
        inside.setdefault(place, []).append(text)
    for place in inside:
        if draw(st.booleans()):
            inside[place].insert(draw(st.integers(0, len(inside[place]))), '"kept":1')
    base = BODIES[kind] | draw(st.dictionaries(st.sampled_from(sorted(BENIGN)), st.just(1), max_size=2))
    members = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in base.items() if name != "sampling_params"]
    members += inside.get((), [])
    extra = inside.get(("sampling_params", "extra_args"), [])
    sampling = [*inside.get(("sampling_params",), []), *([f'"extra_args":{{{",".join(extra)}}}'] if extra else [])]
    if sampling:
        members.append(f'"sampling_params":{{{",".join(sampling)}}}')
    for name in ("vllm_xargs", "nvext"):
        if (name,) in inside:
            members.append(f'"{name}":{{{",".join(inside[(name,)])}}}')
    return f"{{{draw(st.sampled_from([',', ' , ', chr(10) + ','])).join(draw(st.permutations(members)))}}}".encode()


def as_object(value: object) -> dict[str, Any]:
    """As the most obliging of engines would read it: text is parsed."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def acted_on(leg: dict[str, Any]) -> dict[str, Any]:
    """What an engine takes from a body to move KV by: the innermost words of each place, as vLLM merges them."""
    found = {name: leg[name] for name in READ if name in leg}
    for carrier in (leg.get("vllm_xargs"), leg.get("sampling_params"), leg.get("nvext")):
        inside = as_object(carrier)
        deeper = as_object(inside.get("extra_args"))
        for place in (inside, deeper):
            found |= {name: place[name] for name in READ | DYNAMO if name in place}
    return found


@settings(max_examples=120)
@given(data=st.data())
def test_no_client_makes_an_engine_go_anywhere_or_load_anything_that_the_proxy_has_not_chosen(
    data: st.DataObject,
) -> None:
    """The law of the table, for every endpoint whose work is split and those that one engine does."""
    endpoint = data.draw(st.sampled_from(ENDPOINTS[:6]))
    dialect = data.draw(st.sampled_from([NIXL, MOONCAKE, STORE]))
    body = data.draw(bodies(endpoint.kind))
    names = st.sampled_from([row.name.replace("*", "x") for row in FORBIDDEN_FIELDS if row.location == "header"])
    hostile = data.draw(st.lists(st.tuples(names, st.just(EVIL)), max_size=3))
    given_id = data.draw(
        st.sampled_from(["req-1", f"___prefill_addr_{EVIL}:1___decode_addr_{EVIL}:2_{'0' * 32}", EVIL + ":1"])
    )
    found = admitted([(b"x-request-id", given_id.encode()), *((n.encode(), v.encode()) for n, v in hostile)])
    assert EVIL not in f"{found.request_id}{found.forwarded}"
    try:
        sent = legs(endpoint, body, dialect, found.request_id)
    except ProxyError:  # the same name twice
        return
    plain = json.dumps(BODIES[endpoint.kind]).encode()
    chosen = [acted_on(json.loads(leg)) for leg in legs(endpoint, plain, dialect, found.request_id)]
    for leg, ours in zip(sent, chosen, strict=True):
        assert EVIL.encode() not in leg
        done = acted_on(json.loads(leg))
        assert done.keys() == ours.keys()
        if endpoint.kind == "responses":  # the proxy names each response anew
            assert re.fullmatch("|resp_[0-9a-f]{48}", done.pop("request_id", ""))
            ours.pop("request_id", None)
        assert done == ours


def test_the_made_up_bodies_do_steer_an_engine_that_nobody_protects() -> None:
    """The control: most of them say something, and read as they came an engine would act on it."""
    seen: list[bool] = []

    @settings(max_examples=100, database=None, derandomize=True)
    @given(bodies("completions"))
    def look(body: bytes) -> None:
        seen.append(bool(acted_on(json.loads(body))))

    look()
    assert sum(seen) > len(seen) / 3
