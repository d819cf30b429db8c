"""Tests that encode engines, whatever they are and say, cost requests nothing but their encodings."""

from typing import Any

from kvparams.instances import DataParallelRank
from kvparams_proxy.secret import Secret
from tests.support.waiting import until
from tests.system.proxy.encode_site import chat, encoding

PATH = "/v1/chat/completions"


async def test_an_encode_engine_with_ranks_is_told_the_rank(site: Any) -> None:
    there = await site(encoding(), encode_rank=DataParallelRank(1, 2))
    got = await there.running.client.post(PATH, json=chat())
    assert got.status_code == 200, got.text
    assert there.order == ["encode-0", "prefill", "decode"]
    assert b"x-data-parallel-rank: 1" in there.encoders[0].heads[0].lower()
    assert there.bodies[1]["ec_transfer_params"] == HANDED_ON


async def test_pictures_are_encoded_from_when_the_first_encode_engine_joins(site: Any, scripted: Any) -> None:
    """And no longer when the last one has left: bodies are searched only meanwhile."""
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
