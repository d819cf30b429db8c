"""What the proxy knows of its engines: who they are, who is ready, how much runs on each.

The one rule: load is counted at the moment of choice and given back by whoever chose. Everything that several proxy
processes would have to share is behind this object, which is passed in and never global.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from secrets import token_hex
from typing import TYPE_CHECKING, Protocol

from kvparams.admission import QueueLimits, RoleLimits
from kvparams.breaker import BreakerLimits
from kvparams.dialects import Place
from kvparams.pace import Pace
from kvparams.pairing import Beside, pair_key
from kvparams.scheduling import Instance, RequestFacts, Role, SchedulingPolicy
from kvparams.speed import Usual
from kvparams_proxy.fleet.blame import Blame
from kvparams_proxy.fleet.breakers import Breakers
from kvparams_proxy.fleet.dispatch import Dispatcher
from kvparams_proxy.fleet.earlier import Earlier
from kvparams_proxy.fleet.health import RoleHealth, role_healths
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.slowstart import CallLater
from kvparams_proxy.fleet.state_log import EngineStateLog
from kvparams_proxy.fleet.waiting import Waiter

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefixes import Explained, Prefixes

__all__ = ["Fleet", "FleetListener"]


class FleetListener(Protocol):
    """Hears who comes and goes, from when it begins to listen."""

    def joined(self, member: Member) -> None:
        """It will be chosen once it is known to be ready."""
        ...

    def left(self, member: Member) -> None:
        """It is not chosen any more and its last leg has ended: what is kept for it may be closed."""
        ...


class Fleet:
    """The engines behind one proxy. Nothing here waits: time comes from outside, and who has to wait is called."""

    def __init__(
        self,
        instances: Iterable[Instance],
        policies: Mapping[Role, SchedulingPolicy],
        now: Callable[[], float],
        call_later: CallLater,
        *,
        limits: Mapping[Role, RoleLimits] | None = None,
        queue: QueueLimits | None = None,
        breaker: BreakerLimits | None = None,
        slow_start_s: float = 10.0,
        prefixes: "Prefixes | None" = None,
        needed: Iterable[Role] = (Role.PREFILL, Role.DECODE),
    ) -> None:
        """The instances that are there from the start are taken for ready until somebody learns otherwise.

        Args:
            instances: the first ones; ids must be unique.
            policies: for each role how to choose.
            now: the clock, in seconds; the event loop's.
            call_later: the event loop's.
            limits: for each role what one instance may run; without, nobody ever waits.
            queue: for each role that has limits, who may wait for room.
            breaker: when an instance that fails is left alone.
            slow_start_s: in how much time an instance that comes (back) gets its whole share; 0 is at once.
            prefixes: what those have cached that compute prompts, where their policy looks at it.
            needed: the roles without which requests are refused.
        """
        self.needed = frozenset(needed)
        """As the argument, or `need`."""
        instances = tuple(instances)
        self._prefixes = prefixes
        breaker = breaker or BreakerLimits()
        self._breakers = Breakers(breaker, now, call_later, self._breaker_changed)
        self._states = EngineStateLog(now)
        self._now = now
        self._usual = Usual()
        self._members: dict[str, Member] = {}
        self._blame = Blame(breaker, self._members, self._states, now)
        self._earlier = Earlier()
        self._leaving: set[Member] = set()
        """Removed, and listeners do not know yet."""
        self._listeners: list[FleetListener] = []
        for instance in instances:
            if instance.id in self._members:
                raise ValueError(f"two instances are called {instance.id!r}")
            self._members[instance.id] = Member(instance, self._breakers.new(), Pace(now, self._usual), ready=True)
        self._roles = {
            role: Dispatcher(
                role,
                policies[role],
                self._members,
                (limits or {}).get(role) or RoleLimits(),
                queue or QueueLimits(),
                slow_start_s,
                now,
                call_later,
                None if role is Role.DECODE else prefixes,
            )
            for role in Role
        }
        self._paired = len({pair_key(instance) for instance in instances}) > 1
        """Whether it matters who is paired with whom."""
        for dispatcher in self._roles.values():
            dispatcher.changed()

    # who is there

    @property
    def members(self) -> Iterable[Member]:
        """All that have not been removed, in the order they were named."""
        return self._members.values()

    def add(self, instance: Instance, why: str = "") -> Member:
        """It joins, and is chosen once it is known to be ready. `why` is for the log, as for the next three methods.

        Raises:
            ValueError: the id is taken.
        """
        if instance.id in self._members:
            raise ValueError(f"two instances are called {instance.id!r}")
        return self._join(instance, why)

    def remove(self, id: str, why: str = "") -> None:
        """No new legs from now on; those that run go on, and it is forgotten when the last one ends.

        Raises:
            KeyError: nobody is called that.
        """
        member = self._members.pop(id)
        self._leave(member, why)
        self._changed(member)
        self._say_left(member, why)

    def drain(self, id: str, on: bool = True, why: str = "") -> None:
        """No new legs as long as it is on; those that run go on.

        Raises:
            KeyError: nobody is called that.
        """
        member = self._members[id]
        if member.draining is not on:
            member.draining = on
            self._states.look(member, why, answers=False)
            self._changed(member)

    def replace(self, instance: Instance, why: str = "") -> Member:
        """What is called by that id has changed: the old one leaves, the new one joins.

        Raises:
            KeyError: nobody is called that.
        """
        old = self._members[instance.id]
        self._leave(old, why)
        self._say_left(old, why)
        member = self._join(instance, why)
        if old.instance.role is not instance.role:
            self._changed(old)
        return member

    def member(self, instance: Instance) -> Member:
        """Who an instance is or was, as long as a leg runs there.

        Raises:
            KeyError: it is forgotten.
        """
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance:
            return member
        return self._earlier.member(instance)

    def listen(self, listener: FleetListener) -> None:
        """It hears of every change from now on."""
        self._listeners.append(listener)

    def unlisten(self, listener: FleetListener) -> None:
        """It hears nothing more."""
        self._listeners.remove(listener)

    def settled(self) -> None:
        """The proxy has started: those that are ready by now need no slow start, there was nobody before them."""
        for dispatcher in self._roles.values():
            dispatcher.settled()

    def close(self) -> None:
        """Refuse whoever waits; no timer is left. Legs that run can still be released."""
        self._breakers.close()
        for dispatcher in self._roles.values():
            dispatcher.close()

    # what a request needs

    def require(self, roles: Iterable[Role], facts: RequestFacts) -> None:
        """Refuse a request whose later legs nobody could run, or might not even wait for room as things are, before its
        first one costs anything.

        Raises:
            ProxyError: as for `acquire`.
        """
        for role in roles:
            dispatcher = self._roles[role]
            if dispatcher.limited or not dispatcher.knows(facts.model):
                dispatcher.admit(facts)

    def acquire(
        self,
        role: Role,
        facts: RequestFacts,
        avoid: Collection[str],
        waiter: Waiter,
        beside: Beside | None = None,
        near: Collection[str] = (),
    ) -> Instance | None:
        """Take an instance for one leg; its load counts until `release`.

        Args:
            role: what it is for.
            facts: of the request; the same object goes to `release`.
            avoid: ids of instances that failed this request: taken only where there is nobody else.
            waiter: hears later, if there is no room now. It waits for one instance at a time.
            beside: see `kvparams.plan.Choose`.
            near: likewise.

        Returns:
            The instance, or None: `waiter` waits.

        Raises:
            ProxyError: 503 naming the role that is missing; 429 or 503, because nobody more may wait.
        """
        dispatcher = self._roles[role]
        if beside is None:
            return dispatcher.acquire(facts, avoid, waiter, None, near)
        key = None
        if self._paired:
            key = beside if isinstance(beside, Role) else pair_key(beside)
        if not self._blame.watches:
            return dispatcher.acquire(facts, avoid, waiter, key, near)
        instance = dispatcher.acquire(facts, self._blame.avoid(avoid, facts, beside), waiter, key, near)
        if instance is not None:
            self._blame.chosen(instance, beside)
        return instance

    def give_up(self, waiter: Waiter) -> None:
        """It waits no longer. No-op if it does not wait."""
        for dispatcher in self._roles.values():
            if dispatcher.give_up(waiter):
                return

    def release(self, instance: Instance, facts: RequestFacts) -> None:
        """Give back what `acquire` counted; whoever waits and fits is granted at once.

        Raises:
            ValueError: it was given back already.
        """
        member = self._members.get(instance.id)
        if member is None or member.instance is not instance:
            member = self._earlier.release(instance)
        elif not member.in_flight:
            raise ValueError(f"{instance.id} is released more often than it was acquired")
        member.in_flight -= 1
        member.tokens -= facts.tokens
        dispatcher = self._roles[instance.role]
        if dispatcher.guarded:
            self._breakers.released(member, facts)
            dispatcher.released(member, facts)
        if member.left:
            self._say_left(member)
        elif member.draining and not member.in_flight:
            self._states.look(member, "its last leg has ended")

    # what legs and probes find out

    def succeeded(self, instance: Instance, beside: Instance | None = None) -> None:
        """A leg on it did what it should. `beside`: it has fetched the KV of this prefill instance."""
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance and not member.breaker.spotless:
            self._breakers.succeeded(member)
        if beside is not None and self._blame.watches:
            self._blame.fetched(beside, instance)

    def heard(self, instance: Instance, beside: Instance | None = None) -> None:
        """A leg on it has given its first byte: if it is on trial, another one may begin. How it ends still counts.
        `beside`: as for `succeeded`."""
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance and member.trial is not None:
            self._breakers.heard(member)
        if beside is not None and self._blame.watches:
            self._blame.fetched(beside, instance)

    def computed(self, instance: Instance, facts: RequestFacts) -> None:
        """A leg on it that goes on with the answer has its prompt computed."""
        member = self._members.get(instance.id)
        if self._prefixes is not None and member is not None and member.instance is instance:
            self._prefixes.heard(member, facts)

    def decoded(self, instance: Instance, facts: RequestFacts, prompt_tokens: int | None, cached: int | None) -> None:
        """A decode engine has answered. See `Prefixes.decoded`."""
        member = self._members.get(instance.id)
        if self._prefixes is not None and member is not None and member.instance is instance:
            self._prefixes.decoded(instance, facts, prompt_tokens, cached)

    def failed(
        self,
        instance: Instance,
        *,
        connected: bool,
        busy: bool = False,
        why: str = "",
        beside: Instance | None = None,
    ) -> None:
        """A leg on it failed by its fault.

        Args:
            instance: who ran the leg.
            connected: whether there was a connection; without one, it is not chosen before a probe has found it alive.
            busy: whether the engine has said that it has no room.
            why: the evidence, for the log.
            beside: the prefill instance whose KV the leg was to fetch. If the leg failed before its first byte, that
                may be the fault of this instance: see `kvparams_proxy.fleet.pairs`.
        """
        member = self._members.get(instance.id)
        if member is None or member.instance is not instance:  # what an earlier incarnation did tells nothing
            return
        if connected and beside is not None and not self._blame.is_to_blame(member, beside, why):
            return
        opened = self._breakers.failed(member)
        if opened:
            member.busy = busy
            self._blame.forget(instance)
        if not connected and member.ready:
            self.learn(member, False, member.models, why=why)
        elif opened:
            wait_s = member.breaker.until - self._now()
            self._states.look(member, f"its legs fail ({why}); others get its work for {wait_s:.1f} s")
            self._changed(member)

    def learn(
        self,
        member: Member,
        ready: bool,
        models: frozenset[str] | None,
        place: Place | None = None,
        version: str | None = None,
        base: str | None = None,
        *,
        why: str = "",
        answers: bool = False,
    ) -> None:
        """A probe has found out how a member is. One that comes back is another incarnation, and so is one that its
        bootstrap server calls something else than before, or that speaks another version of the protocol. `why` and
        `answers` are for the log: see `EngineStateLog.look`."""
        if self._members.get(member.instance.id) is not member:  # it was removed meanwhile
            return
        member.base = base or member.base
        dispatcher = self._roles[member.instance.role]
        version = version or member.instance.version
        came = ready and (not member.ready or place != member.place or version != member.instance.version)
        if ready:
            self._breakers.probed_well(member)
        if came:
            if member.asked:
                self._set_aside(member)
                member.instance = replace(member.instance, incarnation=token_hex(8))
                self._breakers.restarted(member)
                why = f"{why}, as another incarnation" if why else why
            if version != member.instance.version:
                member.instance = replace(member.instance, version=version)
            member.asked = True
            member.place = place
            dispatcher.starts_slowly(member)
        changed = came or (member.ready, member.models) != (ready, models)
        member.ready, member.models = ready, models
        self._states.look(member, why, answers=answers)
        if changed:
            self._changed(member)

    def place(self, instance: Instance) -> Place | None:
        """What the bootstrap server of an instance has said last; None where it has none, or was not asked yet."""
        try:
            return self.member(instance).place
        except KeyError:
            return None

    def know_model(self, model: str) -> bool:
        """Whether a request for this model can be served at all. True as long as an engine has not said what it has."""
        if any(dispatcher.knows(model) for dispatcher in self._roles.values()):
            return True
        members = self._members.values()
        return not members or any(member.serves(model) for member in members)

    def models(self) -> list[str]:
        """What the engines say they serve, sorted."""
        return sorted({model for member in self._members.values() for model in member.models or ()})

    def need(self, roles: frozenset[Role]) -> None:
        """Without these roles requests are refused, from now on."""
        self.needed = roles

    def there(self, role: Role, model: str | None) -> bool:
        """Whether somebody of this role may be given work for this model, room apart."""
        return self._roles[role].has(model)

    def elsewhere(self, instance: Instance, facts: RequestFacts, failed: Collection[str]) -> bool:
        """See `kvparams.plan.Context.elsewhere`."""
        if not self._paired:
            return False
        other = Role.DECODE if instance.role is Role.PREFILL else Role.PREFILL
        pairs = self._roles[other].keys(facts.model, failed)
        return pair_key(instance) not in pairs and bool(pairs & self._roles[instance.role].keys(facts.model, failed))

    def cached(self, role: Role, facts: RequestFacts) -> Mapping[str, int]:
        """See `kvparams.plan.Context.cached`."""
        if self._prefixes is None or not self.there(role, facts.model):
            return {}
        believed = self._prefixes.cached(facts)
        candidates = (each.instance for each in self._roles[role].candidates(facts.model))
        return {each.id: believed[each] for each in candidates if each in believed}

    def explain(self, role: Role, facts: RequestFacts) -> "Explained | None":
        """What `acquire` would decide now, room apart; nothing is taken. None: the policy looks at no caches.

        Raises:
            ProxyError: 503 naming the role: there is nobody.
        """
        return self._roles[role].explain(facts)

    def health(self) -> dict[Role, RoleHealth]:
        """Returns the figures of each role that is needed, or that somebody has."""
        waiting = {role: dispatcher.waiting for role, dispatcher in self._roles.items()}
        return role_healths(self._members.values(), self.needed, waiting)

    @property
    def pairs_apart(self) -> int:
        """Returns how many pairs of a prefill and a decode instance are set apart: see `kvparams_proxy.fleet.pairs`."""
        return self._blame.pairs_apart

    def panic_legs(self, role: Role) -> int:
        """Returns how many legs of this role were given to suspected instances because no other could be given any."""
        return self._roles[role].panic_legs

    # inside

    def _join(self, instance: Instance, why: str) -> Member:
        instance = replace(instance, incarnation=token_hex(8))  # whoever was called that before was another one
        pace = Pace(self._now, self._usual)
        member = self._members[instance.id] = Member(instance, self._breakers.new(), pace, ready=False)
        self._states.joined(member, why)
        self._changed(member)
        for listener in self._listeners:
            listener.joined(member)
        return member

    def _leave(self, member: Member, why: str) -> None:
        member.left = True
        self._leaving.add(member)
        self._breakers.forget(member)
        self._set_aside(member)
        if member.in_flight:
            self._states.look(member, why)

    def _say_left(self, member: Member, why: str = "its last leg has ended") -> None:
        if member in self._leaving and not member.in_flight:
            self._leaving.discard(member)
            self._states.look(member, why)
            for listener in self._listeners:
                listener.left(member)

    def _set_aside(self, member: Member) -> None:
        """The legs that run on `member.instance` are now those of an earlier one."""
        if member.trial is not None:
            member.trial = None
            member.breaker.end_trial()
        self._earlier.add(member)
        self._blame.forget(member.instance)
        if self._prefixes is not None:
            self._prefixes.lost(member.instance)

    def _breaker_changed(self, member: Member) -> None:
        self._states.look(member, "its legs work again")
        self._changed(member)

    def _changed(self, member: Member) -> None:
        """Whoever may be given work is told to those who choose; where it matters who fits whom, to all of them."""
        split = [pair_key(each.instance) for each in self._members.values()]
        before, self._paired = self._paired, len(set(split)) > 1
        if before or self._paired:
            for dispatcher in self._roles.values():
                dispatcher.changed()
        else:
            self._roles[member.instance.role].changed()
