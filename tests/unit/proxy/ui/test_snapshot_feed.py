"""Tests that viewers are bounded, share their bytes, and cost nothing while nobody looks."""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import cast

import pytest

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.ui.snapshot_feed import MOST_VIEWERS, SnapshotFeed
from tests.support.virtual_loop import VirtualLoop
from tests.unit.proxy.ui.test_snapshot import engine, part, request


class Source:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.engines = [engine()]
        self.fails = False

    async def collect(self) -> Sequence[Mapping[str, object]]:
        self.asked += 1
        if self.fails:
            raise ProxyError(503, "service_unavailable", "no")
        return [part(engines=self.engines)]


def feed_of(loop: asyncio.AbstractEventLoop, source: Source) -> SnapshotFeed:
    return SnapshotFeed(loop, "1", source.collect)


def test_nothing_is_collected_while_nobody_looks() -> None:
    source = Source()

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        await asyncio.sleep(60)
        assert source.asked == 0
        viewer = feed.join(is_admin=False)
        await asyncio.sleep(10.5)
        assert 10 <= source.asked <= 12
        feed.leave(viewer)
        await asyncio.sleep(5)
        asked = source.asked
        await asyncio.sleep(60)
        assert source.asked == asked
        await feed.close()

    VirtualLoop().run(run())


def test_all_viewers_get_the_same_bytes_and_a_late_one_at_once() -> None:
    source = Source()

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        viewers = [feed.join(is_admin=number % 2 == 0) for number in range(4)]
        first = [await viewer.next() for viewer in viewers]
        assert first[0] is not None
        assert all(each is first[0] for each in first)
        late = feed.join(is_admin=False)
        assert await late.next() is first[0]
        assert source.asked == 1
        await feed.close()
        assert await late.next() is None

    VirtualLoop().run(run())


def test_only_admins_see_a_name_that_contains_an_address() -> None:
    source = Source()
    source.engines = [engine("d-10.0.0.1", public_id="decode-abc"), engine("d1")]

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        seen = {is_admin: await feed.latest(is_admin=is_admin) for is_admin in (True, False)}
        assert source.asked == 1
        assert b"10.0.0.1" in seen[True]
        assert b"10.0.0.1" not in seen[False]
        assert b"decode-abc" in seen[False]
        await feed.close()

    VirtualLoop().run(run())


def test_the_address_of_an_engine_that_has_left_is_hidden_too() -> None:
    source = Source()
    gone = "decode-10.0.0.9-8000"
    row = request("r", route=[["decode", gone]], spans=[["decode", gone, 0.0], ["done", "", 1.0]])

    async def collect() -> Sequence[Mapping[str, object]]:
        return [part(engines=source.engines, failed=[row])]

    async def run() -> None:
        feed = SnapshotFeed(asyncio.get_running_loop(), "1", collect)
        assert b"10.0.0.9" in await feed.latest(is_admin=True)
        seen = await feed.latest(is_admin=False)
        assert b"10.0.0.9" not in seen
        (shown,) = json.loads(seen)["requests"]["failed"]
        assert shown["route"][0][1] == shown["spans"][0][1] != ""
        assert shown["spans"][1][1] == ""
        await feed.close()

    VirtualLoop().run(run())


def test_workers_that_do_not_answer_at_first_are_no_fault() -> None:
    source = Source()
    source.fails = True

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        viewer = feed.join(is_admin=False)
        await asyncio.sleep(0.1)
        with pytest.raises(ProxyError):
            await feed.latest(is_admin=False)
        feed.join(is_admin=True)
        source.fails = False
        assert await viewer.next() is not None
        await feed.close()

    VirtualLoop().run(run())


def test_a_slow_viewer_keeps_the_latest_snapshot_only() -> None:
    source = Source()

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        viewer = feed.join(is_admin=False)
        await asyncio.sleep(30.5)
        snapshot = await viewer.next()
        assert snapshot is not None
        assert snapshot is await feed.latest(is_admin=False)
        waiting = asyncio.ensure_future(viewer.next())
        await asyncio.sleep(0)
        assert not waiting.done()  # no other one was kept
        await feed.close()
        assert await waiting is None

    VirtualLoop().run(run())


