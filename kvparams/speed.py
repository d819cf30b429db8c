"""How long an instance takes to prefill, learnt from the legs that it ran.

The one rule: nobody is told how fast an engine is. Four things cost time, each an amount per unit that is never
negative: the leg itself, each token computed, each pair of tokens that attend to each other (so a long prompt costs
more than its length), and each token whose KV is fetched. A leg that took wildly other than expected counts little;
what was long ago counts little. Of an engine that has told nothing yet the usual is expected: what others cost.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Final

__all__ = ["SpeedCurve", "Usual", "features"]

_GUESS: Final = (0.02, 1e-4, 1e-9, 2e-5)
"""Seconds for a leg, a token, a pair, a fetched token, before anything was seen: an accelerator of today and a model of
some ten billion parameters. The first leg corrects the whole by its own factor."""
_DOUBT: Final = 0.001
"""How much the usual weighs against one leg: it may be wrong by a factor, a leg by a thirtieth (the squares' ratio)."""
_KEPT: Final = 0.99
"""What a leg's weight is multiplied with when the next one is seen: about the last hundred count."""
_LEAST_S: Final = 1e-4
"""Nothing is shorter, as far as weights go."""
_FEW: Final = 8
"""As long as fewer legs were seen, none is taken for an outlier."""
_SETTLED: Final = 32
"""After so many legs one changes little: the curve is fitted anew at every eighth."""


def features(new: int, context: int, fetched: float = 0.0) -> tuple[float, float, float, float]:
    """What of one leg costs time: itself, tokens, pairs of tokens, fetched tokens as far as they were waited for."""
    return 1.0, float(new), new * (context - 0.5 * new), fetched


class Usual:
    """What legs cost on the engine of a fleet that told last."""

    __slots__ = ("amounts",)

    def __init__(self) -> None:
        self.amounts: tuple[float, ...] = _GUESS


class SpeedCurve:
    """The learnt curve of one instance: least squares of relative errors, no amount below 0."""

    __slots__ = ("_amounts", "_moments", "_right", "_usual", "_variance", "seen")

    def __init__(self, usual: Usual | None = None) -> None:
        """`usual` is what is expected as long as nothing was seen: of the fleet that the instance belongs to."""
        self._usual = usual or Usual()
        self._amounts: tuple[float, ...] | None = None
        self._moments = [[0.0] * 4 for _ in range(4)]
        """Only on and above the diagonal."""
        self._right = [0.0] * 4
        self.seen = 0
        """Legs that it was learnt from."""
        self._variance = 0.0

    @property
    def doubt(self) -> float:
        """How far legs are off what is expected of them, as a share of that: their standard deviation, 1 at most."""
        return sqrt(self._variance)

    def seconds(self, new: int, context: int) -> float:
        """How long a leg will take that computes the last `new` of `context` tokens."""
        leg, token, pair, _ = self._amounts or self._usual.amounts
        return leg + new * (token + pair * (context - 0.5 * new))

    def fetch_s(self, tokens: int) -> float:
        """How long fetching the KV of so many tokens will take."""
        return (self._amounts or self._usual.amounts)[3] * tokens

    def expected(self, features: Sequence[float]) -> float:
        """How long legs of such features, added up, will take together."""
        amounts = self._amounts or self._usual.amounts
        return sum(amount * feature for amount, feature in zip(amounts, features, strict=True))

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """A leg of such features took so long; or several did together, whose features are added up."""
        expected = max(self.expected(features), _LEAST_S)
        weight = 1.0 / (expected * expected)
        if self.seen >= _FEW:
            off = max(seconds, _LEAST_S) / expected
            weight *= min(1.0, 2.0 / max(off, 1.0 / off))
            self._variance += (1.0 - _KEPT) * (min(1.0, (off - 1.0) ** 2) - self._variance)
        self.seen += 1
        moments, right = self._moments, self._right
        for index, feature in enumerate(features):
            weighted = weight * feature
            right[index] = _KEPT * right[index] + weighted * seconds
            row = moments[index]
            for other in range(index, 4):
                row[other] = _KEPT * row[other] + weighted * features[other]
        if self.seen < _SETTLED or not self.seen % 8:
            self._amounts = self._usual.amounts = _fitted(moments, right, self._usual.amounts)


def _fitted(moments: Sequence[Sequence[float]], right: Sequence[float], usual: Sequence[float]) -> tuple[float, ...]:
    """The amounts that fit best. Whatever would be negative is left out, the worst first."""
    units = [max(pair) for pair in zip(usual, _GUESS, strict=True)]
    used = [0, 1, 2, 3]
    while True:
        solved = _solved(moments, right, usual, units, used)
        worst = min(range(len(used)), key=solved.__getitem__)
        if solved[worst] >= 0.0 or len(used) == 1:
            amounts = [0.0] * 4
            for index, amount in zip(used, solved, strict=True):
                amounts[index] = max(0.0, amount) * units[index]
            return tuple(amounts)
        del used[worst]


def _solved(
    moments: Sequence[Sequence[float]],
    right: Sequence[float],
    usual: Sequence[float],
    units: Sequence[float],
    used: Sequence[int],
) -> list[float]:
    """The normal equations of some amounts, in these units, by elimination: the usual keeps pivots above 0."""
    rows: list[list[float]] = []
    for place, i in enumerate(used):
        row = [moments[min(i, j)][max(i, j)] * units[i] * units[j] for j in used]
        row[place] += _DOUBT
        rows.append([*row, right[i] * units[i] + _DOUBT * usual[i] / units[i]])
    count = len(used)
    for place, row in enumerate(rows):
        for below in rows[place + 1 :]:
            factor = below[place] / row[place]
            for column in range(place, count + 1):
                below[column] -= factor * row[column]
    found = [0.0] * count
    for place in range(count - 1, -1, -1):
        row = rows[place]
        found[place] = (row[count] - sum(row[j] * found[j] for j in range(place + 1, count))) / row[place]
    return found
