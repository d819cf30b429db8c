"""Finds samples in an engine's metrics, in Prometheus' text format, with one search for all wanted names."""

import re
from collections.abc import Iterable, Iterator
from math import inf
from typing import Final, NamedTuple

__all__ = ["EngineSample", "SampleError", "compile_names", "find_samples"]

_RANK: Final = re.compile(rb'(?:^|,)(?:engine|dp_rank)="([^"]*)"')
"""The label of a data-parallel rank: `engine` in vLLM, `dp_rank` in SGLang."""
_MOST_SAMPLES: Final = 2048
_LONGEST_LINE: Final = 4096
_LONGEST_VALUE: Final = 64
"""The longest end of a line that is looked at for its value and time."""
_MOST_BYTES: Final = 256 << 10
"""The longest text of all samples together, whose labels are searched."""


class SampleError(ValueError):
    """The samples are more, or longer, than any engine's."""


class EngineSample(NamedTuple):
    """An `EngineSample` is one number of an engine."""

    name: bytes
    labels: bytes
    """What stands between the braces."""
    value: float | None
    """It is 0 or more; None where something else is said."""

    @property
    def rank(self) -> str:
        """The data-parallel rank that it is of; empty where it names none."""
        found = _RANK.search(self.labels) if self.labels else None
        return "" if found is None else found[1].decode("utf-8", "replace")


def compile_names(names: Iterable[bytes]) -> "re.Pattern[bytes]":
    """Returns what `find_samples` needs to find samples of these names, `PREFIX:NAME` each.

    The names of one prefix stand together: most lines of a page are skipped at their first byte, which takes half of
    the time of a list of whole names.
    """
    by_prefix: dict[bytes, list[bytes]] = {}
    for name in names:
        prefix, _, rest = name.partition(b":")
        by_prefix.setdefault(prefix, []).append(re.escape(rest))
    groups = (b"%b:(?:%b)" % (re.escape(prefix), b"|".join(rests)) for prefix, rests in by_prefix.items())
    return re.compile(rb"\n(%b)(?=[{ \t])" % b"|".join(groups))


def find_samples(text: bytes | bytearray, names: "re.Pattern[bytes]") -> Iterator[EngineSample]:
    """Yields the samples of these names. The time is linear in the text's length.

    Raises:
        SampleError: there are too many samples, or too long ones.
    """
    if text[:1] not in (b"#", b"\n"):  # the first line is a sample
        text = b"\n" + text
    count = nbytes = 0
    for found in names.finditer(text):
        end = found.end()
        line_end = text.find(b"\n", end, end + _LONGEST_LINE)
        if line_end < 0:
            if len(text) - end > _LONGEST_LINE:
                raise SampleError(f"a sample is longer than {_LONGEST_LINE} bytes")
            line_end = len(text)
        rest = bytes(text[end:line_end])
        count, nbytes = count + 1, nbytes + len(rest)
        if count > _MOST_SAMPLES:
            raise SampleError(f"there are more than {_MOST_SAMPLES} samples")
        if nbytes > _MOST_BYTES:
            raise SampleError(f"the samples have more than {_MOST_BYTES} bytes")
        labels, _, said = rest[1:].rpartition(b"}") if rest[:1] == b"{" else (b"", b"", rest)
        yield EngineSample(found[1], labels, _number(said[:_LONGEST_VALUE]))


def _number(said: bytes) -> float | None:
    try:
        value = float(said.split(maxsplit=1)[0])
    except (IndexError, ValueError):
        return None
    return value if 0.0 <= value < inf else None
