"""Tests the answers to siblings that have missed something, beside what `test_fleet_sync.py` shows of whole proxies."""

import asyncio
from collections.abc import Iterator
from struct import pack

import pytest

from kvparams.replication.entries import Entry, LegDequeued
from kvparams.replication.messages import MessageKind
from kvparams.replication.siblings import Sibling
from kvparams_proxy.coordination.missed_entries import MissedEntries
from tests.support.virtual_loop import VirtualLoop


class Sender:
    """Remembers what is sent, and for how many seconds it was asked."""

    def __init__(self, pauses: int = 0) -> None:
        self.loop = VirtualLoop()
        self.asked: list[float] = []
        self.told: list[Entry] = []
        self.answered: list[int] = []
        self.begun = asyncio.Event()
        self._pauses = pauses
        self.missed = MissedEntries(self.loop, self, self._recent)

    def _recent(self, seconds: float) -> Iterator[Entry | None]:
        self.asked.append(seconds)
        self.begun.set()
        for _ in range(self._pauses):
            yield None
        yield LegDequeued(len(self.asked), True)

    def publish(self, entry: Entry) -> None:
        self.told.append(entry)

    def flush(self) -> None:
        pass

    def send_to(self, receiver: int, kind: MessageKind, payload: bytes) -> None:
        assert (kind, payload) == (MessageKind.REPEATED, b"")
        self.answered.append(receiver)

    def ask(self, number: int, seconds: float) -> None:
        self.missed.answer_soon(Sibling(number, 0.0, 0.0), memoryview(pack("<f", seconds)))

    def after(self, seconds: float) -> None:
        self.loop.run_until(self.loop.time() + seconds)
        assert not self.loop.faults


@pytest.mark.parametrize("seconds", [0.0, -5.0, 30.0, float("inf"), float("-inf"), float("nan")])
def test_whatever_somebody_asks_for_is_answered_once(seconds: float) -> None:
    sender = Sender()
    sender.ask(1, seconds)
    sender.after(5.0)
    assert sender.answered == [1]
    assert len(sender.told) == len(sender.asked) == 1
    assert not sender.asked[0] > 2e9
    if seconds == 30.0:
        assert 30.4 < sender.asked[0] < 31.0, "and what was told while requests were collected"


@pytest.mark.parametrize("payload", [b"", b"\0\0\0"])
def test_a_request_that_is_cut_off_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="cut off"):
        Sender().missed.answer_soon(Sibling(1, 0.0, 0.0), memoryview(payload))


def test_several_are_answered_together_and_those_that_come_meanwhile_afterwards() -> None:
    sender = Sender(pauses=3)
    sender.ask(1, 5.0)
    sender.ask(2, 50.0)
    sender.loop.call_later(0.5, lambda: sender.loop.call_soon(sender.ask, 3, 7.0))
    sender.after(5.0)
    assert sender.answered == [1, 2, 3]
    assert [round(seconds) for seconds in sender.asked] == [50, 8]


@pytest.mark.parametrize("is_answering", [False, True], ids=["before it answers", "while it answers"])
def test_nothing_is_left_when_it_closes(is_answering: bool) -> None:
    sender = Sender(pauses=1000)

    async def closes() -> None:
        sender.ask(1, 5.0)
        if is_answering:
            await sender.begun.wait()
        await sender.missed.close()

    sender.loop.run(closes())
    assert bool(sender.asked) is is_answering
    sender.after(10.0)
    assert sender.answered == []
    assert sender.loop.left() == []
