"""Asks each engine from time to time whether it is there, which models it serves and which versions of the protocol it
speaks, over the data path's connections.
Where its dialect has a bootstrap server, an engine is there only when that one says who it is.

Nothing here waits: a probe is a timer and an exchange, and costs the requests beside it next to nothing. The one rule:
for each member at most one probe runs, and none after the member or the prober has gone.
"""

import asyncio
import json
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self, cast

from kvparams.dialects import Place
from kvparams.versions import NoCommonVersion, engine_speaks
from kvparams_proxy.fleet.bootstraps import Bootstraps
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.loopclock import Clock, LoopTimer, WallClock
from kvparams_proxy.upstream.interface import Handle
from kvparams_proxy.upstream.pools import Pools
from kvparams_proxy.upstream.terms import Collect, Head, UpstreamError, UpstreamFull, UpstreamTimeout

__all__ = ["Prober"]

_RETRY_S: Final = 0.5
"""How often while an engine is missing: engines that are started together with the proxy are found at once."""
_LONGEST_S: Final = 5.0
"""For a whole probe."""
_MAX_BYTES: Final = 1 << 20
"""Of an engine's list of models: some thousand adapters."""
_PATH: Final = b"/v1/models"
_UNAUTHORIZED: Final = (401, 403)


class _Said(NamedTuple):
    """What a probe has found out."""

    ready: bool
    why: str
    """The evidence, for the log."""
    models: frozenset[str] | None
    version: str | None = None
    """The version that both sides speak, where the engine says."""
    base: str | None = None
    """The first model that is no adapter."""
    answers: bool = False
    """Whether the engine answers as one should, and is given no work all the same."""


