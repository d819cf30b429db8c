"""Per-request execution state: the facts that its plan asks for, and the KV that the request must release.

KV that is held for the request is fetched, released or counted as orphaned.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic_core import to_json

from kvparams.dialects.interface import BootstrapInfo, Dialect
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.handoff_verifier import HandoffRefused
from kvparams.routing.plan import KVLease, Leg
from kvparams.routing.request_lifecycle import RequestLifecycle
from kvparams_proxy.execution.answer_forms import answer_form
from kvparams_proxy.execution.kv_releaser import AbandonedKV
from kvparams_proxy.execution.leg_requests import build_leg_request
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.execution.stream_continuation import StreamRecorder
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.requests.one_token_changes import one_token_changes
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import ResponseSink

__all__ = ["PlanContext"]

_MOST_MISSING: Final = 16
"""Engines that are asked for an adapter that they have lost, in one request."""
_TOOLS: Final = ("tools", "tool_choice")
"""Members of a chat that change its text alone. vLLM refuses them on an engine without a parser of tool calls."""


class PlanContext:
    """The `kvparams.routing.plan.ExecutionContext` of one request. Its methods never wait."""

    __slots__ = (
        "_attempts",
        "_is_owed",
        "_missing_legs",
        "_resources",
        "_weighs",
        "account",
        "answer_form",
        "client_authorization",
        "endpoint",
        "ends_at_s",
        "inbound",
        "kv_claimed",
        "kv_producer",
        "leg_headers",
        "life",
        "without_model",
    )

    def __init__(
        self,
        resources: ExecutionResources,
        endpoint: APIEndpoint,
        inbound: ParsedRequest,
        life: RequestLifecycle,
        account: RequestRecord,
        upstream_headers: bytes,
        authorization: bytes | None,
    ) -> None:
        """Creates the state of a request that has sent no leg.

        Args:
            resources: what executions share.
            endpoint: the request's.
            inbound: the request.
            life: where its loads and its lease are kept.
            account: where its retries and transfers are told.
            upstream_headers: see `Execution`.
            authorization: see `Execution`.
        """
        self._resources = resources
        self.endpoint = endpoint
        self.answer_form = answer_form(endpoint.kind)
        self.inbound = inbound
        self.life = life
        self.account = account
        self._attempts = 0
        self._is_owed = False
        """Whether the next attempt does not count as a retry."""
        self._missing_legs = 0
        """Legs whose engines have said that they do not know the adapter."""
        self.without_model: tuple[str, ...] = ()
        """The ids of those engines, with all their ranks: they are asked again only where there is nobody else."""
        self._weighs = False
        """Whether its plan looks at what is cached."""
        self.leg_headers = b"x-request-id: " + inbound.facts.request_id.encode() + b"\r\n" + upstream_headers
        """Headers of every leg."""
        self.client_authorization = b"" if authorization is None else b"authorization: %b\r\n" % authorization
        """One more, for engines that have no key of their own."""
        self.ends_at_s: float | None = None
        """When the whole request has to have ended."""
        self.kv_claimed = False
        """Whether an engine may have been told to fetch the KV that is held."""
        self.kv_producer: Instance | None = None
        """The prefill instance whose KV the leg that was sent last is to fetch."""

    # the plan's questions

    def dialect(self, instance: Instance) -> Dialect:
        """See `ExecutionContext.dialect`."""
        return self._resources.dialects[instance.dialect]

    def bootstrap_info(self, instance: Instance) -> BootstrapInfo | None:
        """See `ExecutionContext.bootstrap_info`."""
        return self._resources.fleet.bootstrap_info(instance)

    def verify_handoff(self, instance: Instance, said: Mapping[str, object]) -> None:
        """See `ExecutionContext.verify_handoff`."""
        resources = self._resources
        pool = resources.pools.get(instance.id)
        try:
            resources.handoff_verifier.verify(
                instance, said, () if pool is None else pool.peer_addresses, is_pinned=self.endpoint.pins_rank
            )
        except HandoffRefused as refused:
            resources.metrics.handoffs_refused[refused.reason] += 1
            raise

    def peer_source(self, instance: Instance) -> str | None:
        """See `ExecutionContext.peer_source`."""
        prefixes = self._resources.prefix_cache
        found = None if prefixes is None else prefixes.peer_source(self.inbound.facts)
        if found is None:
            return None
        other, address = found
        try:
            self.verify_handoff(other, {"address": address})
        except HandoffRefused:
            return None
        return address

    def one_token_changes(self) -> Mapping[str, bytes | None]:
        """See `ExecutionContext.one_token_changes`."""
        inbound = self.inbound
        return one_token_changes(self.endpoint.kind, inbound.body, inbound.member_spans, inbound.sampling_spans)

    def time_left(self) -> float | None:
        """See `ExecutionContext.time_left`."""
        return None if self.ends_at_s is None else self.ends_at_s - self.now()

    def can_split(self, request: RequestFacts) -> bool:
        """See `ExecutionContext.can_split`."""
        resources = self._resources
        dialects = {each.dialect for each in resources.fleet.candidates(Role.PREFILL, request)}
        return bool(dialects) and all(resources.dialects[each].can_split(request) for each in dialects)

    def encode_changes(self, instance: Instance) -> Mapping[str, bytes | None]:
        """See `ExecutionContext.encode_changes`."""
        changes = {**self.one_token_changes(), **dict.fromkeys(_TOOLS)}
        model, fleet = self.inbound.facts.model, self._resources.fleet
        if model is not None and not fleet.member(instance).serves(model):
            base = fleet.base_model_of(model)
            if base is not None:
                changes["model"] = to_json(base)
        return changes

    def record_encoding(self, problem: str | None) -> None:
        """See `ExecutionContext.record_encoding`."""
        self.account.is_encoded = problem is None
        if problem is not None:
            self._resources.encoding_log.write(self.inbound.facts.request_id, problem)

    def now(self) -> float:
        """See `ExecutionContext.now`."""
        return self._resources.loop.time()

    def has_candidates(self, role: Role) -> bool:
        """See `ExecutionContext.has_candidates`."""
        return self._resources.fleet.has_candidates(role, self.inbound.facts.model)

    def should_fail_over(self, instance: Instance, failed: Sequence[str]) -> bool:
        """See `ExecutionContext.should_fail_over`."""
        return self._resources.fleet.should_fail_over(instance, self.inbound.facts, (*failed, *self.without_model))

    def cached_tokens(self, role: Role) -> Mapping[str, int]:
        """See `ExecutionContext.cached_tokens`."""
        self._weighs = True
        return self._resources.fleet.cached_tokens(role, self.inbound.facts)

    def record_answer(self, route: Sequence[Instance]) -> None:
        """Records that all legs have succeeded; the last of the route has answered."""
        if self._weighs and route[-1].role is Role.DECODE:
            account = self.account
            said = (account.prompt_tokens, account.cached_tokens) if len(route) == 1 else (None, None)
            self._resources.fleet.record_decode(route[-1], self.inbound.facts, *said)

    def may_retry(self) -> bool:
        """See `ExecutionContext.may_retry`. Settings limit retries per request and of all requests together.

        Another attempt after `record_missing_model` is none of these: nothing has been computed.
        """
        metrics = self._resources.metrics
        if self._is_owed:
            self._is_owed = False
            metrics.retries += 1
            self.account.retries += 1
            return True
        if self._attempts >= self._resources.settings.retries:
            metrics.retries_denied += 1
            return False
        self._attempts += 1
        if not self._resources.retry_budget.try_acquire():
            metrics.retries_denied += 1
            return False
        metrics.retries += 1
        self.account.retries += 1
        return True

    def record_missing_model(self, instance: Instance) -> bool:
        """Records that an engine seems not to know the request's LoRA adapter.

        Returns whether another engine is asked. Each is asked once, and no more than `_MOST_MISSING`. One that is asked
        again is the only one that this request may have: then its answer counts.
        """
        fleet, model = self._resources.fleet, self.inbound.facts.model
        is_asked_again = instance.id in self.without_model
        lacking = fleet.check_adapter(instance, model)
        self.without_model += lacking
        if is_asked_again or not lacking:
            return False
        may_ask = fleet.has_candidates(instance.role, model, self.without_model)
        if instance.role is not Role.ENCODE:  # its step counts its legs itself
            self._missing_legs += 1
            may_ask = may_ask and self._missing_legs < _MOST_MISSING
            self._is_owed = self._is_owed or may_ask
        return may_ask

    def next_transfer(self) -> str:
        """See `ExecutionContext.next_transfer`."""
        return self.account.add_transfer(self._resources.new_id())

    def hold_lease(self, lease: KVLease) -> None:
        """See `ExecutionContext.hold_lease`."""
        held = self.life.lease
        if held is not None and held.transfer_id != lease.transfer_id:
            self.abandon_kv(gone=False)
        self.life.lease = lease
        self.kv_claimed = False

    def release_instance(self, instance: Instance) -> None:
        """See `ExecutionContext.release_instance`."""
        self.life.loads.remove(instance)
        self._resources.fleet.release(instance, self.inbound.facts)

    # the executor's

    def send_leg(self, leg: Leg, sink: ResponseSink, recorder: StreamRecorder | None, once: bool) -> ExchangeHandle:
        """Sends a leg to its instance.

        Args:
            leg: which one.
            sink: hears the answer.
            recorder: remembers the stream, where it may have to be continued.
            once: whether the leg must not be sent again, even where the engine has most likely not seen it.
        """
        self._is_owed = False  # what was owed was for a leg before this one
        resources = self._resources
        instance, named = leg.instance, None
        if instance.rank is not None and instance.role is not Role.ENCODE:  # theirs is no dialect that routes
            named = resources.dialects[instance.dialect].rank_key
        path, body = build_leg_request(self.endpoint, self.inbound, leg, recorder, resources.response_ids, named)
        member = resources.fleet.member(leg.instance)  # what has its name may be another instance
        pool = resources.pools.for_member(member)
        headers = self.leg_headers if pool.has_own_key else self.leg_headers + self.client_authorization
        if self.account.trace_context is not None:
            headers += self.account.trace_context.leg_traceparent_header()
        return pool.exchange(pool.request(path, headers, body), sink, once=once)

    def has_reusable_kv(self, leg: Leg) -> bool:
        """Returns whether the KV of the leg's instance may be fetched more than once."""
        return self._resources.dialects[leg.instance.dialect].has_reusable_kv

    def claim_kv(self) -> bool:
        """Claims KV for a leg that answers the client. Returns whether an engine may fetch the KV only once."""
        lease = self.life.lease
        self.kv_producer = None if lease is None else lease.producer
        if lease is None or self._resources.dialects[lease.producer.dialect].has_reusable_kv:
            return False
        self.kv_claimed = True
        return True

    def abandon_kv(self, *, gone: bool) -> None:
        """Gives up KV that is held for this request and will not be fetched. `gone`: because its client has left.

        Where a leg was to fetch it, the engine that was sent this leg has done so, or frees it as it is aborted. Nobody
        else may: the blocks may be another request's by then.
        """
        lease, self.life.lease = self.life.lease, None
        if lease is None or lease.release_request is None:
            return
        releases = self._resources.kv_releaser
        if self.kv_claimed:
            releases.orphaned += not gone
        elif self.now() >= lease.until_s:
            releases.orphaned += 1
        else:
            trace = self.account.trace_context
            headers = self.leg_headers if trace is None else self.leg_headers + trace.traceparent_header()
            path = self.endpoint.path.encode()
            mode = self._resources.dialects[lease.producer.dialect].mode
            cut = self.one_token_changes()
            releases.release(
                AbandonedKV(
                    lease, lease.release_request, mode, path, self.inbound, cut, headers, self.client_authorization
                )
            )
