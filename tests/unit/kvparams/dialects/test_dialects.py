"""Tests laws of every dialect, and its description of KV that is found by content or over a bootstrap server."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams import PluginError, parse, plugins
from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects.content import CONTENT
from kvparams.dialects.interface import Dialect, HandoffMissing
from kvparams.dialects.legacy import LEGACY
from kvparams.dialects.mooncake import MOONCAKE
from kvparams.dialects.nixl import NIXL
from kvparams.dialects.registry import (
    get_table,
    load_routable_dialects,
    load_tables,
    routable_dialect_names,
    routable_dialects,
)
from kvparams.dialects.sglang import BOOTSTRAP_KEYS, SGLANG, SGLangBootstrap
from kvparams.dialects.table import NativeKey
from kvparams.dialects.trio import TRIO_TABLE
from kvparams.dialects.value_types import FLAG
from kvparams.instances import RequestFacts, Role
from kvparams.params import Mode
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import Leg, LegFailed, LegResult
from tests.support.kvparams.planning import Table, fleet_of

FACTS = RequestFacts("req", "tra", "m", 1, 1, None, None)
RESULT: dict[str, object] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
}
NIXL_ANSWER: dict[str, object] = {
    "remote_engine_id": "e",
    "remote_block_ids": [[1]],
    "remote_host": "h",
    "remote_port": 5600,
}
URL = "http://10.0.0.7:8998"
RANK = {"engine_id": "9a1d", "worker_addr": {"0": {"0": "tcp://10.0.0.7:31234"}}}
"""What vLLM 0.32.0's own bootstrap server answers for one rank."""
PLACE = {"remote_engine_id": "9a1d", "remote_bootstrap_addr": URL}


def every_dialect() -> list[Dialect]:
    return list(routable_dialects().values())


def test_the_dialects_that_the_documents_name_are_there() -> None:
    assert {"nixl", "store", "store-drop", "store-meet", "content", "mooncake"} <= set(plugins.plugin_names("dialects"))


