"""Models how long an instance takes to prefill and to fetch KV, learnt from the legs that it ran.

Speeds are learnt and never configured. A leg that is computed has three costs, each an amount per unit that is never
negative: the leg itself, each token, and each pair of tokens that attend to each other (so a long prompt costs more
than its length). Fetching KV has two: the fetch itself and each token. Loading a LoRA adapter has one, its mean.
Outliers and old observations weigh less. An engine without observations is expected to cost what others in its fleet
cost. Legs of one length say nothing about longer ones: the initial guess decides there, until lengths differ by more
than noise explains. Otherwise long prompts would seem hardly dearer than short ones, and would be sent anywhere.
"""

from collections.abc import Sequence
from math import inf, sqrt
from operator import mul
from typing import Final

__all__ = ["CostModel", "FleetCostPrior", "leg_features"]

_WORK: Final = (0.02, 1e-4, 1e-9)
"""Seconds for a leg, a token, a pair, before anything was seen: an accelerator of today and a model of some ten billion
parameters. The first one corrects the whole by its own factor."""
_FETCH: Final = (0.01, 2e-5)
"""The same for a fetch and a token of it."""
_ADAPTER_LOAD_S: Final = 0.5
"""Seconds to load a LoRA adapter, before anything was seen: LoRAX issue 433 has 0.5 to 1 s, most of it for moving the
weights from host to device."""
_ADAPTER_LOAD_WEIGHT: Final = 0.1
"""The weight of the newest load in the mean."""
_LONGEST_LOAD_S: Final = 60.0
"""A load that takes longer counts as this: something else was slow."""
_DOUBT: Final = 0.001
"""How much the guess weighs against one leg: it may be wrong by a factor, a leg by a thirtieth (the squares' ratio)."""
_TOKENS: Final = 0.5
"""This share of the first leg is taken for its tokens', at least, as long as they cost others more. The guess has less
where it is short, a fourteenth for 16 tokens; on a CPU it may be all."""
_SHORT: Final = 16
"""Of fewer tokens, a block of most engines, the first leg is taken to have had so many: they hardly count."""
_KEPT: Final = 0.99
"""What a leg's weight is multiplied with when the next one is seen: about the last hundred count."""
_LEAST_S: Final = 1e-4
"""Nothing is shorter, as far as weights go."""
_FEW: Final = 8
"""As long as fewer legs were seen, none is taken for an outlier."""
_SETTLED: Final = 32
"""After so many legs one changes little: the curve is fitted anew at every eighth..."""
_SURPRISE: Final = 2.0
"""... and as soon as one takes so many times more or less than expected. Of legs that all have one length a curve knows
no other: the first one of another length may say that a token costs ten times as much."""


def leg_features(new: int, context: int) -> tuple[float, float, float]:
    """Returns the three cost features of a computed leg: the leg, its new tokens, and its pairs of tokens."""
    return 1.0, float(new), new * (context - 0.5 * new)


def _together(amounts: Sequence[float], features: Sequence[float]) -> float:
    return sum(map(mul, amounts, features))


class FleetCostPrior:
    """A `FleetCostPrior` holds the costs of the engine of a fleet that reported most recently."""

    __slots__ = ("adapter_load_s", "amounts", "token")

    def __init__(self) -> None:
        self.adapter_load_s = _ADAPTER_LOAD_S
        """The seconds that loading an adapter takes."""
        self.amounts: tuple[float, ...] = _WORK
        self.token: float | None = None
        """Of that, what a token costs; None as long as none has told."""


