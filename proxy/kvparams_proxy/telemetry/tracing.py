"""W3C trace context: which trace a request belongs to, and what each leg tells its engine of it.

Ids are made before a leg starts, so that the engine's spans hang below the leg's; spans are made when the request is
over (`spans.py`). Without tracing this module is not used, and the client's headers pass through unchanged.
"""

import re
from collections.abc import Sequence
from random import Random
from typing import Final

__all__ = ["TraceContext", "Tracer"]

_TRACEPARENT: Final = re.compile(
    rb"traceparent: (?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\r\n"
)
"""Version, trace, parent, flags, and what only later versions have."""
_TRACE_LINES: Final = (b"traceparent: ", b"tracestate: ")
_SAMPLED: Final = 1
_RANDOM: Final = 2
"""All of the trace's id is random (W3C Trace Context, level 2)."""


class TraceContext:
    """The position of one request in a trace."""

    __slots__ = ("_random", "flags", "legs", "parent_id", "span_id", "trace_id")

    def __init__(self, random: Random, trace_id: int, parent_id: int | None, span_id: int, flags: int) -> None:
        self._random = random
        self.trace_id = trace_id
        self.parent_id = parent_id
        """The client's span; None where it began no trace."""
        self.span_id = span_id
        self.flags = flags
        self.legs: list[int] = []
        """The span ids of the legs, in the order in which they began."""

    @property
    def sampled(self) -> bool:
        """True if spans are recorded for the request."""
        return bool(self.flags & _SAMPLED)

    def traceparent_header(self) -> bytes:
        """Returns the header for requests other than legs."""
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace_id, self.span_id, self.flags)

    def leg_traceparent_header(self) -> bytes:
        """Returns the header of a leg that begins."""
        if not self.flags & _SAMPLED:
            return self.traceparent_header()
        span_id = self.new_span_id()
        self.legs.append(span_id)
        return b"traceparent: 00-%032x-%016x-%02x\r\n" % (self.trace_id, span_id, self.flags)

    def new_span_id(self) -> int:
        """Returns a new span id, which is never 0."""
        return self._random.getrandbits(64) or 1


class Tracer:
    """Decides which requests are traced."""

    def __init__(self, ratio: float, random: Random) -> None:
        """Creates a tracer with this sampling ratio.

        Args:
            ratio: the share of requests to sample, 0 to 1, of those whose client has not decided.
            random: where ids come from: seeded from the system's entropy, and nobody else's.
        """
        self._ratio = ratio
        self._random = random

    def begin(self, lines: Sequence[bytes]) -> tuple[TraceContext, list[bytes]]:
        """Begins the trace context of a new request.

        Args:
            lines: the client's headers that are passed on, whole lines, names in lower case.

        Returns:
            its place, and the lines without a traceparent, as each leg has its own. A client's traceparent that is
            malformed or doubled is dropped with its tracestate, and a new trace begins.
        """
        given = [line for line in lines if line.startswith(_TRACE_LINES[0])]
        found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
        if found is not None:
            version, trace, parent, flags, further = found.groups()
            trace_id, parent_id = int(trace, 16), int(parent, 16)
            if trace_id and parent_id and (version != b"00" or further is None):
                kept = [line for line in lines if not line.startswith(_TRACE_LINES[0])]
                known = int(flags, 16) & (_SAMPLED | _RANDOM)
                span_id = self._span_id() if known & _SAMPLED else parent_id
                return TraceContext(self._random, trace_id, parent_id, span_id, known), kept
        sampled = self._random.random() < self._ratio
        trace_id = self._random.getrandbits(128) or 1
        flags = _RANDOM | (_SAMPLED if sampled else 0)
        kept = [line for line in lines if not line.startswith(_TRACE_LINES)]
        return TraceContext(self._random, trace_id, None, self._span_id(), flags), kept

    def _span_id(self) -> int:
        return self._random.getrandbits(64) or 1