def test_who_routes_and_who_translates_look_into_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table alone can be translated; a proxy needs an object that routes, which brings its table."""
    alone = {"legacy", "store", "store-drop", "store-meet"}
    assert set(routable_dialects()) == {"nixl", "sglang", "content", "mooncake"} | alone
    assert set(load_tables()) | alone == set(plugins.plugin_names("dialects"))
    assert all(one.name == name for name, one in load_tables().items())
    for name, route in routable_dialects().items():
        if name in load_tables():
            assert route.mode == get_table(name).mode
    with pytest.raises(PluginError, match="our document"):
        get_table("store")

    def broken(kind: str) -> dict[str, object]:
        return {"theirs": PluginError("no such module"), "nixl": NIXL, "trio": TRIO_TABLE}

    monkeypatch.setattr(plugins, "load_each_plugin", broken)
    assert routable_dialect_names() == ["nixl"], "what is broken does not take the others away"


def test_one_that_derives_must_have_every_method() -> None:
    """Those of `Dialect` itself would answer None: nothing would be split, and no KV released."""
    derived = type("Derived", (Dialect,), {"can_split": NIXL.can_split})
    with pytest.raises(TypeError, match="decode_keys, prefill_keys, release_request"):
        derived()


def test_one_that_was_written_before_a_member_was_asked_for_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Older:
        mode, has_reusable_kv, lease_s, bootstrap = "direct", True, 1.0, None
        can_split = prefill_keys = decode_keys = release_request = staticmethod(lambda *_: None)

    def loaded(kind: str) -> dict[str, object]:
        return {"older": Older(), "nixl": NIXL}

    monkeypatch.setattr(plugins, "load_each_plugin", loaded)
    found, refused = load_routable_dialects()
    assert list(found) == ["nixl"]
    assert refused == {
        "older": "it has no carries_keys_in_body, prompt_ids_key, rank_key, sends_legs_together: "
        "is it for another kvparams? See kvparams.dialects.interface.Dialect"
    }


@pytest.mark.parametrize("dialect", every_dialect())
def test_the_laws_of_every_dialect(dialect: Dialect) -> None:
    assert dialect.mode in get_args(Mode)
    assert dialect.lease_s > 0
    assert DOCUMENT_KEY not in json.loads(dialect.prefill_keys("t-1"))
    answer = {**NIXL_ANSWER, "kvparams": RESULT}
    told = dialect.decode_keys(answer, "t-1", PLACE)
    assert DOCUMENT_KEY not in told
    native = json.dumps(told).encode()
    for abandon in (dialect.release_request(None), dialect.release_request(native)):
        if abandon is not None and abandon.leg:
            assert (abandon.role, abandon.native) == (Role.DECODE, native)
    assert dialect.can_split(FACTS)
    several = dialect.can_split(FACTS._replace(prompts=2)), dialect.can_split(FACTS._replace(choices=2))
    wanted = (dialect.has_reusable_kv or dialect.carries_keys_in_body, dialect.has_reusable_kv)
    if dialect is LEGACY:
        wanted = (False, True)  # a key stands for one prompt
    assert several == wanted, "what is fetched once is one sequence; SGLang numbers rooms by prompt"
    assert not dialect.carries_keys_in_body or dialect.sends_legs_together


def legs(dialect: Dialect, answer: dict[str, object]) -> tuple[Table, list[Leg]]:
    table = Table(dialect)
    table.found = PLACE
    return table, table.run(
        PrefillThenDecode().legs(FACTS, table), lambda leg: LegResult({} if leg.answers_client else answer)
    )


def params(leg: Leg) -> dict[str, Any]:
    raw = leg.changes["kv_transfer_params"]
    assert raw is not None
    return json.loads(raw)


@pytest.mark.parametrize("answer", [{}, {"first_tok": 7}, {"kvparams": RESULT}])
def test_kv_that_is_found_by_content_needs_nothing_to_be_handed_on(answer: dict[str, object]) -> None:
    table, (first, second) = legs(CONTENT, answer)
    assert params(first).keys() == params(second).keys() == {"kvparams"}
    assert parse(params(second)["kvparams"]).mode == "store"
    assert first.changes["max_tokens"] == b"1"
    assert [lease.release_request for lease in table.leases] == [None]


def test_both_legs_carry_our_transfer_id_and_decode_is_told_where_to_ask() -> None:
    table, (first, second) = legs(MOONCAKE, {})
    asked, told = params(first), params(second)
    assert parse(asked.pop("kvparams")).transfer.id == parse(told.pop("kvparams")).transfer.id == "tra"
    assert asked == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "tra"}
    assert told == {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "tra", **PLACE}
    (lease,) = table.leases
    assert lease.release_request is not None
    assert json.loads(lease.release_request.native) == told
    assert lease.until_s == table.clock_s + 480


@pytest.mark.parametrize("dialect", [MOONCAKE, SGLANG])
def test_without_what_the_bootstrap_server_says_nothing_is_handed_on(dialect: Dialect) -> None:
    with pytest.raises(HandoffMissing, match="has not been asked"):
        dialect.decode_keys({}, "t", None)


@given(st.text(max_size=64), st.text(max_size=64))
def test_a_room_is_one_transfers_and_a_number_that_sglang_takes(one: str, other: str) -> None:
    rooms = [SGLANG.decode_keys({}, id, {"bootstrap_host": "h", "bootstrap_port": 1}) for id in (one, other)]
    assert (rooms[0] == rooms[1]) is (one == other)
    for row in BOOTSTRAP_KEYS:
        assert row.value_type.find_problem(rooms[0][row.name], (row.name,)) is None


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://10.0.0.7:8998", {"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998}),
        ("http://[fd00::7]:9001", {"bootstrap_host": "fd00::7", "bootstrap_port": 9001}),
        ("http://engine", {"bootstrap_host": "engine", "bootstrap_port": 80}),
    ],
)
def test_where_sglangs_engines_meet_is_said_by_the_bootstrap_servers_own_address(
    url: str, place: dict[str, object]
) -> None:
    assert SGLangBootstrap().parse_info(url, {"dp_size": 1}) == place


@pytest.mark.parametrize(
    ("ends", "ids"),
    [
        ([True, None, None], ["tra", "transfer-1", "transfer-1"]),  # prefill broke off
        ([None, False, None], ["tra", "tra", "tra"]),  # no decode engine has seen it
        ([None, True, None, None], ["tra", "tra", "transfer-1", "transfer-1"]),  # its blocks may be gone
    ],
)
def test_an_attempt_that_may_have_moved_kv_is_another_transfer(ends: list[bool | None], ids: list[str]) -> None:
    table = Table(MOONCAKE, fleet_of(2, 2), retries=2)
    table.found = PLACE
    left = list(ends)

    def answer(leg: Leg) -> LegResult | LegFailed:
        claimed = left.pop(0)
        return LegResult({}) if claimed is None else LegFailed("broken", another=True, claimed=claimed)

    table.run(PrefillThenDecode().legs(FACTS, table), answer)
    assert [params(leg)["transfer_id"] for leg in table.legs] == ids
    assert [parse(params(leg)["kvparams"]).transfer.id for leg in table.legs] == ids


def placed(answer: object) -> Any:
    assert MOONCAKE.bootstrap is not None
    return MOONCAKE.bootstrap.parse_info(URL, answer)


@pytest.mark.parametrize("rank", ["0", "3"])
def test_the_bootstrap_server_says_who_the_engine_is(rank: str) -> None:
    assert placed({rank: RANK}) == PLACE


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "no worker yet"),
        ([], "no worker yet"),
        (None, "no worker yet"),
        ({"0": {**RANK, "worker_addr": {}}}, "no worker yet"),
        ({"0": RANK, "1": RANK}, "2 data-parallel ranks"),
        ({"0": {**RANK, "engine_id": ""}}, "no engine_id"),
        ({"0": {**RANK, "engine_id": "x" * 257}}, "no engine_id"),
        ({"0": {**RANK, "engine_id": "a\nb"}}, "no engine_id"),
        ({"0": "9a1d"}, "no engine_id"),
        ({"detail": "Not Found"}, "no engine_id"),
    ],
)
def test_a_bootstrap_server_that_does_not_say_it_is_named_as_such(answer: object, said: str) -> None:
    with pytest.raises(HandoffMissing, match=said):
        placed(answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "engine_id"]), inner),
    max_leaves=8,
)


@given(JSON)
def test_whatever_it_answers_is_used_or_refused(answer: object) -> None:
    with suppress(HandoffMissing):
        place = placed(answer)
        assert place["remote_bootstrap_addr"] == URL
        assert isinstance(place["remote_engine_id"], str)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("extension", "acme"),
        ("extension", "\x1b[31m\nX"),
        ("mode", "teleport"),
        ("order", "backwards"),
        ("container_paths", {"X": "kv_transfer_params"}),
        ("container_paths", {}),
        ("since", "soon"),
        ("until", ""),
    ],
)
def test_a_table_that_says_what_it_cannot_is_refused_by_field(field: str, value: object) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=rf"^trio: {field} cannot be ") as refused:
        replace(TRIO_TABLE, **changed)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("member", "transfer.idd"),
        ("member", "extensions"),
        ("member", "transfer.attempt"),
        ("legs", "PX"),
        ("required_legs", "A"),
        ("marker_values", {"A": True}),
        ("implied_leg", "A"),
        ("member_legs", "A"),
        ("default_values", {"A": None}),
        ("location", "trailer"),
        ("address", "street"),
        ("since", "soon"),
        ("until", "v1"),
    ],
)
def test_a_row_that_says_what_it_cannot_is_refused_by_field(field: str, value: object) -> None:
    changed: dict[str, Any] = {field: value}
    row = replace(NativeKey("own", FLAG), **changed)
    with pytest.raises(ValueError, match=rf"^trio, row {row.name!r}: {field} cannot be "):
        replace(TRIO_TABLE, native_keys=(*TRIO_TABLE.native_keys, row))


def test_what_a_row_can_say_is_accepted() -> None:
    row = NativeKey(
        "own",
        FLAG,
        "PD",
        member="isolation.cache_salt",
        member_legs="D",
        address="host",
        since="0.9",
        until="1.0.post1",
    )
    assert row in replace(TRIO_TABLE, native_keys=(*TRIO_TABLE.native_keys, row)).native_keys
