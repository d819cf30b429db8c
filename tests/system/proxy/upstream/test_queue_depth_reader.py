"""Tests that queue depths are read from engines over HTTP, and that no engine can harm the reader."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from kvparams.instances import Instance, Role
from kvparams.routing.engine_metrics import MovedBytes
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.event_loop.clock import MonotonicClock
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.queue_depth_reader import QueueDepthReader
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.proxy.shared_site import Waiter, facts
from tests.support.waiting import until

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b"


def metrics(running: int, waiting: int = 0) -> bytes:
    text = b'vllm:num_requests_running{engine="0"} %d.0\nvllm:num_requests_waiting{engine="0"} %d.0\n'
    body = text % (running, waiting)
    return WHOLE % (len(body), body)


class Engine:
    """Answers every request with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"GET /metrics ")
                self.asked += 1
                writer.write(self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class Read:
    """A fleet of one engine whose queue depth is read."""

    def __init__(self, engine: Engine, fleet: Fleet, reader: QueueDepthReader) -> None:
        self.engine = engine
        self.fleet = fleet
        self.reader = reader

    @property
    def member(self) -> Member:
        (member,) = self.fleet.members
        return member


@asynccontextmanager
async def read(answer: bytes) -> AsyncGenerator[Read]:
    """Reads an engine that answers so."""
    loop = asyncio.get_running_loop()
    engine = Engine(answer)
    others = asyncio.all_tasks()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    instances = [Instance("p", "b", Role.PREFILL, url, "nixl")]
    fleet = Fleet(instances, {role: LeastLoad() for role in Role}, loop.time, loop.call_later)
    pools = UpstreamPools(lambda each: UpstreamConnectionPool(each.url, UpstreamLimits(connections=8)))
    for member in fleet.members:
        pools.joined(member)
    fleet.add_listener(pools)
    reader = QueueDepthReader(loop, MonotonicClock(loop.time), fleet, pools)
    reader.start()
    try:
        yield Read(engine, fleet, reader)
    finally:
        reader.close()
        fleet.close()
        pools.close()
        server.close()
        await until(lambda: not asyncio.all_tasks() - others - {asyncio.current_task()})


async def test_what_it_says_of_adapters_corrects_the_slots() -> None:
    body = b'vllm:lora_requests_info{max_lora="2",waiting_lora_adapters="b",running_lora_adapters="b"} 1.7e9\n'
    text = metrics(0).partition(b"\r\n\r\n")[2] + body
    async with read(WHOLE % (len(text), text)) as found:
        member = found.member
        found.fleet.record_probe(member, True, frozenset("mabc"), None, None, "m", ("a", "c", "b"))
        slots = member.adapter_slots
        assert slots is not None
        slots.forget("b")
        await until(lambda: slots.capacity == 2)
        assert slots.loaded == ["c", "b"]


@pytest.mark.parametrize("samples", [10_000, 30_000])
async def test_a_page_is_read_that_is_long_for_its_many_combinations_of_adapters(samples: int) -> None:
    labels = 'max_lora="2",running_lora_adapters="adapter-%d",waiting_lora_adapters="adapter-%d,adapter-%d"'
    lines = (f"vllm:lora_requests_info{{{labels % (at, at, at)}}} {1.7e9 + at}\n" for at in range(samples))
    text = metrics(3).partition(b"\r\n\r\n")[2] + "".join(lines).encode()
    assert len(text) > 1 << 20
    async with read(WHOLE % (len(text), text)) as found:
        member, results = found.member, found.reader.results
        found.fleet.record_probe(member, True, frozenset("ma"), None, None, "m", ("a",))
        await until(lambda: results.total() > 0)
        is_read = len(text) <= 2 << 20  # the control: there is a limit
        assert results == ({"read": 1} if is_read else {"failed": 1})
        assert member.foreign == (3 if is_read else 0)
        slots = member.adapter_slots
        assert slots is not None
        assert (slots.capacity == 2) is is_read


async def test_what_the_engine_has_beyond_our_legs_counts_as_load() -> None:
    async with read(metrics(2, 3)) as found:
        member = found.member
        await until(lambda: member.foreign == 5)
        assert (member.in_flight, member.own_in_flight) == (5, 0)
        request = facts("one", tokens=100)
        taken = found.fleet.acquire(Role.PREFILL, request, (), Waiter(request))
        assert taken is member.instance
        await until(lambda: member.foreign == 4)  # it is one of the five
        assert (member.foreign_tokens, member.tokens, member.own_tokens) == (400, 500, 100)
        found.engine.answer = metrics(1)
        await until(lambda: member.foreign == 0)
        assert member.in_flight == member.own_in_flight == 1
        assert found.reader.results["read"] >= 3
        assert not found.reader.results["refused"] + found.reader.results["failed"]


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", None),
        (WHOLE % (12, b"up 1\nvllm: 1"), None),
        (WHOLE % (30, b"vllm:num_requests_running NaN\n"), "refused"),
        (WHOLE % (29, b"vllm:num_requests_running -1\n"), "refused"),
        (WHOLE % ((2 << 20) + 1, b"x" * ((2 << 20) + 1)), "failed"),
        (b"\x00\x01\x02", "failed"),
    ],
    ids=["none", "others", "not a number", "negative", "too long", "no HTTP"],
)
async def test_what_is_no_queue_depth_changes_nothing(answer: bytes, result: str | None) -> None:
    async with read(answer) as found:
        await until(lambda: found.engine.asked >= 1)
        if result is not None:
            await until(lambda: found.reader.results[result] >= 1)
        assert (found.member.in_flight, found.member.foreign) == (0, 0)
        assert found.member.ready
        assert not found.reader.results["read"]


@pytest.mark.parametrize("depth", [b"", b"vllm:num_requests_running 0\n"], ids=["bytes alone", "both"])
async def test_moved_bytes_are_read_with_and_without_a_depth(depth: bytes) -> None:
    def says(moved: int) -> bytes:
        body = depth + b"vllm:kvparams_bytes_loaded_total %d\n" % moved
        return WHOLE % (len(body), body)

    async with read(says(5)) as found:
        await until(lambda: found.member.moved_bytes == MovedBytes(None, 5, None))
        found.engine.answer = says(7)
        await until(lambda: found.member.moved_bytes == MovedBytes(None, 7, None))


async def test_an_engine_that_never_answers_is_given_up_and_its_last_figure_fades() -> None:
    async with read(metrics(3)) as found:
        await until(lambda: found.member.foreign == 3)
        found.engine.answer = b""
        await until(lambda: found.reader.results["failed"] >= 1)
        await until(lambda: found.member.foreign < 3)
        assert found.member.ready


async def test_an_engine_that_leaves_takes_its_load_with_it() -> None:
    async with read(metrics(3)) as found:
        member = found.member
        await until(lambda: member.foreign == 3)
        found.fleet.remove("p")
        assert (member.in_flight, member.foreign) == (0, 0)
