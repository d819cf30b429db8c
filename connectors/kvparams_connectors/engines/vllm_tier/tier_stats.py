"""Determines which numbers the tier reports, and under which names. Pure.

Every number is a change since the last report, so that vLLM's sums over steps stay true.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvparams_connectors.engines.vllm_tier.chunk_pipeline import ChunkTransferResult
from kvparams_connectors.store import ResultCode

__all__ = ["COUNTERS", "FAILED", "REFUSED", "TierStats"]

_PREFIX: Final = "vllm:kvparams_tier_"
COUNTERS: Final = {
    _PREFIX + "chunks_loaded": "Chunks loaded from the store.",
    _PREFIX + "bytes_loaded": "Bytes loaded from the store.",
    _PREFIX + "chunks_gone": "Chunks that were stored when asked for, and not when loaded.",
    _PREFIX + "chunks_saved": "Chunks stored by this engine.",
    _PREFIX + "bytes_saved": "Bytes stored by this engine.",
    _PREFIX + "chunks_existing": "Chunks that were not stored because they were already.",
    _PREFIX + "chunks_nameless": "Chunks left alone because vLLM's hash of their tokens can be forged.",
    _PREFIX + "lookups_failed": "Chunks of which the store did not say whether it has them.",
    _PREFIX + "resets": "Times that vLLM has reset its caches.",
}
"""All that have no label, with what they mean."""
REFUSED: Final = (_PREFIX + "chunks_refused", "reason", "Chunks that were read and not used, by reason.")
FAILED: Final = (_PREFIX + "store_failures", "code", "Chunks that the store did not take or give, by code.")


class TierStats:
    """Describes what has come up since the last report."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """`name` without what all names begin with."""
        if number:
            self._counts[_PREFIX + name, ()] += number

    def moved(self, moved: ChunkTransferResult, chunks: int, *, load: bool) -> None:
        """A job of so many chunks is over. What nothing is known of was late."""
        verb = "loaded" if load else "saved"
        self.add(f"chunks_{verb}", len(moved.done) - moved.existing)
        self.add(f"bytes_{verb}", moved.nbytes)
        self.add("chunks_existing", moved.existing)
        self.add("chunks_gone", moved.gone)
        for reason, number in moved.refused.items():
            self._counts[REFUSED[0], (reason,)] += number
        for code, number in moved.failures.items():
            self._counts[FAILED[0], (code,)] += number
        known = len(moved.done) + moved.gone + sum(moved.refused.values()) + sum(moved.failures.values())
        if chunks > known:
            self._counts[FAILED[0], (ResultCode.TIMEOUT.value,)] += chunks - known

    def take(self) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Name, values of its labels, and how many."""
        counts, self._counts = self._counts, Counter()
        for (name, labels), number in counts.items():
            yield name, labels, number
