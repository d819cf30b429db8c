"""Defines the language model of the simulation: the next token is a function of all tokens before it.

So an answer shows which prompt it was computed from, and how far. An answer that is continued from its token ids equals
one that never broke off.
"""

from collections.abc import Sequence
from zlib import crc32

__all__ = ["answer_ids", "text", "tokenize"]

_FIRST = 1000


def tokenize(prompt: str) -> list[int]:
    """One id for each byte."""
    return list(prompt.encode())


def answer_ids(prompt: Sequence[int], tokens: int) -> list[int]:
    """What comes after `prompt`, which may hold a part of the answer already."""
    state = 0
    for one in prompt:
        state = crc32(one.to_bytes(4, "little"), state)
    answer: list[int] = []
    for _ in range(tokens):
        one = _FIRST + state % 50_000
        answer.append(one)
        state = crc32(one.to_bytes(4, "little"), state)
    return answer


def text(ids: Sequence[int]) -> str:
    """What the client reads."""
    return "".join(f" {one - _FIRST:x}" if one >= _FIRST else chr(one) for one in ids)
