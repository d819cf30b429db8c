"""Tracks the seconds of work that an instance still has, from the legs given to it and its learnt speed.

A leg counts from the moment it is given until it is taken back, by its own key, so no leg is counted twice or leaks. An
engine is modeled as prefilling one leg after the other in the order they came. If it batches, the sum is the same, and
the time of a batch is reported by all its legs together.
"""

from collections.abc import Callable, Hashable
from operator import add
from typing import Final, NamedTuple

from kvparams.cost_model import CostModel, FleetCostPrior, leg_features

__all__ = ["EngineBacklog"]

_TOGETHER: Final = 0.25
"""A leg that ends after the one before it in less than this share of the time that it should take, measured by that
one's, was computed together with it."""
_LATE: Final = 1.05
"""Times what computing a leg should take, and the doubt of that: what takes longer has waited for what it fetches."""
_SHARED_S: Final = 30.0
"""An engine that has run foreign legs is expected to run more of them for so long."""
_DELAYED: Final = 8
"""Of so many batches on such an engine, one is learned from: foreign legs may have delayed the others."""


class _PendingLeg(NamedTuple):
    seconds: float
    since: float
    fetch_s: float
    link_s: float
    """Of that, until its own fetch begins."""
    load_s: float
    """The part of `seconds` in which its LoRA adapter is loaded."""


class _CompletedBatch(NamedTuple):
    """A `_CompletedBatch` adds up the features and the time of legs that were computed together."""

    features: tuple[float, ...]
    seconds: float


class _LeastDelayed:
    """Selects, of each `_DELAYED` batches, the one that took the least time beside its prediction."""

    __slots__ = ("_best", "_count")

    def __init__(self) -> None:
        self._best: _CompletedBatch | None = None
        self._count = 0

    def select(self, batch: _CompletedBatch, expected: Callable[[tuple[float, ...]], float]) -> _CompletedBatch | None:
        """Adds a batch. Returns the one to learn from, or None until there are enough."""
        best = self._best
        if best is None or batch.seconds * expected(best.features) < best.seconds * expected(batch.features):
            best = batch
        self._count += 1
        if self._count < _DELAYED:
            self._best = best
            return None
        self._best, self._count = None, 0
        return best


