"""Joins the exchange to the fleet: what this proxy tells of its engines, and what it believes of what others tell."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

from kvparams.replication.entries import (
    AdapterUsed,
    EngineFailed,
    EngineLoad,
    EngineRestarted,
    Entry,
    LegDequeued,
    LegQueued,
    RoomOffered,
    SettingChanged,
)
from kvparams.replication.messages import MessageAuthenticator
from kvparams.replication.siblings import Sibling
from kvparams_proxy.config.share_url import ShareURL
from kvparams_proxy.config.sharing import SharingSettings
from kvparams_proxy.coordination.exchange import Exchange
from kvparams_proxy.coordination.load_sync import EngineNames, LoadSync
from kvparams_proxy.coordination.queue_sync import QueueSync
from kvparams_proxy.coordination.settings_sync import SettingsSync
from kvparams_proxy.coordination.transport import Transport
from kvparams_proxy.coordination.unix_transport import UnixTransport
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member

if TYPE_CHECKING:
    from kvparams_proxy.coordination.prefix_sync import PrefixSync
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["FleetSync"]

_UNLIKE: Final = {
    "policy": "proxy %016x routes by %s and this one by %s: give all proxies of a site the same --policy",
    "models": "for proxy %016x other settings of single models are in force (%s; here %s): give all proxies of a site "
    "the same `models` in the fleet file, and restart those whose file has changed a `policy` there",
    "chain": "proxy %016x has other block hashes (%s; here %s), so what it says of caches is not used here: "
    "give all proxies of a site the same keys",
}
_log: Final = logging.getLogger(__name__)
_UNLIKE_BEATS: Final = 2
_CHANGING_BEATS: Final = 10
"""Proxies may have unlike `models` for so many heartbeats: a changed file does not reach all of them at once."""
_RESTART_S: Final = 10.0
"""A restart that another proxy tells is the one that this proxy saw itself so recently."""
_MOST_ADAPTERS: Final = 4096
"""The number of such uses that are remembered."""
_TOLD_S: Final = 2.5
"""The longest delay of a start for what the others know; alone it takes a second."""


class FleetSync:
    """Shares one fleet with the other proxies of its site: a `FleetListener`, `FleetSharing` and `ExchangeListener`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fleet: Fleet,
        prefixes: "PrefixCacheModel | None",
        sharing: SharingSettings,
        info: Mapping[str, object],
        transport: Transport | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates it, not started; `fleet` has no members yet.

        Args:
            loop: the event loop.
            fleet: what is shared.
            prefixes: its model of caches, where its policy has one.
            sharing: where the other proxies are, and the keys in common.
            info: what this proxy says of itself.
            transport: what carries messages, if not what `sharing` says.
            wall_clock: seconds since 1970.
        """
        own_id = randbits(63) + 1
        self._secrets = sharing.secrets
        self._authenticator = MessageAuthenticator(sharing.site, sharing.secrets())
        transport = transport or _make_transport(loop, sharing.place, own_id)
        self._loop = loop
        self._fleet = fleet
        self._prefixes = prefixes
        self._info = dict(info)
        if prefixes is not None:
            self._info["chain"] = prefixes.chain_mark
        self.reassign: Callable[[], None] = lambda: None
        """Called when `owns` may say something else."""
        self._like = frozenset[int]()
        """Siblings whose block hashes are this proxy's."""
        self._unlike_beats = 0
        """Heartbeats since all proxies had the same settings."""
        self._unlike_models: dict[int, int] = {}
        """Heartbeats since a sibling has had the same `models`."""
        self._warned: set[tuple[int, str]] = set()
        self._restarts: dict[Member, float] = {}
        """When this proxy saw a member restart last."""
        self._adapters_used: dict[tuple[int, str], float] = {}
        """When this proxy told which adapter an engine has used, the latest last."""
        self._names = EngineNames()
        self.exchange: Final = Exchange(loop, own_id, transport, self._authenticator, self, self._describe, wall_clock)
        self._loads = LoadSync(fleet, self._names, self.exchange.flush_soon, self.exchange.siblings.alive)
        self.settings: Final = SettingsSync(own_id, self.exchange.publish)
        """The operator's changes."""
        self._queues = QueueSync(fleet, own_id, self._names, self.exchange.publish, loop.time, loop.call_later)
        self._caches = _prefix_sync(prefixes, self._names, self.exchange.publish, loop.time)
        fleet.add_listener(self)
        fleet.share_with(self)

    def describe_models(self, mark: str) -> None:
        """Says from now on what holds for single models, see `mark_of_models`."""
        if mark:
            self._info["models"] = mark
        else:
            self._info.pop("models", None)

    def start(self) -> None:
        """Begins to share."""
        self.exchange.start()

    async def wait_until_told(self) -> None:
        """Waits for what the others know, for a bounded time: without it prompts go to engines that lack their KV."""
        await self.exchange.wait_for_snapshot(_TOLD_S)

    async def close(self) -> None:
        """Ends the sharing."""
        self._queues.close()
        await self.exchange.close()

    def health(self) -> dict[str, object]:
        """Returns what `/health` says about the other proxies."""
        exchange = self.exchange
        return {"reachable": not exchange.is_degraded, "alive": len(exchange.siblings)}

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
            self._forget_recent(key)
            self.exchange.publish(EngineRestarted(key))

    def adapter_used(self, member: Member, adapter: str) -> None:
        """See `FleetSharing`."""
        key = self._names.find_key(member)
        if key is not None:
            self._adapters_used.pop((key, adapter), None)
            self._adapters_used[key, adapter] = self._loop.time()
            if len(self._adapters_used) > _MOST_ADAPTERS:
                del self._adapters_used[next(iter(self._adapters_used))]
            self.exchange.publish(AdapterUsed(key, adapter))

    # ExchangeListener

    def apply_entry(self, sibling: Sibling, entry: Entry) -> None:
        """See `ExchangeListener`."""
        if isinstance(entry, EngineLoad):
            self._loads.apply(sibling, entry)
        elif isinstance(entry, EngineFailed | EngineRestarted):
            self._apply_event(entry)
        elif isinstance(entry, AdapterUsed):
            member = self._names.members.get(entry.engine)
            if member is not None and member.adapter_slots is not None and entry.adapter in member.adapters:
                member.adapter_slots.record_loaded((entry.adapter,))
        elif isinstance(entry, SettingChanged):
            self.settings.apply_entry(entry)
        elif isinstance(entry, LegQueued | LegDequeued | RoomOffered):
            self._queues.apply(sibling, entry)
        elif self._caches is not None and sibling.info.get("chain", self._info.get("chain")) == self._info["chain"]:
            self._caches.apply(sibling, entry)

    def apply_loads(self, sibling: Sibling, loads: Mapping[int, tuple[int, int]]) -> None:
        """See `ExchangeListener`."""
        self._loads.replace(sibling, loads)

    def forget_legs(self, sibling: Sibling) -> None:
        """See `ExchangeListener`."""
        self._queues.forget_legs(sibling)
        if self._caches is not None:
            self._caches.forget_legs(sibling)

    def sibling_returned(self) -> None:
        """See `ExchangeListener`."""
        if self._prefixes is not None:
            self._prefixes.distrust_capacities()

    def check_info(self, sibling: Sibling) -> None:
        """See `ExchangeListener`."""
        for name in ("policy", "chain"):
            theirs, ours = sibling.info.get(name), self._info.get(name)
            if theirs != ours and (sibling.id, name) not in self._warned:
                self._warned.add((sibling.id, name))
                _log.warning(_UNLIKE[name], sibling.id, theirs, ours)
        self._update_listeners()

    def siblings_changed(self) -> None:
        """See `ExchangeListener`."""
        self._warned = {each for each in self._warned if each[0] in self.exchange.siblings.alive}
        self._update_listeners()

    def _update_listeners(self) -> None:
        """Finds out which proxies can tell this one what engines publish: those with the same block hashes."""
        own = self._info.get("chain")
        like = frozenset(id for id, each in self.exchange.siblings.alive.items() if each.info.get("chain") == own)
        if like != self._like:
            self._like = like
            self.reassign()

    def owns(self, member: Member) -> bool:
        """Returns whether this proxy, of all proxies of the site, listens to the KV events of an engine.

        All proxies that know each other agree (highest random weight).
        """
        key = self._names.find_key(member)
        return key is None or all(_weight(key, self.exchange.id) > _weight(key, other) for other in self._like)

    def beat(self) -> None:
        """See `ExchangeListener`."""
        self._authenticator.use_secrets(self._secrets())
        self._compare_models()
        alike = (None, self.settings.digest)
        if all(each.info.get("settings") in alike for each in self.exchange.siblings.alive.values()):
            self._unlike_beats = 0
            return
        self._unlike_beats += 1
        if self._unlike_beats > _UNLIKE_BEATS:  # a change was lost: the newest of each name wins again
            self._unlike_beats = 0
            for entry in self.settings.snapshot():
                self.exchange.publish(entry)

    def _compare_models(self) -> None:
        """Warns of siblings that have had unlike `models` for a while."""
        ours = self._info.get("models")
        unlike = {id: each.info for id, each in self.exchange.siblings.alive.items() if each.info.get("models") != ours}
        self._unlike_models = {id: self._unlike_models.get(id, 0) + 1 for id in unlike}
        for id, beats in self._unlike_models.items():
            if beats == _CHANGING_BEATS:
                _log.warning(_UNLIKE["models"], id, unlike[id].get("models"), ours)

    def changed_loads(self) -> Iterable[EngineLoad]:
        """See `ExchangeListener`."""
        return self._loads.changed_loads()

    def loads(self) -> Iterable[EngineLoad]:
        """See `ExchangeListener`."""
        return self._loads.loads()

    def snapshot(self) -> Iterator[Entry | None]:
        """See `ExchangeListener`."""
        yield from self.settings.snapshot()
        yield from self._queues.snapshot()
        yield from self._loaded_adapters()
        if self._caches is not None:
            yield from self._caches.snapshot()

    def recent(self, seconds: float) -> Iterator[Entry | None]:
        """See `ExchangeListener`."""
        yield from self._queues.snapshot()
        since = self._loop.time() - seconds
        yield from [AdapterUsed(*used) for used, at in self._adapters_used.items() if at >= since]
        if self._caches is not None:
            yield from self._caches.recent(seconds)

    # inside

    def _loaded_adapters(self) -> Iterator[Entry | None]:
        """Yields the adapters that engines should have loaded, each engine's last used one last."""
        for key, member in list(self._names.members.items()):
            if member.adapter_slots is not None:
                yield from [AdapterUsed(key, adapter) for adapter in member.adapter_slots.loaded]
                yield None

    def _apply_event(self, entry: EngineFailed | EngineRestarted) -> None:
        member = self._names.members.get(entry.engine)
        if member is None:
            return
        if isinstance(entry, EngineFailed):
            if not entry.connected:
                self._fleet.probe(member)  # it may be out of that proxy's reach alone
            else:
                self._fleet.record_failure_elsewhere(member, entry.why)
        elif self._loop.time() - self._restarts.get(member, -_RESTART_S) >= _RESTART_S:
            self._restarts[member] = self._loop.time()
            self._forget_recent(entry.engine)
            self._fleet.record_restart_elsewhere(member)

    def _forget_recent(self, engine: int) -> None:
        if self._caches is not None:
            self._caches.forget_recent(engine)

    def _describe(self) -> Mapping[str, object]:
        blocks = 0 if self._prefixes is None else self._prefixes.blocks
        return {
            **self._info,
            "settings": self.settings.digest,
            "blocks": blocks,
            "has_snapshot": self.exchange.has_snapshot,
        }


def _weight(key: int, proxy: int) -> tuple[int, int]:
    return xxh3_64_intdigest(f"{key} {proxy}".encode()), proxy


def _make_transport(loop: asyncio.AbstractEventLoop, place: ShareURL | Path, own_id: int) -> Transport:
    """Makes the transport to a place. The client of a server is imported only where there is one."""
    if isinstance(place, Path):
        return UnixTransport(loop, place, own_id)
    from kvparams_proxy.coordination.valkey_transport import ValkeyTransport

    return ValkeyTransport(loop, place, own_id)


def _prefix_sync(
    prefixes: "PrefixCacheModel | None",
    names: EngineNames,
    publish: Callable[[Entry], None],
    now: Callable[[], float],
) -> "PrefixSync | None":
    """Returns what shares the model of caches. numpy is imported only where there is one."""
    if prefixes is None:
        return None
    from kvparams_proxy.coordination.prefix_sync import PrefixSync

    return PrefixSync(prefixes, names, publish, now)
