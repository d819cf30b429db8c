"""Tests that a prefill answer is checked against the instance that gave it, before another engine is told."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.dialects.mooncake import MOONCAKE
from kvparams.dialects.nixl import NIXL, NIXL_TABLE
from kvparams.dialects.registry import load_tables
from kvparams.dialects.store import STORE, STORE_DROP
from kvparams.dialects.table import NativeKey
from kvparams.dialects.value_types import ADDRESSES, HOST, PORT, URL, ListType, UnionType, ValueType
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier, canonical_host, parse_declared_address
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import LegResult
from tests.support.kvparams.planning import Table, fleet_of

PINS = HandoffVerifier(load_tables().values())
ENGINE = Instance("p0", "b", Role.PREFILL, "http://10.0.0.7:8000", "nixl")
ANSWER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r-0",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 4,
    "remote_blocks_expiry_time": None,
}
METADATA = "169.254.169.254"
REACHED = ("10.0.0.7",)


def refusal(said: dict[str, Any], engine: Instance = ENGINE, reached: tuple[str, ...] = ()) -> HandoffRefused:
    with pytest.raises(HandoffRefused) as caught:
        PINS.verify(engine, said, reached)
    assert METADATA not in str(caught.value), "clients are told this"
    return caught.value


def test_the_host_of_its_own_url_is_its_own_with_any_port() -> None:
    PINS.verify(ENGINE, ANSWER)
    PINS.verify(ENGINE, ANSWER | {"remote_port": 65_535})
    PINS.verify(ENGINE, ANSWER | {"remote_host": None})


@pytest.mark.parametrize(
    "host",
    [
        METADATA,
        "10.0.0.8",
        "localhost",
        "127.0.0.1",
        "0.0.0.0",
        "::",
        "evil.example",
        "p0",
        "",
        "10.0.0.7.evil.example",
        "10.0.0.7@evil.example",
        "10.0.0.7:80/",
        "10.0.0.7 ",
        "0x0a000007",
        "167772167",
        "10.7",
        167_772_167,
        ["10.0.0.7", METADATA],
        {"host": "10.0.0.7"},
        True,
    ],
)
def test_any_other_host_is_refused_whatever_it_looks_like(host: object) -> None:
    refused = refusal({**ANSWER, "remote_host": host})
    assert refused.detail.startswith("p0 answered ")


def test_a_host_is_the_same_however_an_address_is_written() -> None:
    for host in ("::ffff:10.0.0.7", "[::ffff:10.0.0.7]"):
        PINS.verify(ENGINE, ANSWER | {"remote_host": host})
    six = replace(ENGINE, url="http://[fd00:0::7]:8000")
    for host in ("fd00::7", "[fd00::7]", "FD00:0:0::0007"):
        PINS.verify(six, ANSWER | {"remote_host": host})
    here = replace(ENGINE, url="http://localhost:8000")
    for host in ("127.0.0.1", "::1", "LOCALHOST", "127.0.0.2"):
        PINS.verify(here, ANSWER | {"remote_host": host})
    named = replace(ENGINE, url="http://P0.pods.svc:8000")
    for host in ("p0.pods.svc", "P0.pods.svc."):
        PINS.verify(named, ANSWER | {"remote_host": host})
    assert refusal(ANSWER | {"remote_host": "pods.svc"}, named).reason == "address"


def test_where_the_url_has_a_name_the_address_that_it_led_to_is_known() -> None:
    """The usual case in Kubernetes: the URL is a name, and the engine's side channel is told the pod's IP."""
    named = replace(ENGINE, url="http://p0.pods.svc:8000")
    refusal(ANSWER, named)
    PINS.verify(named, ANSWER, ("10.0.0.7",))
    PINS.verify(named, ANSWER, ("fd00::1", "::ffff:10.0.0.7"))
    refusal(ANSWER, named, ("10.0.0.8",))


def test_what_is_declared_is_its_own_too() -> None:
    behind_nat = replace(ENGINE, url="http://203.0.113.1:8000", addresses=("10.1.0.0/16", "p0.rdma", "fd00::/64"))
    for host in ("10.1.255.3", "p0.rdma", "fd00::77", "203.0.113.1"):
        PINS.verify(behind_nat, ANSWER | {"remote_host": host})
    for host in ("10.2.0.1", "p1.rdma", "fd01::77", METADATA, "localhost"):
        refusal(ANSWER | {"remote_host": host}, behind_nat)


def test_a_host_that_is_declared_with_a_port_has_no_other() -> None:
    """Several engines on one machine can be told apart by nothing else."""
    one = replace(ENGINE, addresses=("10.0.0.7:5600", "[fd00::7]:5601"))
    PINS.verify(one, ANSWER)
    PINS.verify(one, ANSWER | {"remote_host": "fd00::7", "remote_port": 5601})
    refusal(ANSWER | {"remote_port": 5601}, one)
    refusal(ANSWER | {"remote_host": "fd00::7"}, one)
    both = replace(ENGINE, addresses=("10.0.0.7:5600", "10.0.0.7:5601"))
    PINS.verify(both, ANSWER | {"remote_port": 5601})


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("p0", "p0", None), ("P0.x:80", "p0.x", 80), ("fd00::1", "fd00::1", None), ("[fd00::1]:5", "fd00::1", 5),
     ("[fd00::1]", "fd00::1", None), ("127.0.0.1:9", "localhost", 9)],
)  # fmt: skip
def test_what_may_be_declared(text: str, host: str, port: int | None) -> None:
    assert (parse_declared_address(text).host, parse_declared_address(text).port) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "http://p0:80", "p0:", "p0:0", "p0:99999", "10.0.0.1/8", "a b", "*", "p0/24", "@"]
)
def test_what_may_not_be_declared(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_declared_address(text)


@pytest.mark.parametrize("port", [0, -1, 65_536, "5600", 1.0, True, [5600, 0]])
def test_a_port_is_a_port(port: object) -> None:
    refusal(ANSWER | {"remote_port": port})
    refusal({"remote_host": "10.0.0.7", "remote_handshake_port": port})


@pytest.mark.parametrize(
    "said",
    [
        {"remote_hosts": [METADATA]},
        {"remote_kv_source": {"kv_request_id": "x", "remote_host": METADATA, "remote_port": 5}},
        {"disagg_spec": {"receiver_host": METADATA, "receiver_init_port": [1]}},
        {"remote_bootstrap_addr": f"http://{METADATA}:8998"},
        {"remote_bootstrap_addr": f"http://10.0.0.7@{METADATA}:8998"},
        {"remote_bootstrap_addr": f"http://{METADATA}\\@10.0.0.7:8998"},
        {"bootstrap_host": METADATA},
        {"ctx_info_endpoint": [f"{METADATA}:80"]},
        {"kv_hint": {"actions": [{"payload": {"source_control_endpoint": f"tcp://{METADATA}:80"}}]}},
        {"kv_hint": {"actions": [[f"tcp://{METADATA}:80"]]}},
        {"x": [{"y": [{"remote_host": METADATA}]}]},
        {"x-prefiller-host-port": f"10.0.0.7:80,{METADATA}:80"},
    ],
)
def test_addresses_of_every_dialect_are_looked_for_at_any_depth(said: dict[str, Any]) -> None:
    """Spec-mandated, 1.0#12.6: a decode engine may have several connectors, and all of them read the same object."""
    assert refusal(ANSWER | said).reason == "address"
    PINS.verify(ENGINE, ANSWER | said | dict.fromkeys(said))