class _LeastSquaresFit:
    """Fits the amounts that explain observed seconds best, by least squares of relative errors.

    No amount is below 0, and that of a token is not below the least that the observations allow.
    """

    __slots__ = ("_guess", "_moments", "_right", "amounts", "seen", "variance")

    def __init__(self, guess: Sequence[float]) -> None:
        size = len(guess)
        self._guess = guess
        self._moments = [[0.0] * size for _ in range(size)]
        """Only on and above the diagonal."""
        self._right = [0.0] * size
        self.amounts = tuple(guess)
        self.seen = 0
        self.variance = 0.0
        """Of relative errors, each at most 1."""

    def learn(self, features: Sequence[float], seconds: float, token: float = 0.0) -> None:
        """Adds an observation: work with these features took `seconds`.

        For the first observation, `token` is the least that a token of it should be taken to cost, up to `_TOKENS` of
        the whole.
        """
        expected = max(_together(self.amounts, features), _LEAST_S)
        if not self.seen:
            factor = max(seconds, _LEAST_S) / expected
            expected *= factor
            guess = [factor * amount for amount in self._guess]
            least = min(token, _TOKENS * expected / max(features[1], _SHORT))
            if guess[1] < least:
                rest = (expected - least * features[1]) / (expected - guess[1] * features[1])
                guess = [rest * amount for amount in guess]
                guess[1] = least
            self._guess = guess
        weight = 1.0 / (expected * expected)
        off = max(seconds, _LEAST_S) / expected
        wrong = max(off, 1.0 / off)
        if self.seen >= _FEW:
            weight *= min(1.0, 2.0 / wrong)
            self.variance += (1.0 - _KEPT) * (min(1.0, (off - 1.0) ** 2) - self.variance)
        self.seen += 1
        moments, right = self._moments, self._right
        for index, feature in enumerate(features):
            weighted = weight * feature
            right[index] = _KEPT * right[index] + weighted * seconds
            row = moments[index]
            for other in range(index, len(row)):
                row[other] = _KEPT * row[other] + weighted * features[other]
        if self.seen < _SETTLED or not self.seen % 8 or wrong > _SURPRISE:
            self.amounts = self._fitted()

    def _fitted(self) -> tuple[float, ...]:
        """Whatever would be less than it may be is left out, the worst first, and is that."""
        guess, products = self._guess, self._products()
        least = [0.0] * len(guess)
        least[1] = self._least(products)
        used = list(range(len(guess)))
        while True:
            solved = self._solved(products, used, least)
            over = [each - least[index] for index, each in zip(used, solved, strict=True)]
            lowest = min(over)
            if lowest >= 0.0 or len(used) == 1:
                for index, amount in zip(used, solved, strict=True):
                    least[index] = max(least[index], amount)
                return tuple(map(mul, least, guess))
            del used[over.index(lowest)]

    def _products(self) -> list[list[float]]:
        """Returns the moments in units of the guess, on both sides of the diagonal."""
        guess, moments = self._guess, self._moments
        return [
            [(moments[i][j] if i <= j else moments[j][i]) * guess[i] * guess[j] for j in range(len(guess))]
            for i in range(len(guess))
        ]

    def _least(self, products: Sequence[Sequence[float]]) -> float:
        """Returns the lower bound of the cost of a token, in units of the guess.

        It is the cost at which the guess fits all observations, as far as those do not tell tokens from the rest.
        Lengths that differ do.
        """
        guess, moments, doubt = self._guess, self._moments, max(_DOUBT, self.variance)
        size = 0.0
        for i, row in enumerate(products):
            size += row[i]
            for j in range(i + 1, len(row)):
                size += 2.0 * row[j]
        level = (_together(guess, self._right) + doubt) / (size + doubt)
        one, both, token = moments[0][0], moments[0][1], moments[1][1]
        told = (token - both * both / one) * guess[1] * guess[1]
        return level * doubt / (max(0.0, told) + doubt)

    def _solved(self, products: Sequence[Sequence[float]], used: Sequence[int], least: Sequence[float]) -> list[float]:
        """Solves the normal equations for the amounts in `used`, with the others at their least.

        Values are in units of the guess. Elimination keeps pivots above 0.
        """
        guess, moments = self._guess, self._moments
        others = [index for index in range(len(guess)) if index not in used]
        rows: list[list[float]] = []
        for place, i in enumerate(used):
            row = [products[i][j] for j in used]
            row[place] += _DOUBT
            rest = 0.0
            for j in others:
                rest += (moments[i][j] if i <= j else moments[j][i]) * guess[j] * least[j]
            row.append((self._right[i] - rest) * guess[i] + _DOUBT)
            rows.append(row)
        count = len(used)
        for place, row in enumerate(rows):
            pivot = row[place]
            for lower in range(place + 1, count):
                below = rows[lower]
                factor = below[place] / pivot
                for column in range(place, count + 1):
                    below[column] -= factor * row[column]
        found = [0.0] * count
        for place in range(count - 1, -1, -1):
            row = rows[place]
            known = 0.0
            for j in range(place + 1, count):
                known += row[j] * found[j]
            found[place] = (row[count] - known) / row[place]
        return found


class CostModel:
    """The learnt curve of one instance."""

    __slots__ = ("_adapter_load_s", "_fetch", "_usual", "_work")

    def __init__(self, usual: FleetCostPrior | None = None) -> None:
        """`usual` is what is expected as long as nothing was seen: of the fleet that the instance belongs to."""
        self._usual = usual or FleetCostPrior()
        self._work = _LeastSquaresFit(_WORK)
        self._fetch = _LeastSquaresFit(_FETCH)
        self._adapter_load_s: float | None = None

    @property
    def sample_count(self) -> int:
        """Legs that it was learnt from."""
        return self._work.seen

    @property
    def relative_error(self) -> float:
        """Returns the standard deviation of legs from their predictions, as a share of the prediction, 1 at most."""
        return sqrt(self._work.variance)

    def predict_s(self, new: int, context: int) -> float:
        """Predicts the seconds of a leg that computes the last `new` of `context` tokens."""
        leg, token, pair = self._amounts
        return leg + new * (token + pair * (context - 0.5 * new))

    def predict_batch_s(self, features: Sequence[float]) -> float:
        """Predicts the seconds of legs that run together, from the sum of their features."""
        return _together(self._amounts, features)

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """A leg of such features took so long; or several did together, whose features are added up."""
        usual = self._usual
        self._work.learn(features, seconds, inf if usual.token is None else usual.token)
        usual.amounts = self._work.amounts
        usual.token = usual.amounts[1]

    def predict_fetch_s(self, tokens: int) -> float:
        """Predicts the seconds to fetch the KV of `tokens` tokens."""
        fetch, token = self._fetch.amounts
        return fetch + token * tokens

    def learn_fetch(self, tokens: int, seconds: float) -> None:
        """Fetching the KV of so many tokens took so long."""
        self._fetch.learn((1.0, float(tokens)), seconds)

    @property
    def adapter_load_s(self) -> float:
        """The predicted seconds to load a LoRA adapter that is not in one of the engine's slots."""
        return self._usual.adapter_load_s if self._adapter_load_s is None else self._adapter_load_s

    def learn_adapter_load(self, seconds: float) -> None:
        """Loading an adapter took so long, as far as the rest of its leg is known."""
        mean = self.adapter_load_s
        mean += _ADAPTER_LOAD_WEIGHT * (min(max(seconds, 0.0), _LONGEST_LOAD_S) - mean)
        self._adapter_load_s = self._usual.adapter_load_s = mean

    @property
    def _amounts(self) -> tuple[float, ...]:
        return self._work.amounts if self._work.seen else self._usual.amounts
