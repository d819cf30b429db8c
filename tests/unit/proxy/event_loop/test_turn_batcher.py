"""Tests that the events of one turn of the event loop are handled kind by kind, in order, without loss."""

import asyncio
from functools import partial

import pytest

from kvparams_proxy.event_loop.turn_batcher import TurnBatcher


async def test_what_comes_in_one_turn_is_acted_on_kind_by_kind() -> None:
    loop = asyncio.get_running_loop()
    done: list[str] = []
    one, other = TurnBatcher(loop), TurnBatcher(loop)
    for number in range(3):
        one.schedule(partial(done.append, f"one {number}"))
        other.schedule(partial(done.append, f"other {number}"))
    assert not done  # whoever has come is not in the middle of somebody else's work
    await asyncio.sleep(0)
    assert done == ["one 0", "one 1", "one 2", "other 0", "other 1", "other 2"]
    await asyncio.sleep(0)
    assert len(done) == 6  # once


async def test_what_comes_of_an_act_has_a_turn_of_its_own() -> None:
    done: list[int] = []
    together = TurnBatcher(asyncio.get_running_loop())

    def act(number: int) -> None:
        done.append(number)
        if number < 3:
            together.schedule(partial(act, number + 1))

    together.schedule(partial(act, 0))
    for turns in range(1, 5):
        await asyncio.sleep(0)
        assert done == list(range(turns))


async def test_a_fault_keeps_nobody_else_from_being_acted_on(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    together = TurnBatcher(asyncio.get_running_loop())
    together.schedule(partial(done.append, 1))
    together.schedule(partial(done.__delitem__, 99))
    together.schedule(partial(done.append, 2))
    await asyncio.sleep(0)
    assert done == [1, 2]
    assert "could not be acted on" in caplog.text
    together.schedule(partial(done.append, 3))
    await asyncio.sleep(0)
    assert done == [1, 2, 3]
