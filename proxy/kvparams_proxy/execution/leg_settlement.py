"""Settles ended legs: their response goes to the client or the plan, their failure to the fleet and the plan.

`LegRunner` says when a leg has ended; what the fleet, the prefix cache model and the plan hear of it is said here.
"""

from collections.abc import Mapping
from typing import Final, cast

from kvparams.codec import kv_transfer_members
from kvparams.errors import JSONTextError
from kvparams.instances import Instance, Role
from kvparams.routing.plan import Leg, LegFailed, LegResult
from kvparams_proxy.execution.client_response import ClientResponse
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.execution.leg_outcomes import LegEnd, classify_leg_outcome, invalid_response_failure
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.prefix_cache_report import report_prefill_response, report_stream_usage
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.execution.response_document import embedded_error
from kvparams_proxy.execution.running_leg import RunningLeg
from kvparams_proxy.execution.stream_continuation import StreamRecorder
from kvparams_proxy.telemetry.metrics import failure_kind
from kvparams_proxy.upstream.types import ResponseHead, UpstreamError, UpstreamErrorResponse

__all__ = ["LegSettlement"]

_ANSWERED: Final = LegResult({})
_NO_PROMPT: Final = (Role.DECODE, Role.ENCODE)
"""Roles whose legs that end say nothing of the prompts that their engines have cached."""


