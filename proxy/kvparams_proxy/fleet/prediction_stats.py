"""Compares predictions of the prefix cache model with engines' reports, and logs a warning when they diverge.

Only engines know what they had cached. Legs without a report are counted as such, never estimated.
"""

import logging
from collections import deque
from typing import Final

__all__ = ["PredictionStats"]

_log: Final = logging.getLogger(__name__)
_RECENT: Final = 256
"""Legs, those that were not to hit included: where caches no longer work, what is believed is soon corrected to next to
nothing, and the few that are still to hit have to outlive those that did."""
_ENOUGH: Final = 16
"""Fewer legs that were to hit say nothing."""
_BAD: Final = 0.5
_GOOD: Final = 0.75


class PredictionStats:
    """Compares the predictions of one proxy with reports, in tokens."""

    __slots__ = (
        "_alarmed",
        "_judged",
        "_recent",
        "_silent",
        "_true",
        "_wanted",
        "hit_tokens",
        "predicted_tokens",
        "queried_tokens",
        "zero_matches",
    )

    def __init__(self) -> None:
        self.queried_tokens = 0
        """Prompt tokens that were looked up."""
        self.predicted_tokens = 0
        """Of these, believed to be cached where they were sent."""
        self.hit_tokens = 0
        """Of these, cached there as the engine reports."""
        self.zero_matches = 0
        """Prompts of which nobody was believed to have anything."""
        self._recent: deque[tuple[int, int]] = deque()
        """What was predicted for the last legs, and how much of it came true."""
        self._wanted = self._true = self._judged = 0
        """Their sums, and how many were to hit."""
        self._silent = 0
        """Legs that were to hit, since an engine reported anything."""
        self._alarmed = False

    @property
    def alarmed(self) -> bool:
        """True while predictions are unreliable: from an accuracy below 0.5 until one above 0.75."""
        return self._alarmed

    @property
    def accuracy(self) -> float | None:
        """The share of the tokens predicted for the last legs that were confirmed, or None without predictions."""
        return self._true / self._wanted if self._wanted else None

    def record_lookup(self, tokens: int, best: int) -> None:
        """Records a lookup of a prompt, of which the best instance is believed to have `best` tokens."""
        self.queried_tokens += tokens
        if not best:
            self.zero_matches += 1

    def record_leg(self, predicted: int, settled: int, cached: int | None) -> None:
        """Records a leg that has ended well.

        Args:
            predicted: tokens that were believed to be cached when it would run.
            settled: of these, believed to be there already when it was sent: they must come true.
            cached: what its engine reports, if it does.
        """
        self.predicted_tokens += predicted
        if cached is not None:
            self.hit_tokens += cached
            self._silent = 0
        elif predicted:
            self._silent += 1
            if self._silent == _RECENT:
                _log.warning(
                    "%d prompts were predicted to be cached, but no prefill engine reports cached_tokens, so "
                    "predictions are never corrected; make the engines report it (vLLM: "
                    "--enable-prompt-tokens-details)",
                    _RECENT,
                )
        if cached is None:
            return
        if len(self._recent) == _RECENT:
            wanted, true = self._recent.popleft()
            self._wanted -= wanted
            self._true -= true
            self._judged -= wanted > 0
        true = min(settled, cached)
        self._recent.append((settled, true))
        self._wanted += settled
        self._true += true
        self._judged += settled > 0
        if settled:
            self._judge()

    def _judge(self) -> None:
        share = self._true / self._wanted
        if not self._alarmed and share < _BAD and self._judged >= _ENOUGH:
            self._alarmed = True
            _log.warning(
                "prefix caches: only %.0f %% of the tokens that were predicted to be cached were cached, over "
                "the last %d requests with a prediction",
                100 * share,
                self._judged,
            )
        elif self._alarmed and share > _GOOD:
            self._alarmed = False
            _log.warning(
                "prefix caches: %.0f %% of the tokens that were predicted to be cached are cached again", 100 * share
            )