def test_what_is_no_address_is_let_through_as_it_came() -> None:
    PINS.verify(
        ENGINE, ANSWER | {"huge": 2**63 - 1, "x": {"y": [METADATA, {"z": None}]}, "remote_bootstrap_addr": None}
    )


@pytest.mark.parametrize(
    "said",
    [
        {"tp_size": 10**9},
        {"kv_hint": f"tcp://{METADATA}:80"},
        {"tp_size": 0},
        {"tp_size": "4"},
        {"dcp_size": 4097},
        {"pp_size": True},
        {"remote_block_ids": [[2**31]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [[1, True]]},
        {"remote_block_ids": [[1, 2.0]]},
        {"remote_block_ids": [[1] * 65_537]},
        {"remote_block_ids": [[1]] * 65},
        {"remote_num_tokens": -1},
        {"remote_num_tokens": 2**63},
        {"remote_prefill_cached_tokens": -1},
        {"remote_port": 65_536},
        {"remote_engine_id": "e" * 257},
    ],
)
def test_values_out_of_bounds_are_refused(said: dict[str, Any]) -> None:
    """Spec-mandated, 1.0#12.7. A tensor-parallel size of a billion makes a decode engine build as long a list.

    So they are by an engine whose answers were good before, of which only the block ids differ.
    """
    assert refusal(ANSWER | said).reason == "value"
    for block in range(3):
        PINS.verify(ENGINE, ANSWER | {"remote_block_ids": [[block]]}, REACHED)
    assert refusal(ANSWER | said, reached=REACHED).reason == "value"


def test_block_ids_are_of_whichever_form_some_release_has() -> None:
    cases: list[Any] = [[[1], [2, 3]], [1, 2], [], [[]], None]
    for blocks in cases:
        PINS.verify(ENGINE, ANSWER | {"remote_block_ids": blocks})


def addressed(form: ValueType) -> bool:
    if isinstance(form, UnionType):
        return any(map(addressed, form.forms))
    return addressed(form.inner) if isinstance(form, ListType) else form in (HOST, PORT, URL, ADDRESSES)


def test_every_row_whose_value_is_an_address_says_so() -> None:
    seen = 0
    for table in load_tables().values():
        for row in table.native_keys:
            seen += row.address is not None
            assert not addressed(row.value_type) or row.address is not None, (table.name, row.name)
    assert seen > 40


def test_the_spec_names_every_member_that_is_an_address() -> None:
    spec = (Path(__file__).parents[4] / "spec" / "1.0" / "spec.md").read_text()
    (line,) = [line for line in spec.splitlines() if line.startswith("Members that are addresses, ")]
    parts = line.partition(" at least: ")[2].split("; ")
    named = {part.split(" ")[0].rstrip("s"): set(re.findall(r"`([^`]+)`", part)) for part in parts}
    then = json.loads((Path(__file__).parents[4] / "spec" / "1.0" / "dialects.json").read_bytes())
    keys = [key for table in then.values() for key in table["keys"] if key.get("in") != "headers"]
    rows = [row for table in load_tables().values() for row in table.native_keys if row.location != "headers"]
    for kind in ("host", "port", "url"):
        assert named[kind] == {key["name"] for key in keys if key.get("address") == kind}
        assert named[kind] <= {row.name for row in rows if row.address == kind}, "later tables may name more"


def test_a_dialect_of_somebody_else_is_held_by_its_own_table() -> None:
    theirs = replace(NIXL_TABLE, name="theirs", native_keys=(NativeKey("engine_door", HOST, "RD", address="host"),))
    said = {"engine_door": METADATA}
    PINS.verify(ENGINE, said)  # the control: nobody knows that it is an address
    with pytest.raises(HandoffRefused):
        HandoffVerifier([theirs]).verify(ENGINE, said)


HOSTS = st.from_regex(r"[0-9a-z.:\[\]@/%-]{1,24}", fullmatch=True) | st.ip_addresses().map(str)


@given(HOSTS, st.integers(0, 2**32 - 1))
def test_only_the_hosts_that_are_known_are_let_through(host: str, number: int) -> None:
    four = ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))
    for text in (host, four, f"[{four}]", f"::ffff:{four}"):
        said = {"remote_host": text, "remote_port": 1}
        if canonical_host(text) == "10.0.0.7":
            continue
        with pytest.raises(HandoffRefused):
            PINS.verify(ENGINE, said)


