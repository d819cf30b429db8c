"""Reads requests with the blocks of their prompts from a trace.

A line of a trace is a JSON object: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one for each
block of 512 tokens; equal ids mean the same tokens after the same prefix), as in the FAST'25 traces of Mooncake
(github.com/kvcache-ai/Mooncake, FAST25-release/traces).
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["BLOCK", "Request", "load", "requests", "spread"]

BLOCK: Final = 512
"""Tokens of a block."""


class Request(NamedTuple):
    """A `Request` is a request of a trace."""

    at: float
    """Seconds after the first."""
    tokens: int
    output: int
    blocks: Sequence[int]
    session: int
    """The conversation that it is a turn of."""
    adapter: int = 0
    """The number of the LoRA adapter that it asks for; 0 for the base model."""


def load(path: Path) -> list[Request]:
    """The requests of a trace, in the order of arrival.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not as above.
    """
    rows: list[tuple[float, int, int, list[int]]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            blocks = [int(id) for id in row["hash_ids"]]
            rows.append((row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), blocks))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is not a request of a trace") from error
        if not blocks or -(-rows[-1][1] // BLOCK) != len(blocks):
            raise ValueError(f"{path}:{number} has not one hash for each block of {BLOCK} tokens")
    return requests(rows)


def spread(trace: Sequence[Request]) -> list[Request]:
    """Spreads the requests of one time evenly over the time to the next.

    The traces have their times rounded to seconds, so that up to 28 requests stand at one time.
    """
    times = sorted({request.at for request in trace})
    following = dict(zip(times, [*times[1:], times[-1] + 1.0], strict=True))
    counts = Counter(request.at for request in trace)
    seen = Counter[float]()
    made: list[Request] = []
    for request in trace:
        share = seen[request.at] / counts[request.at]
        seen[request.at] += 1
        made.append(request._replace(at=request.at + share * (following[request.at] - request.at)))
    return made


def requests(rows: Iterable[tuple[float, int, int, Sequence[int]]]) -> list[Request]:
    """Rows of time, input, output and blocks, in order of time, with the conversations that they show.

    A request goes on with an earlier one if it has all its blocks but the last, which the answer has changed.
    """
    seen: dict[int, tuple[int, int]] = {}  # block: whose last it was to be, and how deep the other's blocks went
    made: list[Request] = []
    first: float | None = None
    for number, (at, tokens, output, blocks) in enumerate(sorted(rows, key=lambda row: row[0])):
        first = at if first is None else first
        matched = 0
        while matched < len(blocks) and blocks[matched] in seen:
            matched += 1
        session = number
        if matched:
            earlier, depth = seen[blocks[matched - 1]]
            if matched >= depth - 1:
                session = earlier
        for block in blocks[matched - 1 if matched and session != number else matched :]:
            seen[block] = session, len(blocks)
        made.append(Request(at - first, tokens, output, blocks, session))
    return made
