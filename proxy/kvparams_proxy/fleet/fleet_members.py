"""The members of the fleet: who joins and leaves, who is drained, and what probes find out about them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from kvparams.cost_model import FleetCostPrior
from kvparams.dialects.interface import BootstrapInfo
from kvparams.engine_backlog import EngineBacklog
from kvparams.instances import Instance, Role, SchedulingPolicy
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.breaker import BreakerLimits
from kvparams.routing.model_settings import SettingsByModel
from kvparams.routing.pairing import PairKey, pair_key
from kvparams_proxy.fleet.adapter_loads import base_model_of, record_adapters
from kvparams_proxy.fleet.breakers import Breakers
from kvparams_proxy.fleet.explaining_dispatcher import ExplainingDispatcher
from kvparams_proxy.fleet.failure_attribution import FailureAttributor
from kvparams_proxy.fleet.fleet_listeners import FleetListener, FleetSharing
from kvparams_proxy.fleet.instance_limits import InstanceLimits
from kvparams_proxy.fleet.leg_choosers import LegChoosers
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.retired_instances import RetiredInstances
from kvparams_proxy.fleet.slow_start import CallLater
from kvparams_proxy.fleet.state_log import ChangeCause, EngineStateLog, Evidence, StateCause

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["LAST_LEG_ENDED", "FleetMembers"]

LAST_LEG_ENDED: Final = ChangeCause(Evidence.LAST_LEG, "its last leg has ended")


class FleetMembers:
    """The half of the fleet that changes with engines. Nothing here waits: time comes from outside."""

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
        models: SettingsByModel | None = None,
        model_policies: Mapping[Role, Mapping[str, SchedulingPolicy]] | None = None,
        role_groups: Collection[frozenset[Role]] = (frozenset((Role.PREFILL, Role.DECODE)),),
    ) -> None:
        """Takes the first instances for ready until a probe finds out otherwise.

        Args:
            instances: the first ones; ids must be unique.
            policies: for each role how to choose.
            now: the clock, in seconds; the event loop's, as is `call_later`.
            limits: for each role what one instance may run; without, nobody ever waits.
            queue: for each role that has limits, who may wait for room.
            breaker: when an instance that fails is left alone.
            slow_start_s: in how much time an instance that comes (back) gets its whole share; 0 is at once.
            prefixes: what those have cached that compute prompts, where a policy looks at it.
            models: what is set for single models; the fleet tells it who is whose adapter.
            model_policies: for each role how to choose for models with a policy of their own, by their entry.
            role_groups: the roles that requests need together, for each kind of requests, until `set_role_groups`.
        """
        self.role_groups = role_groups
        self._prefixes = prefixes
        breaker = breaker or BreakerLimits()
        self._breakers = Breakers(breaker, now, call_later, self._breaker_changed)
        self._states = EngineStateLog(now)
        self._now = now
        self._usual = FleetCostPrior()
        self._members: dict[str, Member] = {}
        self._pair_keys = Counter[PairKey]()
        """Of the members; with several it matters who is paired with whom."""
        self._encode_instances = 0
        self._blame = FailureAttributor(breaker, self._members, self._states, now)
        self._earlier = RetiredInstances()
        self._leaving: set[Member] = set()
        """Removed, and listeners do not know yet."""
        self.sharing: FleetSharing | None = None
        """Tells other proxies what becomes of this fleet, where there are any."""
        self.probe: Callable[[Member], None] = lambda member: None
        """Probes a member at once, where probes run."""
        self._listeners: list[FleetListener] = []
        self._models = models or SettingsByModel()
        self._models.base_model_of = lambda adapter: base_model_of(self._members.values(), adapter)
        self._add_first(instances)
        self._roles = {
            role: ExplainingDispatcher(
                role,
                LegChoosers(
                    policies[role],
                    prefixes if role in (Role.PREFILL, Role.AGGREGATED) else None,
                    (model_policies or {}).get(role),
                    self._models,
                ),
                self._members,
                InstanceLimits(role, (limits or {}).get(role) or RoleLimits(), self._models),
                queue or QueueLimits(),
                slow_start_s,
                now,
                call_later,
            )
            for role in Role
        }
        self._paired = len(self._pair_keys) > 1
        for dispatcher in self._roles.values():
            dispatcher.trial_began = self._trial_began
            dispatcher.changed()

    def cause_of(self, member: Member) -> StateCause | None:
        """See `EngineStateLog.cause_of`."""
        return self._states.cause_of(member)

    @property
    def members(self) -> Iterable[Member]:
        """The members that have not been removed, in the order they were named."""
        return self._members.values()

    @property
    def has_encode_instances(self) -> bool:
        """True if an encode instance is among the members, ready or not."""
        return self._encode_instances > 0

    def add(self, instance: Instance, why: str = "") -> Member:
        """Adds an instance, which can be chosen once it is known to be ready.

        `why` is for the log, as for the next three methods.

        Raises:
            ValueError: the id is taken.
        """
        if instance.id in self._members:
            raise ValueError(f"two instances are called {instance.id!r}")
        return self._join(instance, why)

    def remove(self, id: str, why: str = "") -> None:
        """Removes an instance. It gets no new legs; running legs go on, and it is forgotten when the last one ends.

        Raises:
            KeyError: nobody is called that.
        """
        member = self._members.pop(id)
        self._forget_pair_key(member.instance)
        self._leave(member, why)
        self._dispatchers_changed(member)
        self._say_left(member, why)

    def drain(self, id: str, on: bool = True, why: str = "") -> None:
        """Starts or ends draining. A draining instance gets no new legs; running legs go on.

        Raises:
            KeyError: nobody is called that.
        """
        member = self._members[id]
        if member.draining is not on:
            member.draining = on
            self._changed(member, ChangeCause(Evidence.OPERATOR, why))

    def replace(self, instance: Instance, why: str = "") -> Member:
        """Replaces the instance of this id: the old one leaves, the new one joins.

        Raises:
            KeyError: nobody is called that.
        """
        old = self._members[instance.id]
        self._forget_pair_key(old.instance)
        self._leave(old, why)
        self._say_left(old, why)
        member = self._join(instance, why)
        if old.instance.role is not instance.role:
            self._dispatchers_changed(old)
        return member

    def member(self, instance: Instance) -> Member:
        """Returns the member that an instance belongs to, or belonged to while a leg still runs there.

        Raises:
            KeyError: it is forgotten.
        """
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance:
            return member
        return self._earlier.member(instance)

    def share_with(self, sharing: FleetSharing) -> None:
        """Tells `sharing` from now on what other proxies should know."""
        self.sharing = sharing
        for dispatcher in self._roles.values():
            dispatcher.load_changed = sharing.load_changed
            dispatcher.adapter_legs.on_used = sharing.adapter_used

    def add_listener(self, listener: FleetListener) -> None:
        """Adds a listener, which hears of every change from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: FleetListener) -> None:
        """Removes a listener."""
        self._listeners.remove(listener)

    def startup_complete(self) -> None:
        """Hears that the proxy has started: instances that are ready by now need no slow start."""
        for dispatcher in self._roles.values():
            dispatcher.startup_complete()

    @property
    def model_settings(self) -> SettingsByModel:
        """Returns what is set for single models."""
        return self._models

    def model_settings_changed(self) -> None:
        """Hears that what is set for models has changed: their limits hold from now on."""
        for dispatcher in self._roles.values():
            dispatcher.model_settings_changed()

    def limits_of(self, member: Member) -> RoleLimits:
        """Returns what a member may run at a time, by the models that it serves."""
        return self._roles[member.instance.role].limits_of(member)

    def close(self) -> None:
        """Refuses all waiting legs and cancels all timers. Running legs can still be released."""
        self._breakers.close()
        for dispatcher in self._roles.values():
            dispatcher.close()

    def record_probe(
        self,
        member: Member,
        ready: bool,
        models: frozenset[str] | None,
        place: BootstrapInfo | None = None,
        version: str | None = None,
        base: str | None = None,
        adapters: Sequence[str] | None = None,
        *,
        why: str = "",
        answers: bool = False,
    ) -> None:
        """Records the result of a probe.

        A member that comes back is another incarnation, and so is one that its bootstrap server calls something else
        than before, or that speaks another version of the protocol. `why` and `answers` are for the log: see
        `EngineStateLog.observe`.
        """
        evidence = Evidence.PROBE
        self._record_presence(member, ready, models, place, version, base, adapters, evidence, why, answers=answers)

    # inside

    def _record_presence(
        self,
        member: Member,
        ready: bool,
        models: frozenset[str] | None,
        place: BootstrapInfo | None,
        version: str | None,
        base: str | None,
        adapters: Sequence[str] | None,
        evidence: Evidence,
        why: str,
        *,
        answers: bool,
    ) -> None:
        """Records whether a member is there: see `record_probe`."""
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
                self._restarted(member)
                if self.sharing is not None:
                    self.sharing.engine_restarted(member)
                why = f"{why}, as another incarnation" if why else why
            if version != member.instance.version:
                member.instance = replace(member.instance, version=version)
            member.was_ever_ready = True
            member.bootstrap_info = place
            dispatcher.begin_slow_start(member)
        if adapters is not None:  # those of this incarnation
            record_adapters(member, adapters)
        changed = came or (member.ready, member.models) != (ready, models)
        member.ready, member.models = ready, models
        cause = ChangeCause(evidence, why)
        if changed:
            self._changed(member, cause, answers=answers)
        else:
            self._states.observe(member, cause, answers=answers)

    def _add_first(self, instances: Iterable[Instance]) -> None:
        for instance in instances:
            if instance.id in self._members:
                raise ValueError(f"two instances are called {instance.id!r}")
            backlog = EngineBacklog(self._now, self._usual)
            self._members[instance.id] = Member(instance, self._breakers.new(), backlog, ready=True)
            self._count_pair_key(instance)

    def _count_pair_key(self, instance: Instance) -> None:
        if instance.role is Role.ENCODE:  # it is paired with nobody
            self._encode_instances += 1
        else:
            self._pair_keys[pair_key(instance)] += 1

    def _forget_pair_key(self, instance: Instance) -> None:
        if instance.role is Role.ENCODE:
            self._encode_instances -= 1
            return
        key = pair_key(instance)
        self._pair_keys[key] -= 1
        if not self._pair_keys[key]:
            del self._pair_keys[key]

    def _join(self, instance: Instance, why: str) -> Member:
        instance = replace(instance, incarnation=token_hex(8))  # whoever was called that before was another one
        pace = EngineBacklog(self._now, self._usual)
        member = self._members[instance.id] = Member(instance, self._breakers.new(), pace, ready=False)
        self._count_pair_key(instance)
        self._states.joined(member, ChangeCause(Evidence.OPERATOR, why))
        self._dispatchers_changed(member)
        for listener in self._listeners:
            listener.joined(member)
        return member

    def _leave(self, member: Member, why: str) -> None:
        member.has_left = True
        self._leaving.add(member)
        self._breakers.forget(member)
        self._set_aside(member)
        if member.own_in_flight:
            self._states.observe(member, ChangeCause(Evidence.OPERATOR, why))

    def _say_left(self, member: Member, why: str = "") -> None:
        """Tells that a member has left, if its last leg has ended. `why`: it had none."""
        if member in self._leaving and not member.own_in_flight:
            self._leaving.discard(member)
            self._states.observe(member, ChangeCause(Evidence.OPERATOR, why) if why else LAST_LEG_ENDED)
            for listener in self._listeners:
                listener.left(member)

    def _restarted(self, member: Member) -> None:
        """Makes a member another incarnation."""
        self._set_aside(member)
        member.instance = replace(member.instance, incarnation=token_hex(8))
        record_adapters(member, ())
        self._breakers.restarted(member)

    def _set_aside(self, member: Member) -> None:
        """Moves the running legs of `member.instance` to the retired instances."""
        if member.trial is not None:
            member.trial = None
            member.breaker.end_trial()
        self._earlier.add(member)
        self._blame.forget(member.instance)
        if self._prefixes is not None:
            self._prefixes.forget_instance(member.instance)

    def _breaker_changed(self, member: Member) -> None:
        self._changed(member, ChangeCause(Evidence.BREAKER, "its legs work again"))

    def _trial_began(self) -> None:
        """Has all roles look again who may be chosen: an instance on trial is no partner for further legs."""
        for dispatcher in self._roles.values():
            dispatcher.forget_candidates()

    def _changed(self, member: Member, cause: ChangeCause, *, answers: bool = False) -> None:
        """Tells the log and the dispatchers that a member has changed. `answers`: see `EngineStateLog.observe`."""
        self._states.observe(member, cause, answers=answers)
        self._dispatchers_changed(member)

    def _dispatchers_changed(self, member: Member) -> None:
        """Tells the dispatchers that a member has changed; all of them where pairs matter."""
        self._models.forget_adapters()
        before, self._paired = self._paired, len(self._pair_keys) > 1
        if before or self._paired:
            for dispatcher in self._roles.values():
                dispatcher.changed()
        else:
            self._roles[member.instance.role].changed()