def test_so_many_viewers_and_no_more() -> None:
    source = Source()

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        viewers = [feed.join(is_admin=False) for _ in range(MOST_VIEWERS)]
        with pytest.raises(ProxyError) as refused:
            feed.join(is_admin=True)
        assert refused.value.status == 503
        assert refused.value.name == "too_many_viewers"
        feed.leave(viewers[0])
        feed.join(is_admin=False)
        feed.end_viewers()
        assert await viewers[1].next() is None
        with pytest.raises(ProxyError):
            feed.join(is_admin=False)
        with pytest.raises(ProxyError):
            await feed.latest(is_admin=False)
        await feed.close()

    VirtualLoop().run(run())


def test_two_looks_soon_after_each_other_give_rates_without_a_viewer() -> None:
    source = Source()

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        first = json.loads(await feed.latest(is_admin=False))
        assert set(first["rates"].values()) == {None}
        await asyncio.sleep(1.1)
        second = json.loads(await feed.latest(is_admin=False))
        assert set(second["rates"].values()) == {0.0}
        await asyncio.sleep(60)
        third = cast("dict[str, dict[str, float | None]]", json.loads(await feed.latest(is_admin=False)))
        assert set(third["rates"].values()) == {None}
        await feed.close()

    VirtualLoop().run(run())


def test_viewers_stay_while_the_workers_do_not_answer() -> None:
    source = Source()

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        viewer = feed.join(is_admin=False)
        assert await viewer.next() is not None
        source.fails = True
        waiting = asyncio.ensure_future(viewer.next())
        await asyncio.sleep(10)
        assert not waiting.done()
        source.fails = False
        assert await waiting is not None
        await feed.close()

    VirtualLoop().run(run())


def test_a_fault_ends_the_streams_and_the_next_viewer_is_served() -> None:
    source = Source()

    async def run() -> None:
        feed = feed_of(asyncio.get_running_loop(), source)
        viewer = feed.join(is_admin=False)
        assert await viewer.next() is not None
        works = feed._collect  # pyright: ignore[reportPrivateUsage]
        feed._collect = None  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        assert await viewer.next() is None
        feed.leave(viewer)
        feed._collect = works  # pyright: ignore[reportPrivateUsage]
        again = feed.join(is_admin=False)
        assert await again.next() is not None
        await feed.close()

    loop = VirtualLoop()
    loop.run(run())


def test_no_step_of_a_snapshot_holds_up_the_event_loop() -> None:
    """16 workers that know 500 engines each: 2 MB of JSON. The whole takes longer than one step may (the control)."""
    engines = [
        engine(f"prefill-{number}", role="prefill", group=f"rack-{number % 12}", transferred=1.5e9, cache_usage=0.25)
        for number in range(500)
    ]
    rows = [request(f"request-{number}") for number in range(16)]
    lines = [
        json.dumps(part(number, engines=engines, running=rows, recent=rows, slow=rows)).encode() for number in range(16)
    ]
    longest: list[float] = []
    wholes: list[float] = []

    async def collect() -> Iterable[Mapping[str, object]]:
        return (json.loads(line) for line in lines)

    async def run() -> None:
        feed = SnapshotFeed(asyncio.get_running_loop(), "1", collect)
        for _ in range(5):
            steps = feed._encode_snapshot(await collect(), 1.0)  # pyright: ignore[reportPrivateUsage]
            times = [time.thread_time()]
            for _ in steps:
                times.append(time.thread_time())
            times.append(time.thread_time())
            longest.append(max(after - before for before, after in pairwise(times)))
            wholes.append(times[-1] - times[0])
        assert len(json.loads(await feed.latest(is_admin=True))["engines"]) == 500
        await feed.close()

    VirtualLoop().run(run())
    assert min(longest) < 0.02 < min(wholes)
