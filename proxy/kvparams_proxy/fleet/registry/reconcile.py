"""Computes the changes that bring the fleet to the state that a source declares: a pure decision.

A source changes and removes only its own instances. An id belongs to the source that named it first; another source
that names it waits until it is free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec

__all__ = ["FleetChanges", "OwnedInstance", "reconcile", "rollout_steps"]


class OwnedInstance(NamedTuple):
    """An instance in the fleet, and the source that owns it."""

    source: str
    spec: InstanceSpec


class FleetChanges(NamedTuple):
    """Changes to the fleet. An id is in at most one of them."""

    adds: tuple[InstanceSpec, ...] = ()
    replaces: tuple[InstanceSpec, ...] = ()
    """Of the same id, but something about the engine is not what it was: another incarnation."""
    drains: tuple[InstanceSpec, ...] = ()
    """Of which only `drain` has changed."""
    removes: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    """Ids that the source wants and that belong to another one: nothing is done about them."""


def reconcile(owned: Mapping[str, OwnedInstance], source: str, desired: Sequence[InstanceSpec]) -> FleetChanges:
    """Computes the changes after which the fleet has exactly `desired` of `source`, conflicts aside.

    Args:
        owned: everything in the fleet by id, of every source.
        source: whose word it is.
        desired: its complete set; ids are unique in it.
    """
    adds: list[InstanceSpec] = []
    replaces: list[InstanceSpec] = []
    drains: list[InstanceSpec] = []
    conflicts: list[str] = []
    for entry in desired:
        now = owned.get(entry.id)
        if now is None:
            adds.append(entry)
        elif now.source != source:
            conflicts.append(entry.id)
        elif now.spec == entry:
            continue
        elif now.spec == replace(entry, drain=now.spec.drain):
            drains.append(entry)
        else:
            replaces.append(entry)
    wanted = {entry.id for entry in desired}
    removes = (id for id, now in owned.items() if now.source == source and id not in wanted)
    return FleetChanges(tuple(adds), tuple(replaces), tuple(drains), tuple(removes), tuple(conflicts))


def rollout_steps(
    before: Sequence[InstanceSpec], after: Sequence[InstanceSpec], most: int
) -> Iterator[list[InstanceSpec]]:
    """Yields the sets between two sets of instances, each `most` instances further than the one before.

    New ones come first, so that the fleet is never smaller than it has to be.
    """
    now = {entry.id: entry for entry in before}
    then = {entry.id: entry for entry in after}
    others = [id for id, entry in then.items() if now.get(id) != entry]
    others += (id for id in now if id not in then)
    for at in range(0, len(others) - most, most):
        for id in others[at : at + most]:
            if id in then:
                now[id] = then[id]
            else:
                del now[id]
        yield list(now.values())
