"""Tests that a node that comes back hears the last message of its attempt again."""

import asyncio
from typing import cast

from kvparams_proxy.queue.messages import WorkTaken
from kvparams_proxy.queue.pending_reply import PendingReply, ReplyOwner
from tests.system.queue.scenes import Heard


class Said:
    """Of an `ReplyOwner` what is used."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    @property
    def now(self) -> object:
        return asyncio.get_running_loop().time

    def send_control(self, node: str, order: str, id: str, settled: object = None) -> None:
        self.orders.append(order)

    def forget(self, id: str) -> None:
        """Nothing is kept."""


async def test_a_node_that_comes_back_hears_the_last_word_again() -> None:
    """`resume` may be lost with the broker as `pause` may: without it the answer would never go on."""
    said = Said()
    awaited = PendingReply(cast("ReplyOwner", said), "p.1", Heard())
    taken = WorkTaken("p.1", "d")
    awaited.on_result(taken)
    awaited.on_result(taken)
    assert said.orders == []
    awaited.pause()
    awaited.on_result(taken)
    assert said.orders == ["pause", "pause"]
    awaited.resume()
    awaited.on_result(taken)
    assert said.orders[2:] == ["resume", "resume"]
    awaited.discard()
    assert said.orders[4:] == ["cancel"]
