"""Serves `POST /admin/explain-route`, which explains where a request would go now. The body is a client's request.

It works with every policy. It sends no leg, counts no load and uses up no turn of the policy. It asks an engine's
`/tokenize` only where prompts get their ids there.
"""

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING

from starlette.requests import Request

from kvparams.instances import Role
from kvparams.routing.managers.interface import DisaggregatedRequestManager
from kvparams.routing.plan import AcquireInstance
from kvparams.routing.request_lifecycle import RequestLifecycle
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.plan_context import PlanContext
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.requests.asgi_body import read_asgi_body
from kvparams_proxy.requests.authentication import AuthenticatedClient, session_from_header, tenant_cache_salt
from kvparams_proxy.requests.body import RequestBody
from kvparams_proxy.requests.endpoints import ENDPOINTS, APIEndpoint
from kvparams_proxy.requests.intake import ParsedRequest, parse_request_in_steps
from kvparams_proxy.server.admin_answers import CandidateAnswer, RouteAnswer
from kvparams_proxy.server.request_handler import RequestHandler
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.tokenization.service import RoutingTokens, TokenIdSource

if TYPE_CHECKING:
    from kvparams_proxy.fleet.routing_decision import RouteExplanation

__all__ = ["explain_route"]


async def explain_route(request: Request) -> RouteAnswer:
    """Explains where the request in the body would go.

    Raises:
        ProxyError: as the proxy would answer such a request.
    """
    resources: ExecutionResources = request.state.resources
    path = request.query_params.get("path", "/v1/completions")
    endpoint = next((each for each in ENDPOINTS if each.path == path and each.role is None), None)
    if endpoint is None:
        known = ", ".join(each.path for each in ENDPOINTS if each.role is None)
        raise ProxyError(400, "invalid_request_error", f"path must be one of {known}", param="path")
    handler: RequestHandler = request.state.generate[path]
    inbound = await _inbound(resources, endpoint, request)
    handler.resolve_alias(inbound)
    handler.check_model(inbound.facts.model)
    prompt = await _prompt(resources, endpoint, inbound)
    facts = inbound.facts
    if prompt is not None:
        facts = facts._replace(routing_ids=prompt.ids, prompt_tokens=prompt.tokens or facts.prompt_tokens)
        inbound.facts = facts
    manager = handler.select_manager(inbound)
    role, explained = _explain(resources, endpoint, inbound, manager)
    policy = resources.fleet.model_settings.find(facts.model).policy or resources.settings.policy
    modes: ActiveModes = request.state.modes
    by_client = facts.token_ids is not None or facts.routing_ids is not None
    source = prompt.source if prompt is not None else TokenIdSource.CLIENT if by_client else None
    by_cache, stats = explained.by_cache, None
    if resources.prefix_cache is not None and by_cache is not None:
        stats = resources.prefix_cache.prediction_stats
    return RouteAnswer(
        policy=policy,
        mode=modes.name_of(manager, facts.model),
        role=role,
        tokens=facts.prompt_tokens if by_cache is None else by_cache.decision.prompt_tokens,
        ids=None if source is None else source.value,
        estimated=source in (None, TokenIdSource.BYTES),
        chosen=explained.chosen.id,
        decision=_describe(explained, policy),
        candidates=_candidates(resources.fleet, explained),
        waits=explained.waits,
        notes=_notes(resources, role),
        accuracy=None if stats is None else stats.accuracy,
        alarm=stats is not None and stats.alarmed,
    )


