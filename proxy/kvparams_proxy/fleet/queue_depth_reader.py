"""Reads each engine's queue depth from its `/metrics`, so that load from clients unknown to this proxy counts.

Engines without the metrics are left alone. Reading is limited in size and time, and never says whether an engine is
well: probes do.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.instances import Role
from kvparams.routing.foreign_load import ForeignLoad, MeanLeg
from kvparams.routing.queue_depth import QueueDepthError, parse_cache_usage, parse_moved_bytes, parse_queue_depth
from kvparams_proxy.event_loop.clock import Clock, ClockTimer
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError, UpstreamTimeout

__all__ = ["QueueDepthGauges", "QueueDepthReader"]

_PATH: Final = b"/metrics"
_EVERY_S: Final = 0.25
_UNSHARED_S: Final = 1.0
"""The interval while no engine has had foreign load for `_WATCHED_S`: most fleets have one proxy, or proxies that tell
each other everything."""
_WATCHED_S: Final = 60.0
_COST: Final = 25.0
"""The interval is at least so many times the time that a reading takes: it costs an engine 4 % of one core at most."""
_READINGS_PER_S: Final = 200
"""Of all engines together; each costs the proxy some 0.2 ms."""
_LONGEST_S: Final = 5.0
"""The longest interval: a reading counts until `kvparams.routing.foreign_load` takes it for stale."""
_TIMEOUT_S: Final = 1.0
_ABSENT_S: Final = 60.0
"""The interval for an engine that has no metrics, or none that can be read."""
_MAX_BYTES: Final = 1 << 20
_log: Final = logging.getLogger(__name__)


class QueueDepthReader:
    """Reads the queue depths of all members from when it starts until `close`: a `FleetListener`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        fleet: Fleet,
        pools: UpstreamPools,
        random: Random | None = None,
    ) -> None:
        """`pools` must have begun to listen to `fleet`."""
        self.loop: Final = loop
        self.clock: Final = clock
        self.fleet: Final = fleet
        self.pools: Final = pools
        self.mean_legs: Final = {role: MeanLeg() for role in Role}
        self.results: Final = Counter[str]()
        """Counts readings by result: `read`, `failed`, `refused`."""
        self.shown_until_s = 0.0
        """Until when `Member.cache_usage` and `Member.moved_bytes` are wanted, on the clock of `loop`: while somebody
        looks at them."""
        self._random = random or Random()
        self._shared_until = 0.0
        self._readers: dict[Member, _MemberReader] = {}

    def start(self) -> None:
        """Begins to read. Engines are read at different moments."""
        for member in self.fleet.members:
            self.joined(member)
        self.fleet.add_listener(self)

    def close(self) -> None:
        """Stops reading."""
        self.fleet.remove_listener(self)
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def joined(self, member: Member) -> None:
        """See `FleetListener`."""
        self._readers[member] = _MemberReader(self, member)

    def left(self, member: Member) -> None:
        """See `FleetListener`."""
        reader = self._readers.pop(member, None)
        if reader is not None:
            reader.close()

    def record_foreign(self) -> None:
        """Records that some engine has foreign load: all are read more often."""
        self._shared_until = self.loop.time() + _WATCHED_S

    def first_delay_s(self) -> float:
        """Returns the seconds until an engine is read for the first time."""
        return self._random.uniform(0.0, max(_EVERY_S, len(self._readers) / _READINGS_PER_S))

    def interval_s(self, took_s: float) -> float:
        """Returns the seconds until an engine is read again whose last reading took so long."""
        shortest = _EVERY_S if self.loop.time() < self._shared_until else _UNSHARED_S
        interval = min(_LONGEST_S, max(shortest, _COST * took_s, len(self._readers) / _READINGS_PER_S))
        return interval * self._random.uniform(0.9, 1.1)


