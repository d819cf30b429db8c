"""Probes each engine for its presence, its models and its versions of the protocol.

Probes use the data path's connections. Where its dialect has a bootstrap server, an engine is there only when that
server identifies it.

Data-parallel ranks behind one URL have one server: what it answers for one of them holds for all, and only one is
asked. A bootstrap server says something else of each rank; there each is asked.

Nothing here waits: a probe is a timer and an exchange, and costs the requests beside it next to nothing. At most one
probe runs for each member, and none after the member or the prober has gone.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Final, Self

from kvparams.dialects.interface import BootstrapInfo
from kvparams.instances import ranks_key
from kvparams_proxy.event_loop.clock import Clock, ClockTimer, MonotonicClock
from kvparams_proxy.event_loop.step_runner import StepRunner, StepTask
from kvparams_proxy.fleet.bootstrap_servers import BootstrapServers
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.probe_answers import ProbeResult, interpret_answer, parse_answer, parse_long_answer
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import (
    ResponseCollector,
    ResponseHead,
    UpstreamError,
    UpstreamOverflow,
    UpstreamTimeout,
)

__all__ = ["Prober"]

_RETRY_S: Final = 0.5
"""How often while an engine is missing: engines that are started together with the proxy are found at once."""
_LONGEST_RETRY_S: Final = 5.0
_PROBES_PER_S: Final = 200
"""Probes of missing engines that are sent in a second, up to `_LONGEST_RETRY_S` between two of the same one: each costs
some 0.1 ms. Up to 100 engines are probed every `_RETRY_S`."""
_LONGEST_S: Final = 5.0
"""For a whole probe."""
_MAX_BYTES: Final = 1 << 20
"""Of an engine's list of models: some thousand adapters."""
_AT_ONCE_BYTES: Final = 16 << 10
"""A longer answer is read in steps."""
_log: Final = logging.getLogger(__name__)
_PATH: Final = b"/v1/models"


