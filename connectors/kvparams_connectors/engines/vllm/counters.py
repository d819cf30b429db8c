"""Determines which numbers are reported, and under which names. Pure.

A name means one thing, in both halves.
"""

from collections.abc import Iterable
from typing import Final

from kvparams_connectors.transfer.reports import ConnectorStats

__all__ = ["COUNTER_HELP", "FAILED_PREFIX", "REFUSED_PREFIX", "UNTRUSTED_PREFIX", "combine_groups", "flatten_counters"]

COUNTER_HELP: Final = {
    "loads": "Loads that were begun.",
    "loads_short": "Loads that did not reach their end, by rank.",
    "loads_skipped": "Loads that were left out because computing is faster.",
    "loads_small": "Loads that were left out because the engine lacked less than a block.",
    "lookups_failed": "Lookups that the store did not answer.",
    "promises_broken": "Decode legs whose promised pages did not come in time.",
    "requests_off": "Requests for which the store was left alone.",
    "resets": "Times that vLLM has reset its caches.",
    "saves_failed": "Saves that a defect ended; the log has it.",
    "saves_late": "Saves that were left out because those before them took too long.",
    "tokens_claimed": "Tokens that the engine was told to count on.",
    "tokens_loaded": "Tokens loaded, by rank.",
    "pages_loaded": "Pages loaded, by rank and group of layers.",
    "bytes_loaded": "Bytes loaded.",
    "pages_saved": "Pages saved, by rank and group of layers.",
    "bytes_saved": "Bytes saved.",
    "pages_existing": "Pages not saved because they were stored already, by rank and group of layers.",
    "pages_dropped": "Pages not saved because there was no room on the way, by rank and group of layers.",
}
"""All that have no label."""
REFUSED_PREFIX: Final = "pages_refused/"
FAILED_PREFIX: Final = "store_failures/"
UNTRUSTED_PREFIX: Final = "requests_untrusted/"


def flatten_counters(stats: ConnectorStats) -> dict[str, int]:
    """A connector's counters under the names that are reported."""
    counts = {name: int(getattr(stats, name)) for name in COUNTER_HELP if hasattr(stats, name)}
    counts.pop("loads_skipped", None)  # decided in the scheduler
    counts.update({REFUSED_PREFIX + name: count for name, count in stats.pages_refused.items()})
    counts.update({FAILED_PREFIX + name: count for name, count in stats.store_failures.items()})
    return counts


def combine_groups(groups: Iterable[ConnectorStats]) -> dict[str, int]:
    """Combines the counters of a rank's connectors, one for each group of layers.

    Each token is in all groups, and is counted where most are loaded: layers with a window load only the tokens in
    reach.
    """
    counts: dict[str, int] = {}
    for stats in groups:
        for name, count in flatten_counters(stats).items():
            before = counts.get(name, 0)
            counts[name] = max(before, count) if name == "tokens_loaded" else before + count
    return counts
