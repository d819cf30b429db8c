"""Reads the facts of this worker for a snapshot: from the fleet, the metrics, and the records of requests."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import chain, islice
from time import perf_counter, time
from typing import TYPE_CHECKING, Final

from kvparams.instances import Instance, Role
from kvparams.routing.engine_metrics import MovedBytes
from kvparams_proxy.config.mode_parsing import mode_document
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.telemetry.metric_snapshots import spell_series
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.prefix_cache_gauges import PrefixCacheGauges
from kvparams_proxy.telemetry.proxy_gauges import leases_by_instance
from kvparams_proxy.telemetry.recent_requests import EndedRequest, RecentRequests
from kvparams_proxy.ui.hot_prefixes import PromptBlocks, find_hot_prefixes
from kvparams_proxy.ui.public_names import public_engine_name, store_name
from kvparams_proxy.ui.request_rows import describe_ended, describe_running
from kvparams_proxy.ui.worker_part import MOST_REQUESTS, EngineFacts, RequestRow, StoreFacts, WorkerPart, is_shown

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["WorkerSources", "collect_part"]

_LOOKED_AT: Final = 4096
"""Running requests among which the oldest are looked for."""
_SAYS_NOTHING: Final = MovedBytes(None, None, None)
_SPARSE: Final = ("kvparams_proxy_leg_failures_total", "kvparams_proxy_handoffs_refused_total")
"""Counters whose series are left out until they have counted something."""


@dataclass(frozen=True, slots=True)
class WorkerSources:
    """The objects that a worker's part is read from."""

    resources: ExecutionResources
    modes: ActiveModes
    requests: RecentRequests
    sync: FleetSync | None
    worker: int = 0
    """The number of this worker; 0 where there is one process."""
    names: dict[Instance, str] = field(default_factory=dict[Instance, str])
    """The names of instances for viewers, as they were found for the last part."""


def collect_part(sources: WorkerSources) -> WorkerPart:
    """Collects the facts of this worker. It takes a few milliseconds where there are 500 engines."""
    resources = sources.resources
    resources.record_dispatcher.flush()
    fleet, metrics, requests = resources.fleet, resources.metrics, sources.requests
    members = list(fleet.members)
    recent = list(requests.recent)
    return WorkerPart(
        worker=sources.worker,
        policy=resources.settings.policy,
        modes=[mode_document(mode) for mode in sources.modes.active],
        needed=sorted(fleet.needed),
        roles={role.value: health._asdict() for role, health in fleet.health().items()},
        exchange=None if sources.sync is None else sources.sync.health(),
        engines=_engines(resources, members, _names(sources, members)),
        counters=_counters(metrics, resources.prefix_cache),
        states={
            "pending": metrics.count_in_states("created", "queued"),
            "encoding": metrics.count_in_states("encode"),
            "prefilling": metrics.count_in_states("prefill", "result"),
            "decoding": metrics.count_in_states("decode", "first_byte"),
        },
        running=_running(resources),
        recent=[describe_ended(each) for each in recent[: -MOST_REQUESTS - 1 : -1]],
        failed=[describe_ended(each) for each in list(requests.failed)[: -MOST_REQUESTS - 1 : -1]],
        slow=[describe_ended(each) for each in requests.slowest(time())],
        flows=_flows(recent),
        stores=_stores(members, recent),
        prefixes=None if resources.prefix_cache is None else _prefixes(recent, resources.prefix_cache.block_tokens),
        sampled=len(recent),
    )


def _names(sources: WorkerSources, members: Iterable[Member]) -> Mapping[Instance, str]:
    """Returns the names for viewers. Finding one takes 20 microseconds, so those of the last part are used again."""
    before, names = sources.names.copy(), sources.names
    names.clear()
    for member in members:
        instance = member.instance
        names[instance] = before.get(instance) or public_engine_name(instance)
    return names