class _MemberReader:
    """Reads one member, again and again."""

    __slots__ = ("_absent", "_exchange", "_known", "_load", "_member", "_owner", "_sent_at", "_timeout", "_timer")

    def __init__(self, owner: QueueDepthReader, member: Member) -> None:
        self._owner = owner
        self._member = member
        self._load = ForeignLoad()
        self._absent = False
        """Whether the last answer had no figures that can be read."""
        self._exchange: ExchangeHandle | None = None
        self._timeout: ClockTimer | None = None
        self._known = 0
        self._sent_at = 0.0
        self._timer = owner.loop.call_later(owner.first_delay_s(), self._tick)

    def close(self) -> None:
        self._timer.cancel()
        if self._timeout is not None:
            self._timeout.cancel()
        if self._exchange is not None:
            self._exchange.discard()
        self._apply(0)

    def _tick(self) -> None:
        owner, member = self._owner, self._member
        self._apply(self._load.legs(owner.loop.time()))  # it may have become stale
        pool = owner.pools.get(member.instance.id)
        if not member.ready or member.has_left or pool is None or pool.shared:
            self._wait(owner.interval_s(0.0))
            return
        self._known = member.known_in_flight
        self._sent_at = owner.loop.time()
        self._timeout = ClockTimer(owner.loop, owner.clock, _TIMEOUT_S, self._expire)
        self._exchange = pool.exchange(pool.get(_PATH), ResponseCollector(_MAX_BYTES, self._answered))

    def _expire(self) -> None:
        if self._exchange is not None:
            self._exchange.abort(UpstreamTimeout("does not answer with its metrics"))

    def _answered(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        owner = self._owner
        self._exchange = None
        if self._timeout is not None:
            self._timeout.cancel()
        took_s = owner.loop.time() - self._sent_at
        if error is not None:
            owner.results["failed"] += 1
        elif head.status < 500:
            self._read(raw if head.status == 200 else b"")
        self._wait(_ABSENT_S if self._absent else owner.interval_s(took_s))

    def _read(self, raw: bytes) -> None:
        owner, member = self._owner, self._member
        self._absent = True
        if owner.loop.time() < owner.shown_until_s:
            member.cache_usage = parse_cache_usage(raw)
            member.moved_bytes = parse_moved_bytes(raw)
        try:
            depth = parse_queue_depth(raw)
        except QueueDepthError as error:
            owner.results["refused"] += 1
            _log.debug("the metrics of %s are ignored: %s", member.instance.id, error)
            return
        self._absent = depth is None and parse_moved_bytes(raw) is None
        if depth is None:
            return
        owner.results["read"] += 1
        backlog = member.backlog
        mean = owner.mean_legs[member.instance.role]
        mean.record(member.own_in_flight, member.own_tokens, backlog.given_legs, backlog.given_s)
        now = owner.loop.time()
        self._load.record(depth, self._known, member.known_in_flight, now)
        self._apply(self._load.legs(now))

    def _apply(self, legs: int) -> None:
        """Counts so many foreign legs on the member from now on."""
        owner, member = self._owner, self._member
        if legs:
            owner.record_foreign()
        if legs or member.foreign:
            mean = owner.mean_legs[member.instance.role]
            owner.fleet.set_foreign(member, legs, round(legs * mean.tokens), legs * mean.seconds)

    def _wait(self, delay_s: float) -> None:
        self._timer = self._owner.loop.call_later(delay_s, self._tick)


class QueueDepthGauges(Collector):
    """Collects the metrics of reading queue depths."""

    def __init__(self, reader: QueueDepthReader) -> None:
        self._reader = reader

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        readings = CounterMetricFamily(
            "kvparams_proxy_queue_depth_readings", "Readings of engines' queue depths.", labels=["result"]
        )
        for result in ("failed", "read", "refused"):
            readings.add_metric([result], self._reader.results[result])
        yield readings
        foreign = GaugeMetricFamily(
            "kvparams_proxy_foreign_legs",
            "Estimated legs of clients that this proxy does not know.",
            labels=["role", "instance"],
        )
        for member in self._reader.fleet.members:
            foreign.add_metric([member.instance.role, member.instance.id], member.foreign)
        yield foreign
