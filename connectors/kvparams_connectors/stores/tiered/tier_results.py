"""Combines the answers of several tiers to one batch.

A key that any tier has is found. A key is missing only if every tier says so.
"""

from collections.abc import Sequence
from typing import Final

from kvparams_connectors.store import Result, ResultCode, Results

__all__ = ["TierResults", "merge_deleted"]

_RANKS: Final = {
    code: rank
    for rank, code in enumerate(
        (
            ResultCode.OK,
            ResultCode.INVALID,
            ResultCode.TOO_LARGE,
            ResultCode.TIMEOUT,  # from here on it may be there after all
            ResultCode.UNAVAILABLE,
            ResultCode.DENIED,
            ResultCode.INTERNAL,
            ResultCode.CORRUPT,  # from here on it is nowhere of use
            ResultCode.MISS,
        )
    )
}
_LAST: Final = len(_RANKS)
_TIMEOUT: Final = Result(ResultCode.TIMEOUT)


class TierResults:
    """A `TierResults` combines the results of a get or exists; its owner does the locking."""

    def __init__(self, valid: Sequence[bool], tiers: int) -> None:
        """Begins without any tier's answer.

        Args:
            valid: for each operation, whether a tier may be asked; the others are INVALID.
            tiers: the number of tiers.
        """
        self._tiers = tiers
        self._best: list[Result | None] = [None if fine else Result(ResultCode.INVALID) for fine in valid]
        self._said = [0 if fine else tiers for fine in valid]
        """How many tiers have answered."""
        self.source: list[int | None] = [None] * len(valid)
        """Which tier has it, by its number."""
        self.corrupt: list[tuple[int, int]] = []
        """Tiers and operations: values that are damaged there."""

    def open(self) -> list[int]:
        """Operations for which another tier may know more."""
        every, said, ok, invalid = self._tiers, self._said, ResultCode.OK, ResultCode.INVALID
        return [
            index
            for index, best in enumerate(self._best)
            if best is None or (best.code is not ok and best.code is not invalid and said[index] < every)
        ]

    def take(self, tier: int, indexes: Sequence[int], results: Results) -> None:
        """Takes a tier's results for some operations; the faster of two tiers that have a value counts."""
        for index, result in zip(indexes, results, strict=True):
            self._said[index] += 1
            best, code = self._best[index], result.code
            if code is ResultCode.CORRUPT:
                self.corrupt.append((tier, index))
            if best is not None and not self._better(tier, index, code, best.code):
                continue
            self._best[index] = result
            if code is ResultCode.OK:
                self.source[index] = tier

    def _better(self, tier: int, index: int, code: ResultCode, known: ResultCode) -> bool:
        if code is known:  # looked up first, for a code's hash is slow and most answers are alike
            source = self.source[index]
            return source is not None and tier < source
        return _RANKS.get(code, _LAST) < _RANKS.get(known, _LAST)

    def results(self) -> Results:
        """As things stand: what is still open is a TIMEOUT."""
        results = [_TIMEOUT if best is None else best for best in self._best]
        for index in self.open():
            results[index] = _TIMEOUT
        return results


def merge_deleted(answers: Sequence[Result]) -> Result:
    """Returns what became of a key that every tier was asked to delete: OK or MISS only if it is nowhere any more."""
    failed = [answer for answer in answers if answer.code not in (ResultCode.OK, ResultCode.MISS)]
    if failed:
        return Result(min((answer.code for answer in failed), key=lambda code: _RANKS.get(code, _LAST)))
    return Result(ResultCode.OK if any(answer.code is ResultCode.OK for answer in answers) else ResultCode.MISS)