class Prober:
    """Keeps `Member.ready` and `Member.models` true, for whoever is in the fleet: a `FleetListener`.

    Use it as an async context: the first round is done on entry.
    """

    def __init__(
        self,
        fleet: Fleet,
        every_s: float,
        pools: UpstreamPools,
        bootstraps: BootstrapServers | None = None,
        clock: Clock | None = None,
        steps: StepRunner | None = None,
    ) -> None:
        """`pools` must have begun to listen to `fleet`: a member's pool is there before its first probe.

        Args:
            fleet: whose members are probed.
            every_s: how often, in seconds.
            pools: the connections to them.
            bootstraps: the servers that say who some of them are.
            clock: what the time of a probe is measured by, if not the loop's own.
            steps: reads long answers; without one the prober has its own.
        """
        self._clock = clock
        self._steps = steps
        self._fleet = fleet
        self._bootstraps = bootstraps
        self._every_s = every_s
        self._pools = pools
        self._probes: dict[Member, _MemberProbe] = {}
        self._ranks: dict[object, dict[_MemberProbe, None]] = {}
        """The probes of all ranks behind one URL, by `ranks_key`."""
        self._free_s = 0.0
        """When the next engine that joins may be probed for the first time."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        members = list(self._fleet.members)
        # Engines are probed at different moments: all of them together would be felt by the requests beside them.
        apart_s = self._every_s / max(1, len(members))
        first: list[asyncio.Future[None]] = []
        for number, member in enumerate(members):
            probe = self._probes[member] = self._probe(member, loop)
            first.append(probe.begin(number * apart_s, number / len(members)))
        self._fleet.add_listener(self)
        try:
            await asyncio.gather(*first, return_exceptions=True)  # who is removed meanwhile is not waited for
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def joined(self, member: Member) -> None:
        """See `FleetListener`."""
        loop = asyncio.get_running_loop()
        probe = self._probes[member] = self._probe(member, loop)
        now = loop.time()
        at = max(now, self._free_s)  # hundreds may join in the same turn of the event loop
        self._free_s = at + 1 / _PROBES_PER_S
        probe.begin_after(at - now)

    def left(self, member: Member) -> None:
        """See `FleetListener`."""
        probe = self._probes.pop(member, None)
        if probe is not None:
            probe.end()
            key = ranks_key(member.instance)
            ranks = self._ranks.get(key, {})
            ranks.pop(probe, None)
            if not ranks:
                self._ranks.pop(key, None)

    def probe_now(self, member: Member) -> None:
        """Probes a member at once, unless it is being probed."""
        probe = self._probes.get(member)
        if probe is not None:
            probe.ask_now()

    def _probe(self, member: Member, loop: asyncio.AbstractEventLoop) -> "_MemberProbe":
        steps = self._steps = self._steps or StepRunner(loop)
        key = ranks_key(member.instance)
        ranks = dict[_MemberProbe, None]() if key is None else self._ranks.setdefault(key, {})
        probe = _MemberProbe(
            self._fleet,
            self._pools,
            member,
            self._every_s,
            loop,
            steps,
            self._retry_s,
            self._bootstraps,
            self._clock,
            ranks,
        )
        ranks[probe] = None
        return probe

    def _retry_s(self) -> float:
        """Returns how long a missing engine is left alone: longer in a fleet of hundreds."""
        retry_s = max(_RETRY_S, len(self._probes) / _PROBES_PER_S)
        return min(self._every_s, retry_s, _LONGEST_RETRY_S)

    def _close(self) -> None:
        self._fleet.remove_listener(self)
        for probe in self._probes.values():
            probe.end()
        self._probes.clear()


class _MemberProbe:
    """Asks one member, again and again."""

    __slots__ = (
        "_apart_s",
        "_apart_share",
        "_bootstrap",
        "_clock",
        "_due",
        "_every_s",
        "_exchange",
        "_first",
        "_fleet",
        "_keyed",
        "_loop",
        "_member",
        "_pools",
        "_ranks",
        "_reading",
        "_retry_s",
        "_steps",
        "_timer",
    )

    def __init__(
        self,
        fleet: Fleet,
        pools: UpstreamPools,
        member: Member,
        every_s: float,
        loop: asyncio.AbstractEventLoop,
        steps: StepRunner,
        retry_s: Callable[[], float],
        bootstraps: BootstrapServers | None = None,
        clock: Clock | None = None,
        ranks: Collection["_MemberProbe"] = (),
    ) -> None:
        self._ranks = ranks
        """The probes of all ranks behind the same URL, this one included."""
        self._retry_s = retry_s
        self._steps = steps
        self._reading: StepTask | None = None
        """Of an answer that is long."""
        self._clock = clock or MonotonicClock(loop.time)
        self._fleet = fleet
        self._pools = pools
        self._member = member
        self._every_s = every_s
        self._loop = loop
        self._bootstrap = None if bootstraps is None else bootstraps.for_instance(member.instance)
        self._first: asyncio.Future[None] = loop.create_future()
        self._apart_s = 0.0
        self._apart_share = 0.0
        self._due = 0.0
        self._keyed = False
        self._exchange: ExchangeHandle | None = None
        self._timer: asyncio.TimerHandle | ClockTimer | None = None
        """For the time-out of the probe that runs, or for the next one."""

    def begin(self, apart_s: float, apart_share: float) -> asyncio.Future[None]:
        """Sends the first probe at once, and returns a future that is done with its answer.

        The second probe comes `apart_s` later, or where the engine is missing `apart_share` of the time between two.
        """
        self._apart_s = apart_s
        self._apart_share = apart_share
        self._ask()
        return self._first

    def begin_after(self, delay_s: float) -> None:
        """Asks for the first time after `delay_s`."""
        if delay_s > 0.0:
            self._timer = self._loop.call_later(delay_s, self._ask)
        else:
            self._ask()

    def ask_now(self) -> None:
        """Sends the next probe at once, unless one is under way: of ranks with one server, for any of them."""
        others = () if self._bootstrap is not None else self._ranks
        if not (self.is_under_way or any(each.is_under_way for each in others)):
            if self._timer is not None:
                self._timer.cancel()
            self._ask()

    @property
    def is_under_way(self) -> bool:
        """True while a probe is sent, or its answer is read."""
        return self._exchange is not None or self._reading is not None

    def end(self) -> None:
        """Ends the probes."""
        if self._timer is not None:
            self._timer.cancel()
        if self._exchange is not None:
            self._exchange.discard()
        if self._reading is not None:
            self._reading.cancel()
        if self._bootstrap is not None:
            self._bootstrap.close()
        self._first.cancel()

    def _ask(self) -> None:
        pool = self._pools.get(self._member.instance.id)
        if pool is None or self._member.has_left:
            self._first.cancel()
            return
        self._timer = ClockTimer(self._loop, self._clock, min(self._every_s, _LONGEST_S), self._expire)
        self._keyed = pool.has_own_key
        self._exchange = pool.exchange(pool.get(_PATH), ResponseCollector(_MAX_BYTES, self._answered))

    def _expire(self) -> None:
        if self._exchange is not None:
            self._exchange.abort(UpstreamTimeout("does not answer a probe"))

    def _answered(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        self._exchange = None
        if isinstance(error, UpstreamOverflow):  # busy: that tells nothing
            self._over()
            return
        if error is not None or head.status != 200:
            self._read(head, error, None)
        elif len(raw) <= _AT_ONCE_BYTES:
            self._read(head, None, parse_answer(raw))
        else:
            read, failed = partial(self._read, head, None), self._unreadable
            self._reading = self._steps.run(parse_long_answer(raw), read, failed, at_once=False)

    def _unreadable(self, error: Exception) -> None:
        _log.error("the answer to a probe could not be read", exc_info=error)
        self._read(ResponseHead(200), None, None)

    def _read(self, head: ResponseHead, error: UpstreamError | None, document: Mapping[str, object] | None) -> None:
        """Acts on the answer to a probe; `document` is what it says, None where it is not JSON."""
        self._reading = None
        said = interpret_answer(head, document, error, self._member, self._keyed)
        if said.ready and self._bootstrap is not None:  # within the same time
            self._exchange = self._bootstrap.query(partial(self._placed, said))
            return
        self._learn(said)

    def _placed(self, said: ProbeResult, place: BootstrapInfo | None, why: str) -> None:
        self._exchange = None
        if place is None:
            said = said._replace(ready=False, why=why, answers=True)
        self._learn(said, place)

    def _learn(self, said: ProbeResult, place: BootstrapInfo | None = None) -> None:
        self._record(said, place)
        if self._bootstrap is None:
            for other in tuple(self._ranks):
                if other is not self:
                    other._hear(said)
        self._over()

    def _hear(self, said: ProbeResult) -> None:
        """Learns what the server has answered for another rank, and asks later than that rank."""
        if self.is_under_way:
            return
        self._record(said)
        self._over(_RETRY_S)

    def _record(self, said: ProbeResult, place: BootstrapInfo | None = None) -> None:
        ready, why, models, version, base, answers, adapters = said
        self._fleet.record_probe(self._member, ready, models, place, version, base, adapters, why=why, answers=answers)

    def _over(self, later_s: float = 0.0) -> None:
        """Schedules the next probe, `later_s` after its time."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._first.done():
            self._first.set_result(None)
        apart_s, self._apart_s = self._apart_s, 0.0
        self._due = self._loop.time() + self._every_s + apart_s + later_s
        self._wait(later_s)

    def _wait(self, later_s: float = 0.0) -> None:
        """Schedules the next probe.

        It comes soon, since a leg without a connection may make a member not ready at any time.
        """
        if self._member.ready:
            delay_s = min(self._every_s, _RETRY_S)
        else:
            delay_s = self._retry_s() * (1.0 + self._apart_share)
            self._apart_share = 0.0
        self._timer = self._loop.call_later(delay_s + later_s, self._look)

    def _look(self) -> None:
        if self._member.ready and self._loop.time() < self._due:
            self._wait()
        else:
            self._ask()
