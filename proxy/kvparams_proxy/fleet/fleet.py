"""The engines behind one proxy, as requests see them: an instance for each leg, and what its legs find out.

Load is counted when an instance is chosen, and given back by the caller that chose it. All state that several proxy
processes would have to share is behind `Fleet`, which is passed in and never global.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from kvparams.dialects.interface import BootstrapInfo
from kvparams.instances import Instance, RequestFacts, Role, ranks_key
from kvparams.routing.pairing import PairTarget, pair_key
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.adapter_loads import base_model_of
from kvparams_proxy.fleet.fleet_members import LAST_LEG_ENDED, FleetMembers
from kvparams_proxy.fleet.health import RoleHealth, health_by_role
from kvparams_proxy.fleet.leg_queue import LegWaiter, QueueObserver, RemoteLeg
from kvparams_proxy.fleet.state_log import ChangeCause, Evidence

if TYPE_CHECKING:
    from kvparams_proxy.fleet.member import Member
    from kvparams_proxy.fleet.routing_decision import RouteExplanation

__all__ = ["Fleet"]


class Fleet(FleetMembers):
    """The engines behind one proxy. Nothing here waits: a request that has to wait is called later."""

    # what a request needs

    def check_admission(self, roles: Iterable[Role], facts: RequestFacts) -> None:
        """Refuses a request whose later legs could not run or wait for room, before its first leg costs anything.

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
        """Takes an instance for one leg; its load counts until `release`.

        Args:
            role: what it is for.
            facts: of the request; the same object goes to `release`.
            avoid: ids of instances that failed this request: taken only where there is nobody else.
            waiter: hears later, if there is no room now. It waits for one instance at a time.
            beside: see `kvparams.routing.plan.AcquireInstance`.
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
        """Cancels a wait. Does nothing if the leg does not wait."""
        for dispatcher in self._roles.values():
            if dispatcher.cancel_wait(waiter):
                return

    def release(self, instance: Instance, facts: RequestFacts) -> None:
        """Releases the load that `acquire` counted. Waiting legs that fit are granted at once.

        Raises:
            ValueError: it was given back already.
        """
        member = self._members.get(instance.id)
        if member is None or member.instance is not instance:
            member = self._earlier.release(instance)
        elif member.in_flight == member.elsewhere + member.foreign:
            raise ValueError(f"{instance.id} is released more often than it was acquired")
        elif member.adapter_slots is not None:
            self._roles[instance.role].adapter_legs.end(member, facts.model)
        member.in_flight -= 1
        member.tokens -= facts.prompt_tokens
        if self.sharing is not None:
            self.sharing.load_changed(member)
        dispatcher = self._roles[instance.role]
        if dispatcher.needs_notice:
            self._breakers.released(member, facts)
            dispatcher.released(member, facts)
        if member.has_left:
            self._say_left(member)
        elif member.draining and not member.own_in_flight:
            self._states.observe(member, LAST_LEG_ENDED)

    # what its legs find out

    def record_success(self, instance: Instance, beside: Instance | None = None) -> None:
        """Records the success of a leg. `beside`: it has fetched the KV of this prefill instance."""
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance and not member.breaker.is_pristine:
            self._breakers.succeeded(member)
        if beside is not None and self._blame.has_failures:
            self._blame.record_fetch(beside, instance)

    def record_first_byte(self, instance: Instance, beside: Instance | None = None) -> None:
        """Records the first byte of a leg: if its instance is on trial, another trial may begin.

        The leg's end still counts. `beside`: as for `record_success`.
        """
        member = self._members.get(instance.id)
        if member is not None and member.instance is instance and member.trial is not None:
            self._breakers.trial_answered(member)
        if beside is not None and self._blame.has_failures:
            self._blame.record_fetch(beside, instance)

    def record_prompt_computed(self, instance: Instance, facts: RequestFacts) -> None:
        """Records that the prompt of a leg is computed that goes on with the answer."""
        member = self._members.get(instance.id)
        if self._prefixes is not None and member is not None and member.instance is instance:
            self._prefixes.record_first_byte(member, facts)

    def record_decode(
        self, instance: Instance, facts: RequestFacts, prompt_tokens: int | None, cached: int | None
    ) -> None:
        """Records the answer of a decode engine. See `PrefixCacheModel.record_decode`."""
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
        """Records a failure of a leg for which its instance is to blame.

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
        if self.sharing is not None:
            self.sharing.engine_failed(member, connected=connected, why=why)
        opened = self._breakers.failed(member)
        if opened:
            member.busy = busy
            self._blame.forget(instance)
        if not connected and member.ready:
            for each in [each for each in self._behind_one_url(member) if each.ready]:
                self._record_presence(
                    each, False, each.models, None, None, None, None, Evidence.LEG, why, answers=False
                )
        elif opened:
            wait_s = member.breaker.half_open_at - self._now()
            words = f"its legs fail ({why}); others get its work for {wait_s:.1f} s"
            self._changed(member, ChangeCause(Evidence.BREAKER, words))

    def _behind_one_url(self, member: "Member") -> "list[Member]":
        """Returns the member, and all other data-parallel ranks of its engine: there is one server for all of them."""
        key = ranks_key(member.instance)
        if key is None:
            return [member]
        return [each for each in self._members.values() if ranks_key(each.instance) == key]

    def check_adapter(self, instance: Instance, model: str | None) -> tuple[str, ...]:
        """Probes an engine that seems not to know a LoRA adapter that it has listed.

        Only the probe decides whether the engine has lost it: what a leg was answered may be a client's own words.

        Returns:
            The ids of all ranks behind the engine's URL; nothing if the model is no adapter that it has listed.
        """
        member = self._members.get(instance.id)
        if member is None or member.instance is not instance or model is None or model not in member.adapters:
            return ()
        ranks = self._behind_one_url(member)
        for each in ranks:
            self.probe(each)
        return tuple(each.instance.id for each in ranks)

    # what other proxies tell

    def set_elsewhere(self, member: "Member", in_flight: int, tokens: int) -> None:
        """Sets the load that all other proxies together have on a member. Waiting legs that fit are granted at once."""
        more = in_flight - member.elsewhere
        member.in_flight += more
        member.tokens += tokens - member.elsewhere_tokens
        member.elsewhere, member.elsewhere_tokens = in_flight, tokens
        if more < 0:
            self._roles[member.instance.role].room_made()

    def set_foreign(self, member: "Member", legs: int, tokens: int, seconds: float) -> None:
        """Sets the load on a member of clients that no proxy here knows. Waiting legs that fit are granted at once.

        `tokens` and `seconds` are estimates for all these legs: of their prompts, and of computing them.
        """
        more = legs - member.foreign
        member.in_flight += more
        member.tokens += tokens - member.foreign_tokens
        member.foreign, member.foreign_tokens = legs, tokens
        member.backlog.set_foreign(legs, seconds)
        if more < 0:
            self._roles[member.instance.role].room_made()

    def push_remote(self, role: Role, leg: RemoteLeg) -> None:
        """Adds a leg that waits for room at another proxy."""
        self._roles[role].push_remote(leg)

    def drop_remote(self, role: Role, leg: RemoteLeg, *, granted: bool) -> None:
        """Removes a leg that waits no longer at another proxy. Its tenant is charged if it was granted."""
        self._roles[role].drop_remote(leg, granted=granted)

    def accept_offer(self, role: Role, waiter: LegWaiter, member: "Member") -> None:
        """Grants a waiting leg the room that another proxy holds for it. Does nothing if it waits no longer."""
        self._roles[role].accept_offer(waiter, member)

    def watch_queues(self, observer: QueueObserver) -> None:
        """Tells `observer` which legs wait for room, from now on."""
        for dispatcher in self._roles.values():
            dispatcher.watch_queue(observer)

    def record_failure_elsewhere(self, member: "Member", why: str) -> None:
        """Records that a leg of another proxy failed there."""
        if self._breakers.failed(member):
            wait_s = member.breaker.half_open_at - self._now()
            words = f"legs of another proxy fail ({why}); others get work for {wait_s:.1f} s"
            self._changed(member, ChangeCause(Evidence.OTHER_PROXY, words))

    def record_restart_elsewhere(self, member: "Member") -> None:
        """Records that another proxy saw this engine restart."""
        if member.was_ever_ready and not member.has_left:
            self._restarted(member)
            self._changed(member, ChangeCause(Evidence.OTHER_PROXY, "another proxy saw it restart"))

    # what there is

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        """Returns the last answer of an instance's bootstrap server, or None without a server or an answer."""
        try:
            return self.member(instance).bootstrap_info
        except KeyError:
            return None

    def may_serve_model(self, model: str) -> bool:
        """Returns whether a request for this model can be served at all.

        True while an engine has not reported its models.
        """
        for dispatcher in self._roles.values():
            if dispatcher.has_cached_candidates(model):
                return True
        members = self._members.values()
        return not members or any(member.serves(model) for member in members)

    def models(self) -> list[str]:
        """Returns the models that the engines report, sorted."""
        return sorted({model for member in self._members.values() for model in member.models or ()})

    def adapter_parents(self) -> dict[str, str]:
        """Returns the base model of each LoRA adapter that the engines report."""
        members = self._members.values()
        return {adapter: each.base_model or "" for each in members for adapter in each.adapters}

    def base_model_of(self, adapter: str) -> str | None:
        """Returns the base model of a LoRA adapter that an engine serves, or None."""
        return base_model_of(self._members.values(), adapter)

    def set_role_groups(self, groups: Collection[frozenset[Role]]) -> None:
        """Sets the roles that requests need: models may have groups of their own."""
        self.role_groups = groups

    @property
    def needed(self) -> frozenset[Role]:
        """The roles that some requests need."""
        return frozenset[Role]().union(*self.role_groups)

    def has_candidates(self, role: Role, model: str | None, avoid: Collection[str] = ()) -> bool:
        """Returns whether an instance of this role may be given work for this model, regardless of room.

        `avoid`: ids of instances that do not count.
        """
        return self._roles[role].has_candidates(model, avoid)

    def should_fail_over(self, instance: Instance, facts: RequestFacts, failed: Collection[str]) -> bool:
        """See `kvparams.routing.plan.ExecutionContext.should_fail_over`."""
        if not self._paired:
            return False
        other = Role.DECODE if instance.role is Role.PREFILL else Role.PREFILL
        pairs = self._roles[other].pair_keys(facts.model, failed)
        return pair_key(instance) not in pairs and bool(
            pairs & self._roles[instance.role].pair_keys(facts.model, failed)
        )

    def alternatives(self, instance: Instance, facts: RequestFacts, beside: Instance | None = None) -> list[Instance]:
        """Returns the other instances that might run a leg of this instance, least loaded first. Nothing is taken.

        `beside`: who runs the other leg.
        """
        return [each for each in self.candidates(instance.role, facts, beside) if each is not instance]

    def candidates(self, role: Role, facts: RequestFacts, beside: Instance | None = None) -> list[Instance]:
        """Returns the instances that might run a leg, least loaded first, regardless of room. Nothing is taken.

        `beside`: who runs the other leg.
        """
        key = pair_key(beside) if beside is not None and self._paired else None
        try:
            found = self._roles[role].candidates_for(facts, key)
        except ProxyError:
            return []
        return [member.instance for member in sorted(found, key=lambda each: (each.in_flight, each.tokens))]

    def cached_tokens(self, role: Role, facts: RequestFacts) -> Mapping[str, int]:
        """See `kvparams.routing.plan.ExecutionContext.cached_tokens`."""
        if self._prefixes is None or not self.has_candidates(role, facts.model):
            return {}
        believed = self._prefixes.cached_tokens(facts)
        candidates = (each.instance for each in self._roles[role].candidates(facts.model))
        return {each.id: believed[each] for each in candidates if each in believed}

    def check_candidates(self, roles: Iterable[Role], facts: RequestFacts) -> None:
        """Refuses a request as `check_admission` does, regardless of room.

        Raises:
            ProxyError: 503 naming the role: no instance can be chosen.
        """
        for role in roles:
            self._roles[role].candidates_for(facts)

    def explain(
        self, role: Role, facts: RequestFacts, beside: PairTarget | None = None, near: Collection[str] = ()
    ) -> "RouteExplanation":
        """Explains the decision that `acquire` would make now.

        Nothing is taken, and no turn of the policy is used up. Of a request that would have to wait, the choice is
        that among all that could run it.

        Raises:
            ProxyError: 503 naming the role: no instance can be chosen.
        """
        key = None
        if beside is not None and self._paired:
            key = beside if isinstance(beside, Role) else pair_key(beside)
        avoid: Collection[str] = ()
        if beside is not None and self._blame.has_failures:
            avoid = self._blame.ids_to_avoid((), facts, beside)
        return self._roles[role].explain(facts, avoid, key, near)

    def health(self) -> dict[Role, RoleHealth]:
        """Returns the figures of each role that is needed, or that somebody has."""
        waiting = {role: dispatcher.waiting_legs for role, dispatcher in self._roles.items()}
        return health_by_role(self._members.values(), self.needed, waiting)

    @property
    def separated_pairs(self) -> int:
        """Returns how many prefill and decode pairs are set apart: see `kvparams_proxy.fleet.pair_failures`."""
        return self._blame.separated_pairs

    def panic_legs(self, role: Role) -> int:
        """Returns how many legs of this role were given to suspected instances because no other could be given any."""
        return self._roles[role].panic_legs

    def adapter_legs(self, role: Role, *, loaded: bool) -> int:
        """Returns how many legs for LoRA adapters went to instances that should have had theirs loaded, or not."""
        return self._roles[role].adapter_legs.counts[loaded]
