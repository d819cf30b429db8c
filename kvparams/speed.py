"""How long an instance takes to prefill, learnt from the legs that it ran.

The one rule: nobody is told how fast an engine is. Four things cost time, each an amount per unit that is never
negative: the leg itself, each token computed, each pair of tokens that attend to each other (so a long prompt costs
more than its length), and each token whose KV is fetched. A leg that took wildly other than expected counts little;
what was long ago counts little.
"""

from typing import Final

__all__ = ["SpeedCurve"]

_GUESS: Final = (0.02, 1e-4, 1e-9, 2e-5)
"""Seconds for a leg, a token, a pair, a fetched token, before anything was seen: an accelerator of today and a model of
some ten billion parameters. The first leg corrects the whole by its own factor."""
_DOUBT: Final = 0.04
"""How much the guess weighs against one leg: it may be wrong by a factor, a leg by a fifth (the squares' ratio)."""
_LEAST_S: Final = 1e-4
"""Nothing is shorter, as far as weights go."""
_KEPT: Final = 0.99
"""What a leg's weight is multiplied with when the next one is seen: about the last hundred count."""
_ROUNDS: Final = 4
"""Sweeps over the four amounts for each leg; they go on where the last leg's ended."""
_FEW: Final = 8
"""As long as fewer legs were seen, none is taken for an outlier."""


class SpeedCurve:
    """The learnt curve of one instance: least squares of relative errors, by coordinate descent, never below 0."""

    __slots__ = ("_amounts", "_moments", "_right", "seen")

    def __init__(self) -> None:
        self._amounts = list(_GUESS)
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._right = [0.0] * 4
        self.seen = 0
        """Legs that it was learnt from."""

    def seconds(self, new: int, context: int, fetched: int = 0) -> float:
        """How long a leg will take that computes `new` of `context` tokens, after the KV of `fetched` was fetched."""
        leg, token, pair, fetch = self._amounts
        return leg + new * (token + pair * (context - 0.5 * new)) + fetch * fetched

    def learn(self, features: tuple[float, float, float, float], seconds: float) -> None:
        """Legs took so long together; see `features`, which are added up where several ended at once."""
        expected = sum(amount * feature for amount, feature in zip(self._amounts, features, strict=True))
        expected = max(expected, _LEAST_S)
        weight = 1.0 / (expected * expected)
        if self.seen >= _FEW:
            off = max(seconds, _LEAST_S) / expected
            weight *= min(1.0, 2.0 / max(off, 1.0 / off))
        self.seen += 1
        moments, right, amounts = self._moments, self._right, self._amounts
        for row, x in zip(moments, features, strict=True):
            for index in range(4):
                row[index] = _KEPT * row[index] + weight * x * features[index]
        for index, x in enumerate(features):
            right[index] = _KEPT * right[index] + weight * x * seconds
        for _ in range(_ROUNDS):
            for index, row in enumerate(moments):
                others = sum(m * a for m, a in zip(row, amounts, strict=True)) - row[index] * amounts[index]
                guess = _GUESS[index]
                doubt = _DOUBT / (guess * guess)
                amounts[index] = max(0.0, (right[index] + doubt * guess - others) / (row[index] + doubt))


def features(new: int, context: int, fetched: int = 0) -> tuple[float, float, float, float]:
    """What of one leg costs time: itself, tokens, pairs of tokens, fetched tokens."""
    return 1.0, float(new), new * (context - 0.5 * new), float(fetched)