class LegSettlement:
    """Settles the legs of one request: the half of `LegRunner` that knows what an answer is worth."""

    __slots__ = ("_context", "_recorder", "_resources", "_response")

    def __init__(
        self,
        resources: ExecutionResources,
        context: PlanContext,
        response: ClientResponse,
        recorder: StreamRecorder | None,
    ) -> None:
        """Creates the settlement of one request's legs.

        Args:
            resources: what executions share.
            context: what the request holds.
            response: the response to its client.
            recorder: remembers a stream that may have to be continued.
        """
        self._resources = resources
        self._context = context
        self._response = response
        self._recorder = recorder

    def begin_answer(self, leg: Leg | None) -> None:
        """Prepares for the first byte that the client is about to get from this engine or its successor."""
        resources, life = self._resources, self._context.life
        again = life.answering
        life.enter("first_byte")
        if leg is not None:  # a stream may be long, and others wait for an engine that is on trial
            resources.fleet.record_first_byte(leg.instance, self._context.kv_producer)
            if leg.instance.role is Role.AGGREGATED and not again:
                resources.fleet.record_prompt_computed(leg.instance, self._context.account.facts)
        if again:
            resources.metrics.continuations += 1
            return
        resources.metrics.first_byte.observe(life.since_s - life.started_s)

    def report_response(self, leg: Leg, answer: EngineResponse) -> None:
        """Tells the prefix cache model of an answer that has come whole, before the load of its instance is given back.

        A leg that goes on with a broken stream has another prompt than the one that was looked up."""
        prefixes = self._resources.prefix_cache
        if prefixes is not None and leg.instance.role not in _NO_PROMPT and leg.resume_from is None:
            report_prefill_response(prefixes, self._context.account, answer)

    def report_stream(self, leg: Leg | None) -> None:
        """Tells the prefix cache model of a stream, whose last event counts tokens if the client asked for that."""
        prefixes = self._resources.prefix_cache
        if prefixes is None or leg is None or not self._context.life.answering:
            return
        if leg.instance.role is Role.AGGREGATED and leg.resume_from is None:
            report_stream_usage(prefixes, self._context.account, self._response.usage)

    def settle(
        self,
        leg: Leg,
        head: ResponseHead,
        answer: EngineResponse,
        error: UpstreamError | None,
        gone: bool,
        beside: RunningLeg | None,
        has_decode: bool,
    ) -> LegResult | LegFailed | None:
        """Settles a leg whose answer is whole, if there is one.

        Args:
            leg: which one.
            head: of its answer.
            answer: the answer, empty where none came.
            error: why its exchange did not come to its end, if so.
            gone: whether the client has left.
            beside: the prefill leg that was sent at the same time.
            has_decode: whether the leg is a prefill whose decode leg was sent with it.

        Returns:
            What the plan is told; None where the client has left and the plan is told nothing.
        """
        if error is not None or head.status != 200:
            return self._settle_failure(leg, head, answer.raw, error, gone, beside)
        try:
            if leg.instance.role is Role.ENCODE:
                result = _encode_result(answer)
            elif not leg.answers_client:
                result = self._prefill_result(leg, answer, has_decode)
            elif gone:
                return None
            else:
                pieces = self._response.correct_response(answer)
                self.begin_answer(None)  # the leg has ended: `record_success` below says all of it
                self._response.send_document(pieces)
                result = _ANSWERED
        except UpstreamError as refused:
            return self._settle_failure(leg, head, b"", refused, gone, beside)
        except JSONTextError:
            if gone:  # the engine has seen it, and ended in the middle of what it had to say
                return None
            self._resources.fleet.record_failure(leg.instance, connected=True, why="the answer of a leg is not JSON")
            self._resources.metrics.leg_failed(leg.instance, "garbage")
            return invalid_response_failure(leg.instance)
        self._resources.fleet.record_success(leg.instance, self._context.kv_producer if leg.answers_client else None)
        return result

    def settle_stream(
        self,
        leg: Leg,
        head: ResponseHead,
        raw: bytes,
        error: UpstreamError | None,
        gone: bool,
        beside: RunningLeg | None,
    ) -> LegResult | LegFailed | None:
        """Settles a leg whose client has a part of the answer; otherwise as `settle`."""
        if error is not None or head.status != 200:
            return self._settle_failure(leg, head, raw, error, gone, beside)
        if gone:
            return None
        self._resources.fleet.record_success(leg.instance)
        return _ANSWERED

    def _prefill_result(self, leg: Leg, answer: EngineResponse, has_decode: bool) -> LegResult:
        """Returns what prefill says of its KV.

        Raises:
            JSONTextError: the answer is not a JSON object.
            UpstreamErrorResponse: it is an error.
        """
        document = _document(answer)
        if leg.resume_from is None:  # what the client is told is what its own prompt cost
            self._response.learn_prefill_usage(document)
            self._context.account.record_prefill(document)
        if not has_decode:
            self._context.life.enter("result", leg.instance.id)
        return LegResult(kv_transfer_members(document.get("kv_transfer_params")))

    def _settle_failure(
        self,
        leg: Leg,
        head: ResponseHead,
        raw: bytes,
        error: UpstreamError | None,
        gone: bool,
        beside: RunningLeg | None,
    ) -> LegResult | LegFailed | None:
        context, resources, recorder = self._context, self._resources, self._recorder
        pool = resources.pools.get(leg.instance.id)
        own_key = not context.client_authorization or pool is None or pool.has_own_key
        end = LegEnd(leg.instance, head, raw, error, own_key, pool is not None and pool.shared, leg.limit_s)
        if leg.answers_client and end.kv_untouched:
            context.kv_claimed = False
        if gone:
            return None
        begun = context.life.answering
        sent = recorder.progress() if recorder is not None and begun else None
        model = context.account.facts.model
        is_missing = model is not None and end.says_model_missing(model)
        others_serve = context.record_missing_model(leg.instance) if is_missing else False
        outcome = classify_leg_outcome(
            end,
            resources.engine_addresses,
            context.inbound.body,
            begun=begun,
            sent=sent,
            others_serve=others_serve,
        )
        if leg.answers_client and context.kv_claimed:  # nobody else may fetch it, whether the client stays or not
            context.abandon_kv(gone=False)
        resources.metrics.leg_failed(leg.instance, failure_kind(head, error))
        if outcome.blames_instance:
            resources.fleet.record_failure(
                leg.instance,
                connected=error is None or error.connected,
                busy=outcome.is_busy,
                why=outcome.evidence,
                beside=None if outcome.is_busy else self._kv_source(leg, head, beside),
            )
        ending = recorder.missing_ending() if recorder is not None and begun else None
        if ending is None:
            return outcome.failure
        self._response.send_ending(self._response.correct_events(ending))  # it has failed behind its last token
        return _ANSWERED

    def _kv_source(self, leg: Leg, head: ResponseHead, beside: RunningLeg | None) -> Instance | None:
        """Returns the prefill instance whose KV a leg was to fetch that failed before its first byte.

        The KV may be the reason for the failure.
        """
        begun = self._context.life.answering and (leg.resume_from is None or head.status == 200)
        if not leg.answers_client or begun:
            return None
        return self._context.kv_producer if beside is None else beside.leg.instance


def _document(answer: EngineResponse) -> Mapping[str, object]:
    """Returns the document of an answer.

    Raises:
        JSONTextError: the answer is not a JSON object.
        UpstreamErrorResponse: it is an error.
    """
    document = answer.document
    if (reported := embedded_error(document)) is not None:
        raise UpstreamErrorResponse(reported)
    return document


def _encode_result(answer: EngineResponse) -> LegResult:
    """Returns what an encode engine says of its encodings. Raises what `_document` does."""
    said = _document(answer).get("ec_transfer_params")
    return LegResult({}, cast("dict[str, object]", said) if isinstance(said, dict) else {})