def _engines(
    resources: ExecutionResources, members: Iterable[Member], names: Mapping[Instance, str]
) -> list[EngineFacts]:
    metrics, prefixes = resources.metrics, resources.prefix_cache
    leases = leases_by_instance(metrics, resources.kv_releaser)
    epoch_s = time() - resources.loop.time()
    found: list[EngineFacts] = []
    for member in members:
        instance = member.instance
        totals = metrics.instance_totals(instance.id, 0)
        cause = resources.fleet.cause_of(member)
        held = capacity = None
        if prefixes is not None and instance.role in (Role.PREFILL, Role.AGGREGATED):
            held, capacity = prefixes.feed.held_blocks(instance), prefixes.feed.capacity(instance)
        found.append(
            EngineFacts(
                instance.id,
                names[instance],
                instance.role.value,
                instance.group or "",
                instance.dialect,
                "" if instance.store is None else store_name(instance.store),
                member.state.value,
                member.breaker.state.value,
                member.own_in_flight,
                member.own_tokens,
                member.foreign,
                leases[instance.id],
                round(member.backlog.wait_s, 4),
                totals.legs,
                totals.prompt_tokens,
                totals.cached_tokens,
                totals.answer_tokens,
                totals.gaps,
                round(totals.gaps_s, 4),
                member.cache_usage,
                held,
                capacity,
                *(member.moved_bytes or _SAYS_NOTHING),
                "" if cause is None else cause.why,
                0.0 if cause is None else round(epoch_s + cause.since_s, 1),
            )
        )
    return found


def _counters(metrics: Metrics, prefixes: "PrefixCacheModel | None") -> dict[str, float]:
    families = list(metrics.collect())
    if prefixes is not None:
        families += PrefixCacheGauges(prefixes).collect()
    return {
        spell_series(sample.name, tuple(chain(*sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if is_shown(sample.name) and (sample.value or sample.name not in _SPARSE)
    }


def _running(resources: ExecutionResources) -> list[RequestRow]:
    some = islice(resources.running_executions, _LOOKED_AT)
    oldest = nsmallest(MOST_REQUESTS, (each.record for each in some), key=lambda each: each.lifecycle.started_s)
    now_s, epoch_s = perf_counter(), time()
    return [describe_running(record, now_s, epoch_s) for record in oldest]


def _flows(requests: Iterable[EndedRequest]) -> list[list[str | int]]:
    """Counts the requests and prompt tokens that went from one group of engines to another."""
    number: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    for request in requests:
        route = [instance for instance in request.route if instance.role is not Role.ENCODE]
        if len(route) < 2 or route[0].role is not Role.PREFILL or route[-1].role is not Role.DECODE:
            continue
        way = (route[0].group or "", route[-1].group or "")
        number[way] += 1
        tokens[way] += request.prompt_tokens or 0
    return [[*way, count, tokens[way]] for way, count in number.most_common(64)]


def _stores(members: Iterable[Member], requests: Iterable[EndedRequest]) -> list[StoreFacts]:
    """Describes the stores by what the last requests were expected to fetch, and what engines then had."""
    engines: Counter[str] = Counter()
    ready: Counter[str] = Counter()
    for member in members:
        if (store := member.instance.store) is not None:
            engines[store] += 1
            ready[store] += member.available
    fetches: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    confirmed: Counter[str] = Counter()
    for request in requests if engines else ():
        decision = request.decision
        if decision is None or decision.source is not None or not decision.expected.fetched_tokens:
            continue
        store = decision.chosen.store or ""
        wanted = decision.in_engine_tokens(decision.expected.fetched_tokens, request.prompt_tokens)
        had = decision.in_engine_tokens(decision.expected.cached_tokens, request.prompt_tokens)
        fetches[store] += 1
        expected[store] += wanted
        confirmed[store] += min(wanted, max(0, (request.cached_tokens or 0) - had))
    return [
        StoreFacts(store_name(name), number, ready[name], fetches[name], expected[name], confirmed[name])
        for name, number in sorted(engines.items())
    ]


def _prefixes(requests: Iterable[EndedRequest], block_tokens: int) -> list[list[str | int]]:
    prompts: list[PromptBlocks] = []
    for request in requests:
        decision = request.decision
        if decision is None or not request.prefix_hashes:
            continue
        cached = request.cached_tokens
        if cached is None:
            cached = decision.expected.cached_tokens
        elif request.prompt_tokens:  # in the tokens by which blocks are counted
            cached = cached * decision.prompt_tokens // request.prompt_tokens
        prompts.append(PromptBlocks(request.prefix_hashes, (cached + 1) // block_tokens))
    return [list(each) for each in find_hot_prefixes(prompts)]
