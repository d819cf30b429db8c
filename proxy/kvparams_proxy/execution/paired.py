"""A prefill leg that runs beside the decode leg of its request, whose answer is held until prefill has ended well.

The one rule: an execution owns both; whichever ends badly ends the other.
"""

from collections.abc import Callable
from time import perf_counter

from kvparams.plan import Pair
from kvparams_proxy.execution.answers import Answer
from kvparams_proxy.steprunner import Work
from kvparams_proxy.upstream.interface import Handle
from kvparams_proxy.upstream.terms import Collect, Head, UpstreamError, UpstreamTimeout

__all__ = ["Paired"]


class Paired:
    """One of them, as long as it runs."""

    __slots__ = ("_ended", "began", "exchange", "kept", "pair", "reading")

    def __init__(self, pair: Pair, ended: Callable[["Paired", Head, bytes, UpstreamError | None], None]) -> None:
        self.pair = pair
        self._ended = ended
        self.began = perf_counter()
        self.exchange: Handle | None = None
        self.kept: tuple[Head, Answer] | None = None
        """Decode's whole answer, where it is here already."""
        self.reading: Work | None = None
        """Of its own answer, where that is long."""

    def sink(self, limit_bytes: int) -> Collect:
        """For its answer."""
        return Collect(limit_bytes, self._collected)

    def expire(self) -> None:
        """For the watch: it takes too long."""
        if self.exchange is not None:
            self.exchange.abort(UpstreamTimeout("said nothing for longer than the time-out of its leg"))

    def _collected(self, head: Head, raw: bytes, error: UpstreamError | None) -> None:
        self.exchange = None
        self._ended(self, head, raw, error)
