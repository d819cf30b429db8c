"""Visits to values on LMCache's multi-process server: what is locked there, and how every lock is given back.

A lookup locks what it finds for whoever will read it, for 300 s if nobody says more; room to write is kept for 600 s
(`read_ttl_seconds`, `write_ttl_seconds` in distributed/config.py of 0.5.6). The locks of readers are counters without
names, so giving back one too many takes somebody else's; room that was given cannot be given back, only published, and
then deleted.

Invariant: each visit ends exactly once, by what it is known to hold. If an answer was missed, the server is asked again
later, before any other request. A value whose lookup was not ended cannot be deleted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvparams_connectors.stores.lmcache.mp_client import LMCacheMPClient, NoReplyError

__all__ = ["LeaseState", "ValueLease", "begin_read", "end_leases", "look_up"]

_POLL_S: Final = 0.5


class LeaseState(Enum):
    """Describes what a visit holds on the server, as far as is known here."""

    NOTHING = "nothing"
    """A session at most."""
    PERHAPS = "perhaps"
    """A lookup was sent; whether it found and locked anything is not known."""
    LOOKUP = "lookup"
    """The lock of a lookup."""
    READING = "reading"
    """That lock, handed on by `prepare_retrieve`, or on its way there."""
    ROOM = "room"
    """Room to write, perhaps; nothing is written."""
    WRITTEN = "written"
    """Room, with the whole value in it."""


@dataclass(eq=False, slots=True)
class ValueLease:
    """A `ValueLease` is one requested key."""

    key: str
    request: str
    """Names the session; never used twice."""
    shared: Any
    """The key for lookups."""
    own: Any
    """The key for transfers."""
    holds: LeaseState = LeaseState.NOTHING
    found: bool = False
    """By the last look."""


def look_up(link: LMCacheMPClient, visits: Sequence[ValueLease], deadline: float) -> None:
    """Look up all of them; what is found is locked until `end_leases`.

    Raises:
        NoReplyError: the deadline is over; each visit knows what it may hold.
    """
    for visit in visits:
        visit.holds = LeaseState.PERHAPS
    asked = [link.lookup(visit.shared) for visit in visits]
    for answer in asked:
        link.wait(answer, deadline)
    pending = list(visits)
    while pending:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise NoReplyError
        # The server waits in one of its few threads, so not for long.
        answers = [link.status(visit.request, min(_POLL_S, left_s / 2)) for visit in pending]
        counts = [link.wait(answer, deadline) for answer in answers]
        for visit, count in zip(pending, counts, strict=True):
            if count is not None:
                visit.found = count > 0
                visit.holds = LeaseState.LOOKUP if visit.found else LeaseState.NOTHING
        pending = [visit for visit, count in zip(pending, counts, strict=True) if count is None]


def begin_read(link: LMCacheMPClient, visits: Sequence[ValueLease], instance: int, deadline: float) -> list[Any]:
    """Have the values of found visits laid open; for each what `SharedPoolMemory.slot` reads, None where it has gone.

    Raises:
        NoReplyError: the deadline is over.
    """
    asked: list[Any] = []
    for visit in visits:
        visit.holds = LeaseState.READING
        asked.append(link.prepare_retrieve(visit.own, instance))
    contexts: list[Any] = []
    for visit, answer in zip(visits, asked, strict=True):
        response = link.wait(answer, deadline)
        if not response.success:  # then the server has kept nothing of it, and the lookup's lock is still there
            visit.holds = LeaseState.LOOKUP
        contexts.append(response.context if response.success else None)
    return contexts


def end_leases(link: LMCacheMPClient, visits: Sequence[ValueLease], instance: int, deadline: float) -> list[ValueLease]:
    """Give back whatever they hold, and end their sessions, the last one first: that is the order of use.

    Returns:
        Those whose room was published with nothing in it; their values must be deleted.

    Raises:
        NoReplyError: the deadline is over; those that still hold something know it.
    """
    given: list[tuple[ValueLease, Any]] = []
    for visit in visits:
        if visit.holds in (LeaseState.ROOM, LeaseState.WRITTEN):
            given.append((visit, link.commit_store(visit.own, instance)))
        elif visit.holds is LeaseState.READING:
            given.append((visit, link.commit_retrieve(visit.own, instance)))
        elif visit.holds in (LeaseState.LOOKUP, LeaseState.PERHAPS):
            # The server gives back what this lookup has locked, nothing if that was nothing.
            given.append((visit, link.free(visit.shared)))
    spoiled: list[ValueLease] = []
    for visit, answer in given:
        published = link.wait(answer, deadline)
        if visit.holds is LeaseState.ROOM and published:
            spoiled.append(visit)
        visit.holds = LeaseState.NOTHING
    for answer in [link.end(visit.request) for visit in reversed(visits)]:
        link.wait(answer, deadline)
    return spoiled
