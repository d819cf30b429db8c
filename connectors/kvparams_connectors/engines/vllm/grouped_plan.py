"""Defines what one sequence is to a store where layers have groups: a plan for each, and up to where it is held.

Tokens are held only up to a page's end where an engine can go on: with every page up to there of the layers that look
at all tokens, and with those pages of the layers with a window that the window reaches from there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvparams.keys import Page
from kvparams_connectors.store import Results
from kvparams_connectors.transfer.reports import PrefixHit
from kvparams_connectors.transfer.sequence_plan import PagePresence, SequencePlan, find_presence

__all__ = ["GroupedPlan", "PageChains"]

PageChains = tuple[tuple[Page, ...], ...]
"""The pages of a sequence, by group of layers."""


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """A `GroupedPlan` plans one sequence; the pages of all groups begin and end at the same tokens."""

    plans: tuple[SequencePlan, ...]
    windows: tuple[int | None, ...]
    """By group: how many of the last tokens the engine keeps; None: all."""

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of the sequence."""
        return self.plans[0].tokens

    @property
    def pages(self) -> tuple[Page, ...]:
        """Returns the pages of the first group."""
        return self.plans[0].pages

    @property
    def chains(self) -> PageChains:
        """The pages of all groups."""
        return tuple(plan.pages for plan in self.plans)

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the keys of all groups, one after the other."""
        if len(self.plans) == 1:
            return self.plans[0].keys
        return tuple(key for plan in self.plans for key in plan.keys)

    @property
    def source(self) -> str | None:
        """Returns where the producer's pages can be read."""
        return self.plans[0].source

    def needed(self, group: int, pages: int) -> range:
        """The pages of a group that an engine needs to go on behind so many."""
        window = self.windows[group]
        if window is None or not pages:
            return range(pages)
        # An engine that goes on one token earlier, to have a token to compute, still finds its window.
        first = max(0, self.pages[pages - 1].end - window)
        return range(first // self.plans[group].namespace.page_tokens, pages)

    def find_hit(self, results: Results) -> PrefixHit:
        """Up to where the sequence is held, by what `exists` said of `keys`."""
        seen: list[PagePresence] = []
        at = 0
        for plan, window in zip(self.plans, self.windows, strict=True):
            seen.append(find_presence(plan, results[at : at + len(plan.keys)], to_gap=window is None))
            at += len(plan.keys)
        held = self._reach([one.pages for one in seen])
        total = sum(one.nbytes[page] for group, one in enumerate(seen) for page in self.needed(group, held))
        end = self.pages[held - 1].end if held else 0
        failure = next((one.failure for one in seen if one.failure is not None), None)
        return PrefixHit(end, held, total, None if held == len(self.pages) else failure)

    def promised(self, load_keys: Collection[str]) -> int:
        """Up to where these keys promise the sequence: to the last page that all groups have among them."""
        keys = frozenset(load_keys)
        for page in reversed(self.pages):
            if all(keys.issuperset(self._keys_of(plan, page.index)) for plan in self.plans):
                return page.end
        return 0

    def promised_keys(self, gaps: Collection[tuple[int, int]]) -> tuple[str, ...]:
        """The keys to load the sequence by, up to the last page that it can be loaded to.

        Args:
            gaps: group and end of pages that were not saved.
        """
        good = [[(group, page.end) not in gaps for page in plan.pages] for group, plan in enumerate(self.plans)]
        held = self._reach(good)
        return tuple(
            key
            for group, plan in enumerate(self.plans)
            for page in self.needed(group, held)
            for key in self._keys_of(plan, page)
        )

    def stored_bytes(self, start: int, end: int) -> int:
        """Returns the bytes to read to go on at `end` if the tokens up to `start` are there."""
        pages = sum(page.start < end for page in self.pages)
        return sum(
            plan.identity(part).stored_bytes
            for group, plan in enumerate(self.plans)
            for page in self.needed(group, pages)
            if plan.pages[page].end > start
            for part in plan.parts(page)
        )

    def _reach(self, good: Sequence[Sequence[bool]]) -> int:
        """After how many pages an engine can go on, of the pages that are there by group."""
        reach = len(self.pages)
        runs: list[tuple[int, list[int]]] = []
        for group, there in enumerate(good):
            if self.windows[group] is None:
                reach = min(reach, next((page for page, one in enumerate(there) if not one), reach))
                continue
            since = 0
            firsts: list[int] = []  # behind each page: the first one of those without a gap before
            for page, one in enumerate(there):
                since = since if one else page + 1
                firsts.append(since)
            runs.append((group, firsts))
        while reach and any(firsts[reach - 1] > self.needed(group, reach).start for group, firsts in runs):
            reach -= 1
        return reach

    @staticmethod
    def _keys_of(plan: SequencePlan, page: int) -> tuple[str, ...]:
        parts = plan.parts(page)
        return plan.keys[parts.start : parts.stop]
