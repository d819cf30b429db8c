"""Tests that a proxy which starts later believes what is true, whatever happens while it is told."""

from collections.abc import Callable, Iterator
from itertools import count
from unittest.mock import patch

import pytest

from kvparams.instances import Instance, Role
from kvparams.replication.entries import Entry, LegDequeued, LegQueued, PrefillBegan, PrefillEnded
from kvparams.replication.entry_codec import encode_entry
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams_proxy.coordination import exchange
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SharedProxy, Waiter, facts
from tests.support.virtual_loop import VirtualLoop

_ENGINES = [Instance(f"{role}-0", "1", role, f"http://{role}-0", "nixl") for role in (Role.PREFILL, Role.DECODE)]
_PROMPT = list(range(5000, 6000))


class Site:
    """Proxies in front of one engine of each role, which takes two legs at a time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self._network = MemoryNetwork(self.loop)
        self._numbers = count()

    def start(self) -> SharedProxy:
        """Starts another proxy."""
        limits = RoleLimits(requests=2)
        return SharedProxy(self._network, next(self._numbers), _ENGINES, limits=limits, queue=QueueLimits())

    def after(self, seconds: float) -> None:
        """Lets time pass."""
        self.loop.run_until(self.loop.time() + seconds)
        assert not self.loop.faults


def _at_first_pause(proxy: SharedProxy, happens: Callable[[], None]) -> list[Entry]:
    """Has something happen at the first pause of the next snapshot. Returns the list of what was yielded before it."""
    snapshot = proxy.shared.snapshot
    before: list[Entry] = []

    def interrupted() -> Iterator[Entry | None]:
        is_first = True
        for entry in snapshot():
            yield entry
            if entry is None and is_first:
                is_first = False
                happens()
            elif entry is not None and is_first:
                before.append(entry)

    proxy.shared.snapshot = interrupted  # type: ignore[method-assign]
    return before


def _told(proxy: SharedProxy) -> list[Entry]:
    """Returns the list of entries that the proxy will hear."""
    heard: list[Entry] = []
    apply = proxy.shared.apply_entry
    proxy.shared.apply_entry = lambda sibling, entry: (heard.append(entry), apply(sibling, entry))[1]  # type: ignore[method-assign]
    return heard


@pytest.mark.parametrize("ends", [True, False], ids=["ends meanwhile", "control-goes on"])
def test_a_leg_that_ends_while_a_snapshot_is_told_is_not_believed_to_wait(ends: bool) -> None:
    site = Site()
    a = site.start()
    site.after(3.0)
    ask = facts("computed", _PROMPT)
    a.prefixes.record_report(ask, 1000, 0)
    for number in range(2):
        a.acquire(Role.PREFILL, facts(f"running {number}", _PROMPT))
    waiter = Waiter(facts("waiting", _PROMPT))
    assert a.fleet.acquire(Role.PREFILL, waiter.facts, (), waiter) is None

    def happens() -> None:
        if ends:
            a.fleet.cancel_wait(waiter)
            a.shared.exchange.flush()

    before = _at_first_pause(a, happens)
    new = site.start()
    heard = _told(new)
    site.after(1.5)
    assert any(isinstance(each, LegQueued) for each in before)
    last = [each for each in heard if isinstance(each, LegQueued | LegDequeued)][-1]
    assert isinstance(last, LegDequeued) is ends


@pytest.mark.parametrize(("kind", "end"), [(PrefillBegan, PrefillEnded), (LegQueued, LegDequeued)])
def test_each_leg_of_a_long_snapshot_is_told_only_while_it_is_there(
    kind: type[PrefillBegan | LegQueued], end: type[PrefillEnded | LegDequeued]
) -> None:
    """Between two messages of one snapshot, the leg that the second one would tell ends."""
    site = Site()
    a = site.start()
    site.after(3.0)
    running = [facts(f"running {number}", _PROMPT) for number in range(2)]
    engine, _ = [a.acquire(Role.PREFILL, leg) for leg in running]
    waiting = [Waiter(facts(f"waiting {number}", _PROMPT)) for number in range(2)]
    for waiter in waiting:
        assert a.fleet.acquire(Role.PREFILL, waiter.facts, (), waiter) is None
    told: list[Entry] = []

    def ends() -> None:
        if kind is LegQueued:
            a.fleet.cancel_wait(waiting[1])
        else:
            a.fleet.cancel_wait(waiting[0])
            a.fleet.cancel_wait(waiting[1])
            a.fleet.release(engine, running[1])

    def encode(entry: Entry) -> bytes:
        if isinstance(entry, kind):
            told.append(entry)
            if len(told) == 1:
                site.loop.call_soon(ends)
        return encode_entry(entry)

    new = site.start()
    heard = _told(new)
    with patch.object(exchange, "_BATCH_BYTES", 1), patch.object(exchange, "encode_entry", encode):
        site.after(1.5)
    began = [each.leg for each in heard if isinstance(each, kind)]
    ended = [each.leg for each in heard if isinstance(each, end)]
    assert (len(began), len(ended)) == (1, 1)
    assert began != ended
