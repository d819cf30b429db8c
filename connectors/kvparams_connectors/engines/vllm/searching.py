"""The scheduler's question to the store: how much of a sequence is there, of all ranks.

The one rule: what one rank misses is not there. Every rank must find its part of a page, so all parts are asked for.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final

from kvparams.keys import Extra, Namespace, Rectangle
from kvparams.params import KVTransferParams
from kvparams_connectors.grid import Grid
from kvparams_connectors.jobs import Job
from kvparams_connectors.plan import Plan, make_plan, stored_prefix
from kvparams_connectors.reports import Hit
from kvparams_connectors.store import KVStore

__all__ = ["Prefixes"]


class Prefixes:
    """Looks sequences up. It moves no KV, so it needs no tensors."""

    def __init__(
        self, store: KVStore, namespace: Namespace, grid: Grid, deadline_s: float, *, own: str | None = None
    ) -> None:
        """Args:
        store: stays the caller's.
        namespace: without cache salt and LoRA, which each request brings.
        grid: of all engines that share.
        deadline_s: for one lookup.
        own: where this engine's own pages are read, if not in the store.
        """
        self._store = store
        self._own = own
        self._namespace: Final = namespace
        self._deadline_s: Final = deadline_s
        self._whole: Final = Rectangle.whole(namespace.geometry)
        self._units: Final = grid.touching(self._whole, namespace.geometry)

    def plan(self, token_ids: Sequence[int], shared: KVTransferParams | None, extras: Iterable[Extra]) -> Plan:
        """The pages of a sequence, with the parts of all ranks."""
        return make_plan(self._namespace, self._whole, token_ids, shared, extras, self._units)

    def look(self, plan: Plan) -> Job[Hit]:
        """How much of the sequence is stored without a gap."""
        source = plan.source or self._own
        if source is not None:
            self._store.locate(plan.keys, source)
        at_once = self._store.exists_at_once(plan.keys)
        if at_once is not None:
            hit = stored_prefix(plan, at_once)
            job = Job(time.monotonic() + self._deadline_s, hit)
            job.finish(hit)
            return job
        return self._store.exists(plan.keys, self._deadline_s).then(lambda results: stored_prefix(plan, results))
