"""One attempt and the node that it hears: what is said to that node again, as it may not have heard it."""

import asyncio
from typing import cast

from kvparams_proxy.queue.awaited import Awaited, Owner
from kvparams_proxy.queue.messages import Taken

from .scenes import Heard


class Said:
    """Of an `Owner` what is used."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    @property
    def now(self) -> object:
        return asyncio.get_running_loop().time

    def tell(self, node: str, order: str, id: str, settled: object = None) -> None:
        self.orders.append(order)

    def over(self, id: str) -> None:
        """Nothing is kept."""


async def test_a_node_that_comes_back_hears_the_last_word_again() -> None:
    """`resume` may be lost with the broker as `pause` may: without it the answer would never go on."""
    said = Said()
    awaited = Awaited(cast("Owner", said), "p.1", Heard())
    taken = Taken("p.1", "d")
    awaited.hear(taken)
    awaited.hear(taken)
    assert said.orders == []
    awaited.pause()
    awaited.hear(taken)
    assert said.orders == ["pause", "pause"]
    awaited.resume()
    awaited.hear(taken)
    assert said.orders[2:] == ["resume", "resume"]
    awaited.discard()
    assert said.orders[4:] == ["cancel"]
