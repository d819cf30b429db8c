"""What has to happen so that the fleet is what a source wants: a pure decision, and the law of sources.

The one rule: a source changes and removes only what is its own. An id belongs to the source that named it first;
whoever names it later waits until it is free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvparams_proxy.registry.entries import Entry

__all__ = ["Changes", "Owned", "portions", "reconcile"]


class Owned(NamedTuple):
    """An instance that is in the fleet, and by whose word."""

    source: str
    entry: Entry


class Changes(NamedTuple):
    """What has to be done to the fleet. An id is in one of them at most."""

    adds: tuple[Entry, ...] = ()
    replaces: tuple[Entry, ...] = ()
    """Of the same id, but something about the engine is not what it was: another incarnation."""
    drains: tuple[Entry, ...] = ()
    """Of which only `drain` has changed."""
    removes: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    """Ids that the source wants and that belong to another one: nothing is done about them."""


def reconcile(owned: Mapping[str, Owned], source: str, desired: Sequence[Entry]) -> Changes:
    """What has to happen so that of `source` exactly `desired` is there, conflicts aside.

    Args:
        owned: everything in the fleet by id, of every source.
        source: whose word it is.
        desired: its complete set; ids are unique in it.
    """
    adds: list[Entry] = []
    replaces: list[Entry] = []
    drains: list[Entry] = []
    conflicts: list[str] = []
    for entry in desired:
        now = owned.get(entry.id)
        if now is None:
            adds.append(entry)
        elif now.source != source:
            conflicts.append(entry.id)
        elif now.entry == entry:
            continue
        elif now.entry == replace(entry, drain=now.entry.drain):
            drains.append(entry)
        else:
            replaces.append(entry)
    wanted = {entry.id for entry in desired}
    removes = (id for id, now in owned.items() if now.source == source and id not in wanted)
    return Changes(tuple(adds), tuple(replaces), tuple(drains), tuple(removes), tuple(conflicts))


def portions(before: Sequence[Entry], after: Sequence[Entry], most: int) -> Iterator[list[Entry]]:
    """The way from one set to another: the sets between them, each `most` instances further than the one before.

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
