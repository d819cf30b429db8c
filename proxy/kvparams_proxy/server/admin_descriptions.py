"""Describes the fleet and its instances for operators, without secrets."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from kvparams_proxy.config.mode_parsing import mode_document
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.server.admin_answers import (
    AdminRouteAnswer,
    FleetAnswer,
    InstanceAnswer,
    ModeAnswer,
    ModelAnswer,
    ModelsAnswer,
    RequestAnswer,
    RequestStateAnswer,
    RoleAnswer,
    SourceAnswer,
)
from kvparams_proxy.server.admin_operations import ADMIN_OPERATIONS
from kvparams_proxy.telemetry.recent_requests import EndedRequest

__all__ = ["describe_fleet", "describe_instance", "describe_models", "describe_request"]

_WORD: Final = 200
"""Characters of what a client chooses, at most."""


def describe_fleet(registry: Registry) -> FleetAnswer:
    """Returns the sources and roles of the fleet, and the routes of the admin API."""
    sources = [
        SourceAnswer(
            name=name,
            instances=sum(owned.source == name for owned in registry.owned.values()),
            applied=state.applied_count,
            refused=state.refused_count,
            problems=list(state.problems),
            conflicts=list(state.conflicts),
        )
        for name, state in registry.sources.items()
    ]
    roles = {role: RoleAnswer(**health._asdict()) for role, health in registry.fleet.health().items()}
    routes = [AdminRouteAnswer(method=each.method, path=each.path, summary=each.summary) for each in ADMIN_OPERATIONS]
    return FleetAnswer(sources=sources, roles=roles, routes=routes)


def describe_instance(registry: Registry, member: Member, leases: Mapping[str, int]) -> InstanceAnswer:
    """Returns the description of an instance. `leases` counts them by the id of the instance."""
    instance = member.instance
    owned = registry.owned[instance.id]
    return InstanceAnswer(
        id=instance.id,
        url=instance.url,
        rank=None if instance.rank is None else instance.rank.number,
        role=instance.role,
        connector=instance.dialect,
        bootstrap=instance.bootstrap,
        addresses=list(instance.addresses),
        kv_events=instance.kv_events,
        kv_events_replay=instance.kv_events_replay,
        store=instance.store,
        group=instance.group,
        compatibility=instance.compatibility,
        labels=dict(instance.labels),
        source=owned.source,
        incarnation=instance.incarnation,
        state=member.state,
        ready=member.ready,
        draining=member.draining,
        breaker=member.breaker.state,
        in_flight=member.in_flight,
        tokens=member.tokens,
        max_requests=registry.fleet.limits_of(member).requests,
        leases=leases.get(instance.id, 0),
        models=None if member.models is None else sorted(member.models),
        loaded_adapters=None if member.adapter_slots is None else member.adapter_slots.loaded,
        has_key=owned.spec.credentials.key is not None,
    )


def describe_models(resources: ExecutionResources, modes: ActiveModes) -> ModelsAnswer:
    """Returns what holds for each model that engines serve or that has an entry."""
    settings, fleet = resources.settings, resources.fleet
    entries = fleet.model_settings
    answers: list[ModelAnswer] = []
    for model in sorted({*fleet.models(), *entries.entries}):
        found = entries.find(model).with_defaults(settings.for_all_models)
        answers.append(
            ModelAnswer(
                id=model,
                entry=entries.entry_name(model),
                aliases=sorted(alias for alias, name in settings.model_aliases.items() if name == model),
                policy=found.policy or settings.policy,
                modes=[ModeAnswer.model_validate(mode_document(mode)) for mode in modes.active_for(model)],
                max_requests={role: limits.requests for role, limits in found.limits.items()},
                instances=[each.instance.id for each in fleet.members if model in (each.models or ())],
            )
        )
    return ModelsAnswer(data=answers)


def describe_request(request: EndedRequest) -> RequestAnswer:
    """Returns the description of a request that has ended."""
    spans = request.spans
    began_s, ended_s = spans[0][2], spans[-1][2]
    states = [
        RequestStateAnswer(
            state=state,
            instance=who or None,
            start_ms=round(1000 * (at_s - began_s), 3),
            duration_ms=round(1000 * (until_s - at_s), 3),
        )
        for (state, who, at_s), (_, _, until_s) in pairwise((*spans, spans[-1]))
    ]
    return RequestAnswer(
        id=request.request_id,
        transfer_ids=list(request.transfer_ids),
        tenant=request.tenant[:_WORD],
        model=request.model and request.model[:_WORD],
        endpoint=request.endpoint,
        stream=bool(request.stream),
        outcome=request.outcome,
        status=request.status,
        error=request.code,
        started=round(request.ended_s - (ended_s - began_s), 6),
        total_ms=round(1000 * (ended_s - began_s), 3),
        states=states,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.completion_tokens,
        retries=request.retries,
        answer_bytes=request.answer_bytes,
        trace_id=request.trace_id,
    )