class Prober:
    """Keeps `Member.ready` and `Member.models` true, for whoever is in the fleet: a `FleetListener`.

    Use it as an async context: the first round is done on entry.
    """

    def __init__(
        self,
        fleet: Fleet,
        every_s: float,
        pools: Pools,
        bootstraps: Bootstraps | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`pools` must have begun to listen to `fleet`: a member's pool is there before its first probe. `clock`: what
        the time of a probe is measured by, if not the loop's own."""
        self._clock = clock
        self._fleet = fleet
        self._bootstraps = bootstraps
        self._every_s = every_s
        self._pools = pools
        self._probes: dict[Member, _Probe] = {}

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        members = list(self._fleet.members)
        # Engines are probed at different moments: all of them together would be felt by the requests beside them.
        apart_s = self._every_s / max(1, len(members))
        first: list[asyncio.Future[None]] = []
        for number, member in enumerate(members):
            probe = self._probes[member] = self._probe(member, loop)
            first.append(probe.begin(number * apart_s))
        self._fleet.listen(self)
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
        probe = self._probes[member] = self._probe(member, asyncio.get_running_loop())
        probe.begin(0.0)

    def left(self, member: Member) -> None:
        """See `FleetListener`."""
        probe = self._probes.pop(member, None)
        if probe is not None:
            probe.end()

    def _probe(self, member: Member, loop: asyncio.AbstractEventLoop) -> "_Probe":
        return _Probe(self._fleet, self._pools, member, self._every_s, loop, self._bootstraps, self._clock)

    def _close(self) -> None:
        self._fleet.unlisten(self)
        for probe in self._probes.values():
            probe.end()
        self._probes.clear()


class _Probe:
    """Asks one member, again and again."""

    __slots__ = (
        "_apart_s",
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
        "_timer",
    )

    def __init__(
        self,
        fleet: Fleet,
        pools: Pools,
        member: Member,
        every_s: float,
        loop: asyncio.AbstractEventLoop,
        bootstraps: Bootstraps | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or WallClock(loop)
        self._fleet = fleet
        self._pools = pools
        self._member = member
        self._every_s = every_s
        self._loop = loop
        self._bootstrap = None if bootstraps is None else bootstraps.of(member.instance)
        self._first: asyncio.Future[None] = loop.create_future()
        self._apart_s = 0.0
        self._due = 0.0
        self._keyed = False
        self._exchange: Handle | None = None
        self._timer: asyncio.TimerHandle | LoopTimer | None = None
        """For the time-out of the probe that runs, or for the next one."""

    def begin(self, apart_s: float) -> asyncio.Future[None]:
        """Ask at once; what is given is done with the first answer. The second probe comes so much later."""
        self._apart_s = apart_s
        self._ask()
        return self._first

    def end(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._exchange is not None:
            self._exchange.discard()
        if self._bootstrap is not None:
            self._bootstrap.close()
        self._first.cancel()

    def _ask(self) -> None:
        pool = self._pools.get(self._member.instance.id)
        if pool is None or self._member.left:
            self._first.cancel()
            return
        self._timer = LoopTimer(self._loop, self._clock, min(self._every_s, _LONGEST_S), self._expire)
        self._keyed = pool.keyed
        self._exchange = pool.exchange(pool.get(_PATH), Collect(_MAX_BYTES, self._answered))

    def _expire(self) -> None:
        if self._exchange is not None:
            self._exchange.abort(UpstreamTimeout("does not answer a probe"))

    def _answered(self, head: Head, raw: bytes, error: UpstreamError | None) -> None:
        self._exchange = None
        if isinstance(error, UpstreamFull):  # busy: that tells nothing
            self._over()
            return
        said = _read(head, raw, error, self._member, self._keyed)
        if said.ready and self._bootstrap is not None:  # within the same time
            self._exchange = self._bootstrap.ask(partial(self._placed, said))
            return
        self._learn(said)

    def _placed(self, said: _Said, place: Place | None, why: str) -> None:
        self._exchange = None
        if place is None:
            said = said._replace(ready=False, why=why, answers=True)
        self._learn(said, place)

    def _learn(self, said: _Said, place: Place | None = None) -> None:
        ready, why, models, version, base, answers = said
        self._fleet.learn(self._member, ready, models, place, version, base, why=why, answers=answers)
        self._over()

    def _over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._first.done():
            self._first.set_result(None)
        apart_s, self._apart_s = self._apart_s, 0.0
        self._due = self._loop.time() + self._every_s + apart_s
        self._wait()

    def _wait(self) -> None:
        """A leg that finds no connection makes a member not ready at any time: so it is looked at often."""
        self._timer = self._loop.call_later(min(self._every_s, _RETRY_S), self._look)

    def _look(self) -> None:
        if self._member.ready and self._loop.time() < self._due:
            self._wait()
        else:
            self._ask()


def _read(head: Head, raw: bytes, error: UpstreamError | None, member: Member, keyed: bool) -> _Said:
    """What an answer to a probe says. `keyed`: the proxy has a key for it, so that one refused is wrong; without one
    clients may bring their own."""
    known = member.models
    if error is not None:
        return _Said(False, error.reason, known)
    if keyed and head.status in _UNAUTHORIZED:
        return _Said(False, f"it refuses the proxy's credentials ({head.status})", known, answers=True)
    if head.status >= 500:
        return _Said(False, f"a probe was answered {head.status}", known)
    if head.status != 200:  # somebody is there, who does not say
        return _Said(True, f"a probe was answered {head.status}", known)
    try:
        document: object = json.loads(raw)
    except (ValueError, RecursionError):
        return _Said(False, "the answer to a probe is not JSON", known)
    fields = cast("dict[str, object]", document) if isinstance(document, dict) else {}
    models, base = _models(fields.get("data"))
    try:
        version = engine_speaks(fields)
    except NoCommonVersion as none:
        return _Said(False, str(none), known, answers=True)
    return _Said(True, "it answers probes", models, version, base)


def _models(data: object) -> tuple[frozenset[str] | None, str | None]:
    if not isinstance(data, list):
        return None, None
    entries = [cast("dict[str, object]", e) for e in cast("list[object]", data)[:10_000] if isinstance(e, dict)]
    named = [(name, entry.get("parent")) for entry in entries if isinstance(name := entry.get("id"), str)]
    return frozenset(name for name, _ in named), next((name for name, parent in named if name and not parent), None)
