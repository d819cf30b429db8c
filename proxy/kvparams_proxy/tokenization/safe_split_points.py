"""Finds places at which a text can be split so that its parts have the same token ids as the whole.

A text is split only where the tokenizer itself must split it. First, right before an added token that it
finds. HF `tokenizers` looks for added tokens first, leftmost and longest, and normalises, splits and encodes what lies
between two of them by itself
(tokenizers 0.23 src/tokenizer/added_vocabulary.rs, extract_and_normalize). So with a token found at a place

- nothing before it depends on what follows: a longer match that began earlier would have covered it,
- nothing after it depends on what came before: the search goes on from the token's start, and only a piece that begins
  the whole text can be treated as the first one, which no piece behind an added token is.

What would break this is left alone: tokens that take blanks before them (`lstrip`) or begin with one are no places to
cut, a vocabulary with a token that must stand as a word (`single_word`) has none at all, and tokens that are looked for
in the normalised text only count where there is no normaliser.

Second, in long pieces of text, between an ASCII letter and a blank that another one follows, for tokenizers whose
splitting is known (`may_split_between_words`): none of these patterns has a match with a letter before a blank in it,
none looks back, and none looks further ahead than the end of a run of letters.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final, Protocol

__all__ = ["AddedTokenInfo", "SafeSplitPoints", "may_split_between_words"]

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN: Final = (_LLAMA3, _LLAMA3.replace("{1,3}", ""))
"""Of Llama 3 and of Qwen 2 and 3, from their `tokenizer.json`. That of GPT-2 is what `ByteLevel` has itself."""
_WORDS: Final = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
_LONG: Final = 1024
"""Characters, beyond which a piece of text is cut between words."""
_LEAST: Final = 128
"""Characters between two cuts at least: a part costs an entry, whoever encodes it again some 30 microseconds."""

_SEARCHED: Final = 1 << 16
"""Characters that are searched at a time."""


class AddedTokenInfo(Protocol):
    """An added token, as `tokenizers.AddedToken` has it."""

    @property
    def content(self) -> str: ...
    @property
    def single_word(self) -> bool: ...
    @property
    def lstrip(self) -> bool: ...
    @property
    def rstrip(self) -> bool: ...
    @property
    def normalized(self) -> bool: ...


class SafeSplitPoints:
    """Cuts texts for one tokenizer."""

    def __init__(
        self, added: Iterable[AddedTokenInfo], *, normalizes: bool, words: bool = False, least: int = _LEAST
    ) -> None:
        """Prepares the patterns of one tokenizer.

        Args:
            added: all added tokens of its vocabulary.
            normalizes: whether it has a normaliser.
            words: whether it may be cut between words: see `may_split_between_words`.
            least: how many characters a part has at least, but for the last one.
        """
        raw: list[str] = []
        late: list[str] = []
        self._safe: set[str] = set()
        whole = blanks = False
        for token in added:
            if not token.content:
                continue
            whole = whole or token.single_word
            takes = token.rstrip and token.content[-1].isalpha()  # the blank between two words
            blanks = blanks or takes or any(character.isspace() for character in token.content)
            (late if token.normalized else raw).append(token.content)
            if not token.lstrip and not token.content[0].isspace() and not (token.normalized and normalizes):
                self._safe.add(token.content)
        if whole:
            self._safe.clear()
        self._long = _LONG // _LEAST * least if words and not whole and not blanks else 0
        self._raw = _pattern(raw)
        self._late = None if normalizes else _pattern(late)
        self._least = least
        firsts = {content[0] for content in (*raw, *late)}
        self._first = firsts.pop() if len(firsts) == 1 else ""
        """With which all added tokens begin, if with one: a text without it is not searched for them."""
        # A raw token that overlaps with a late one takes the place of its text, so a cut before it hangs on both.
        self.lookahead_chars: Final = max(map(len, ("  ", *raw))) + max(map(len, late), default=0)

    def split(self, text: str, start: int = 0) -> list[str]:
        """Splits the text into parts that can be encoded one by one.

        A text that begins with another one is split like that one, but for that one's last part.

        Args:
            text: all of it.
            start: one of its cuts: only what lies behind it is cut.
        """
        edges = [start]
        if self._safe and text.find(self._first, start) >= 0:
            for place in self._places(text, start):
                if place >= edges[-1] + self._least:
                    self._between_words(text, edges, place, self._long)
                    edges.append(place)
        self._between_words(text, edges, len(text), self._long)
        return _cut(text, edges)

    def split_finely(self, last: str) -> list[str]:
        """Splits the last part of a text into small ones: a text with another end shares most of them."""
        edges = [0]
        if self._long:
            self._between_words(last, edges, len(last), self._least)
        return _cut(last, edges)

    def _between_words(self, text: str, edges: list[int], end: int, size: int) -> None:
        """Adds split points behind the last one, while the text that follows it up to `end` is longer than `size`."""
        while size and end - edges[-1] > size:
            found = next(_find_all(_WORDS, text, edges[-1] + size, end, 1), None)
            if found is None:
                return
            edges.append(found.start())

    def _places(self, text: str, behind: int) -> Iterator[int]:
        safe, late = self._safe, self._late
        for found in () if self._raw is None else _find_all(self._raw, text, behind, len(text), self.lookahead_chars):
            if late is not None:
                yield from self._late_places(late, text, behind, found.start())
            if found[0] in safe:
                yield found.start()
            behind = found.end()
        if late is not None:
            yield from self._late_places(late, text, behind, len(text))

    def _late_places(self, late: "re.Pattern[str]", text: str, start: int, end: int) -> Iterator[int]:
        return (
            found.start() for found in _find_all(late, text, start, end, self.lookahead_chars) if found[0] in self._safe
        )


def _find_all(pattern: "re.Pattern[str]", text: str, at: int, end: int, most: int) -> Iterator["re.Match[str]"]:
    """Finds what `pattern.finditer(text, at, end)` does, without one search through a long text.

    No other thread runs during a search. `most`: characters that a match, with what it looks at behind itself, has at
    most.
    """
    while at < end:
        stop = min(at + _SEARCHED, end)
        found = pattern.search(text, at, min(stop + most, end))
        if found is None or found.start() >= stop:
            at = stop
        else:
            yield found
            at = found.end()


def _cut(text: str, edges: list[int]) -> list[str]:
    """Splits the text at these positions, and appends the end to them."""
    if edges == [0]:
        return [text]
    edges.append(len(text))
    return [text[start:end] for start, end in pairwise(edges)]


def may_split_between_words(normalizer: object, pre_tokenizer: object) -> bool:
    """Returns whether a tokenizer with these parts, as in `tokenizer.json`, may be split between words."""
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return False
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in _KNOWN
        case _:
            return False


class _PrefixTree(dict[str, "_PrefixTree"]):
    """Texts by their characters; the empty one is the end of a text."""


def _pattern(tokens: list[str]) -> "re.Pattern[str] | None":
    """Finds the longest of these at the leftmost place. A tree of prefixes, so that no text makes it slow."""
    if not tokens:
        return None
    root = _PrefixTree()
    for token in tokens:
        node = root
        for character in token:
            node = node.setdefault(character, _PrefixTree())
        node[""] = _PrefixTree()
    return re.compile(_branch(root))


def _branch(node: _PrefixTree) -> str:
    single = ""
    while len(node) == 1 and "" not in node:  # a run of characters without a choice
        character, node = next(iter(node.items()))
        single += re.escape(character)
    further = [re.escape(character) + _branch(child) for character, child in node.items() if character]
    if not further:
        return single
    return f"{single}(?:{'|'.join(further)}){'?' if '' in node else ''}"
