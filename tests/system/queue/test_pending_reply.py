"""Tests what a prefill node and a decode node say to each other when one of them has found the broker again."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from kvparams_proxy.queue.messages import WorkTaken
from kvparams_proxy.queue.pending_reply import PendingReply, ReplyOwner
from tests.support.virtual_loop import VirtualLoop
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


class Link(Said):
    """The same on a virtual clock, with a broker that may be away."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self.opened_at: float | None = None
        """None while there is no connection."""

    @property
    def now(self) -> Callable[[], float]:
        return self._loop.time

    @property
    def call_later(self) -> Callable[..., asyncio.TimerHandle]:
        return self._loop.call_later

    @property
    def connected_for_s(self) -> float:
        return 0.0 if self.opened_at is None else self._loop.time() - self.opened_at

    def open(self, awaited: PendingReply) -> None:
        awaited.on_broker_opened()
        self.opened_at = self._loop.time()


class Answer(Heard):
    """What a client hears, on no loop."""

    def __init__(self) -> None:
        self.errors: list[object] = []

    def on_done(self, error: object) -> None:
        self.errors.append(error)


TAKEN = WorkTaken("p.1", "d")


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_answer_whose_last_results_are_lost_with_their_queue_ends(goes_on: bool) -> None:
    """The broker deletes a queue of results that nobody reads. The node has sent its last part and lets go of it."""
    loop = VirtualLoop()
    link, answer = Link(loop), Answer()
    awaited = PendingReply(cast("ReplyOwner", link), "p.1", answer)
    awaited.on_result(TAKEN)
    loop.run_until(loop.time() + 20.0)
    assert link.orders == []
    link.open(awaited)
    for _ in range(20):
        loop.run_until(loop.time() + 1.0)
        if goes_on:
            awaited.on_result(TAKEN)
    assert bool(answer.errors) is not goes_on
    assert set(link.orders) == {"ask"}
    awaited.discard()
    loop.run_until(loop.time() + 20.0)
    assert len(answer.errors) == (0 if goes_on else 1)


def test_a_node_is_not_silent_while_there_is_no_broker() -> None:
    loop = VirtualLoop()
    link, answer = Link(loop), Answer()
    awaited = PendingReply(cast("ReplyOwner", link), "p.1", answer)
    awaited.on_result(TAKEN)
    link.open(awaited)
    link.opened_at = None
    loop.run_until(loop.time() + 20.0)
    assert answer.errors == []
    link.open(awaited)
    loop.run_until(loop.time() + 5.0)
    assert answer.errors == []
    loop.run_until(loop.time() + 5.0)
    assert len(answer.errors) == 1, "the control"


def test_work_that_nobody_has_taken_is_not_asked_about() -> None:
    loop = VirtualLoop()
    link = Link(loop)
    PendingReply(cast("ReplyOwner", link), "p.1", Answer()).on_broker_opened()
    loop.run_until(loop.time() + 20.0)
    assert link.orders == []
