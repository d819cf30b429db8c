"""Looks up, loads and saves the KV of one sequence in the store.

No method waits; the engine's loop asks again.
"""

from dataclasses import replace
from time import monotonic
from typing import Final

from kvparams_connectors.jobs import Job
from kvparams_connectors.store import KVStore, ResultCode
from kvparams_connectors.transfer.connector import KVStoreConnector
from kvparams_connectors.transfer.reports import LoadReport, PrefixHit, SaveReport
from reference_engine.handoff import Handoff

__all__ = ["KVSession"]


_MEETING_S: Final = 60.0
"""For prefill that runs at the same time; whoever leaves earlier is aborted."""
_AGAIN_S: Final = 0.002


class KVSession:
    """A `KVSession` looks up, loads and saves one sequence; the engine's loop calls its methods in their order."""

    def __init__(self, connector: KVStoreConnector, prompt: list[int], handoff: Handoff, page_tokens: int) -> None:
        self.prompt: Final = prompt
        self.local_tokens = 0
        """Prompt tokens found in the engine's own cache."""
        self.loaded_to = 0
        """Up to this position the blocks are filled: by the local cache, and behind that from the store."""
        self.loaded_bytes = 0
        self.failure: str | None = None
        """Why the sequence cannot go on, in words."""
        self._connector, self._handoff, self._page_tokens = connector, handoff, page_tokens
        self._plan = connector.plan(prompt, handoff.shared)
        if handoff.source is not None:
            self._plan = replace(self._plan, source=handoff.source)
        self._blocks: list[int] = []
        self._lookup: Job[PrefixHit] | None = None
        self._load: Job[LoadReport] | None = None
        self._saves: list[Job[SaveReport]] = []
        self._until_s = self._again_s = 0.0
        """Where it meets prefill: for how long it is waited for, and when the store is asked again."""
        self._stored_to = 0  # as far as is known: what lies before need not be saved
        self._found_to = 0

    @property
    def _wanted(self) -> int:
        """Tokens that need not be computed: all but the last, whose logits choose the first token of the answer."""
        return len(self.prompt) - 1

    def begin(self, blocks: list[int], local_tokens: int) -> None:
        """Start to fill the sequence's blocks behind `local_tokens`; they are not the engine's until `loaded`."""
        self._blocks = blocks
        self.local_tokens = self.loaded_to = local_tokens
        if self._handoff.meeting:
            self._until_s = monotonic() + _MEETING_S
            self._lookup = self._connector.lookup(self._plan)
        elif self._handoff.decoding:
            self._stored_to = local_tokens
            self._start_load(self._wanted)  # promised: no need to ask first
        else:
            self._lookup = self._connector.lookup(self._plan)

    def meet_nobody(self) -> None:
        """Prefill is not waited for any longer."""
        self._until_s = 0.0

    def loaded(self) -> bool:
        """Returns True once the blocks are the engine's; `loaded_to` and `failure` then say how far they are filled."""
        if self._lookup is not None and self._lookup.done():
            hit = self._lookup.result(0)
            if self._handoff.meeting and hit.tokens < self._wanted and monotonic() < self._until_s:
                if monotonic() >= self._again_s:
                    self._again_s = monotonic() + _AGAIN_S
                    self._lookup = self._connector.lookup(self._plan)
                return False
            self._lookup = None
            self._stored_to = hit.tokens
            self._start_load(min(hit.tokens, self._wanted))
            self._found_to = self._stored_to
            if self._handoff.source is not None:
                self._stored_to = 0  # what another engine has is saved here, too: decode reads it here
        if self._load is not None and self._load.done():
            report = self._load.result(0)
            self._load = None
            self.loaded_to, self.loaded_bytes = report.end_token, report.nbytes
            short = report.refused or report.failure is not None
            if self._handoff.decoding or (short and self._handoff.source is None):
                self._stored_to = report.end_token
            if self._handoff.fails and report.end_token < self._wanted:
                why = report.failure.value if report.failure else report.refused[0].reason
                self.failure = f"KV of {self._wanted - report.end_token} prompt tokens could not be loaded: {why}"
        return self._lookup is None and self._load is None

    def advance(self, tokens: list[int], computed: int) -> None:
        """Save the pages that are full now that `computed` of `tokens` are; for a prefill leg the partial one too."""
        end = computed - computed % self._page_tokens
        if self._handoff.prefilling and self._stored_to < len(self.prompt) <= computed:
            end = len(self.prompt)
        if end <= self._stored_to:
            return
        known = end <= len(self.prompt)
        plan = self._plan if known else self._connector.plan(tokens[:end], self._handoff.shared)
        self._saves.append(self._connector.save(plan, self._blocks, self._stored_to, end))
        self._stored_to = end

    def saved(self) -> bool:
        """Returns True if the answer may go out: at once, except for a prefill leg."""
        return not self._handoff.prefilling or all(save.done() for save in self._saves)

    @property
    def saved_bytes(self) -> int:
        """Bytes stored for this sequence, as far as is known."""
        return sum(save.result(0).nbytes for save in self._saves if save.done())

    @property
    def stored_keys(self) -> tuple[str, ...]:
        """The keys under which a prefill leg's KV is stored; none if the store did not take all of it."""
        reports = [save.result(0) for save in self._saves]
        return () if any(report.dropped or report.failed for report in reports) else self._plan.keys

    async def drop(self, store: KVStore) -> int:
        """Deletes the pages that were newly saved for the prompt, once the saving has ended, and returns their number.

        The partial page stays while another transfer of the same prompt has not been released.
        """
        for save in self._saves:
            await save
        pages = zip(self._plan.pages, self._plan.keys, strict=True)
        mine = [(page, key) for page, key in pages if self._found_to < page.end <= self._stored_to]
        full = [key for page, key in mine if page.tokens == self._page_tokens]
        deleted = await store.delete(full)
        tail = (await self._connector.release(self._plan)).deleted if len(full) < len(mine) else 0
        return sum(result.code is ResultCode.OK for result in deleted) + tail

    def _start_load(self, end: int) -> None:
        if end > self.loaded_to:
            self._load = self._connector.load(self._plan, self._blocks, self.loaded_to, end)
