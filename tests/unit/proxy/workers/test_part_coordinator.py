"""Tests that a snapshot has the parts of one round: those that workers made when they were asked for it."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.channel import Frame, FrameKind
from kvparams_proxy.workers.metrics_hub import MetricsHub
from kvparams_proxy.workers.part_coordinator import PartCoordinator
from kvparams_proxy.workers.worker_process import WorkerProcess
from tests.support.virtual_loop import VirtualLoop

NUMBER = b"\x00" * 7 + b"\x07"


class Worker:
    """A worker whose end of the channel is here."""

    is_ready = True

    def __init__(self, serial: int) -> None:
        self.identity = WorkerIdentity(serial, 2, serial, Path("/nowhere"))
        self.asked: list[bytes] = []
        """The payloads of `COLLECT_PART`."""
        self.answers: list[list[dict[str, Any]]] = []

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        if kind is FrameKind.COLLECT_PART:
            self.asked.append(payload)
        else:
            assert kind is FrameKind.PARTS
            assert payload.startswith(NUMBER)
            self.answers.append([json.loads(line) for line in payload[len(NUMBER) :].splitlines()])


class Rig:
    """A coordinator with two workers."""

    def __init__(self) -> None:
        self.coordinator = PartCoordinator(MetricsHub())
        self.workers = [Worker(1), Worker(2)]
        for worker in self.workers:
            self.coordinator.started(cast("WorkerProcess", worker))

    def received(self, worker: Worker, kind: FrameKind, payload: bytes) -> None:
        self.coordinator.received(cast("WorkerProcess", worker), Frame(kind, payload))

    async def want(self, worker: Worker) -> None:
        """The worker is asked for a snapshot."""
        self.received(worker, FrameKind.PARTS_WANTED, NUMBER)
        await passed(0.01)

    async def answer(self, worker: Worker, place: int, value: int) -> None:
        """The worker answers what it was asked at this place."""
        self.received(worker, FrameKind.PART, worker.asked[place] + json.dumps({"worker": value}).encode())
        await passed(0.01)


async def passed(seconds: float) -> None:
    """Lets time pass on the virtual clock."""
    await asyncio.sleep(seconds)


def numbers(parts: list[dict[str, Any]]) -> list[int]:
    return sorted(part["worker"] for part in parts if "worker" in part)


def test_all_parts_are_in_the_answer() -> None:
    async def run() -> None:
        rig = Rig()
        one, other = rig.workers
        await rig.want(one)
        await rig.answer(one, 0, 1)
        assert one.answers == []
        await rig.answer(other, 0, 2)
        assert [numbers(each) for each in one.answers] == [[1, 2]]
        assert other.answers == []

    VirtualLoop().run(run())


def test_a_late_part_does_not_count_for_the_next_round() -> None:
    async def run() -> None:
        rig = Rig()
        one, other = rig.workers
        await rig.want(one)
        await rig.answer(one, 0, 1)
        await passed(3.0)
        assert [numbers(each) for each in one.answers] == [[1]]  # the other one was too slow
        await rig.want(one)
        await rig.answer(other, 0, 2)  # of the first round
        await rig.answer(one, 1, 11)
        assert len(one.answers) == 1  # its part of this round is still awaited
        await rig.answer(other, 1, 12)
        assert numbers(one.answers[1]) == [11, 12]
        await rig.want(other)
        assert [part.get("worker") for part in other.answers[0]] == [12, 11, None]  # that of the worker that asks first

    VirtualLoop().run(run())


def test_a_worker_that_exits_is_not_waited_for() -> None:
    async def run() -> None:
        rig = Rig()
        one, other = rig.workers
        await rig.want(one)
        await rig.answer(one, 0, 1)
        rig.coordinator.ended(cast("WorkerProcess", other))
        await passed(0.01)
        assert [numbers(each) for each in one.answers] == [[1]]

    VirtualLoop().run(run())


def test_an_answer_that_fails_costs_no_later_one(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        rig = Rig()
        one, other = rig.workers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(other, "send", None)  # a fault of any kind
            await rig.want(one)
        await passed(3.0)
        assert one.answers == []
        await rig.want(one)
        await rig.answer(one, -1, 1)
        await rig.answer(other, -1, 2)
        assert [numbers(each) for each in one.answers] == [[1, 2]]

    VirtualLoop().run(run())
    assert "could not be collected" in caplog.text