FACTS = RequestFacts("r", "t", "m", 1, 1, None, None)


def planned(dialect: Any, answer: dict[str, Any], pins: HandoffVerifier | None) -> Table:
    table = Table(dialect, [replace(each, url="http://10.0.0.7:1", dialect="nixl") for each in fleet_of()])
    table.pins = pins
    table.found = {"remote_engine_id": "e", "remote_bootstrap_addr": "http://10.0.0.7:8998"}
    table.run(PrefillThenDecode().legs(FACTS, table), lambda leg: LegResult({} if leg.answers_client else answer))
    return table


def document(address: str) -> dict[str, Any]:
    return {
        "kvparams": {
            "version": "1.0",
            "request_id": "r",
            "transfer": {"id": "t", "attempt": 1},
            "phase": "prefill_result",
            "mode": "store",
            "producer": {"id": "p", "address": address},
            "load_keys": ["k"],
        }
    }


@pytest.mark.parametrize(
    ("dialect", "good", "evil"),
    [
        (NIXL, ANSWER, ANSWER | {"remote_host": METADATA}),
        (NIXL, ANSWER | document("10.0.0.7:9"), ANSWER | document(f"{METADATA}:9")),
        (STORE, document("10.0.0.7:9"), document(f"{METADATA}:9")),
        (STORE, document("10.0.0.7:9"), document("p1:9")),
        (MOONCAKE, {}, document("p1:9")),
    ],
)
def test_the_plan_sends_no_decode_leg_with_such_an_answer(dialect: Any, good: Any, evil: Any) -> None:
    """Spec-mandated, 1.0#12.6."""
    assert len(planned(dialect, good, PINS).legs) == 2
    assert len(planned(dialect, evil, None).legs) == 2  # the control: without pins it is sent
    table = Table(dialect, [replace(each, url="http://10.0.0.7:1", dialect="nixl") for each in fleet_of()])
    table.pins = PINS
    table.found = {"remote_engine_id": "e", "remote_bootstrap_addr": "http://10.0.0.7:8998"}
    with pytest.raises(HandoffRefused):
        table.run(PrefillThenDecode().legs(FACTS, table), lambda leg: LegResult(evil))
    assert [leg.answers_client for leg in table.legs] == [False]


