"""Reads each engine's queue depth from its `/metrics`, so that load from clients unknown to this proxy counts.

What the metrics say of LoRA adapters corrects what the proxy believes to be loaded there.

Engines without the metrics are left alone. Reading is limited in size and time, and never says whether an engine is
well: probes do.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.instances import Role, ranks_key
from kvparams.routing.adapter_metrics import parse_adapter_metrics
from kvparams.routing.engine_metrics import add_moved_bytes, parse_engine_metrics
from kvparams.routing.foreign_load import ForeignLoad, MeanLeg
from kvparams_proxy.event_loop.clock import Clock, ClockTimer
from kvparams_proxy.fleet.adapter_loads import correct_slots
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.interface import ExchangeHandle, Upstream
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
_MAX_BYTES: Final = 2 << 20
"""The longest page of metrics that is read. vLLM adds a line for each combination of LoRA adapters that it has had, and
removes none: there is room for more than 10,000."""
T = TypeVar("T")
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
        self._random = random or Random()
        self._shared_until = 0.0
        self._readers: dict[Member, _PageReader] = {}
        self._pages: dict[object, _PageReader] = {}
        """By member, or by engine: one page has the figures of all ranks behind one URL."""

    def start(self) -> None:
        """Begins to read. Engines are read at different moments."""
        for member in self.fleet.members:
            self.joined(member)
        self.fleet.add_listener(self)

    def close(self) -> None:
        """Stops reading."""
        self.fleet.remove_listener(self)
        for member in list(self._readers):
            self.left(member)

    def joined(self, member: Member) -> None:
        """See `FleetListener`."""
        key = ranks_key(member.instance) or member
        reader = self._pages.get(key)
        if reader is None:
            reader = self._pages[key] = _PageReader(self)
        self._readers[member] = reader
        reader.add(member)

    def left(self, member: Member) -> None:
        """See `FleetListener`."""
        reader = self._readers.pop(member, None)
        if reader is not None and reader.remove(member):
            del self._pages[ranks_key(member.instance) or member]

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


class _PageReader:
    """Reads the metrics of one engine, or of all ranks behind one URL, again and again."""

    __slots__ = ("_absent", "_exchange", "_owner", "_ranks", "_sent_at", "_timeout", "_timer")

    def __init__(self, owner: QueueDepthReader) -> None:
        self._owner = owner
        self._ranks: dict[Member, _MemberLoad] = {}
        self._absent = False
        """Whether the last answer had no figures that can be read."""
        self._exchange: ExchangeHandle | None = None
        self._timeout: ClockTimer | None = None
        self._sent_at = 0.0
        self._timer = owner.loop.call_later(owner.first_delay_s(), self._tick)

    def add(self, member: Member) -> None:
        """Reads the figures of this member, too."""
        self._ranks[member] = _MemberLoad(self._owner, member)

    def remove(self, member: Member) -> bool:
        """Reads the figures of this member no longer. Returns whether it was the last one: then reading ends."""
        self._ranks.pop(member).apply(0)
        if self._ranks:
            return False
        self._timer.cancel()
        if self._timeout is not None:
            self._timeout.cancel()
        if self._exchange is not None:
            self._exchange.discard()
        return True

    def _tick(self) -> None:
        owner = self._owner
        for load in self._ranks.values():
            load.expire()
        pool = next(filter(None, (load.usable_pool() for load in self._ranks.values())), None)
        if pool is None:
            self._wait(owner.interval_s(0.0))
            return
        for load in self._ranks.values():
            load.begin()
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
        owner = self._owner
        said = parse_engine_metrics(raw)
        for member in self._ranks:
            member.cache_usage = _of_rank(member, said.cache_usages, max)
            member.moved_bytes = _of_rank(member, said.moved, add_moved_bytes)
        if any(member.adapter_slots is not None for member in self._ranks):
            self._correct_slots(raw)
        self._absent = True
        if said.fault is not None:
            owner.results["refused"] += 1
            _log.debug("the metrics of %s are ignored: %s", next(iter(self._ranks)).instance.id, said.fault)
            return
        for member, load in self._ranks.items():
            depth = _of_rank(member, said.queue_depths, sum)
            if depth is not None:
                self._absent = False
                load.record(depth)
        owner.results["read"] += not self._absent
        if self._absent:  # an engine that counts bytes and tells no queue is read as often: the live page shows rates
            self._absent = not said.moved

    def _correct_slots(self, raw: bytes) -> None:
        said = parse_adapter_metrics(raw)
        if said is None:
            return
        # vLLM does not say which rank has an adapter (0.32.0 v1/metrics/loggers.py).
        if any(member.instance.rank is not None for member in self._ranks):
            said = said._replace(active=frozenset())
        for member in self._ranks:
            correct_slots(member, said)

    def _wait(self, delay_s: float) -> None:
        self._timer = self._owner.loop.call_later(delay_s, self._tick)


class _MemberLoad:
    """The foreign load of one member, from what its page says."""

    __slots__ = ("_known", "_load", "_member", "_owner")

    def __init__(self, owner: QueueDepthReader, member: Member) -> None:
        self._owner = owner
        self._member = member
        self._load = ForeignLoad()
        self._known: int | None = None
        """The legs that were known when the page was asked for; None: it was not, since the member joined."""

    def usable_pool(self) -> Upstream | None:
        """Returns the way to the member; None where it cannot be read now."""
        member = self._member
        pool = self._owner.pools.get(member.instance.id)
        return None if not member.ready or member.has_left or pool is None or pool.shared else pool

    def begin(self) -> None:
        """Hears that the page is asked for."""
        self._known = self._member.known_in_flight

    def expire(self) -> None:
        """Forgets a reading that has become stale."""
        self.apply(self._load.legs(self._owner.loop.time()))

    def record(self, depth: int) -> None:
        """Records what the page says."""
        owner, member, known = self._owner, self._member, self._known
        if known is None:
            return
        backlog = member.backlog
        mean = owner.mean_legs[member.instance.role]
        mean.record(member.own_in_flight, member.own_tokens, backlog.given_legs, backlog.given_s)
        now = owner.loop.time()
        self._load.record(depth, known, member.known_in_flight, now)
        self.apply(self._load.legs(now))

    def apply(self, legs: int) -> None:
        """Counts so many foreign legs on the member from now on."""
        owner, member = self._owner, self._member
        if legs:
            owner.record_foreign()
        if legs or member.foreign:
            mean = owner.mean_legs[member.instance.role]
            owner.fleet.set_foreign(member, legs, round(legs * mean.tokens), legs * mean.seconds)


def _of_rank(member: Member, by_rank: Mapping[str, T], join: Callable[[Iterable[T]], T]) -> T | None:
    """Returns the figure of a member's rank; of an engine without ranks, that of all together; None without any."""
    if member.instance.rank is not None:
        return by_rank.get(str(member.instance.rank.number))
    return join(by_rank.values()) if by_rank else None


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
