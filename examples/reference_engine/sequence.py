"""One prompt with one answer growing behind it: what was asked, how far it is, and when it ends.

The one rule: text leaves only when no stop string can still begin in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from reference_engine.kv import KVSession
from reference_engine.sampling import Choice, Sampling
from reference_engine.tokenizer import EOS, decode

__all__ = ["Event", "Sequence"]


class Event(NamedTuple):
    """What one step did for a sequence."""

    sequence: "Sequence"
    text: str
    """New text; may be empty while a stop string may be forming."""
    choice: Choice | None
    """The new token; None in the event of an error."""
    finish: Literal["stop", "length", "error"] | None
    """Why the sequence has ended; None: it goes on."""
    reason: str | None
    """The stop string that was met, or the error in words."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence; the engine's thread alone changes it once it is submitted."""

    prompt: list[int]
    index: int
    """The choice's index in the answer."""
    deliver: Callable[[Event], None]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
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
    last: Event | None = field(init=False, default=None)
    """The event that ends it, kept until what it announces is safely stored."""
    _text: str = field(init=False, default="")
    _sent: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - len(self.prompt)

    @property
    def may_end(self) -> bool:
        """Whether the next token may be the end marker."""
        return not self.ignore_eos and self.generated >= self.min_tokens

    def append(self, choice: Choice) -> Event:
        """Take the next token in."""
        self.tokens.append(choice.token)
        self._text += decode([choice.token])
        finish: Literal["stop", "length"] | None = None
        stopped = self._stopped() if self.generated > self.min_tokens else None
        if choice.token == EOS or stopped is not None:
            finish = "stop"
        elif self.generated >= self.max_tokens:
            finish = "length"
        held = 0 if finish or not self.stop else max(map(len, self.stop)) - 1
        end = max(len(self._text) - held, self._sent)
        text = self._text[self._sent : end]
        self._sent = end
        return Event(self, text, choice, finish, stopped)

    def _stopped(self) -> str | None:
        """The stop string that the last token completed, if any; the text is cut before it."""
        met = max((stop for stop in self.stop if self._text.endswith(stop)), key=len, default=None)
        if met is not None:
            self._text = self._text.removesuffix(met)
        return met
