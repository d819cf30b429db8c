"""Tests messages to a broker that does not state its limits: the too large one is found, and no other suffers."""

import asyncio
from collections import Counter
from typing import Any, Final, cast

import pytest
from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelClosed, ChannelInvalidStateError, ChannelPreconditionFailed
from pamqp.commands import Basic

from kvparams_proxy.queue.outbox import DeliveryOutcome, OutboundMessage, Outbox

LIMIT_BYTES: Final = 1000
SILENT: Final = (ChannelPreconditionFailed("PRECONDITION_FAILED"), ChannelClosed(311, "CONTENT_TOO_LARGE"))


class Narrow:
    """A channel to such a broker: it is closed when too much comes, and whatever flew fails."""

    def __init__(self, how: Exception) -> None:
        self.closed = asyncio.Event()
        self.bodies: list[bytes] = []
        self._how = how
        self._flying: list[asyncio.Future[Basic.Ack]] = []

    async def basic_publish(self, body: bytes, **_: object) -> Basic.Ack:
        if self.closed.is_set():
            raise ChannelInvalidStateError("closed")
        answer: asyncio.Future[Basic.Ack] = asyncio.get_running_loop().create_future()
        self._flying.append(answer)
        asyncio.get_running_loop().call_soon(self._settle, answer, body)
        return await answer

    def _settle(self, answer: "asyncio.Future[Basic.Ack]", body: bytes) -> None:
        if self.closed.is_set():
            return
        if len(body) <= LIMIT_BYTES:
            self._flying.remove(answer)
            self.bodies.append(body)
            answer.set_result(Basic.Ack())
            return
        self.closed.set()
        for each in self._flying:
            each.set_exception(self._how)


class Sent:
    """An outbox that gets another channel as often as one is closed."""

    def __init__(self, how: Exception) -> None:
        self.outbox = Outbox(1 << 30)
        self.fates: dict[str, DeliveryOutcome] = {}
        self.channels: list[Narrow] = []
        self._how = how

    def put(self, name: str, size: int, *, joins: bool) -> None:
        body = name.encode().ljust(size, b"-")

        def settled(fate: DeliveryOutcome) -> None:
            assert name not in self.fates
            self.fates[name] = fate

        self.outbox.put(OutboundMessage("queue", body, settled, joins=joins))

    async def all_settled(self) -> None:
        async with asyncio.timeout(20):
            while True:
                channel = Narrow(self._how)
                self.channels.append(channel)
                self.outbox.opened(cast("AbstractChannel", cast("Any", channel)))
                closed = asyncio.ensure_future(channel.closed.wait())
                while len(self.outbox) and not closed.done():  # noqa: ASYNC110  it tells nobody
                    await asyncio.sleep(0)
                closed.cancel()
                if not len(self.outbox):
                    return
                self.outbox.closed()


@pytest.mark.parametrize("how", SILENT, ids=["406", "311"])
async def test_the_largest_that_flew_was_too_large(how: Exception) -> None:
    sent = Sent(how)
    for number in range(20):
        sent.put(f"{number}", 1001 if number == 7 else 900, joins=False)
    sent.put("large", 5000, joins=False)
    await sent.all_settled()
    assert {name for name, fate in sent.fates.items() if fate != "kept"} == {"7", "large"}
    assert set(sent.fates.values()) == {"kept", "too large"}
    assert len(sent.channels) == 3  # each that was too large has cost one


@pytest.mark.parametrize("how", SILENT, ids=["406", "311"])
async def test_letters_that_are_too_large_only_together_go_one_by_one(how: Exception) -> None:
    sent = Sent(how)
    for number in range(150):
        sent.put(f"{number}", 400, joins=True)
    sent.put("large", 1500, joins=True)
    for number in range(150, 300):
        sent.put(f"{number}", 400, joins=True)
    await sent.all_settled()
    assert Counter(sent.fates.values()) == {"kept": 300, "too large": 1}
    assert len(sent.channels) == 3  # the first learns that they go alone, the second which one does not
    assert [len(body) for channel in sent.channels for body in channel.bodies].count(400) >= 300


async def test_on_another_broker_they_go_together_again() -> None:
    sent = Sent(SILENT[0])
    for number in range(4):
        sent.put(f"{number}", 400, joins=True)
    await sent.all_settled()
    assert len(sent.channels) == 2
    sent.outbox.closed()
    sent.put("one", 400, joins=True)
    sent.put("more", 400, joins=True)
    await sent.all_settled()
    assert len(sent.channels) == 3
    assert [len(body) for body in sent.channels[-1].bodies] == [800]
    assert set(sent.fates.values()) == {"kept"}
