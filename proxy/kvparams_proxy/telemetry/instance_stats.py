"""Statistics of each instance: totals, and changes within about the last minute.

Sums only grow. Readers that want a mean or a rate sample them repeatedly; single requests are not stored.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["InstanceStats", "InstanceTotals", "SlidingWindow", "WindowDelta"]


class InstanceTotals(NamedTuple):
    """Totals of an instance since it joined, or of a part of this time."""

    begun: int = 0
    """Legs that were given to it; one that was taken back before it was sent is no longer among them."""
    legs: int = 0
    """Legs that have ended ..."""
    legs_s: float = 0.0
    """... and how long they took."""
    waits: int = 0
    """Its legs of requests that are over, those that did not have to wait included ..."""
    waits_s: float = 0.0
    """... and how long they had waited in the proxy before."""
    prompts: int = 0
    """Prompts that it has computed in a leg for that ..."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these, found in a cache as the engine reports."""
    answers: int = 0
    """Answers that clients got from it, in whole or in part ..."""
    answer_tokens: int = 0
    """... and their length in tokens; of a stream whose engine does not say it, in events."""
    gaps: int = 0
    """Between two tokens of such a stream ..."""
    gaps_s: float = 0.0

    def minus(self, before: "InstanceTotals") -> "InstanceTotals":
        """Returns the differences from an earlier state."""
        return InstanceTotals(*(now - then for now, then in zip(self, before, strict=True)))  # pyright: ignore[reportArgumentType]  member by member


_NOTHING: Final = InstanceTotals()


class InstanceStats:
    """The sums of an instance, as they grow: the members are those of `InstanceTotals`, `begun` apart."""

    __slots__ = (
        "answer_tokens",
        "answers",
        "cached_tokens",
        "gaps",
        "gaps_s",
        "legs",
        "legs_s",
        "prompt_tokens",
        "prompts",
        "waits",
        "waits_s",
    )

    def __init__(self) -> None:
        self.legs = 0
        self.legs_s = 0.0
        self.waits = 0
        self.waits_s = 0.0
        self.prompts = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.answers = 0
        self.answer_tokens = 0
        self.gaps = 0
        self.gaps_s = 0.0

    def totals(self, running: int) -> InstanceTotals:
        """Returns the totals now; `running` legs have not ended."""
        return InstanceTotals(
            self.legs + running,
            self.legs,
            self.legs_s,
            self.waits,
            self.waits_s,
            self.prompts,
            self.prompt_tokens,
            self.cached_tokens,
            self.answers,
            self.answer_tokens,
            self.gaps,
            self.gaps_s,
        )


class WindowDelta(NamedTuple):
    """Differences between now and the beginning of a window."""

    seconds: float
    """How long ago that is."""
    added: Mapping[str, InstanceTotals]
    """By the id of an instance."""


class SlidingWindow:
    """Looks at sums from time to time, and remembers what it saw for as long as it takes."""

    def __init__(self, now_s: float, length_s: float = 60.0, apart_s: float = 5.0) -> None:
        """Starts with all totals at zero.

        Args:
            now_s: on the clock of whoever looks.
            length_s: what is added is what came in at least this time, if there was a look before it, and in at most
                `apart_s` more, if there was one so often.
            apart_s: looks that follow each other more closely than this are not remembered: there are never more of
                them than `length_s / apart_s + 3`.
        """
        self._length_s = length_s
        self._apart_s = apart_s
        self._looks: deque[tuple[float, dict[str, InstanceTotals]]] = deque([(now_s, {})])

    def __len__(self) -> int:
        """Returns the number of samples kept."""
        return len(self._looks)

    def observe(self, now_s: float, sums: Mapping[str, InstanceTotals]) -> WindowDelta:
        """Adds a sample and returns the differences within the window.

        An instance that is not among `sums` is forgotten: a later one of the same id is another instance.
        """
        looks = self._looks
        for _, seen in looks:
            for id in seen.keys() - sums.keys():
                del seen[id]
        while len(looks) > 1 and looks[1][0] <= now_s - self._length_s:
            looks.popleft()
        since_s, before = looks[0]
        if now_s - looks[-1][0] >= self._apart_s:
            looks.append((now_s, dict(sums)))
        return WindowDelta(now_s - since_s, {id: now.minus(before.get(id, _NOTHING)) for id, now in sums.items()})
