"""A prefill leg that runs beside the decode leg of its request, whose answer is held until prefill has ended well.

The one rule: an execution owns both; whichever ends badly ends the other.
"""

from collections.abc import Callable
from time import perf_counter

from kvparams.routing.plan import LegPair
from kvparams_proxy.event_loop.step_runner import StepTask
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError, UpstreamTimeout

__all__ = ["ConcurrentPrefill"]


class ConcurrentPrefill:
    """One of them, as long as it runs."""

    __slots__ = ("_ended", "began", "exchange", "held_decode_response", "pair", "pending_parse")

    def __init__(
        self, pair: LegPair, ended: Callable[["ConcurrentPrefill", ResponseHead, bytes, UpstreamError | None], None]
    ) -> None:
        self.pair = pair
        self._ended = ended
        self.began = perf_counter()
        self.exchange: ExchangeHandle | None = None
        self.held_decode_response: tuple[ResponseHead, EngineResponse] | None = None
        """Decode's whole answer, where it is here already."""
        self.pending_parse: StepTask | None = None
        """Of its own answer, where that is long."""

    def make_sink(self, limit_bytes: int) -> ResponseCollector:
        """For its answer."""
        return ResponseCollector(limit_bytes, self._collected)

    def expire(self) -> None:
        """For the watch: it takes too long."""
        if self.exchange is not None:
            self.exchange.abort(UpstreamTimeout("said nothing for longer than the time-out of its leg"))

    def _collected(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        self.exchange = None
        self._ended(self, head, raw, error)
