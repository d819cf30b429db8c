"""Names, properties and declarations of the queues.

Only work that may wait is in a durable, bounded queue. The queues of one node disappear with it.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from aiormq.abc import AbstractChannel

__all__ = ["QueueNames", "declare_control", "declare_results", "declare_work"]

_MOST_WAITING: Final = 100_000
"""Further work is refused by the broker."""
_DELIVERIES: Final = 3
"""Work that takes its node down each time is put aside after so many."""
_DEAD_MOST: Final = 10_000
_DEAD_MS: Final = 24 * 3_600_000
"""Dead letters hold what clients have asked: not for ever."""
_ORPHAN_MS: Final = 15_000
"""A result queue that nobody reads is gone after so long: time enough for its node to find a broker that was away."""


class QueueNames(NamedTuple):
    """Names of the queues of one pool of decode nodes."""

    prefix: str

    @property
    def work(self) -> str:
        """The shared work queue: prefill nodes write, decode nodes pull."""
        return f"{self.prefix}.work"

    @property
    def dead_letter(self) -> str:
        """The queue of work that no node could or would run."""
        return f"{self.prefix}.dead"

    def results(self, node: str) -> str:
        """Returns the name of one prefill node's result queue."""
        return f"{self.prefix}.results.{node}"

    def control(self, node: str) -> str:
        """Returns the name of one decode node's control queue."""
        return f"{self.prefix}.control.{node}"


async def declare_work(channel: AbstractChannel, names: QueueNames) -> None:
    """Declares the queues of work and of dead letters; all nodes declare them alike."""
    bounds: Mapping[str, int | str] = {"x-max-length": _DEAD_MOST, "x-message-ttl": _DEAD_MS}
    await channel.queue_declare(names.dead_letter, durable=True, arguments=dict(bounds))
    await channel.queue_declare(
        names.work,
        durable=True,
        arguments={
            "x-queue-type": "quorum",
            "x-max-length": _MOST_WAITING,
            "x-overflow": "reject-publish",
            "x-delivery-limit": _DELIVERIES,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": names.dead_letter,
        },
    )


async def declare_results(channel: AbstractChannel, name: str) -> None:
    """Declares a result queue, which outlives the broker, and its node by a moment."""
    await channel.queue_declare(name, durable=True, arguments={"x-expires": _ORPHAN_MS})


async def declare_control(channel: AbstractChannel, name: str) -> None:
    """Declares a control queue, which exists exactly as long as its node is connected."""
    await channel.queue_declare(name, exclusive=True, auto_delete=True)
