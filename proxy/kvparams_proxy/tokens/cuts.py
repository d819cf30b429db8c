"""Where a text may be cut so that its parts have the same token ids as the whole.

The one rule: a text is cut only right before an added token that the tokenizer finds there. HF `tokenizers` looks for
added tokens first, leftmost and longest, and normalises, splits and encodes what lies between two of them by itself
(tokenizers 0.23 src/tokenizer/added_vocabulary.rs, extract_and_normalize). So with a token found at a place

- nothing before it depends on what follows: a longer match that began earlier would have covered it,
- nothing after it depends on what came before: the search goes on from the token's start, and only a piece that begins
  the whole text can be treated as the first one, which no piece behind an added token is.

What would break this is left alone: tokens that take blanks before them (`lstrip`) or begin with one are no places to
cut, a vocabulary with a token that must stand as a word (`single_word`) has none at all, and tokens that are looked for
in the normalised text only count where there is no normaliser.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final, Protocol

__all__ = ["Added", "Cuts"]

_LEAST: Final = 128
"""Characters between two cuts at least: a part costs an entry, whoever encodes it again some 30 microseconds."""


class Added(Protocol):
    """An added token, as `tokenizers.AddedToken` has it."""

    @property
    def content(self) -> str: ...
    @property
    def single_word(self) -> bool: ...
    @property
    def lstrip(self) -> bool: ...
    @property
    def normalized(self) -> bool: ...


class Cuts:
    """Cuts texts for one tokenizer."""

    def __init__(self, added: Iterable[Added], *, normalizes: bool, least: int = _LEAST) -> None:
        """
        Args:
            added: all added tokens of its vocabulary.
            normalizes: whether it has a normaliser.
            least: how many characters a part has at least, but for the last one.
        """
        raw: list[str] = []
        late: list[str] = []
        self._safe: set[str] = set()
        whole = False
        for token in added:
            if not token.content:
                continue
            whole = whole or token.single_word
            (late if token.normalized else raw).append(token.content)
            if not token.lstrip and not token.content[0].isspace() and not (token.normalized and normalizes):
                self._safe.add(token.content)
        if whole:
            self._safe.clear()
        self._raw = _pattern(raw)
        self._late = None if normalizes else _pattern(late)
        self._least = least

    def parts(self, text: str) -> list[str]:
        """The text in parts that can be encoded one by one. A text that begins with another one is cut like that one,
        but for that one's last part."""
        edges = [0]
        if self._safe:
            due = self._least
            for start in self._places(text):
                if start >= due:
                    edges.append(start)
                    due = start + self._least
        if len(edges) == 1:
            return [text]
        edges.append(len(text))
        return [text[start:end] for start, end in pairwise(edges)]

    def _places(self, text: str) -> Iterator[int]:
        safe, late = self._safe, self._late
        behind = 0
        for found in () if self._raw is None else self._raw.finditer(text):
            if late is not None:
                yield from (inner.start() for inner in late.finditer(text, behind, found.start()) if inner[0] in safe)
            if found[0] in safe:
                yield found.start()
            behind = found.end()
        if late is not None:
            yield from (inner.start() for inner in late.finditer(text, behind) if inner[0] in safe)


class _Tree(dict[str, "_Tree"]):
    """Texts by their characters; the empty one is the end of a text."""


def _pattern(tokens: list[str]) -> "re.Pattern[str] | None":
    """Finds the longest of these at the leftmost place. A tree of prefixes, so that no text makes it slow."""
    if not tokens:
        return None
    root = _Tree()
    for token in tokens:
        node = root
        for character in token:
            node = node.setdefault(character, _Tree())
        node[""] = _Tree()
    return re.compile(_branch(root))


def _branch(node: _Tree) -> str:
    single = ""
    while len(node) == 1 and "" not in node:  # a run of characters without a choice
        character, node = next(iter(node.items()))
        single += re.escape(character)
    further = [re.escape(character) + _branch(child) for character, child in node.items() if character]
    if not further:
        return single
    return f"{single}(?:{'|'.join(further)}){'?' if '' in node else ''}"
