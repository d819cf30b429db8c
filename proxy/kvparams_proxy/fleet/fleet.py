"""What the proxy knows of its engines: who they are, who is ready, how much runs on each.

The one rule: load is counted at the moment of choice and given back by whoever chose. Everything that several proxy
processes would have to share is behind this object, which is passed in and never global.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from secrets import token_hex
from typing import TYPE_CHECKING, Protocol

from kvparams.cost_model import FleetCostPrior
from kvparams.dialects.interface import BootstrapInfo
from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Instance, RequestFacts, Role, SchedulingPolicy
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.breaker import BreakerLimits
from kvparams.routing.pairing import PairTarget, pair_key
from kvparams_proxy.fleet.breakers import Breakers
from kvparams_proxy.fleet.dispatcher import Dispatcher
from kvparams_proxy.fleet.failure_attribution import FailureAttributor
from kvparams_proxy.fleet.health import RoleHealth, health_by_role
from kvparams_proxy.fleet.leg_queue import LegWaiter
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.retired_instances import RetiredInstances
from kvparams_proxy.fleet.slow_start import CallLater
from kvparams_proxy.fleet.state_log import EngineStateLog

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel, RouteExplanation

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
        prefixes: "PrefixCacheModel | None" = None,
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
        """As the argument, or `set_needed_roles`."""
        instances = tuple(instances)
        self._prefixes = prefixes
        breaker = breaker or BreakerLimits()
        self._breakers = Breakers(breaker, now, call_later, self._breaker_changed)
        self._states = EngineStateLog(now)
        self._now = now
        self._usual = FleetCostPrior()
        self._members: dict[str, Member] = {}
        self._blame = FailureAttributor(breaker, self._members, self._states, now)
        self._earlier = RetiredInstances()
        self._leaving: set[Member] = set()
        """Removed, and listeners do not know yet."""
        self._listeners: list[FleetListener] = []
        for instance in instances:
            if instance.id in self._members:
                raise ValueError(f"two instances are called {instance.id!r}")
            self._members[instance.id] = Member(
                instance, self._breakers.new(), EngineBacklog(now, self._usual), ready=True
            )
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
            self._states.log_member(member, why, answers=False)
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

    def add_listener(self, listener: FleetListener) -> None:
        """It hears of every change from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: FleetListener) -> None:
        """It hears nothing more."""
        self._listeners.remove(listener)

    def startup_complete(self) -> None:
        """The proxy has started: those that are ready by now need no slow start, there was nobody before them."""
        for dispatcher in self._roles.values():
            dispatcher.startup_complete()

    def close(self) -> None:
        """Refuse whoever waits; no timer is left. Legs that run can still be released."""
        self._breakers.close()
        for dispatcher in self._roles.values():
            dispatcher.close()

    # what a request needs

    def check_admission(self, roles: Iterable[Role], facts: RequestFacts) -> None:
        """Refuse a request whose later legs nobody could run, or might not even wait for room as things are, before its
        first one costs anything.

        Raises:
            ProxyError: as for `acquire`.
        """
        for role in roles:
            dispatcher = self._roles[role]
            if dispatcher.has_limits or not dispatcher.has_cached_candidates(facts.model):
                dispatcher.admit(facts)

    def acquire(
        self,
        role: Role,
        facts: RequestFacts,
        avoid: Collection[str],
        waiter: LegWaiter,
        beside: PairTarget | None = None,
        near: Collection[str] = (),
    ) -> Instance | None:
        """Take an instance for one leg; its load counts until `release`.

        Args:
            role: what it is for.
            facts: of the request; the same object goes to `release`.
            avoid: ids of instances that failed this request: taken only where there is nobody else.
            waiter: hears later, if there is no room now. It waits for one instance at a time.
            beside: see `kvparams.routing.plan.Choose`.
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
        if not self._blame.has_failures:
            return dispatcher.acquire(facts, avoid, waiter, key, near)
        instance = dispatcher.acquire(facts, self._blame.ids_to_avoid(avoid, facts, beside), waiter, key, near)
        if instance is not None:
            self._blame.record_choice(instance, beside)
        return instance

    def cancel_wait(self, waiter: LegWaiter) -> None:
        """It waits no longer. No-op if it does not wait."""
        for dispatcher in self._roles.values():
            if dispatcher.cancel_wait(waiter):
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
        member.tokens -= facts.prompt_tokens
        dispatcher = self._roles[instance.role]
        if dispatcher.needs_notice:
            self._breakers.released(member, facts)
            dispatcher.released(member, facts)
        if member.has_left:
            self._say_left(member)
        elif member.draining and not member.in_flight:
            self._states.log_member(member, "its last leg has ended")

    # what legs and probes find out

    def record_success(self, instance: Instance, beside: Instance | None = None) -> None:
        """A leg on it did what it should. `beside`: it has fetched the KV of this prefill instance."""
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance and not member.breaker.is_pristine:
            self._breakers.succeeded(member)
        if beside is not None and self._blame.has_failures:
            self._blame.record_fetch(beside, instance)

    def record_first_byte(self, instance: Instance, beside: Instance | None = None) -> None:
        """A leg on it has given its first byte: if it is on trial, another one may begin. How it ends still counts.
        `beside`: as for `record_success`."""
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance and member.trial is not None:
            self._breakers.trial_answered(member)
        if beside is not None and self._blame.has_failures:
            self._blame.record_fetch(beside, instance)

    def record_prompt_computed(self, instance: Instance, facts: RequestFacts) -> None:
        """A leg on it that goes on with the answer has its prompt computed."""
        member = self._members.get(instance.id)
        if self._prefixes is not None and member is not None and member.instance is instance:
            self._prefixes.record_first_byte(member, facts)

    def record_decode(
        self, instance: Instance, facts: RequestFacts, prompt_tokens: int | None, cached: int | None
    ) -> None:
        """A decode engine has answered. See `PrefixCacheModel.record_decode`."""
        member = self._members.get(instance.id)
        if self._prefixes is not None and member is not None and member.instance is instance:
            self._prefixes.record_decode(instance, facts, prompt_tokens, cached)

    def record_failure(
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
                may be the fault of this instance: see `kvparams_proxy.fleet.pair_failures`.
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
            self.record_probe(member, False, member.models, why=why)
        elif opened:
            wait_s = member.breaker.half_open_at - self._now()
            self._states.log_member(member, f"its legs fail ({why}); others get its work for {wait_s:.1f} s")
            self._changed(member)

    def record_probe(
        self,
        member: Member,
        ready: bool,
        models: frozenset[str] | None,
        place: BootstrapInfo | None = None,
        version: str | None = None,
        base: str | None = None,
        *,
        why: str = "",
        answers: bool = False,
    ) -> None:
        """A probe has found out how a member is. One that comes back is another incarnation, and so is one that its
        bootstrap server calls something else than before, or that speaks another version of the protocol. `why` and
        `answers` are for the log: see `EngineStateLog.log_member`."""
        if self._members.get(member.instance.id) is not member:  # it was removed meanwhile
            return
        member.base_model = base or member.base_model
        dispatcher = self._roles[member.instance.role]
        version = version or member.instance.version
        came = ready and (not member.ready or place != member.bootstrap_info or version != member.instance.version)
        if ready:
            self._breakers.probed_well(member)
        if came:
            if member.was_ever_ready:
                self._set_aside(member)
                member.instance = replace(member.instance, incarnation=token_hex(8))
                self._breakers.restarted(member)
                why = f"{why}, as another incarnation" if why else why
            if version != member.instance.version:
                member.instance = replace(member.instance, version=version)
            member.was_ever_ready = True
            member.bootstrap_info = place
            dispatcher.begin_slow_start(member)
        changed = came or (member.ready, member.models) != (ready, models)
        member.ready, member.models = ready, models
        self._states.log_member(member, why, answers=answers)
        if changed:
            self._changed(member)

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        """What the bootstrap server of an instance has said last; None where it has none, or was not asked yet."""
        try:
            return self.member(instance).bootstrap_info
        except KeyError:
            return None

    def may_serve_model(self, model: str) -> bool:
        """Whether a request for this model can be served at all. True as long as an engine has not said what it has."""
        if any(dispatcher.has_cached_candidates(model) for dispatcher in self._roles.values()):
            return True
        members = self._members.values()
        return not members or any(member.serves(model) for member in members)

    def models(self) -> list[str]:
        """What the engines say they serve, sorted."""
        return sorted({model for member in self._members.values() for model in member.models or ()})

    def set_needed_roles(self, roles: frozenset[Role]) -> None:
        """Without these roles requests are refused, from now on."""
        self.needed = roles

    def has_candidates(self, role: Role, model: str | None) -> bool:
        """Whether somebody of this role may be given work for this model, room apart."""
        return self._roles[role].has_candidates(model)

    def should_fail_over(self, instance: Instance, facts: RequestFacts, failed: Collection[str]) -> bool:
        """See `kvparams.routing.plan.Context.elsewhere`."""
        if not self._paired:
            return False
        other = Role.DECODE if instance.role is Role.PREFILL else Role.PREFILL
        pairs = self._roles[other].pair_keys(facts.model, failed)
        return pair_key(instance) not in pairs and bool(
            pairs & self._roles[instance.role].pair_keys(facts.model, failed)
        )

    def cached_tokens(self, role: Role, facts: RequestFacts) -> Mapping[str, int]:
        """See `kvparams.routing.plan.Context.cached`."""
        if self._prefixes is None or not self.has_candidates(role, facts.model):
            return {}
        believed = self._prefixes.cached_tokens(facts)
        candidates = (each.instance for each in self._roles[role].candidates(facts.model))
        return {each.id: believed[each] for each in candidates if each in believed}

    def explain(self, role: Role, facts: RequestFacts) -> "RouteExplanation | None":
        """What `acquire` would decide now, room apart; nothing is taken. None: the policy looks at no caches.

        Raises:
            ProxyError: 503 naming the role: there is nobody.
        """
        return self._roles[role].explain(facts)

    def health(self) -> dict[Role, RoleHealth]:
        """Returns the figures of each role that is needed, or that somebody has."""
        waiting = {role: dispatcher.waiting_legs for role, dispatcher in self._roles.items()}
        return health_by_role(self._members.values(), self.needed, waiting)

    @property
    def separated_pairs(self) -> int:
        """Returns how many pairs of a prefill and a decode instance are set apart: see
        `kvparams_proxy.fleet.pair_failures`."""
        return self._blame.separated_pairs

    def panic_legs(self, role: Role) -> int:
        """Returns how many legs of this role were given to suspected instances because no other could be given any."""
        return self._roles[role].panic_legs

    # inside

    def _join(self, instance: Instance, why: str) -> Member:
        instance = replace(instance, incarnation=token_hex(8))  # whoever was called that before was another one
        pace = EngineBacklog(self._now, self._usual)
        member = self._members[instance.id] = Member(instance, self._breakers.new(), pace, ready=False)
        self._states.log_joined(member, why)
        self._changed(member)
        for listener in self._listeners:
            listener.joined(member)
        return member

    def _leave(self, member: Member, why: str) -> None:
        member.has_left = True
        self._leaving.add(member)
        self._breakers.forget(member)
        self._set_aside(member)
        if member.in_flight:
            self._states.log_member(member, why)

    def _say_left(self, member: Member, why: str = "its last leg has ended") -> None:
        if member in self._leaving and not member.in_flight:
            self._leaving.discard(member)
            self._states.log_member(member, why)
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
            self._prefixes.forget_instance(member.instance)

    def _breaker_changed(self, member: Member) -> None:
        self._states.log_member(member, "its legs work again")
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
