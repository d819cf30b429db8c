"""Searches a text for several words at once."""

from kvparams.native import NATIVE

__all__ = ["find_words"]


def find_words(raw: bytes, words: tuple[bytes, ...], at: int = 0) -> list[int]:
    """Returns for each word where it stands first, from `at` on, or -1."""
    if NATIVE is not None:
        return NATIVE.find_words(raw, words, at)
    return [raw.find(word, at) for word in words]
