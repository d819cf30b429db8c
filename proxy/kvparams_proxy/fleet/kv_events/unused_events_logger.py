"""Logs the instances whose declared KV events are not used.

An operator's declaration is either used or reported in the log.
"""

import logging
from collections.abc import Callable
from typing import Final

from kvparams_proxy.fleet.member import Member

__all__ = ["UnusedEventsLogger"]

_log: Final = logging.getLogger(__name__)
_NAMED: Final = 5
"""Of a large fleet the first few, and how many."""


class UnusedEventsLogger:
    """Logs declared publishers that are not used; those of one turn of the event loop share a line.

    A `kvparams_proxy.fleet.fleet_members.FleetListener`.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], why: str) -> None:
        """`soon` calls in the next turn; `why` says what to do, too."""
        self._soon = soon
        self._why = why
        self._ids: list[str] = []

    def joined(self, member: Member) -> None:
        """See `FleetListener`."""
        if member.instance.kv_events is None:
            return
        if not self._ids:
            self._soon(self._say)
        self._ids.append(member.instance.id)

    def left(self, member: Member) -> None:
        """See `FleetListener`."""

    def _say(self) -> None:
        ids, self._ids = self._ids, []
        names = ", ".join(ids[:_NAMED])
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        _log.warning("the kv_events of %s%s are not used, %s", names, more, self._why)
