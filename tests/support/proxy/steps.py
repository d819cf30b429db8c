"""Runs all steps of some work at once."""

from collections.abc import Generator
from typing import Any, TypeVar

from kvparams_proxy.requests.intake import ParsedRequest, parse_request_in_steps

__all__ = ["drained", "read_all"]

T = TypeVar("T")


def drained(steps: Generator[None, None, T]) -> T:
    """Returns what the work returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def read_all(*arguments: Any, **options: Any) -> ParsedRequest:
    """Reads the body of a request, however long."""
    return drained(parse_request_in_steps(*arguments, **options))
