"""Loads pages that lie in this process's memory: they are verified where they lie, and copied once, to the blocks.

A page is pinned from before it is verified until it is written, so nothing changes it in between.
"""

from collections.abc import Sequence
from typing import Final

from kvparams.page_layout import HEADER_BYTES, HeaderTemplate
from kvparams.pages import unsealed_header
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import Result, ResultCode
from kvparams_connectors.transfer.page_pipeline import PagePipeline
from kvparams_connectors.transfer.page_writer import LoadablePage, PageWriter
from kvparams_connectors.transfer.reports import LoadReport, RefusedPage
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.value_memory import PinnedValue, ValueMemory

__all__ = ["InPlaceLoad"]

_AT_ONCE_BYTES: Final = 8 << 20
"""Pinned and written at a time."""


class InPlaceLoad:
    """Writes the pages of one load that lie in this process's memory."""

    def __init__(self, memory: ValueMemory, pipeline: PagePipeline, plan: SequencePlan, writer: PageWriter) -> None:
        """Begins with nothing written.

        Args:
            memory: of the store.
            pipeline: verifies pages.
            plan: the pages of the sequence.
            writer: writes them to the blocks; its report says why there are no more.
        """
        self._memory = memory
        self._pipeline = pipeline
        self._plan = plan
        self._writer = writer
        self._verifies_when_written = len(plan.units) == 1 and pipeline.keys is None and pipeline.verifies
        self._templates: dict[int, HeaderTemplate] = {}
        """By the tokens of a page."""

    def run(self, job: Job[LoadReport], pages: Sequence[int]) -> Sequence[int]:
        """Writes pages up to the first one that is not what was asked for.

        Returns:
            The pages that the store has to be asked for, from the first one that lies in several pieces.
        """
        plan = self._plan
        step = -(-_AT_ONCE_BYTES // sum(self._writer.sizes(plan.namespace.page_tokens)))  # rounded up
        for first in range(0, len(pages), step):
            some = pages[first : first + step]
            held = self._memory.pin_values([plan.keys[part] for page in some for part in plan.parts(page)])
            try:
                whole = next((at for at, one in enumerate(held) if one is not None and len(one.views) != 1), len(held))
                count = whole // len(plan.units)
                self._write(job, some[:count], held)
            finally:
                self._memory.unpin_values([one for one in held if one is not None])
            if self._writer.is_over:
                return ()
            if count < len(some):
                return pages[first + count :]
        return ()

    def _write(self, job: Job[LoadReport], pages: Sequence[int], held: Sequence[PinnedValue | None]) -> None:
        """Writes pinned pages, and says why there are no more."""
        each = len(self._plan.units)
        good: list[LoadablePage] = []
        end: ResultCode | RefusedPage | None = None
        for number, page in enumerate(pages):
            found = self._loadable(page, held[number * each : (number + 1) * each])
            if not isinstance(found, LoadablePage):
                end = found
                break
            good.append(found)
        written = self._writer.write(job, good)
        if written < len(good) and not self._writer.is_over:  # its payload is not that of its header
            page = good[written].number
            end = self._refusal(page, held[written * each : (written + 1) * each])
            end = end or RefusedPage(page, self._plan.keys[self._plan.parts(page).start], "flipped_payload")
        if end is not None and not self._writer.is_over:
            self._writer.end(end)

    def _loadable(self, page: int, values: Sequence[PinnedValue | None]) -> LoadablePage | ResultCode | RefusedPage:
        """Returns a page that may be written, or why it is not used."""
        if self._verifies_when_written and (value := values[0]) is not None:
            checksum = self._expected_checksum(page, value.views[0])
            if checksum is not None:
                return LoadablePage(page, value.views, checksum)
        refusal = self._refusal(page, values)
        if refusal is not None:
            return refusal
        return LoadablePage(page, [value.views[0] for value in values if value is not None])

    def _expected_checksum(self, page: int, view: memoryview) -> int | None:
        """Returns the checksum that a payload must have, by its header; None if the page has another size or header."""
        where = self._plan.pages[page]
        if view.nbytes != self._writer.sizes(where.tokens)[0]:
            return None
        template = self._templates.get(where.tokens)
        if template is None:
            identity = self._plan.identity(self._plan.parts(page).start)
            template = self._templates[where.tokens] = HeaderTemplate(unsealed_header(identity))
        return template.expected_checksum(view[:HEADER_BYTES], where.chain)

    def _refusal(self, page: int, values: Sequence[PinnedValue | None]) -> ResultCode | RefusedPage | None:
        """Verifies the parts of a page; returns why it is not used."""
        plan = self._plan
        for part, value in zip(plan.parts(page), values, strict=True):
            if value is None:
                return ResultCode.MISS
            refusal = self._pipeline.why_unusable(Result(ResultCode.OK, value.nbytes), plan.identity(part), value.views)
            if isinstance(refusal, ResultCode):
                return refusal
            if refusal is not None:
                return RefusedPage(page, plan.keys[part], refusal.reason)
        return None
