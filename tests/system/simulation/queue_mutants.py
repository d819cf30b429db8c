"""Creates mutants of `kvparams_proxy.queue`, each with one plausible mistake, which the simulation must notice.

Unlike the releases of `mutants.py`, these mistakes are often steps that are done too early, twice, or not again. Each
replaces a few words of one function, and these words must be there, once.
"""

import importlib
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from tests.system.simulation.mutants import check_control, code_in, first_wrong, function_in
from tests.system.simulation.scenario import QUEUED

__all__ = ["WRONGS", "Wrong", "noticed"]


class Wrong(NamedTuple):
    """What is done wrong."""

    what: str
    module: str
    """In `kvparams_proxy`."""
    function: str
    old: str
    new: str


WRONGS = (
    Wrong(
        "work is acknowledged when it is begun",
        "queue.consumer",
        "WorkConsumer._begin",
        "        running.deliveries.append(tag)\n        self._idle",
        "        self._acknowledge(tag)\n        self._idle",
    ),
    Wrong(
        "work is acknowledged when a part of its answer is safe",
        "queue.running_work",
        "RunningWork._settled",
        "elif self._last and not self._letters:",
        "elif True:",
    ),
    Wrong(
        "work that another node had is run again",
        "queue.consumer",
        "WorkConsumer._take",
        "elif message.redelivered:",
        "elif False:",
    ),
    Wrong(
        "work that another node had is acknowledged without a word",
        "queue.consumer",
        "WorkConsumer._take",
        "self._say(tag, write_result(WorkLost(work.id, self.node)), work.id, well=True)",
        "self._acknowledge(tag)",
    ),
    Wrong(
        "what is no work is not put aside",
        "queue.consumer",
        "_answer",
        "await channel.basic_reject(tag, requeue=False, wait=False)",
        "pass",
    ),
    Wrong(
        "a node that has found the broker again keeps its letters",
        "queue.consumer",
        "WorkConsumer._opened",
        "self._outbox.opened(writes)",
        "pass",
    ),
    Wrong(
        "what was not confirmed is not sent again",
        "queue.outbox",
        "Outbox.opened",
        "for letter in list(self._letters):",
        "for letter in list[OutboundMessage]():",
    ),
    Wrong(
        "the node whose client has left is not told",
        "queue.pending_reply",
        "PendingReply.discard",
        'self._owner.send_control(self._node, "cancel", self._id)',
        "pass",
    ),
    Wrong(
        "a part that comes again is passed on again",
        "queue.pending_reply",
        "PendingReply.on_result",
        "if result.number >= self._next and result.number not in self._early:\n"
        "            self._early[result.number] = result",
        "if True:\n            self._early[self._next] = result",
    ),
    Wrong(
        "`resume` is not said again",
        "queue.pending_reply",
        "PendingReply.on_result",
        "if self._throttles:",
        "if self._throttled:",
    ),
    Wrong(
        "what was read is not acknowledged",
        "queue.queue_upstream",
        "QueueUpstream._opened",
        "self._settled.opened(reads)",
        "pass",
    ),
    Wrong(
        "whoever goes on for nobody is not told",
        "queue.queue_upstream",
        "QueueUpstream._hear",
        'self.send_control(result.node, "cancel", result.id)',
        "pass",
    ),
    Wrong(
        "a node that wants less consumes twice",
        "queue.consumer_prefetch",
        "ConsumerPrefetch._change",
        "await channel.basic_cancel(self._tag)",
        "pass",
    ),
    Wrong(
        "a connection that is of no use is not closed",
        "queue.broker_connection",
        "BrokerConnection._serve",
        "await connection.close()",
        "pass",
    ),
)


def noticed(wrong: Wrong, seeds: range) -> tuple[int, str] | None:
    """The first seed in which it is noticed, and how; None if in none."""
    modes = {QUEUED: 1}
    with _done(wrong):
        found = first_wrong(seeds, modes)
    check_control(found, modes)
    return found


@contextmanager
def _done(wrong: Wrong) -> Generator[None]:
    module = f"kvparams_proxy.{wrong.module}"
    source = inspect.getsource(importlib.import_module(module))
    function = function_in(module, wrong.function)
    assert inspect.getsource(function).count(wrong.old) == 1, f"{wrong.function} has not {wrong.old!r} once"
    before, mine = function.__code__, inspect.getsource(function)
    changed = compile(source.replace(mine, mine.replace(wrong.old, wrong.new)), f"<mutant of {module}>", "exec")
    function.__code__ = code_in(changed, wrong.function.split("."))
    try:
        yield
    finally:
        function.__code__ = before
