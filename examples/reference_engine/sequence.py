"""Holds a prompt with a growing answer: the request, its progress, and its end.

Text leaves only when no stop string can still begin in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from reference_engine.grammar import Expression, ends, first, rest
from reference_engine.sampling import Choice, Sampling
from reference_engine.session import KVSession
from reference_engine.tokenizer import EOS, OUTPUT_IDS, decode

__all__ = ["Event", "Limits", "Sequence"]

_ALL: Final = frozenset(OUTPUT_IDS)


class Event(NamedTuple):
    """An `Event` is the result of one step for a sequence."""

    sequence: "Sequence"
    text: str
    """New text; may be empty while a stop string may be forming."""
    choice: Choice | None
    """The new token; None in the event of an error."""
    finish: Literal["stop", "length", "error"] | None
    """Why the sequence has ended; None: it goes on."""
    reason: str | int | None
    """The stop string or the stop token that was met, or the error in words."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A `Limits` says when an answer ends, and which texts are allowed."""

    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    """End the answer like the end marker does, without text."""
    keep_stop: bool = False
    """Whether what ended the answer stays in its text."""
    ignore_eos: bool = False
    grammar: Expression | None = None
    """What the text must be; when it is complete, the answer ends."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence; the engine's thread alone changes it once it is submitted."""

    prompt: list[int]
    index: int
    """The choice's index in the answer."""
    deliver: Callable[[Event], None]
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    cache_root: bytes = b""
    """Only sequences with equal roots share cached prefixes."""
    kv: KVSession | None = None
    """Its dealings with the store."""

    tokens: list[int] = field(init=False)
    """The prompt and what was generated."""
    blocks: list[int] = field(init=False, default_factory=list[int])
    names: list[bytes] = field(init=False, default_factory=list[bytes])
    """The names of the full blocks that are computed."""
    computed: int = field(init=False, default=0)
    """Tokens whose K and V are in the blocks."""
    cached_tokens: int = field(init=False, default=0)
    """Prompt tokens that were not computed here, wherever they came from."""
    aborted: bool = field(init=False, default=False)
    ended: bool = field(init=False, default=False)
    """Whether the engine is through with it: nothing more is computed or saved."""
    last: Event | None = field(init=False, default=None)
    """The event that ends it, kept until what it announces is safely stored."""
    _text: str = field(init=False, default="")
    _sent: int = field(init=False, default=0)
    _grammar: Expression | None = field(init=False)
    """What may still follow."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self._grammar = self.limits.grammar

    @property
    def generated(self) -> int:
        """Returns the number of generated tokens."""
        return len(self.tokens) - len(self.prompt)

    def allowed(self) -> frozenset[int] | None:
        """The tokens that may come next; None: all. Where a grammar leaves only the end, the end it is."""
        limits, grammar = self.limits, self._grammar
        early = self.generated < limits.min_tokens
        if grammar is None:
            if not early and not limits.ignore_eos:
                return None
            possible = _ALL
        else:
            possible = frozenset(map(ord, first(grammar)))
            if ends(grammar):
                possible |= {EOS}
        barred = limits.stop_tokens | {EOS} if early else frozenset[int]()
        if limits.ignore_eos and EOS not in limits.stop_tokens:
            barred |= {EOS}
        return possible - barred or possible

    def append(self, choice: Choice) -> Event:
        """Take the next token in."""
        self.tokens.append(choice.token)
        limits, text = self.limits, decode([choice.token])
        if self._grammar is not None and text:
            self._grammar = rest(self._grammar, text)
        stopped = choice.token if choice.token in limits.stop_tokens else None
        if stopped is None or limits.keep_stop:
            self._text += text
        if stopped is None and self.generated > limits.min_tokens:
            stopped = self._stopped()
        finish: Literal["stop", "length"] | None = None
        if choice.token == EOS or stopped is not None:
            finish = "stop"
        elif self.generated >= limits.max_tokens:
            finish = "length"
        held = 0 if finish or not limits.stop or limits.keep_stop else max(map(len, limits.stop)) - 1
        end = max(len(self._text) - held, self._sent)
        new = self._text[self._sent : end]
        self._sent = end
        return Event(self, new, choice, finish, stopped)

    def _stopped(self) -> str | None:
        """The stop string that the last token completed, if any; the text is cut before it."""
        met = max((stop for stop in self.limits.stop if self._text.endswith(stop)), key=len, default=None)
        if met is not None and not self.limits.keep_stop:
            self._text = self._text.removesuffix(met)
        return met
