"""Refusal of JSON numbers that a double can only hold as infinity."""

from collections.abc import Collection
from typing import Final, cast

from kvparams.jsontext.scanner import infinite_number_error

__all__ = ["check_finite", "may_overflow"]

_INFINITE: Final = float("inf")
_DOUBLE_DIGITS: Final = 300
"""A number without an exponent needs more digits than this to overflow a double."""


def may_overflow(raw: bytes, start: int, end: int) -> bool:
    """Returns True if a number in `raw[start:end]` may be too large for a double.

    Mostly a search excludes that at once.
    """
    if raw.find(b"e", start, end) >= 0 or raw.find(b"E", start, end) >= 0:
        return True
    return end - start >= _DOUBLE_DIGITS and raw.find(b".", start, end) >= 0


def check_finite(text: bytes, value: object) -> None:
    """Refuse a number that a double can only hold as infinity.

    Args:
        text: the text of the value, without that of containers in it.
        value: what it parses to: a number, or a list or an object of such and of other values.

    Raises:
        JSONTextError: there is one.
    """
    if not may_overflow(text, 0, len(text)):
        return
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).values()
    elif not isinstance(value, list):
        value = (value,)
    values = cast("Collection[object]", value)
    if _INFINITE in values or -_INFINITE in values:
        raise infinite_number_error()
