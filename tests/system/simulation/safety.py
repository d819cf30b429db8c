"""Defines the safety laws of every message, whatever the broker and its nodes go through.

The laws judge by what the broker itself has seen, never by a node's belief.
"""

from collections import Counter
from typing import TYPE_CHECKING

from kvparams_proxy.queue.messages import (
    MalformedMessage,
    ResultPart,
    WorkLost,
    node_of,
    read_control,
    read_results,
    read_work,
)

if TYPE_CHECKING:
    from tests.system.simulation.legs import Leg
    from tests.system.simulation.world import World

__all__ = ["Safety"]

_HEARD_S = 0.05
"""In that time a node has said that it runs something, and has heard that nobody waits for it."""
_FOUND_S = 4.0
"""Nodes that have lost the broker have found it again after that, and have said what they run."""


class Safety:
    """A `broker.Watcher`."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.counts: Counter[str] = Counter()
        self._answered: set[tuple[str, str]] = set()
        """Which node may acknowledge which work: nothing more is to be done for it there."""
        self._published: Counter[bytes] = Counter()
        """How often the broker has been given a request, by its body."""
        self._begun: Counter[bytes] = Counter()
        self.well_at = 0.0
        """From then on nodes and broker have found each other."""

    def accepted(self, who: str, queue: str, body: bytes) -> None:
        """See `Watcher.accepted`."""
        if queue.endswith(".work"):
            self._published[read_work(body).body] += 1
            return
        if ".results." not in queue:
            return
        for result in read_results(body):
            if isinstance(result, MalformedMessage):
                self._world.wrong(f"{who} says what is malformed: {result}")
            elif isinstance(result, WorkLost) or (isinstance(result, ResultPart) and result.last):
                self._answered.add((who, result.id))

    def returned(self, who: str, queue: str, body: bytes) -> None:
        """See `Watcher.returned`."""
        self.counts["returned"] += 1
        if ".results." in queue:
            self._answered |= {
                (who, result.id)
                for result in read_results(body)
                if not isinstance(result, MalformedMessage) and result.id
            }

    def delivered(self, who: str, queue: str, body: bytes, *, again: bool) -> None:
        """See `Watcher.delivered`."""
        self.counts["redelivered"] += again
        if ".control." in queue:
            control = read_control(body)
            if control.order == "cancel":
                self._answered.add((who, control.id))

    def settled(self, who: str, queue: str, body: bytes, *, well: bool) -> None:
        """See `Watcher.settled`."""
        if not queue.endswith(".work"):
            return
        if not well:
            self.counts["put aside"] += 1
            return
        work = read_work(body)
        if (who, work.id) not in self._answered:
            self._world.wrong(f"{who} acknowledges work for {node_of(work.id)} before all of its answer is safe")

    def died(self, queue: str, body: bytes, why: str) -> None:
        """See `Watcher.died`."""
        self.counts[f"dead: {why}"] += 1

    def begun(self, leg: "Leg") -> bool:
        """A decode engine has been asked that; whether one had been before."""
        raw = leg.raw
        self._begun[raw] += 1
        if self._begun[raw] > self._published[raw]:
            self._world.wrong(f"work that was published {self._published[raw]} times is run {self._begun[raw]} times")
        return self._begun[raw] > 1

    def cut(self, leg: "Leg") -> None:
        """An engine has cut it off on a connection that had been kept: it may be asked again, and that is no more."""
        if leg.kind == "decode" and leg.link.served > 1:
            self._begun[leg.raw] -= 1

    def troubled(self, for_s: float) -> None:
        """Something is wrong between the nodes and the broker for so long; then they find each other."""
        self.well_at = max(self.well_at, self._world.now + for_s + _FOUND_S)

    @property
    def is_troubled(self) -> bool:
        """Whether it may still be so."""
        return self._world.now < self.well_at

    def abandoned(self, leg: "Leg") -> None:
        """Nobody waits for its answer any more: it must be over, unless a node cannot have heard that."""
        world = self._world
        if leg.over:
            return
        heard_at = max(self.well_at, leg.begun + _HEARD_S)
        if world.now < heard_at:
            world.loop.call_at(heard_at, self.abandoned, leg)
        else:
            world.wrong(f"{leg.link.engine.name} still works for {leg.prompt}, whose client has left")
