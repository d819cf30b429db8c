"""Tracks which LoRA adapters members serve and should have loaded, and tells policies what loading costs."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final

from kvparams.instances import RequestFacts, Role
from kvparams.routing.adapter_metrics import AdapterMetrics
from kvparams.routing.adapter_slots import AdapterSlots
from kvparams_proxy.fleet.member import Member

__all__ = [
    "AdapterLegs",
    "base_model_of",
    "correct_slots",
    "record_adapters",
    "with_adapter_loads",
    "with_free_slots",
]


def record_adapters(member: Member, adapters: Collection[str]) -> None:
    """Records the adapters that a member serves now, in its own order.

    vLLM 0.32.0 loads an adapter when it begins to serve it (`entrypoints/openai/models/serving.py`).
    """
    before, member.adapters = member.adapters, frozenset(adapters)
    if not adapters:
        member.adapter_slots = None
        return
    if member.adapter_slots is None:
        member.adapter_slots = AdapterSlots()
    slots = member.adapter_slots
    slots.forget(before - member.adapters)
    slots.record_loaded([each for each in adapters if each not in before])


def correct_slots(member: Member, said: AdapterMetrics) -> None:
    """Corrects what is believed of a member's slots by what its metrics say."""
    if member.adapter_slots is None:
        return
    is_known = said.active <= member.adapters  # otherwise a name has a comma, or is new
    member.adapter_slots.correct(said.slots, said.active if is_known else ())


class AdapterLegs:
    """Tells members' slots of the legs of one role that are for LoRA adapters."""

    def __init__(self) -> None:
        self.counts: Final = Counter[bool]()
        """Counts these legs, by whether their instance should have had the adapter loaded."""
        self.on_used: Callable[[Member, str], None] | None = None
        """Called where an adapter has become the one that a member used last: other proxies should know."""

    def begin(self, member: Member, model: str | None) -> None:
        """A leg for a model is given to a member. Does nothing if the model is no adapter."""
        slots = member.adapter_slots
        if slots is None or model is None or model not in member.adapters:
            return
        before = slots.newest
        self.counts[slots.begin(model)] += 1
        self._tell(member, model, before)

    def end(self, member: Member, model: str | None) -> None:
        """A leg for a model has ended at a member: its adapter was in use until now."""
        slots = member.adapter_slots
        if slots is None or model is None:
            return
        before = slots.newest
        slots.end(model)
        self._tell(member, model, before)

    def _tell(self, member: Member, adapter: str, before: str | None) -> None:
        slots = member.adapter_slots
        if self.on_used is not None and slots is not None and slots.newest == adapter != before:
            self.on_used(member, adapter)


def base_model_of(members: Iterable[Member], adapter: str) -> str | None:
    """Returns the base model of a LoRA adapter that one of the members serves, or None."""
    return next((each.base_model for each in members if adapter in each.adapters), None)


def with_adapter_loads(facts: RequestFacts, members: Iterable[Member]) -> RequestFacts:
    """Adds to a request how long each member should need to load its adapter."""
    model = facts.model
    absent = [each for each in members if each.adapter_slots is not None and each.has_to_load(model)]
    loads = {each.instance: each.backlog.cost_model.adapter_load_s for each in absent}
    return facts._replace(adapter_load_s=loads) if loads else facts


def with_free_slots(role: Role, members: list[Member], model: str | None) -> list[Member]:
    """Returns the members where a leg for an adapter finds a slot, and need not wait for others to end; or else all.

    A prompt that waits for prefill is in no slot yet.
    """
    if role is Role.PREFILL:
        return members
    free = [each for each in members if each.adapter_slots is None or _has_slot(each, each.adapter_slots, model)]
    return free or members


def _has_slot(member: Member, slots: AdapterSlots, model: str | None) -> bool:
    return model is None or model not in member.adapters or slots.has_slot(model)
