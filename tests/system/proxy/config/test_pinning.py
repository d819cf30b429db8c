"""Tests an engine that names an address that is not its own.

Decode is not told. The client learns which engine is at fault, and no address. KV that can be released is released.
"""

import asyncio
import json
from typing import Any

import pytest

from kvparams.instances import Role
from kvparams_proxy.checks.fleet_check import check_fleet
from kvparams_proxy.config.settings import default_spec_rules, known_dialects
from kvparams_proxy.config.spec_fields import check_addresses
from kvparams_proxy.config.spec_parsing import DefaultsSection, parse_specs
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.proxy.fixtures import Awaited
from tests.support.waiting import until
from tests.system.proxy.test_legs import ANSWER, CLIENT, NIXL, answering

METADATA = "169.254.169.254"
RESULT: dict[str, Any] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["k1"],
}
EVIL: dict[str, tuple[str, dict[str, Any]]] = {
    "the metadata service": ("nixl", NIXL | {"remote_host": METADATA}),
    "another's name": ("nixl", NIXL | {"remote_host": "prefill-1.pods"}),
    "a hint": ("nixl", NIXL | {"kv_hint": {"actions": [{"payload": {"e": f"tcp://{METADATA}:1"}}]}}),
    "another connector's keys": ("nixl", NIXL | {"remote_kv_source": {"remote_host": METADATA, "remote_port": 80}}),
    "the document": ("store", {"kvparams": RESULT | {"producer": {"id": "p", "address": f"{METADATA}:80"}}}),
}


@pytest.mark.parametrize("which", EVIL)
async def test_decode_is_not_told_of_an_address_that_is_not_the_engines(
    which: str, scripted: Any, proxy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dialect, params = EVIL[which]
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": params}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], dialect)
    got = await running.client.post("/v1/completions", json=CLIENT)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "handoff_refused")
    assert "addresses" in got.json()["error"]["message"]
    assert METADATA not in got.text
    assert decode.bodies == []
    assert await running.metric('kvparams_proxy_handoffs_refused_total{reason="address"}') == 1
    told = [record.getMessage() for record in caplog.records if "prefill-0 answered" in record.getMessage()]
    assert len(told) == 1
    assert await running.metric("kvparams_proxy_in_flight") == 0
    assert await running.metric("kvparams_proxy_leases") == 0


async def test_what_the_operator_has_declared_is_told(scripted: Any, proxy: Any) -> None:
    """The control of the test above, and the way out of it."""
    for dialect, params in EVIL.values():
        prefill = await scripted(answering(ANSWER | {"kv_transfer_params": params}))
        decode = await scripted(answering(ANSWER))
        running = await proxy([prefill.url], [decode.url], dialect, addresses=("169.254.0.0/16", "prefill-1.pods"))
        assert (await running.client.post("/v1/completions", json=CLIENT)).status_code == 200
        assert METADATA.encode() in decode.bodies[0] or b"prefill-1.pods" in decode.bodies[0]


@pytest.mark.parametrize("wrong", [{"tp_size": 10**9}, {"remote_host": 2_130_706_433}])
async def test_a_value_out_of_bounds_is_not_handed_on(wrong: dict[str, Any], scripted: Any, proxy: Any) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL | wrong}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url])
    got = await running.client.post("/v1/completions", json=CLIENT)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "handoff_refused")
    assert decode.bodies == []
    assert await running.metric('kvparams_proxy_handoffs_refused_total{reason="value"}') == 1


async def test_an_answer_whose_params_are_text_is_held_and_handed_on_alike(scripted: Any, proxy: Any) -> None:
    for host, status in (("127.0.0.1", 200), (METADATA, 502)):
        text = json.dumps(NIXL | {"remote_host": host})
        prefill = await scripted(answering(ANSWER | {"kv_transfer_params": text}))
        decode = await scripted(answering(ANSWER))
        running = await proxy([prefill.url], [decode.url])
        assert (await running.client.post("/v1/completions", json=CLIENT)).status_code == status
        told = [json.loads(body)["kv_transfer_params"] for body in decode.bodies]
        assert [{name: one[name] for name in NIXL} for one in told] == ([NIXL] if status == 200 else [])


async def test_what_it_has_stored_is_dropped(scripted: Any, proxy: Any) -> None:
    evil = {"kvparams": RESULT | {"producer": {"id": "p", "address": f"{METADATA}:80"}}}
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": evil}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], "store-drop")
    assert (await running.client.post("/v1/completions", json=CLIENT)).status_code == 502

    async def released() -> bool:
        return await running.metric("kvparams_proxy_transfers_released_total") == 1

    await until(released)
    assert prefill.heads[1].split(b" ")[1] == b"/v1/kvparams"
    assert METADATA.encode() not in prefill.bodies[1]
    assert decode.bodies == []


async def test_the_pool_knows_where_a_name_has_led_to(scripted: Any) -> None:
    engine = await scripted(answering(ANSWER))
    pool = UpstreamConnectionPool(f"http://localhost:{engine.port}", UpstreamLimits())
    assert pool.peer_addresses == ()
    for _ in range(2):
        sink = Awaited()
        pool.exchange(pool.request(b"/x", b"", b"{}"), sink)
        async with asyncio.timeout(10):
            await sink.answer
    assert pool.peer_addresses == ("127.0.0.1",)
    pool.close()


def entry(document: dict[str, Any], **defaults: Any) -> tuple[InstanceSpec | None, list[str]]:
    problems, rules = ConfigProblems(), default_spec_rules()
    rules = DefaultsSection.model_validate(defaults, context=rules).apply_to(rules)
    found = next(
        iter(parse_specs({"id": "p0", "url": "http://p0:1", "role": "prefill"} | document, "", rules, problems)), None
    )
    try:
        problems.raise_if_any()
    except ConfigError as error:
        return found, [str(error)]
    return found, []


def test_addresses_are_declared_for_one_engine_or_for_all() -> None:
    assert entry({}) == (InstanceSpec("p0", "http://p0:1", Role.PREFILL, "nixl"), [])
    found, _ = entry({"addresses": ["10.1.0.0/16", "p0.rdma:5600"]})
    assert found is not None
    assert found.make_instance().addresses == ("10.1.0.0/16", "p0.rdma:5600")
    found, _ = entry({}, addresses=["10.1.0.0/16"])
    assert found is not None
    assert found.addresses == ("10.1.0.0/16",)
    found, _ = entry({"addresses": []}, addresses=["10.1.0.0/16"])
    assert found is not None
    assert found.addresses == ()
    bad: list[Any] = ["10.0.0.1", ["http://p0:1"], [7], ["10.0.0.1/8"], ["p"] * 65, [""], {}]
    for wrong in bad:
        assert any("addresses" in problem for problem in entry({"addresses": wrong})[1])
        with pytest.raises(ValueError, match=r"must be a (list|host)"):
            check_addresses(wrong)


async def test_check_says_which_address_is_not_known(scripted: Any) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL | {"remote_host": "10.7.7.7"}}))
    decode = await scripted(answering(ANSWER))
    entries = [
        InstanceSpec("p0", prefill.url, Role.PREFILL, "nixl"),
        InstanceSpec("d0", decode.url, Role.DECODE, "nixl"),
    ]
    said = [found async for found in check_fleet(entries, known_dialects(), UpstreamLimits())]
    assert said[-1].grade == "error"
    assert "'10.7.7.7'" in said[-1].message
    assert "addresses" in said[-1].message
