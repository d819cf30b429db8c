"""Generates traces, each by a seed, the same every time.

`uniform` and `bursts` are of kinds that no policy here was developed on; `agents` and `documents` have since changed
`cache_aware`.
"""

from collections.abc import Callable, Sequence
from itertools import count
from random import Random

from benchmarks.replay.trace import BLOCK, Request, requests

__all__ = ["KINDS", "generate"]

_Row = tuple[float, int, int, Sequence[int]]


class _Author:
    """Writes prompts: blocks that are new, and blocks that go on from others."""

    def __init__(self, seed: int) -> None:
        self.die = Random(seed)
        self._ids = count()
        self.rows: list[_Row] = []

    def prompt(self, tokens: int, before: Sequence[int] = (), known: int = 0) -> list[int]:
        """The blocks of a prompt whose first `known` tokens are those of the prompt with the blocks `before`."""
        kept = list(before[: known // BLOCK])
        return kept + [next(self._ids) for _ in range(-(-tokens // BLOCK) - len(kept))]

    def conversation(self, at: float, turns: int, first: int, said: int, answer: int, pause_s: float) -> None:
        """Turns that each go on from all that was said before; figures are means."""
        tokens = self._about(first)
        blocks = self.prompt(tokens)
        self.goes_on(at, turns, tokens, blocks, said, answer, pause_s)

    def goes_on(
        self, at: float, turns: int, tokens: int, blocks: list[int], said: int, answer: int, pause_s: float
    ) -> None:
        """A conversation from its first prompt on."""
        for _ in range(turns):
            output = self._about(answer)
            self.rows.append((at, tokens, output, blocks))
            at += output * 0.02 + self.die.expovariate(1 / pause_s)
            longer = tokens + output + self._about(said)
            blocks = self.prompt(longer, blocks, tokens)
            tokens = longer

    def _about(self, mean: int) -> int:
        return max(1, round(self.die.gammavariate(2.0, mean / 2.0)))


def _agents(author: _Author, number: int) -> None:
    """Two dozen agents, each with a long system prompt of its own, in tasks of many short steps."""
    die = author.die
    heads: list[tuple[int, list[int]]] = []
    for _ in range(24):
        tokens = die.randrange(4, 24) * BLOCK
        heads.append((tokens, author.prompt(tokens)))
    at = 0.0
    while len(author.rows) < number:
        at += die.expovariate(1.0)
        head, blocks = heads[min(int(die.paretovariate(1.0)) - 1, 23)]
        tokens = head + die.randrange(200, 1500)
        author.goes_on(at, die.randrange(3, 16), tokens, author.prompt(tokens, blocks, head), 600, 150, 4.0)


def _uniform(author: _Author, number: int) -> None:
    """Prompts of all lengths that have nothing in common."""
    at = 0.0
    while len(author.rows) < number:
        at += author.die.expovariate(3.0)
        tokens = author.die.randrange(100, 16_000)
        author.rows.append((at, tokens, author.die.randrange(1, 600), author.prompt(tokens)))


def _bursts(author: _Author, number: int) -> None:
    """Chats that begin in bursts, a minute apart."""
    die = author.die
    at = 0.0
    while len(author.rows) < number:
        at += die.expovariate(1 / 60.0)
        for _ in range(die.randrange(10, 60)):
            author.conversation(at + die.expovariate(0.5), die.randrange(1, 12), 900, 300, 350, 25.0)


def _documents(author: _Author, number: int) -> None:
    """Long documents, few of them asked about often."""
    die = author.die
    at = 0.0
    documents: list[tuple[int, list[int]]] = []
    while len(author.rows) < number:
        at += die.expovariate(1.0)
        if not documents or die.random() < 0.2:
            tokens = die.randrange(10_000, 80_000)
            documents.append((tokens, author.prompt(tokens)))
        recent = documents[-40:]
        document, blocks = recent[-min(int(die.paretovariate(0.7)), len(recent))]
        tokens = document + die.randrange(50, 500)
        author.rows.append((at, tokens, die.randrange(50, 500), author.prompt(tokens, blocks, document)))


KINDS: dict[str, Callable[[_Author, int], None]] = {
    "agents": _agents,
    "uniform": _uniform,
    "bursts": _bursts,
    "documents": _documents,
}


def generate(kind: str, number: int, seed: int = 1) -> list[Request]:
    """About so many requests of a kind, a name in `KINDS`."""
    author = _Author(seed)
    KINDS[kind](author, number)
    return requests(author.rows)[:number]
