"""Saves pages into a store in this process's memory: they are copied once, out of the blocks to where they stay."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvparams.pages import HEADER_BYTES, PageIdentity, seal
from kvparams_connectors.store import ResultCode
from kvparams_connectors.transfer.block_copier import HostBlockCopier, PageCopy
from kvparams_connectors.transfer.reports import SaveReport
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.value_memory import CreatedValue, ValueMemory

__all__ = ["InPlaceSave"]

_AT_ONCE_BYTES: Final = 4 << 20
"""Created, copied and published at a time."""


@dataclass(slots=True)
class _Batch:
    """Pages that are published together."""

    pages: list[int] = field(default_factory=list[int])
    parts: list[int] = field(default_factory=list[int])
    identities: list[PageIdentity] = field(default_factory=list[PageIdentity])
    values: list[CreatedValue] = field(default_factory=list[CreatedValue])
    """One per part, as the identities."""
    existing: int = 0
    """Pages that were stored before."""
    left: list[int] = field(default_factory=list[int])
    """Pages for which there is no room that can be written in place."""


class InPlaceSave:
    """Saves pages of one sequence in place. Nothing here waits.

    The pages have no tag: making one takes longer than an engine's thread may wait.
    """

    def __init__(self, memory: ValueMemory, copier: HostBlockCopier, plan: SequencePlan) -> None:
        """Begins with nothing saved.

        Args:
            memory: of the store.
            copier: copies KV out of the blocks.
            plan: the pages of the sequence.
        """
        self._memory = memory
        self._copier = copier
        self._plan = plan
        self.report = SaveReport()
        """What became of the pages that were saved or found."""

    def save(self, block_ids: Sequence[int], pages: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
        """Saves pages.

        Args:
            block_ids: the sequence's block table from token 0.
            pages: the indexes of the pages.
            parts: of each page those parts that are to be stored.

        Returns:
            The pages that have to be put.

        Raises:
            IndexError: as `BlockCopier.gather`; what was not published by then is not stored.
        """
        left: list[int] = []
        page_bytes = sum(self._plan.sizes(self._plan.namespace.page_tokens))
        step = -(-_AT_ONCE_BYTES // page_bytes)  # rounded up
        for first in range(0, len(pages), step):
            batch = self._create(pages[first : first + step], parts[first : first + step])
            left += batch.left
            try:
                self._copy(block_ids, batch)
            except BaseException:
                self._memory.abandon_values(batch.values)
                raise
            self._memory.publish_values(batch.values)
            nbytes = sum([value.view.nbytes for value in batch.values])
            self.report += SaveReport(len(batch.pages), batch.existing, nbytes=nbytes)
        return left

    def _create(self, pages: Sequence[int], parts: Sequence[Sequence[int]]) -> _Batch:
        """Makes room for the parts that are not stored."""
        plan, batch = self._plan, _Batch()
        identities = {part: plan.identity(part) for of_page in parts for part in of_page}
        wanted = [(plan.keys[part], identity.stored_bytes) for part, identity in identities.items()]
        found = iter(self._memory.create_values(wanted))
        for page, of_page in zip(pages, parts, strict=True):
            made = {part: next(found) for part in of_page}
            values = {part: value for part, value in made.items() if isinstance(value, CreatedValue)}
            if any(not isinstance(value, CreatedValue) and value is not ResultCode.EXISTS for value in made.values()):
                self._memory.abandon_values(list(values.values()))
                batch.left.append(page)
            elif values:
                batch.pages.append(page)
                batch.parts += values
                batch.identities += [identities[part] for part in values]
                batch.values += values.values()
            else:
                batch.existing += 1
        return batch

    def _copy(self, block_ids: Sequence[int], batch: _Batch) -> None:
        """Copies pages out of the blocks, and seals them."""
        plan = self._plan
        copies: list[PageCopy] = []
        for part, value in zip(batch.parts, batch.values, strict=True):
            page, unit = divmod(part, len(plan.units))
            where = plan.pages[page]
            whole = range(where.start, where.end)
            copies.append(PageCopy(plan.units[unit], where.start, where.tokens, whole, value.view[HEADER_BYTES:]))
        checksums: dict[int, int] = {}
        self._copier.gather(block_ids, copies, checksums.__setitem__)
        for index, (identity, value) in enumerate(zip(batch.identities, batch.values, strict=True)):
            seal(value.view, identity, payload_checksum=checksums[index])
