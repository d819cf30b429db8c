"""Joins the exchange to the fleet: what this proxy tells of its engines, and what it believes of what others tell."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from kvparams.replication.entries import EngineFailed, EngineLoad, EngineRestarted, Entry
from kvparams.replication.messages import MessageAuthenticator
from kvparams.replication.siblings import Sibling
from kvparams_proxy.coordination.exchange import Exchange
from kvparams_proxy.coordination.load_sync import EngineNames, LoadSync
from kvparams_proxy.coordination.transport import Transport
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member

if TYPE_CHECKING:
    from kvparams_proxy.coordination.prefix_sync import PrefixSync
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["FleetSync"]

_LOAD_S: Final = 0.002
"""For so long changes of load are collected."""
_RESTART_S: Final = 10.0
"""A restart that another proxy tells is the one that this proxy saw itself so recently."""


class FleetSync:
    """Shares one fleet with the other proxies of its site: a `FleetListener`, `FleetSharing` and `ExchangeListener`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fleet: Fleet,
        prefixes: "PrefixCacheModel | None",
        transport: Transport,
        authenticator: MessageAuthenticator,
        info: Mapping[str, object],
        probe: Callable[[Member], None] = lambda member: None,
    ) -> None:
        """Creates it, not started; `fleet` has no members yet.

        Args:
            loop: the event loop.
            fleet: what is shared.
            prefixes: its model of caches, where its policy has one.
            transport: what carries messages to the other proxies.
            authenticator: seals and opens them.
            info: what this proxy says of itself.
            probe: probes a member at once.
        """
        self._loop = loop
        self._fleet = fleet
        self._prefixes = prefixes
        self._info = info
        self._probe = probe
        self._restarts: dict[Member, float] = {}
        """When this proxy saw a member restart last."""
        self._names = EngineNames()
        self.exchange: Final = Exchange(loop, transport, authenticator, self, self._describe)
        self._loads = LoadSync(fleet, self._names, self._publish_loads_soon, self.exchange.siblings.alive)
        self._caches = _prefix_sync(prefixes, self._names, self.exchange.publish)
        fleet.add_listener(self)
        fleet.share_with(self)

    def start(self) -> None:
        """Begins to share."""
        self.exchange.start()

    async def close(self) -> None:
        """Ends the sharing."""
        await self.exchange.close()

    # FleetListener

    def joined(self, member: Member) -> None:
        """Hears that a member has joined."""
        self._names.joined(member)
        self._loads.joined(member)

    def left(self, member: Member) -> None:
        """Hears that a member has left."""
        self._names.left(member)
        self._restarts.pop(member, None)

    # FleetSharing

    def load_changed(self, member: Member) -> None:
        """See `FleetSharing`."""
        self._loads.load_changed(member)

    def engine_failed(self, member: Member, *, connected: bool, why: str) -> None:
        """See `FleetSharing`."""
        key = self._names.find_key(member)
        if key is not None:
            self.exchange.publish(EngineFailed(key, connected, why))

    def engine_restarted(self, member: Member) -> None:
        """See `FleetSharing`."""
        self._restarts[member] = self._loop.time()
        key = self._names.find_key(member)
        if key is not None:
            self.exchange.publish(EngineRestarted(key))

    # ExchangeListener

    def apply_entry(self, sibling: Sibling, entry: Entry, *, is_snapshot: bool) -> None:
        """See `ExchangeListener`."""
        if isinstance(entry, EngineLoad):
            self._loads.apply(sibling, entry)
        elif isinstance(entry, EngineFailed | EngineRestarted):
            self._apply_event(entry)
        elif self._caches is not None:
            self._caches.apply(sibling, entry)

    def apply_loads(self, sibling: Sibling, loads: Mapping[int, tuple[int, int]]) -> None:
        """See `ExchangeListener`."""
        self._loads.replace(sibling, loads)

    def forget_legs(self, sibling: Sibling) -> None:
        """See `ExchangeListener`."""
        if self._caches is not None:
            self._caches.forget_legs(sibling)

    def loads(self) -> Iterable[EngineLoad]:
        """See `ExchangeListener`."""
        return self._loads.loads()

    def snapshot(self) -> Iterator[Entry | None]:
        """See `ExchangeListener`."""
        if self._caches is not None:
            yield from self._caches.snapshot()

    # inside

    def _apply_event(self, entry: EngineFailed | EngineRestarted) -> None:
        member = self._names.members.get(entry.engine)
        if member is None:
            return
        if isinstance(entry, EngineFailed):
            if not entry.connected:
                self._probe(member)  # it may be out of that proxy's reach alone
            else:
                self._fleet.record_failure_elsewhere(member, entry.why)
        elif self._loop.time() - self._restarts.get(member, -_RESTART_S) >= _RESTART_S:
            self._restarts[member] = self._loop.time()
            self._fleet.record_restart_elsewhere(member)

    def _publish_loads_soon(self) -> None:
        self._loop.call_later(_LOAD_S, self._publish_loads)

    def _publish_loads(self) -> None:
        for load in self._loads.changed_loads():
            self.exchange.publish(load)

    def _describe(self) -> Mapping[str, object]:
        blocks = 0 if self._prefixes is None else self._prefixes.blocks
        return {**self._info, "blocks": blocks, "has_snapshot": self.exchange.has_snapshot}


def _prefix_sync(
    prefixes: "PrefixCacheModel | None", names: EngineNames, publish: Callable[[Entry], None]
) -> "PrefixSync | None":
    """Returns what shares the model of caches. numpy is imported only where there is one."""
    if prefixes is None:
        return None
    from kvparams_proxy.coordination.prefix_sync import PrefixSync

    return PrefixSync(prefixes, names, publish)
