"""Caches encoded texts as a whole: a text with the same beginning reuses their ids without a look at its parts.

Ids are reused up to a split point of the other text. Both texts must agree for enough characters behind it to make it a
split point of this text, too (`safe_split_points.py`).
"""

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof
from typing import Final, NamedTuple

__all__ = ["EncodedText", "TextPrefixCache"]

_OPENING: Final = 512
"""Characters by which texts are found. Of those that have them in common, as conversations with one system prompt do,
the last one is kept: what they have in common is found all the same."""

_COMPARED: Final = 1 << 16
"""Characters that are compared at a time."""


class EncodedText(NamedTuple):
    """A text and its ids. None of it is ever changed again."""

    text: str
    split_points: Sequence[int]
    """Where it was cut, in order."""
    id_counts: Sequence[int]
    """How many ids stand before each cut."""
    ids: "array[int]"


class TextPrefixCache:
    """The encoded texts of one tokenizer, for several threads."""

    def __init__(self, max_bytes: int, margin: int) -> None:
        """Creates an empty cache.

        Args:
            max_bytes: of texts and ids together. A text that takes more than an eighth of it is not kept.
            margin: characters behind a cut on which it depends.
        """
        self.max_bytes: Final = max_bytes
        self._margin = margin
        self._kept: OrderedDict[tuple[bool, str], EncodedText] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """The bytes held now."""
        return self._bytes

    def find(self, text: str, *, special: bool) -> tuple[EncodedText, int] | None:
        """Finds a text with the same beginning, and the number of its split points in the common part.

        `special`: whether ids stand around it.
        """
        key = special, text[:_OPENING]
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
        alike = self._alike(found, text)
        return (found, alike) if alike else None

    def add(self, encoded: EncodedText, *, special: bool) -> None:
        """Adds a text, in place of another one that begins with the same characters."""
        size = _size(encoded)
        if len(encoded.text) < _OPENING or not encoded.split_points or size > self.max_bytes // 8:
            return
        key = special, encoded.text[:_OPENING]
        with self._lock:
            before = self._kept.pop(key, None)
            self._bytes += size - (0 if before is None else _size(before))
            self._kept[key] = encoded
            while self._bytes > self.max_bytes:
                self._bytes -= _size(self._kept.popitem(last=False)[1])

    def _alike(self, other: EncodedText, text: str) -> int:
        """Returns the number of split points of the other text that are valid for this one too.

        They lie far enough within the common prefix.
        """
        return bisect_right(other.split_points, _alike_chars(other.text, text) - self._margin)


def _alike_chars(one: str, other: str) -> int:
    """Returns the length of the common prefix in characters. No operation takes long: other threads wait meanwhile."""
    most = min(len(one), len(other))
    at = 0
    while at < most and one[at : at + _COMPARED] == other[at : at + _COMPARED]:
        at += _COMPARED
    step = _COMPARED
    while step and at < most:
        if one[at : at + step] == other[at : at + step]:
            at += step
        step //= 2
    return min(at, most)


def _size(encoded: EncodedText) -> int:
    ids = encoded.ids
    return getsizeof(encoded.text) + ids.itemsize * len(ids) + 64 * len(encoded.split_points) + 1024
