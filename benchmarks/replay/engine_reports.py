"""The reports of simulated engines: metrics with their queue depths, and KV events.

Proxies read both with the code that reads those of real engines.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import numpy as np

from benchmarks.replay.trace import BLOCK
from kvparams.instances import Instance
from kvparams.kv_events.model import BlockLocation, BlockRemoved, BlockStored, EventBatch, EventSource
from kvparams_proxy.event_loop.clock import MonotonicClock
from kvparams_proxy.fleet.queue_depth_reader import QueueDepthReader
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.types import ResponseHead, ResponseSink, UpstreamBody, UpstreamError, UpstreamRequest
from tests.support.proxy.shared_site import SharedProxy
from tests.support.virtual_loop import VirtualLoop

__all__ = ["EngineReports"]

_DEVICE: Final = BlockLocation("device")
_WIDTH: Final = 8


class EngineReports:
    """The queue depths and KV events of all engines of one fleet."""

    def __init__(self, loop: VirtualLoop, workers: int, delay_s: Callable[[], float]) -> None:
        """`delay_s` is the time of a message in one direction."""
        self.depths = [0] * workers
        self.loop = loop
        self.delay_s = delay_s
        self._random = Random(1)
        self._parents: dict[int, int] = {}
        """The block in front of each."""

    def read_depths(self, replica: SharedProxy) -> None:
        """Makes a proxy read the queue depths from now on."""
        pools = UpstreamPools(lambda instance: _MetricsUpstream(self, _worker(instance)))
        for member in replica.fleet.members:
            pools.joined(member)
        # asyncio's interface, as far as the reader uses it.
        random = Random(self._random.random())
        QueueDepthReader(self.loop, MonotonicClock(self.loop.time), replica.fleet, pools, random).start()

    def send_events(self, replica: SharedProxy) -> None:
        """Makes a proxy accept the KV events of all engines."""
        for member in replica.fleet.members:
            replica.prefixes.event_sources.add(member, lambda: None)

    def record_prompt(self, blocks: Sequence[int]) -> None:
        """Records which block stands in front of which."""
        self._parents.update(zip(blocks[1:], blocks, strict=False))

    def publish(self, replicas: Sequence[SharedProxy], worker: int, came: Sequence[int], went: Sequence[int]) -> None:
        """Tells proxies that blocks came to a worker's cache and went from there."""
        events = [self._stored(block) for block in reversed(came)]  # a cache names the last block first
        removed = BlockRemoved(_DEVICE, _names(went), _WIDTH)
        batch = EventBatch(EventSource(str(worker)), (*events, removed) if went else tuple(events))
        for replica in replicas:
            member = next(each for each in replica.fleet.members if _worker(each.instance) == worker)
            replica.prefixes.event_sources.apply(member, batch, "*")

    def _stored(self, block: int) -> BlockStored:
        parent = self._parents.get(block)
        tokens = np.full(BLOCK, block, np.uint32).tobytes()
        before = None if parent is None else _names([parent])
        return BlockStored(_DEVICE, _names([block]), _WIDTH, before, tokens, BLOCK)


class _MetricsUpstream:
    """An `Upstream` of an engine that answers with its metrics and nothing else."""

    has_own_key = False
    shared = False
    peer_addresses = ()
    open_connections = 0

    def __init__(self, engines: EngineReports, worker: int) -> None:
        self._engines = engines
        self._worker = worker

    def request(self, path: bytes, headers: bytes, body: UpstreamBody) -> UpstreamRequest:
        raise NotImplementedError

    def get(self, path: bytes, headers: bytes = b"") -> UpstreamRequest:
        return path, (b"",)

    def exchange(self, request: UpstreamRequest, sink: ResponseSink, *, once: bool = False) -> "_Exchange":
        engines = self._engines
        engines.loop.call_later(engines.delay_s(), self._answer, sink)
        return _Exchange()

    def close(self) -> None:
        """Has nothing to close."""

    def _answer(self, sink: ResponseSink) -> None:
        engines = self._engines
        text = b'vllm:num_requests_running{engine="0"} %d\n' % engines.depths[self._worker]
        engines.loop.call_later(engines.delay_s(), _finish, sink, text)


class _Exchange:
    """An `ExchangeHandle` that nothing interrupts."""

    def abort(self, error: UpstreamError) -> None: ...
    def discard(self) -> None: ...
    def half_close(self) -> bool:
        return False

    def pause(self) -> None: ...
    def resume(self) -> None: ...


def _finish(sink: ResponseSink, text: bytes) -> None:
    sink.on_head(ResponseHead(200))
    sink.on_body(text)
    sink.on_done(None)


def _worker(instance: Instance) -> int:
    return int(instance.id.rpartition("-")[2])


def _names(blocks: Sequence[int]) -> bytes:
    return np.array(blocks, ">u8").tobytes()
