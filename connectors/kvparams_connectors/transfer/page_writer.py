"""Writes the pages of one load to the engine's blocks, in their order, and keeps the report of it.

No block is written once the wait for the load is over.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvparams.pages import HEADER_BYTES
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import ResultCode
from kvparams_connectors.transfer.block_copier import PageCopy
from kvparams_connectors.transfer.devices import DeviceEvent
from kvparams_connectors.transfer.reports import LoadReport, RefusedPage
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.transfer.transfer_context import TransferContext

__all__ = ["LoadablePage", "PageWriter"]


class LoadablePage(NamedTuple):
    """A page that may be written to the blocks."""

    number: int
    """Among the pages of the plan."""
    views: Sequence[memoryview]
    """Of each of its parts the header and the payload."""
    checksum: int | None = None
    """XXH3-64 of the payload of its only part, which is verified when it is written. None: it is verified."""


class PageWriter:
    """Writes the pages of one load."""

    def __init__(
        self,
        context: TransferContext,
        plan: SequencePlan,
        block_ids: Sequence[int],
        start_token: int,
        end_token: int,
        fence: DeviceEvent | None,
    ) -> None:
        """Begins with nothing written.

        Args:
            context: the connector's copier and settings.
            plan: the pages of the sequence.
            block_ids: the block table of the sequence, from token 0.
            start_token: the first position to write, in tokens.
            end_token: the position after the last one to write.
            fence: an event of the engine's stream; blocks are written after it. None: there is no stream.
        """
        self._copier = context.copier
        self._step = max(1, context.copier.batch_size // len(plan.units))
        self._plan = plan
        self._block_ids = block_ids
        self._end_token = end_token
        self._fence = fence
        self._sizes: dict[int, list[int]] = {}
        """By the tokens of a page: the stored bytes of its parts."""
        self.report = LoadReport(start_token, start_token)
        """What was written, and why there is no more."""

    @property
    def is_over(self) -> bool:
        """Returns whether nothing more is to be written."""
        return self.report.failure is not None or bool(self.report.refused)

    def end(self, reason: ResultCode | RefusedPage) -> None:
        """Says why there are no more pages."""
        if isinstance(reason, RefusedPage):
            self.report = replace(self.report, refused=(reason,))
        else:
            self.report = replace(self.report, failure=reason)

    def sizes(self, tokens: int) -> list[int]:
        """Returns the stored bytes of each part of a page of so many tokens."""
        sizes = self._sizes.get(tokens)
        if sizes is None:
            sizes = self._sizes[tokens] = self._plan.sizes(tokens)
        return sizes

    def write(self, job: Job[LoadReport], pages: Sequence[LoadablePage]) -> int:
        """Writes the wanted tokens of pages that follow what was written before.

        Returns:
            How many pages were written: all, or those before the first one whose payload has another checksum, or those
            for which there was time.
        """
        written = 0
        for first in range(0, len(pages), self._step):
            some = pages[first : first + self._step]
            with job.guarded_section() as in_time:
                if not in_time:
                    self.end(ResultCode.TIMEOUT)
                    return written
                done = self._copy(some)
                self._add(job, some[:done])
            written += done
            if done < len(some):
                break
        return written

    def _copy(self, pages: Sequence[LoadablePage]) -> int:
        """Copies pages to the blocks; returns how many."""
        at = self.report.end_token
        copies: list[PageCopy] = []
        for page in pages:
            where = self._plan.pages[page.number]
            end = min(where.end, self._end_token)
            whole = range(where.start, where.end)
            for unit, view, size in zip(self._plan.units, page.views, self.sizes(where.tokens), strict=True):
                copies.append(PageCopy(unit, at, end - at, whole, view[HEADER_BYTES:size]))
            at = end
        if self._copier.host is not None and any(page.checksum is not None for page in pages):
            return self._copier.host.scatter_verified(self._block_ids, copies, [page.checksum for page in pages])
        self._copier.scatter(self._block_ids, copies, self._fence)
        return len(pages)

    def _add(self, job: Job[LoadReport], pages: Sequence[LoadablePage]) -> None:
        """Adds written pages to the report, and to what it says should the deadline pass now."""
        if not pages:
            return
        report = self.report
        end = min(self._plan.pages[pages[-1].number].end, self._end_token)
        nbytes = report.nbytes + sum([sum(self.sizes(self._plan.pages[page.number].tokens)) for page in pages])
        self.report = LoadReport(report.start_token, end, report.pages + len(pages), nbytes)
        job.set_partial_result(replace(self.report, failure=ResultCode.TIMEOUT))