def _explain(
    resources: ExecutionResources, endpoint: APIEndpoint, inbound: ParsedRequest, manager: DisaggregatedRequestManager
) -> "tuple[Role, RouteExplanation]":
    """Explains the choice that costs most: of the prefill instance where the plan begins with a split request.

    Raises:
        ProxyError: as the proxy would answer the request.
    """
    facts = inbound.facts
    resources.fleet.check_candidates(manager.roles, facts)
    life = RequestLifecycle(perf_counter)
    record = RequestRecord(facts, endpoint.path, inbound.stream, life, (), None)
    plan = manager.legs(facts, PlanContext(resources, endpoint, inbound, life, record, b"", None))
    step = next(plan)
    plan.close()
    if not isinstance(step, AcquireInstance):
        raise ProxyError(400, "invalid_request_error", "the manager of this request chooses its instances itself")
    explained = resources.fleet.explain(step.role, facts, step.paired_with, step.prefer)
    if step.prefer and explained.chosen.id not in step.prefer:  # the plan splits the request then
        return Role.PREFILL, resources.fleet.explain(Role.PREFILL, facts, Role.DECODE)
    if step.paired_with is not Role.PREFILL:
        return step.role, explained
    return Role.PREFILL, resources.fleet.explain(Role.PREFILL, facts, explained.chosen)


async def _inbound(resources: ExecutionResources, endpoint: APIEndpoint, request: Request) -> ParsedRequest:
    limits = resources.settings.body
    try:
        body = await read_asgi_body(request.receive, RequestBody(limits.max_bytes))
    except ConnectionError:
        raise ProxyError(400, "invalid_request_error", "the body is incomplete") from None
    tenant = request.query_params.get("tenant")
    client = None if tenant is None else AuthenticatedClient("", tenant, 0, tenant_cache_salt(tenant, None))
    name = resources.new_id()
    kept = resources.token_service is not None
    session = session_from_header(request.headers.get("x-session-id", "").encode("latin-1"))
    steps = parse_request_in_steps(endpoint.kind, body, name, name, limits, client, session, keep_document=kept)
    return await resources.step_runner.complete(steps)


async def _prompt(resources: ExecutionResources, endpoint: APIEndpoint, inbound: ParsedRequest) -> RoutingTokens | None:
    if resources.token_service is None:
        return None
    found: asyncio.Future[RoutingTokens | None] = asyncio.get_running_loop().create_future()
    resources.token_service.find(
        endpoint.kind, inbound, lambda prompt: None if found.done() else found.set_result(prompt)
    )
    return await found


def _notes(resources: ExecutionResources, role: Role) -> list[str]:
    """Returns what the explanation leaves out."""
    notes: list[str] = []
    if role is Role.PREFILL:
        notes.append("the decode engine is chosen when prefill has answered, by the load of that moment")
    if resources.decode_picker is not None:
        notes.append("the external picker (--decode-picker) is not asked; it chooses the decode engine")
    if resources.settings.prefill_partner != "off":
        notes.append("the prefill engine that a picker names in a request's header is not known here")
    return notes


def _describe(explained: "RouteExplanation", policy: str) -> str:
    """Returns the reasons as text."""
    if explained.by_cache is not None:
        return explained.by_cache.decision.summary()
    chosen = next(member for member in explained.members if member.instance is explained.chosen)
    return (
        f"{explained.chosen.id}: chosen by {policy} among {len(explained.members)} candidates; "
        f"it has {chosen.in_flight} requests in flight"
    )


def _candidates(fleet: Fleet, explained: "RouteExplanation") -> list[CandidateAnswer]:
    loads = [
        CandidateAnswer(
            id=member.instance.id,
            in_flight=member.in_flight,
            tokens_in_flight=member.tokens,
            max_requests=fleet.limits_of(member).requests,
            excluded=explained.excluded.get(member.instance.id),
        )
        for member in explained.members
    ]
    found = explained.by_cache
    if found is None:
        return loads
    return [
        load.model_copy(
            update={
                "cached": one.cached_tokens,
                "fetched": one.fetched_tokens,
                "source": None if source is None else source.id,
                "computed": one.computed_tokens,
                "wait_s": round(one.wait_s, 6),
                "fetch_s": round(one.fetch_s, 6),
                "load_s": round(one.load_s, 6),
                "compute_s": round(one.compute_s, 6),
                "first_token_s": round(one.ttft_s, 6),
                "legs_seen": member.backlog.cost_model.sample_count,
            }
        )
        for load, member, one, source in zip(loads, explained.members, found.expected, found.sources, strict=True)
    ]
