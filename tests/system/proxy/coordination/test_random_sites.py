"""Tests random sites: what must hold does, and each protection that is taken away is missed."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvparams.replication.siblings import Arrival, SiblingTable
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.coordination.load_sync import LoadSync
from kvparams_proxy.coordination.prefix_sync import PrefixSync
from kvparams_proxy.coordination.queue_sync import QueueSync
from kvparams_proxy.coordination.settings_sync import SettingsSync
from tests.system.proxy.coordination.random_site import run

_SEEDS = 40
_MOST = 400
"""Seeds after which a fault must have been noticed."""


def test_random_sites_are_sound() -> None:
    for seed in range(_SEEDS):
        site = run(seed)
        assert not site.wrong, f"seed {seed}: {site.wrong[:5]}"
        assert site.counts["legs"] > 20


@pytest.mark.slow
def test_many_random_sites_are_sound(
    effort: Callable[[int, int], int], record: Callable[[dict[str, Any]], None]
) -> None:
    number = effort(400, 100_000)
    counts = Counter[str]()
    for seed in range(1000, 1000 + number):
        site = run(seed)
        assert not site.wrong, f"seed {seed}: {site.wrong[:5]}"
        counts.update(site.counts)
    record({"seeds": number, **counts})
    assert counts["partitions"] > number
    assert counts["kills"] > number


def test_a_seed_repeats() -> None:
    assert run(7).counts == run(7).counts


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes a protection away."""


def _no_siblings(*args: Any) -> list[Any]:
    """Nobody has ended."""
    return []


def _hear_without_gaps(hear: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(*args: Any) -> Any:
        arrival, sibling = hear(*args)
        return (Arrival.IN_ORDER if arrival is Arrival.AFTER_GAP else arrival), sibling

    return faulty


def _newest_of_all(apply: Callable[..., Any]) -> Callable[..., Any]:
    def faulty(self: Any, entry: Any) -> None:
        self._entries.pop(entry.name, None)
        apply(self, entry)

    return faulty


FAULTS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "legs of a sibling that is gone stay": (FleetSync, "forget_legs", lambda _: _nothing),
    "loads of heartbeats are ignored": (LoadSync, "replace", lambda _: _nothing),
    "a lease never ends": (SiblingTable, "expire", lambda _: _no_siblings),
    "gaps are not noticed": (SiblingTable, "hear", _hear_without_gaps),
    "room that is held is never released": (QueueSync, "_release", lambda _: _nothing),
    "the end of a sibling's legs is ignored": (PrefixSync, "_end", lambda _: _nothing),
    "the last setting that is heard wins": (SettingsSync, "apply_entry", _newest_of_all),
    "lost settings are not told again": (FleetSync, "beat", lambda _: _nothing),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, change = FAULTS[fault]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert any(run(seed).wrong for seed in range(_MOST))
