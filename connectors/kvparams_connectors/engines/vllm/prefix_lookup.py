"""The scheduler's question to the store: how much of a sequence is there, of all ranks.

A page counts as stored only if every rank finds its part, so all parts are asked for.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final

from kvparams.keys import ExtraKey, KVShard, chain_pages
from kvparams.params import KVTransferParams
from kvparams_connectors.engines.vllm.grouped_plan import GroupedPlan, PageChains
from kvparams_connectors.engines.vllm.rank_geometry import RankShard
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import KVStore
from kvparams_connectors.transfer.reports import PrefixHit
from kvparams_connectors.transfer.sequence_plan import isolate_namespace, make_plan

__all__ = ["StorePrefixLookup"]


class StorePrefixLookup:
    """Looks sequences up. It moves no KV, so it needs no tensors."""

    def __init__(
        self, store: KVStore, shares: Sequence[RankShard], deadline_s: float, *, own: str | None = None
    ) -> None:
        """Asks the store nothing yet.

        Args:
            store: where pages are looked up; the caller closes it.
            shares: what a rank holds of each group of layers, in the engine's order. Each request adds its cache salt
                and LoRA.
            deadline_s: the time limit of one lookup, in seconds.
            own: where this engine's own pages are read, if not in the store.
        """
        self._store = store
        self._own = own
        self._deadline_s: Final = deadline_s
        self._windows: Final = tuple(share.window for share in shares)
        wholes = [(share, KVShard.whole(share.namespace.geometry)) for share in shares]
        self._known: Final = [
            (share.namespace, whole, share.grid.units_touching(whole, share.namespace.geometry))
            for share, whole in wholes
        ]

    def plan(
        self,
        token_ids: Sequence[int],
        shared: KVTransferParams | None,
        extras: Iterable[ExtraKey],
        known: PageChains = (),
    ) -> GroupedPlan:
        """The pages of a sequence, with the parts of all ranks.

        Args:
            token_ids: the whole sequence.
            shared: what of a document concerns it.
            extras: what else its KV depends on.
            known: its pages by group, as by `chain_pages`.
        """
        others = tuple(extras)
        plans = (
            make_plan(namespace, whole, token_ids, shared, others, units, known[group] if known else ())
            for group, (namespace, whole, units) in enumerate(self._known)
        )
        return GroupedPlan(tuple(plans), self._windows)

    def pages(
        self, token_ids: Sequence[int], shared: KVTransferParams | None, extras: Iterable[ExtraKey], known: PageChains
    ) -> PageChains:
        """The pages of a sequence by group, without a name for any; see `plan`."""
        others = tuple(extras)
        return tuple(
            chain_pages(isolate_namespace(namespace, shared), token_ids, others, known[group] if known else ())
            for group, (namespace, _, _) in enumerate(self._known)
        )

    def look_up(self, plan: GroupedPlan) -> Job[PrefixHit]:
        """Up to where the sequence is stored."""
        source = plan.source or self._own
        if source is not None:
            self._store.hint_location(plan.keys, source)
        at_once = self._store.exists_nowait(plan.keys)
        if at_once is not None:
            hit = plan.find_hit(at_once)
            job = Job(time.monotonic() + self._deadline_s, hit)
            job.finish(hit)
            return job
        return self._store.exists(plan.keys, self._deadline_s).then(plan.find_hit)
