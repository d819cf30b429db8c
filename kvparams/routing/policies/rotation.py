"""Rotates the candidates by one each turn, so that ties are shared evenly."""

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["rotate_candidates"]

T = TypeVar("T")


def rotate_candidates(candidates: Sequence[T], turn: int) -> Sequence[T]:
    """Returns all candidates once, beginning with another one each turn.

    `min` of the result takes the first of equals.
    """
    first = turn % len(candidates)
    return (*candidates[first:], *candidates[:first]) if first else candidates
