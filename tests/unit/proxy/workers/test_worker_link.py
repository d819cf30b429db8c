"""Tests the messages that a worker sends to its supervisor and receives from it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.telemetry.exposition import MetricsExposition
from kvparams_proxy.telemetry.metric_snapshots import decode_metric
from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers import worker_link
from kvparams_proxy.workers.channel import Frame, FrameKind, encode_frame, read_frame
from kvparams_proxy.workers.worker_link import WorkerLink
from tests.support.waiting import until


class Counts(Collector):
    """A counter, or a gauge."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def collect(self) -> list[Metric]:
        return [self.metric]


class Supervisor:
    """The other end of the channel."""

    def __init__(self, link: WorkerLink, sock: socket.socket) -> None:
        self.link = link
        self.sock = sock
        self.commands: list[FrameKind] = []

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.sock)
        counter = Counts(CounterMetricFamily("counted", "text", value=3))
        gauge = Counts(GaugeMetricFamily("measured", "text", value=4))
        self.link.attach(MetricsExposition(counter, gauges=[gauge]))
        await self.link.open(self.commands.append)

    async def snapshot(self) -> tuple[dict[str, float], Frame]:
        """Reads a snapshot; its values and its end."""
        found: dict[str, float] = {}
        async with asyncio.timeout(5):
            while (frame := await read_frame(self.reader)) is not None:
                if frame.kind is not FrameKind.FAMILY:
                    return found, frame
                name, _, data = frame.payload.partition(b"\n")
                found[name.decode()] = decode_metric(data).samples[0].value
        raise AssertionError("the channel is closed")


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    ours, theirs = socket.socketpair()
    found = Supervisor(WorkerLink(theirs, WorkerIdentity(1, 2, 1, Path("/nowhere"))), ours)
    await found.open()
    yield found
    await found.link.close()
    found.writer.close()


async def test_commands_arrive_and_the_end_of_the_supervisor_is_one(supervisor: Supervisor) -> None:
    for kind in (FrameKind.DRAIN, FrameKind.RETIRE):
        supervisor.writer.write(encode_frame(kind))
    supervisor.writer.close()
    await until(lambda: len(supervisor.commands) == 3)
    assert supervisor.commands == [FrameKind.DRAIN, FrameKind.RETIRE, FrameKind.CUT]


async def test_a_complete_snapshot_is_sent_on_demand(supervisor: Supervisor) -> None:
    supervisor.writer.write(encode_frame(FrameKind.COLLECT, b"7"))
    values, end = await supervisor.snapshot()
    assert end == Frame(FrameKind.COLLECTED, b"7")
    assert (values["counted"], values["measured"]) == (3, 4)


async def test_counters_are_sent_without_being_asked_for_and_at_the_end(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "_EVERY_S", 0.01)
    supervisor.link.ready()
    assert await read_frame(supervisor.reader) == Frame(FrameKind.READY, b"")
    values, end = await supervisor.snapshot()
    assert end == Frame(FrameKind.COLLECTED, b"")
    assert values["counted"] == 3
    assert "measured" not in values
    await supervisor.link.close()
    while end.kind is not FrameKind.ENDED:
        values, end = await supervisor.snapshot()
    assert values["counted"] == 3
    assert await read_frame(supervisor.reader) is None


@pytest.mark.parametrize("text", [b"", b"a 1\nb 2\n"])
async def test_the_metrics_of_all_workers_come_from_the_supervisor(supervisor: Supervisor, text: bytes) -> None:
    asked = [asyncio.create_task(supervisor.link.scrape(f"text/{number}")) for number in range(12)]
    numbers: list[bytes] = []
    for number in range(12):  # the number of the eleventh is a line feed, as bytes
        frame = await read_frame(supervisor.reader)
        assert frame is not None
        assert (frame.kind, frame.payload[8:]) == (FrameKind.SCRAPE, b"text/%d" % number)
        numbers.append(frame.payload[:8])
    for number in reversed(range(12)):
        supervisor.writer.write(encode_frame(FrameKind.EXPOSITION, numbers[number] + b"type/%d\n" % number + text))
    assert await asyncio.gather(*asked) == [(text, f"type/{number}") for number in range(12)]


async def test_a_supervisor_that_does_not_answer_is_not_waited_for(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "_ANSWER_S", 0.01)
    with pytest.raises(ProxyError) as caught:
        await supervisor.link.scrape("")
    assert (caught.value.status, caught.value.code) == (503, "metrics_timeout")
