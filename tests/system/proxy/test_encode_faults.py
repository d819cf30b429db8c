"""Tests that encode engines, whatever they are and say, cost requests nothing but their encodings."""

import asyncio
import json
import logging
from typing import Any

import pytest

from kvparams.dialects.table import DialectTable
from kvparams.errors import PluginError
from kvparams.instances import DataParallelRank
from kvparams_proxy.secret import Secret
from tests.support.waiting import until
from tests.system.proxy.encode_site import ENCODED, HANDED_ON, HASH, PEER, Script, chat, encoding

PATH = "/v1/chat/completions"


async def test_an_encode_engine_with_ranks_is_told_the_rank(site: Any) -> None:
    there = await site(encoding(), encode_rank=DataParallelRank(1, 2))
    got = await there.running.client.post(PATH, json=chat())
    assert got.status_code == 200, got.text
    assert there.order == ["encode-0", "prefill", "decode"]
    assert b"x-data-parallel-rank: 1" in there.encoders[0].heads[0].lower()
    assert there.bodies[1]["ec_transfer_params"] == HANDED_ON


async def test_pictures_are_encoded_from_when_the_first_encode_engine_joins(site: Any, scripted: Any) -> None:
    """Bodies are searched only while there is one."""
    there = await site(admin_token=Secret("token"))
    bearer = {"authorization": "Bearer token"}
    late = await scripted(there.noting("late", encoding()))

    async def asked() -> list[str]:
        there.order.clear()
        got = await there.running.client.post(PATH, json=chat())
        assert got.status_code == 200, got.text
        return list(there.order)

    assert await asked() == ["prefill", "decode"]
    member = {"id": "late", "url": late.url, "role": "encode", "connector": "ec"}
    got = await there.running.client.post("/admin/instances", json=member, headers=bearer)
    assert got.status_code < 300, got.text

    async def is_encoded() -> bool:
        return await asked() == ["late", "prefill", "decode"]

    await until(is_encoded)
    got = await there.running.client.delete("/admin/instances/late", headers=bearer)
    assert got.status_code < 300, got.text
    assert await asked() == ["prefill", "decode"]


def refusing(words: str) -> Script:
    async def script(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = json.dumps({"error": {"message": words, "type": words, "code": 400}}).encode()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(said) + said)

    return script


@pytest.mark.parametrize(
    ("script", "evidence"),
    [
        (refusing("'input': 'my password'\nWARNING forged"), "a leg was answered 400"),
        (encoding({"my password": PEER}), "a name that is no hash"),
        (encoding({HASH: {**PEER, "size_bytes": "my password"}}), "size_bytes is not"),
        (encoding(answer={"error": {"message": "my password", "type": "my password", "code": 400}}), "an error"),
    ],
)
async def test_the_log_tells_nothing_that_an_engine_says_and_that_not_often(
    site: Any, caplog: pytest.LogCaptureFixture, script: Script, evidence: str
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvparams_proxy")
    there = await site(script)
    for _ in range(5):
        assert (await there.running.client.post(PATH, json=chat())).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    assert not any("password" in line or "forged" in line for line in lines), lines
    [line] = [line for line in lines if "no encode engine has encoded its media" in line]
    assert evidence in line
    assert await there.running.metric('kvparams_proxy_encodings_total{encoded="no"}') == 5


def no_tables() -> tuple[list[DialectTable], list[PluginError]]:
    return [], []


@pytest.mark.parametrize("has_tables", [True, False])
async def test_an_address_that_is_not_the_encode_engines_is_refused_even_if_no_dialect_is_registered(
    site: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_tables: bool
) -> None:
    """The control: the engine's own address is handed on."""
    if not has_tables:
        monkeypatch.setattr("kvparams_proxy.server.app_plugins.load_tables_and_errors", no_tables)
    foreign = {HASH: {**ENCODED[HASH], "peer_host": "169.254.169.254"}}
    for said, handed in ((ENCODED, HANDED_ON), (foreign, None)):
        there = await site(encoding(said))
        assert (await there.running.client.post(PATH, json=chat())).status_code == 200
        assert there.order == ["encode-0", "prefill", "decode"]
        assert there.bodies[1].get("ec_transfer_params") == handed
        assert await there.running.metric('kvparams_proxy_handoffs_refused_total{reason="address"}') == (handed is None)
    assert "169.254.169.254" in caplog.text, "the operator is told what to declare"


@pytest.mark.parametrize(
    "said",
    [
        {name: {**PEER, "peer_host": "169.254.169.254"}}
        for name in ("address", "remote_bootstrap_addr", "kv_hint", "consumer_zmq")
    ],
)
async def test_an_address_cannot_be_hidden_under_a_name_that_means_something_else(site: Any, said: Any) -> None:
    there = await site(encoding(said))
    assert (await there.running.client.post(PATH, json=chat())).status_code == 200
    assert there.order == ["encode-0", "prefill", "decode"]
    assert "169.254.169.254" not in json.dumps(there.bodies)


async def test_metadata_that_no_consumer_reads_reaches_nobody(site: Any) -> None:
    there = await site(encoding({HASH: {**ENCODED[HASH], "metadata": {"endpoint": "tcp://169.254.169.254:1"}}}))
    assert (await there.running.client.post(PATH, json=chat())).status_code == 200
    assert there.bodies[1]["ec_transfer_params"] == HANDED_ON


async def silent(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_a_request_with_a_time_limit_goes_on_without_a_silent_encode_engine(site: Any) -> None:
    there = await site(silent, silent, request_timeout_s=2.0)
    got = await there.running.client.post(PATH, json=chat())
    assert got.status_code == 200, got.text
    asked = [who[:6] for who in there.order]
    assert asked[-2:] == ["prefil", "decode"]
    assert asked[:-2] in (["encode"], ["encode"] * 2)  # deadlines are looked at some times a second
    assert await there.running.metric('kvparams_proxy_encodings_total{encoded="no"}') == 1
    assert await there.running.metric("kvparams_proxy_in_flight") == 0


async def test_a_request_that_one_decode_engine_answers_alone_has_no_encode_leg(site: Any) -> None:
    there = await site(encoding())
    got = await there.running.client.post(PATH, json=chat(n=2))
    assert got.status_code == 200, got.text
    assert there.order == ["decode"]
    assert await there.running.metric("kvparams_proxy_encodings_total") == 0


ADAPTER = b'{"object":"list","data":[{"id":"stub"},{"id":"adapter","parent":"stub"}]}'


async def test_media_for_a_lora_adapter_are_encoded_by_engines_of_its_base_model(site: Any) -> None:
    """The second request is for the base model itself."""
    there = await site(encoding(), models=ADAPTER, probe_interval_s=0.1)

    async def is_known() -> bool:
        return "adapter" in (await there.running.client.get("/v1/models")).text

    await until(is_known)
    for model in ("adapter", "stub"):
        got = await there.running.client.post(PATH, json={**chat(), "model": model})
        assert got.status_code == 200, got.text
    assert there.order == ["encode-0", "prefill", "decode"] * 2
    assert [body["model"] for body in there.bodies] == ["stub", "adapter", "adapter", "stub", "stub", "stub"]
    assert there.bodies[1]["ec_transfer_params"] == HANDED_ON
    assert await there.running.metric('kvparams_proxy_encodings_total{encoded="yes"}') == 2
    assert await there.running.metric("kvparams_proxy_in_flight") == 0
