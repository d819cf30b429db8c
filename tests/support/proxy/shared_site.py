"""Provides proxies that share a fleet, without HTTP: real fleets, cache models and exchanges over a `MemoryNetwork`."""

from collections.abc import Iterable, Sequence
from typing import Final

from kvparams.instances import Instance, RequestFacts, Role, SchedulingPolicy
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams_proxy.config.share_url import ShareURL
from kvparams_proxy.config.sharing import SharingSettings
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.prefix_cache_model import BLOCK_TOKENS, SHARED_BLOCK_TOKENS, PrefixCacheModel
from tests.support.proxy.memory_network import MemoryNetwork, MemoryTransport

__all__ = ["SECRET", "SharedProxy", "Waiter", "facts"]

SECRET: Final = b"s" * 32


def facts(name: str, ids: Sequence[int] | None = None, *, tokens: int = 0, tenant: str = "") -> RequestFacts:
    """Returns the facts of a request; its prompt has the token ids, or so many unknown ones."""
    count = tokens if ids is None else len(ids)
    return RequestFacts(name, name, None, 1, 1, ids, None, prompt_tokens=count, tenant=tenant)


class Waiter:
    """A leg that may have to wait for room."""

    def __init__(self, facts: RequestFacts) -> None:
        self.facts = facts
        self.instance: Instance | None = None
        self.error: ProxyError | None = None

    def granted(self, instance: Instance) -> None:
        """Has room."""
        self.instance = instance

    def refused(self, error: ProxyError) -> None:
        """Has none."""
        self.error = error


class SharedProxy:
    """One proxy of a site."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        engines: Iterable[Instance],
        *,
        is_alone: bool = False,
        secret: bytes = SECRET,
        policy: type[SchedulingPolicy] = CacheAware,
        limits: RoleLimits | None = None,
        queue: QueueLimits | None = None,
        clock_offset_s: float = 0.0,
    ) -> None:
        """Starts a proxy.

        Args:
            network: where its siblings are.
            number: its place there.
            engines: all of the fleet, ready at once.
            is_alone: shares nothing.
            secret: of the site.
            policy: for every role.
            limits: of each engine.
            queue: of those that wait.
            clock_offset_s: how wrong its clock is.
        """
        loop = network.loop
        size = BLOCK_TOKENS if is_alone else SHARED_BLOCK_TOKENS
        prefixes = PrefixCacheModel(loop.time, 1, size) if getattr(policy, "uses_prefixes", False) else None
        self._prefixes = prefixes
        self.fleet = Fleet(
            (),
            {role: policy() for role in Role},
            loop.time,
            loop.call_later,
            limits=None if limits is None else dict.fromkeys(Role, limits),
            queue=queue,
            slow_start_s=0.0,
            prefixes=prefixes,
            role_groups=(frozenset[Role](),),
        )
        self.transport = MemoryTransport(network, number)
        self.probed: list[Member] = []
        self.sync: FleetSync | None = None
        if not is_alone:
            settings = SharingSettings(
                ShareURL("valkey://site", "site"), lambda: (secret,), seed=1, response_secret=b"r"
            )
            info = {"policy": policy.__name__}
            self.sync = FleetSync(
                loop, self.fleet, prefixes, settings, info, self.transport, lambda: loop.time() + clock_offset_s
            )
            self.fleet.probe = self.probed.append
        for engine in engines:
            self.join(engine)
        self.fleet.startup_complete()
        if self.sync is not None:
            self.sync.start()

    @property
    def prefixes(self) -> PrefixCacheModel:
        """The model of caches; there is one where the policy looks at it."""
        assert self._prefixes is not None
        return self._prefixes

    @property
    def shared(self) -> FleetSync:
        """What it shares."""
        assert self.sync is not None
        return self.sync

    def join(self, engine: Instance) -> Member:
        """Adds an engine, which is ready."""
        member = self.fleet.add(engine)
        self.fleet.record_probe(member, True, None)
        return member

    def member(self, id: str) -> Member:
        """Returns the member of this id."""
        return next(each for each in self.fleet.members if each.instance.id == id)

    def acquire(self, role: Role, facts: RequestFacts) -> Instance:
        """Takes an instance that has room."""
        chosen = self.fleet.acquire(role, facts, (), Waiter(facts))
        assert chosen is not None
        return chosen
