"""`POST /admin/explain-route`: where a request would go now, and why. The body is what a client would send.

The one rule: no leg is sent and no load is counted; only an engine's `/tokenize` is asked, where prompts get their ids
there.
"""

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvparams.scheduling import Role
from kvparams_proxy.clients.auth import Client, bind_salt
from kvparams_proxy.clients.body import Body
from kvparams_proxy.clients.endpoints import ENDPOINTS, Endpoint
from kvparams_proxy.clients.gathering import whole_body
from kvparams_proxy.clients.intake import Inbound, read_steps
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.resources import Resources
from kvparams_proxy.tokens.service import Prompt

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefixes import Explained

__all__ = ["explain_route"]


async def explain_route(request: Request) -> Response:
    """The answer.

    Raises:
        ProxyError: as the proxy would answer such a request; 400 where no engine is chosen by what it has cached.
    """
    resources: Resources = request.state.resources
    path = request.query_params.get("path", "/v1/completions")
    endpoint = next((each for each in ENDPOINTS if each.path == path and each.role is None), None)
    if endpoint is None:
        known = ", ".join(each.path for each in ENDPOINTS if each.role is None)
        raise ProxyError(400, "invalid_request_error", f"path must be one of {known}", param="path")
    inbound = await _inbound(resources, endpoint, request)
    prompt = await _prompt(resources, endpoint, inbound)
    facts = inbound.facts
    if prompt is not None:
        facts = facts._replace(routing_ids=prompt.ids, tokens=prompt.tokens or facts.tokens)
    role = Role.PREFILL if resources.fleet.there(Role.PREFILL, facts.model) else Role.AGGREGATED
    explained = resources.fleet.explain(role, facts)
    if explained is None or resources.prefixes is None:
        message = f"the policy {resources.settings.policy} does not look at what engines have cached"
        raise ProxyError(400, "invalid_request_error", message, code="policy")
    by_client = facts.token_ids is not None or facts.routing_ids is not None
    found = prompt.source if prompt is not None else "client" if by_client else None
    document = _document(explained, found)
    document["accuracy"] = resources.prefixes.predictions.accuracy
    document["alarm"] = resources.prefixes.predictions.alarmed
    return JSONResponse(document)


async def _inbound(resources: Resources, endpoint: Endpoint, request: Request) -> Inbound:
    limits = resources.settings.body
    try:
        body = await whole_body(request.receive, Body(limits.max_bytes))
    except ConnectionError:
        raise ProxyError(400, "invalid_request_error", "the body has broken off") from None
    tenant = request.query_params.get("tenant")
    client = None if tenant is None else Client("", tenant, 0, bind_salt(tenant, None))
    name = resources.new_id()
    kept = resources.tokens is not None
    steps = read_steps(endpoint.kind, body, name, name, limits, client, keep_document=kept)
    return await resources.steps.complete(steps)


async def _prompt(resources: Resources, endpoint: Endpoint, inbound: Inbound) -> Prompt | None:
    if resources.tokens is None:
        return None
    found: asyncio.Future[Prompt | None] = asyncio.get_running_loop().create_future()
    resources.tokens.find(endpoint.kind, inbound, lambda prompt: None if found.done() else found.set_result(prompt))
    return await found


def _document(explained: "Explained", source: str | None) -> dict[str, object]:
    decision = explained.decision
    return {
        "object": "route",
        "tokens": decision.tokens,
        "ids": source,
        "chosen": decision.chosen.id,
        "decision": decision.words(),
        "candidates": [
            {
                "id": member.instance.id,
                "cached": one.cached,
                "fetched": one.fetched,
                "source": None if source is None else source.id,
                "computed": one.computed,
                "wait_s": round(one.wait_s, 6),
                "fetch_s": round(one.fetch_s, 6),
                "compute_s": round(one.work_s, 6),
                "first_token_s": round(one.ttft_s, 6),
                "in_flight": member.in_flight,
                "legs_seen": member.pace.speed.seen,
            }
            for member, one, source in zip(explained.members, explained.expected, explained.sources, strict=True)
        ],
    }
