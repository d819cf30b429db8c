"""Tests that encode engines, whatever they are and say, cost requests nothing but their encodings."""

from typing import Any

from kvparams.instances import DataParallelRank
from tests.system.proxy.encode_site import ENCODED, chat, encoding

PATH = "/v1/chat/completions"


async def test_an_encode_engine_with_ranks_is_told_the_rank(site: Any) -> None:
    there = await site(encoding(), encode_rank=DataParallelRank(1, 2))
    got = await there.running.client.post(PATH, json=chat())
    assert got.status_code == 200, got.text
    assert there.order == ["encode-0", "prefill", "decode"]
    assert b"x-data-parallel-rank: 1" in there.encoders[0].heads[0].lower()
    assert there.bodies[1]["ec_transfer_params"] == ENCODED
