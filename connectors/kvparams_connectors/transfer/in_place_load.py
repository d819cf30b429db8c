"""Loads pages that lie in this process's memory: they are verified where they lie, and copied once, to the blocks.

A page is pinned from before it is verified until it is written, so nothing changes it in between.
"""

from collections.abc import Sequence
from typing import Final

from kvparams_connectors.jobs import Job
from kvparams_connectors.store import Result, ResultCode
from kvparams_connectors.transfer.page_pipeline import PagePipeline
from kvparams_connectors.transfer.page_writer import LoadablePage, PageWriter
from kvparams_connectors.transfer.reports import LoadReport, RefusedPage
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.value_memory import PinnedValue, ValueMemory

__all__ = ["load_in_place"]

_AT_ONCE_BYTES: Final = 8 << 20
"""Pinned and written at a time."""


def load_in_place(
    memory: ValueMemory,
    pipeline: PagePipeline,
    plan: SequencePlan,
    pages: Sequence[int],
    writer: PageWriter,
    job: Job[LoadReport],
) -> Sequence[int]:
    """Writes the pages of a load that lie in `memory`, and says in the writer's report why there are no more.

    Returns:
        The pages that the store has to be asked for, from the first one that lies in several pieces.
    """
    step = -(-_AT_ONCE_BYTES // sum(writer.sizes(plan.namespace.page_tokens)))  # rounded up
    for first in range(0, len(pages), step):
        some = pages[first : first + step]
        held = memory.pin_values([plan.keys[part] for page in some for part in plan.parts(page)])
        try:
            whole = next((at for at, one in enumerate(held) if one is not None and len(one.views) != 1), len(held))
            count = whole // len(plan.units)
            _write(pipeline, plan, some[:count], held, writer, job)
        finally:
            memory.unpin_values([one for one in held if one is not None])
        if writer.is_over:
            return ()
        if count < len(some):
            return pages[first + count :]
    return ()


def _write(
    pipeline: PagePipeline,
    plan: SequencePlan,
    pages: Sequence[int],
    held: Sequence[PinnedValue | None],
    writer: PageWriter,
    job: Job[LoadReport],
) -> None:
    """Writes pages up to the first one that is not what was asked for."""
    each = len(plan.units)
    good: list[LoadablePage] = []
    end: ResultCode | RefusedPage | None = None
    for number, page in enumerate(pages):
        values = held[number * each : (number + 1) * each]
        found = _loadable(pipeline, plan, page, values)
        if not isinstance(found, LoadablePage):
            end = found
            break
        good.append(found)
    written = writer.write(job, good)
    if written < len(good) and not writer.is_over:  # its payload is not that of its header
        page = good[written].index
        end = _refusal(pipeline, plan, page, held[written * each : (written + 1) * each])
        end = end or RefusedPage(page, plan.keys[plan.parts(page).start], "flipped_payload")
    if end is not None and not writer.is_over:
        writer.end(end)


def _loadable(
    pipeline: PagePipeline, plan: SequencePlan, page: int, values: Sequence[PinnedValue | None]
) -> LoadablePage | ResultCode | RefusedPage:
    """Returns a page that may be written, or why it is not used."""
    views = [value.views[0] for value in values if value is not None]
    if len(views) == len(values) == 1:
        checksum = pipeline.expected_checksum(plan.identity(plan.parts(page).start), views[0])
        if checksum is not None:
            return LoadablePage(page, views, checksum)
    return _refusal(pipeline, plan, page, values) or LoadablePage(page, views)


def _refusal(
    pipeline: PagePipeline, plan: SequencePlan, page: int, values: Sequence[PinnedValue | None]
) -> ResultCode | RefusedPage | None:
    """Verifies the parts of a page; returns why it is not used."""
    for part, value in zip(plan.parts(page), values, strict=True):
        if value is None:
            return ResultCode.MISS
        refusal = pipeline.why_unusable(Result(ResultCode.OK, value.nbytes), plan.identity(part), value.views)
        if isinstance(refusal, ResultCode):
            return refusal
        if refusal is not None:
            return RefusedPage(page, plan.keys[part], refusal.reason)
    return None
