"""Finds samples in an engine's metrics, in Prometheus' text format, with one search for all wanted names."""

import re
from collections.abc import Iterable, Iterator
from math import inf
from typing import Final, NamedTuple

__all__ = ["RANK_LABEL", "EngineSample", "compile_names", "find_samples"]

RANK_LABEL: Final = re.compile(rb'(?:^|,)(?:engine|dp_rank)="([^"]*)"')
"""The label of a data-parallel rank: `engine` in vLLM, `dp_rank` in SGLang."""
_MOST_SAMPLES: Final = 1024
_LONGEST_LINE: Final = 4096
_LONGEST_VALUE: Final = 64
"""The longest end of a line that is looked at for its value and time."""
_MOST_BYTES: Final = 256 << 10
"""The longest text of all samples together, whose labels are searched."""


class EngineSample(NamedTuple):
    """An `EngineSample` is one number of an engine."""

    name: bytes
    rank: str
    """The data-parallel rank that it is of; empty where the sample names none."""
    value: float
    """It is 0 or more."""


def compile_names(names: Iterable[bytes]) -> "re.Pattern[bytes]":
    """Returns what `find_samples` needs to find samples of these names."""
    return re.compile(rb"\n(%b)(?=[{ \t])" % b"|".join(map(re.escape, names)))


def find_samples(text: bytes | bytearray, names: "re.Pattern[bytes]") -> Iterator[EngineSample]:
    """Yields the samples of these names that are numbers of 0 or more. The time is linear in the text's length."""
    if text[:1] not in (b"#", b"\n"):  # the first line is a sample
        text = b"\n" + text
    count = nbytes = 0
    for found in names.finditer(text):
        end = found.end()
        line_end = text.find(b"\n", end, end + _LONGEST_LINE)
        if line_end < 0:
            if len(text) - end > _LONGEST_LINE:
                continue
            line_end = len(text)
        rest = bytes(text[end:line_end])
        count, nbytes = count + 1, nbytes + len(rest)
        if count > _MOST_SAMPLES or nbytes > _MOST_BYTES:
            return
        labels, _, said = rest[-_LONGEST_VALUE:].rpartition(b"}")
        try:
            value = float(said.split(maxsplit=1)[0])
        except (IndexError, ValueError):
            continue
        if 0.0 <= value < inf:
            rank = RANK_LABEL.search(rest[1:]) if labels else None
            yield EngineSample(found[1], "" if rank is None else rank[1].decode("utf-8", "replace"), value)