class EngineBacklog:
    """An `EngineBacklog` holds the pending legs and the speed of one instance; any hashable key stands for a leg."""

    __slots__ = (
        "_delays",
        "_fetching_until",
        "_foreign",
        "_foreign_s",
        "_given",
        "_head_from",
        "_loaded_at",
        "_now",
        "_pending",
        "_shared_until",
        "_told",
        "cost_model",
        "ended",
    )

    def __init__(self, now: Callable[[], float], usual: FleetCostPrior | None = None) -> None:
        """Creates an empty backlog.

        Args:
            now: the clock, in seconds.
            usual: what is expected of its fleet's instances until they tell.
        """
        self.cost_model: Final = CostModel(usual)
        self._now = now
        self._given: dict[Hashable, _PendingLeg] = {}
        self._pending = 0.0
        """The sum of what is given."""
        self._foreign = 0
        """Legs of others that nobody gave to it here: `kvparams.routing.foreign_load`."""
        self._foreign_s = 0.0
        """Their estimated seconds."""
        self._shared_until = 0.0
        """Until when legs may have been delayed by foreign ones."""
        self._delays: _LeastDelayed | None = None
        self._head_from = 0.0
        """When the oldest of them began to be computed, or will."""
        self.ended = 0.0
        """When a leg ended last; 0 as long as none has."""
        self._loaded_at = -1.0
        """When a leg ended last for which an adapter was loaded, or that was computed together with one."""
        self._fetching_until = 0.0
        """When all that is fetched should be there."""
        self._told: _CompletedBatch | None = None
        """What ended last, as long as the next one may turn out to belong to it."""

    @property
    def wait_s(self) -> float:
        """Returns the seconds until the given legs and the foreign ones should be done.

        A leg that overruns is never nearer to its end than the usual prediction error.
        """
        if not self._given:
            return self._foreign_s
        head = next(iter(self._given.values())).seconds
        ran = max(0.0, self._now() - self._head_from)
        left = max(head - ran, self.cost_model.relative_error * head)
        return max(0.0, self._pending - head + left) + self._foreign_s

    @property
    def is_shared(self) -> bool:
        """Returns whether it runs foreign legs, or has lately."""
        return self._now() < self._shared_until

    @property
    def idle_s(self) -> float:
        """Seconds since it had something to do last, or since the clock began; 0 while it has."""
        return 0.0 if self._given or self._foreign else self._now() - self.ended

    @property
    def given_legs(self) -> int:
        """The number of legs that were given to it and have not ended."""
        return len(self._given)

    @property
    def given_s(self) -> float:
        """The predicted seconds of these, from when each began."""
        return self._pending if self._given else 0.0

    def set_foreign(self, legs: int, seconds: float) -> None:
        """Sets the legs that others have given to the engine, and how long all of them should take.

        While there are some, and for a while after, the engine's speed is learned from the least delayed legs only.
        """
        self._foreign, self._foreign_s = legs, seconds
        if legs:
            self._shared_until = self._now() + _SHARED_S

    def expected_fetch_s(self, tokens: int) -> float:
        """Seconds until the KV of so many tokens should be there, after what is being fetched now."""
        return max(0.0, self._fetching_until - self._now()) + self.cost_model.predict_fetch_s(tokens)

    def begin(self, leg: Hashable, seconds: float, fetch_s: float = 0.0, load_s: float = 0.0) -> None:
        """A leg that should take so long is given to it, once what it fetches is there.

        `load_s`: the seconds that loading the leg's LoRA adapter should add, if the engine has to.

        Raises:
            ValueError: it was given already.
        """
        if leg in self._given:
            raise ValueError("this leg was given already")
        now = self._now()
        if not self._given:
            self._head_from = now + max(fetch_s, self._foreign_s)
            self._pending = 0.0  # what rounding left
        link_s = 0.0
        if fetch_s:
            link_s = max(0.0, self._fetching_until - now)
            self._fetching_until = now + fetch_s
        seconds += load_s
        self._given[leg] = _PendingLeg(seconds, now, fetch_s, link_s, load_s)
        self._pending += seconds

    def add_load(self, leg: Hashable, load_s: float) -> None:
        """A leg that was given should have to load its LoRA adapter first, too. No-op if it was not given."""
        given = self._given.get(leg)
        if given is not None:
            self._given[leg] = given._replace(seconds=given.seconds + load_s, load_s=given.load_s + load_s)
            self._pending += load_s

    def end(self, leg: Hashable, new: int | None = None, context: int = 0, fetched: int = 0) -> None:
        """A leg has ended. No-op if it was not given, or has ended already.

        Args:
            leg: which.
            new: tokens that it computed, as the engine tells; None where nothing is to be learnt, it failed.
            context: tokens of the whole prompt.
            fetched: tokens whose KV came from elsewhere.
        """
        given = self._given.get(leg)
        if given is None:
            return
        was_head = next(iter(self._given)) == leg
        del self._given[leg]
        self._pending -= given.seconds
        if new is not None or was_head:
            now = self._now()
            began = max(self.ended, given.since)
            self.ended = now
            if self._given:
                head = next(iter(self._given.values()))
                self._head_from = max(now, head.since + head.fetch_s)
            if new is not None:
                self._hear(given, began, now, leg_features(new, context), fetched)
        if not self._given:
            self._learn()

    def _hear(self, given: _PendingLeg, began: float, now: float, what: tuple[float, ...], fetched: int) -> None:
        """A leg has been computed, from `began` on or from when what it fetches was there."""
        speed, seconds, before = self.cost_model, now - began, self._told
        expected = speed.predict_batch_s
        if given.load_s:  # its time tells of the load, as far as that of computing is known
            if before is not None and self._is_together(before, what, seconds):
                what, seconds = tuple(map(add, what, before.features)), seconds + before.seconds
                self._told = None
            if speed.sample_count and not fetched:
                speed.learn_adapter_load(seconds - expected(what))
            self._learn()
            self._loaded_at = now
            return
        if began == self._loaded_at and seconds < _TOGETHER * expected(what):
            self._loaded_at = now  # it was computed together with the leg whose adapter was loaded
            return
        if fetched and given.fetch_s:
            if not speed.sample_count:
                return  # who knows which of both took so long
            alone = expected(what)
            late = seconds > (_LATE + speed.relative_error) * alone
            # An engine begins to fetch when the leg is given to it, or when its turn comes, or in between.
            longest = max(0.0, now - alone - given.since - given.link_s)
            shortest = min(longest, seconds - alone) if late else 0.0
            predicted = given.fetch_s - given.link_s
            if not shortest <= predicted <= longest:
                speed.learn_fetch(fetched, shortest if predicted < shortest else longest)
            if late:
                self._learn()
                return
        it = _CompletedBatch(what, seconds)
        if before is None:
            self._told = it
        elif self._is_together(before, what, seconds):
            self._told = _CompletedBatch(tuple(map(add, it.features, before.features)), seconds + before.seconds)
        else:
            self._learn()
            self._told = it

    def _is_together(self, before: _CompletedBatch, what: tuple[float, ...], seconds: float) -> bool:
        """Returns whether a leg was computed together with the batch that has ended before it."""
        expected = self.cost_model.predict_batch_s
        return seconds * expected(before.features) < _TOGETHER * before.seconds * expected(what)

    def _learn(self) -> None:
        """Passes the completed batch to the cost model."""
        batch, self._told = self._told, None
        if batch is not None and self.is_shared:
            self._delays = self._delays or _LeastDelayed()
            batch = self._delays.select(batch, self.cost_model.predict_batch_s)
        if batch is not None:
            self.cost_model.learn(batch.features, batch.seconds)
