"""Decides from numbers alone what one request still wants of the store.

A request waits, has an offer made, may load, computes, and ends; preempted, it waits again for a new offer. Pure.

An offer that was accepted is not repeated before the request is preempted. The engine computes the part that could not
be loaded; a repeated offer would fail forever.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["LoadRange", "RequestStage", "RequestStateMachine", "SaveRange"]


class RequestStage(Enum):
    """Describes where a request stands, as the store sees it."""

    WAITING = "waiting"
    """Nothing is in its blocks, and an offer may be made."""
    OFFERED = "offered"
    """The engine was told how much could be loaded, and may ask again."""
    LOADING = "loading"
    """The engine has given blocks to be filled."""
    COMPUTING = "computing"
    """What is not there is computed; no offer is made."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LoadRange:
    """Tokens [start, end) that the engine counts on us for."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SaveRange:
    """Pages that end in (start, end] are to be saved, as pages of the sequence's first `end` tokens."""

    start: int
    end: int


class RequestStateMachine:
    """A `RequestStateMachine` follows one request in the engine's order of calls.

    A call that does not fit the stage has no effect.
    """

    def __init__(self, *, prompt_tokens: int, page_tokens: int, saves: bool, saves_tail: bool) -> None:
        """Begins in the state of a waiting request without an offer.

        Args:
            prompt_tokens: the length of the prompt as it came, in tokens.
            page_tokens: the length of a stored page, in tokens.
            saves: whether any page of the request is saved.
            saves_tail: whether the prompt's last page is saved although it is not full, for another engine.
        """
        self.prompt_tokens: Final = prompt_tokens
        self._page_tokens: Final = page_tokens
        self._saves: Final = saves
        self._saves_tail: Final = saves_tail
        self.stage = RequestStage.WAITING
        self.preemptions = 0
        self.stored_to = 0
        """As far as is known: pages that end before need not be saved."""
        self.cached_tokens: int | None = None
        """Tokens that were there when computing began, wherever from; None before."""
        self.loaded_tokens = 0
        self._offer = LoadRange(0, 0)
        self._claim: LoadRange | None = None

    def offer_tokens(self, found: int, local: int, total: int) -> int:
        """Returns how many tokens behind the `local` ones to offer; nothing changes if the engine does not take it up.

        Args:
            found: so many are stored.
            local: so many the engine has itself.
            total: tokens of the sequence; the last is always computed, for its logits choose the next one.
        """
        if self.stage not in (RequestStage.WAITING, RequestStage.OFFERED):
            return 0
        self.stage = RequestStage.OFFERED
        self.stored_to = found
        self._offer = LoadRange(local, max(local, min(found, total - 1)))
        return self._offer.end - local

    def decline(self) -> None:
        """The offer is not made after all: computing is faster."""
        self._offer = LoadRange(self._offer.start, self._offer.start)

    def begin_load(self, external: int) -> LoadRange | None:
        """The engine has blocks for the request, and counts on `external` tokens from outside: what to load into them.

        Called once more when the load is over, with 0. Another connector's tokens are no business of ours: 0 then too.
        """
        if self.stage is RequestStage.OFFERED and 0 < external <= self._offer.end - self._offer.start:
            self.stage = RequestStage.LOADING
            self._claim = LoadRange(self._offer.start, self._offer.start + external)
            return self._claim
        if self.stage is not RequestStage.ENDED:
            self.stage = RequestStage.COMPUTING
        return None

    def schedule_saves(self, start: int, count: int, known: int) -> list[SaveRange]:
        """The engine computes the tokens [start, start + count) in this step: what can be saved when it has.

        Args:
            start: so many are there before.
            count: of them guesses that may be taken back, if the engine guesses.
            known: tokens of the sequence that are certain, so that a page of them can be named.
        """
        if self.stage is RequestStage.ENDED:
            return []
        self.stage = RequestStage.COMPUTING
        if self._claim is not None:
            self.loaded_tokens = max(0, min(start, self._claim.end) - self._claim.start)
            if start < self._claim.end:  # some of it was not what it should be, so it is not stored either
                self.stored_to = min(self.stored_to, start)
            self._claim = None
        if self.cached_tokens is None:
            self.cached_tokens = min(start, self.prompt_tokens)
        end = min(start + count, known)
        spans: list[SaveRange] = []
        if not self._saves:
            return spans
        if self._saves_tail and self.stored_to < self.prompt_tokens <= end:
            spans.append(self._span(self.prompt_tokens))
        full = end - end % self._page_tokens
        if full > self.stored_to:
            spans.append(self._span(full))
        return spans

    def _span(self, end: int) -> SaveRange:
        span = SaveRange(self.stored_to, end)
        self.stored_to = end
        return span

    def record_preemption(self, preemptions: int) -> bool:
        """Returns how often the engine took the request's blocks away, by its count; whether that is news."""
        if preemptions == self.preemptions or self.stage is RequestStage.ENDED:
            return False
        self.preemptions = preemptions
        self.stage = RequestStage.WAITING
        self._claim = None
        return True

    def end(self) -> bool:
        """The request is over; whether it was not before."""
        first = self.stage is not RequestStage.ENDED
        self.stage = RequestStage.ENDED
        return first
