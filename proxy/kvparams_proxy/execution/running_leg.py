"""A leg while it runs: its exchange, the relay of its stream, and the reading of a long answer."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final

from kvparams.routing.plan import Leg, LegPair
from kvparams_proxy.event_loop.step_runner import StepTask
from kvparams_proxy.event_loop.turn_batcher import TurnBatcher
from kvparams_proxy.execution.engine_response import LONG_RESPONSE_BYTES, EngineResponse
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.execution.stream_relay import StreamRelay
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError, UpstreamTimeout

__all__ = ["LEG_TIMEOUT_REASON", "ConcurrentPrefill", "RunningLeg"]

LEG_TIMEOUT_REASON: Final = "sent nothing for longer than its time-out"
_COSTLY_BYTES: Final = 1 << 20
"""To put together a longer answer has taken milliseconds of this turn already."""


OnAnswer = Callable[[ResponseHead, EngineResponse, UpstreamError | None], None]
"""Hears of an answer that is whole; it is empty where none came."""


class RunningLeg(ResponseCollector):
    """A leg from when it is sent until the load of its instance is given back. It gathers what is no stream."""

    __slots__ = (
        "_answer",
        "_batcher",
        "_began_s",
        "_context",
        "_on_answer",
        "_on_fault",
        "_parse",
        "_resources",
        "exchange",
        "leg",
        "relay",
    )

    def __init__(
        self,
        leg: Leg,
        resources: ExecutionResources,
        context: PlanContext,
        on_answer: OnAnswer,
        on_fault: Callable[[Exception], None],
        batcher: TurnBatcher | None,
    ) -> None:
        """Creates the leg; its exchange has not begun.

        Args:
            leg: which one.
            resources: what executions share.
            context: what the request holds.
            on_answer: hears of an answer that is wanted whole.
            on_fault: hears what goes wrong in this process while a long answer is read.
            batcher: has short answers acted on together; at once without one.
        """
        super().__init__(resources.settings.upstream_limits.answer_bytes)
        self.leg = leg
        self._on_answer = on_answer
        self._batcher = batcher
        self._resources = resources
        self._context = context
        self._on_fault = on_fault
        self._began_s = perf_counter()
        self.exchange: ExchangeHandle | None = None
        self.relay: StreamRelay | None = None
        """Carries its answer to the client, where that is a stream."""
        self._parse: StepTask | None = None
        """Reads its answer, where that is long."""
        self._answer: EngineResponse | None = None
        """Its answer, where that is short, until it is acted on."""

    @property
    def is_being_read(self) -> bool:
        """True while a long response is being parsed."""
        return self._parse is not None and not self._parse.is_finished

    def on_done(self, error: UpstreamError | None) -> None:
        """Handles the end of a leg whose complete answer is wanted.

        A long answer is parsed before `on_answer` hears of it. A short one is handled in a batch with others.
        """
        head = self._head
        raw, self._first = self._first if self._rest is None else self.take(), b""
        if error is None and head.status == 200 and len(raw) > LONG_RESPONSE_BYTES:
            self.read(raw, head)
        elif error is None and self._batcher is not None:
            self._answer = EngineResponse(raw, self._context.answer_form)
            self._batcher.schedule(self._pass_on)
        else:
            self._on_answer(head, EngineResponse(raw, self._context.answer_form), error)

    def _pass_on(self) -> None:
        """Has a short answer acted on."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self._on_answer(self._head, answer, None)

    def read(self, raw: bytes, head: ResponseHead) -> None:
        """Reads a long answer in steps, unless the leg is given up meanwhile.

        `on_answer` hears of it, at once if there is time.
        """
        done = self._on_answer

        def finish(answer: EngineResponse) -> None:
            done(head, answer, None)

        request_id = self._context.inbound.facts.request_id
        steps = EngineResponse(raw, self._context.answer_form).parse_in_steps(
            request_id, self._resources.engine_addresses
        )
        task = self._resources.step_runner.run(steps, finish, self._on_fault, at_once=len(raw) < _COSTLY_BYTES)
        if not task.is_finished:
            self._parse = task

    def pause(self) -> None:
        """Throttles the engine. No-op where the exchange is over, as are the next two."""
        if self.exchange is not None:
            self.exchange.pause()

    def resume(self) -> None:
        """Lets the engine go on."""
        if self.exchange is not None:
            self.exchange.resume()

    def abort(self, error: UpstreamError) -> None:
        """Ends the exchange, whose sink hears `error`."""
        if self.exchange is not None:
            self.exchange.abort(error)

    def end(self) -> None:
        """Ends the leg and releases the load of its instance."""
        self._cancel_parse()
        del self._on_answer  # it knows of this leg
        self.exchange = self.relay = None
        self._context.release_instance(self.leg.instance)
        self._resources.metrics.leg_ended(self.leg.instance, perf_counter() - self._began_s)

    def discard(self) -> None:
        """Discards the leg when its request is over, so that the engine does not go on."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.discard()
        self.relay = None
        self._cancel_parse()

    def _cancel_parse(self) -> None:
        if self._parse is not None:
            self._parse.cancel()
            self._parse = None


class ConcurrentPrefill(RunningLeg):
    """A prefill leg beside the decode leg of its request, whose answer is held until prefill has ended well."""

    __slots__ = ("held_decode_response", "pair")

    def __init__(
        self,
        pair: LegPair,
        resources: ExecutionResources,
        context: PlanContext,
        on_answer: Callable[["ConcurrentPrefill", ResponseHead, EngineResponse, UpstreamError | None], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        super().__init__(pair.prefill, resources, context, partial(on_answer, self), on_fault, None)
        self.pair = pair
        self.held_decode_response: tuple[ResponseHead, EngineResponse] | None = None
        """Decode's whole answer, where it is here already."""

    def expire(self) -> None:
        """Ends a prefill leg that takes too long; `Deadlines` calls it."""
        self.abort(UpstreamTimeout(LEG_TIMEOUT_REASON))