def test_what_the_refused_answer_holds_is_given_back_without_telling_anyone_the_address() -> None:
    table = Table(STORE_DROP, [replace(each, url="http://10.0.0.7:1") for each in fleet_of()])
    table.pins = PINS
    with pytest.raises(HandoffRefused):
        table.run(PrefillThenDecode().legs(FACTS, table), lambda leg: LegResult(document(f"{METADATA}:9")))
    abandon = table.leases[-1].release_request
    assert abandon is not None
    assert abandon.role is Role.PREFILL
    assert METADATA.encode() not in abandon.native


def test_what_was_good_together_need_not_be_good_apart() -> None:
    """A host that is the instance's with one port alone, first beside that port, then without it; and an answer that
    says what was good in two others."""
    pins = HandoffVerifier(load_tables().values())
    instance = Instance("p", "1", Role.PREFILL, "http://prefill:8000", "nixl", addresses=("side:5600", "side:5601"))
    good = {"remote_host": "side", "remote_port": 5600, "com.example": "x"}
    for _ in range(3):
        pins.verify(instance, good)
    pins.verify(instance, {"remote_host": "side", "remote_port": 5601})
    for bad in ({"remote_host": "side"}, {"remote_host": "side", "com.example": "x"}, {**good, "remote_port": True}):
        with pytest.raises(HandoffRefused):
            pins.verify(instance, bad)
        pins.verify(instance, good)


VALUES: dict[str, list[Any]] = {
    "do_remote_prefill": [True, False, 1, 1.0, None],
    "remote_block_ids": [[[1, 2]], [[3]], [[1.0]], [[-1]], [[True]], [[2**31]], [], None],
    "remote_engine_id": ["e", "f", 7, "x" * 300],
    "remote_request_id": ["r-0", "r-1", "r-2", ""],
    "remote_host": ["10.0.0.7", METADATA, None, ["10.0.0.7"], "10.0.0.9"],
    "remote_port": [5600, 5600.0, True, 1, 0, None, [5600]],
    "tp_size": [4, 4.0, True, 1, 0, None],
    "unknown": ["http://10.0.0.7:1", {"remote_host": METADATA}, {"remote_host": "10.0.0.7"}, 5],
}
ANSWERS = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from([values[0], *values]) for name, values in VALUES.items()},
)


@given(st.lists(st.tuples(ANSWERS, st.booleans()), min_size=2, max_size=8))
def test_what_was_good_before_changes_no_verdict(answers: list[tuple[dict[str, Any], bool]]) -> None:
    """A verifier that remembers the shapes of good answers judges each answer as one that has seen none."""
    ways: tuple[tuple[str, ...], ...] = ((), ("10.0.0.9",))
    used = HandoffVerifier(load_tables().values())
    for said, reached in answers:
        for _ in range(3):  # the third time it is compared with the shape of the second
            verdicts: list[str] = []
            for verifier in (used, HandoffVerifier(load_tables().values())):
                try:
                    verifier.verify(ENGINE, said, ways[reached])
                    verdicts.append("good")
                except HandoffRefused as refused:
                    verdicts.append(refused.reason)
            assert verdicts[0] == verdicts[1]


def test_an_answer_like_the_last_ones_is_compared_at_once() -> None:
    """The control of the law above: the shape is used, and a number of another type has another shape."""
    verifier = HandoffVerifier(load_tables().values())
    for number in range(4):
        verifier.verify(ENGINE, ANSWER | {"remote_request_id": f"r-{number}"})
    shape = verifier._own[ENGINE].shape  # pyright: ignore[reportPrivateUsage]
    assert shape is not None
    assert shape.fits(ANSWER | {"remote_request_id": "r-9"})
    assert "remote_request_id" in dict(shape.changing)
    for other in ({"remote_port": 5600.0}, {"do_remote_prefill": 1}, {"remote_host": METADATA}, {"tp_size": 5}):
        assert not shape.fits(ANSWER | other)
