"""The scheduler's half, without an engine: all requests, what is looked up for them, and the orders of each step.

No call here waits, and no single request raises. A request for which the store has nothing usable is computed.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from kvparams.keys import ExtraKey
from kvparams.params import Endpoint, KVTransferParams
from kvparams_connectors.engines.vllm.connector_metadata import ConnectorMetadata, LoadSpec, TokenSequence
from kvparams_connectors.engines.vllm.grouped_plan import GroupedPlan, PageChains
from kvparams_connectors.engines.vllm.request_params import RequestParams, prefill_result
from kvparams_connectors.engines.vllm.request_state import ALL_TOKENS, RequestState
from kvparams_connectors.engines.vllm.request_state_machine import RequestStage, RequestStateMachine
from kvparams_connectors.engines.vllm.transfer_specs import GroupBlockTables, load_specs, save_specs
from kvparams_connectors.jobs import Job
from kvparams_connectors.log_rate_limiter import LogRateLimiter
from kvparams_connectors.transfer.load_rate import LoadRate
from kvparams_connectors.transfer.reports import PrefixHit

__all__ = ["PrefixLookup", "ScheduledRequest", "SchedulerOptions", "SchedulerState"]

_LOGGER: Final = logging.getLogger(__name__)
_AGAIN_S: Final = 0.005
"""Between two lookups of pages that are promised and not there yet."""
_LEAST_PROMISE_S: Final = 0.02


class PrefixLookup(Protocol):
    """`prefix_lookup.StorePrefixLookup`."""

    def plan(
        self, token_ids: Tokens[int], shared: KVTransferParams | None, extras: Tokens[ExtraKey], known: PageChains = ()
    ) -> GroupedPlan:
        """Returns the pages of a sequence."""
        ...

    def pages(
        self, token_ids: Tokens[int], shared: KVTransferParams | None, extras: Tokens[ExtraKey], known: PageChains
    ) -> PageChains:
        """Returns the pages that are known of a sequence."""
        ...

    def look_up(self, plan: GroupedPlan) -> Job[PrefixHit]:
        """Asks the store how much of a sequence it has."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Describes what holds for all requests."""

    page_tokens: int
    loads: bool
    saves: bool
    fails_on_load_error: bool
    """The engine ends a request whose KV could not be loaded, rather than compute it."""
    promise_s: float
    """How long to wait for promised pages."""
    block_tokens: int = 1
    """Of the engine's block: where it has the rest itself, fewer tokens than that are not worth a load."""
    windows: tuple[int | None, ...] = (None,)
    """By group of layers: how many of the last tokens the engine keeps; None: all."""
    wait_s: float = 0.0
    """How long a step may wait for lookups, all of its requests together. A store that is near answers within it; put
    off to the next step, a request loses more, and alone an engine that has nothing to do sleeps in between."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request that computes in this step."""

    request_id: str
    start: int
    """Tokens that are there before the step."""
    count: int
    """Tokens of the step."""
    token_ids: Tokens[int]
    """All that are certain."""
    tables: Callable[[], GroupBlockTables]
    """By group the block table from token 0, if anybody wants to know."""


class SchedulerState:
    """A `SchedulerState` holds all requests of an engine, for the scheduler's thread alone."""

    def __init__(
        self,
        search: PrefixLookup,
        rules: SchedulerOptions,
        producer: Endpoint,
        rate: LoadRate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._search, self._rules, self._producer, self._clock = search, rules, producer, clock
        self.pin_blocks: Callable[[Tokens[int]], int] | None = None
        """Keeps blocks as they are for a save that has not copied them yet; returns its number. None: nobody can."""
        self._wait_s = rules.wait_s
        """Left in this step."""
        self._rate = rate
        self._promise_s = rules.promise_s
        self._entries: dict[str, RequestState] = {}
        self._loads: list[LoadSpec] = []
        self._life: tuple[ExtraKey, ...] = ()
        self._off_lines: Final = LogRateLimiter()
        self.counts: Counter[str] = Counter()
        """What was decided, by name, since the start."""

    def __len__(self) -> int:
        return len(self._entries)

    def add_request(
        self, request_id: str, prompt: Tokens[int], handoff: RequestParams, extras: tuple[ExtraKey, ...] = ()
    ) -> None:
        """A request has come: the lookup starts while it waits its turn."""
        rules = self._rules
        ids = tuple(prompt)
        plan = None
        if handoff.disabled_reason is None:
            try:
                plan = self.plan_of(ids, handoff.shared_params, extras + self._life)
            except ValueError as error:  # a token id that no key can hold, and no answer either
                self._tell_off(request_id, str(error))
                return
        else:
            self._tell_off(request_id, handoff.disabled_reason)
            if handoff.params is None:
                return
        saves = rules.saves and plan is not None
        tracked = RequestStateMachine(
            prompt_tokens=len(prompt),
            page_tokens=rules.page_tokens,
            saves=saves,
            saves_tail=saves and handoff.is_prefill,
        )
        entry = self._entries[request_id] = RequestState(handoff, extras, ids, tracked, self._life, plan)
        if rules.loads and plan is not None:
            if handoff.is_decode:
                entry.patient_until = self._clock() + self._promise_s
            entry.lookup = self._search.look_up(plan)

    def _tell_off(self, request_id: str, why: str) -> None:
        """The store is left alone for a request; clients decide for how many."""
        self.counts["requests_off"] += 1
        level = logging.WARNING if self._off_lines.is_due() else logging.DEBUG
        _LOGGER.log(level, "the store is not used for request %s: %s", request_id, why)

    def get_matched_tokens(self, request_id: str, local: int, token_ids: Tokens[int], preemptions: int) -> int | None:
        """Returns how many tokens behind the `local` ones the store has; None: ask again."""
        entry = self._entries.get(request_id)
        if entry is None or entry.disabled_reason or not self._rules.loads:
            return 0
        tracked = entry.state_machine
        if tracked.record_preemption(preemptions):
            entry.outdated = True
        if tracked.stage not in (RequestStage.WAITING, RequestStage.OFFERED):
            return 0
        if entry.outdated:
            entry.outdated = False
            entry.patient_until = None
            self._look(entry, token_ids)
        found = self._found(entry)
        if found is None:
            return None
        offer = tracked.offer_tokens(found, local, len(token_ids))
        if offer and not self._worth(entry, local, local + offer):
            tracked.decline()
            return 0
        return offer

    def update_after_alloc(
        self, request_id: str, external: int, token_ids: Tokens[int], tables: GroupBlockTables
    ) -> None:
        """Records that the engine has blocks for the request, and counts on `external` tokens.

        See `RequestStateMachine.begin_load`.
        """
        entry = self._entries.get(request_id)
        claim = None if entry is None else entry.state_machine.begin_load(external)
        if entry is not None and claim is not None:
            sequence = entry.sequence(token_ids)
            rules = self._rules
            self._loads += load_specs(
                request_id, sequence, tables, claim, block_tokens=rules.block_tokens, windows=rules.windows
            )
            self.counts["loads"] += 1
            self.counts["tokens_claimed"] += claim.end - claim.start

    def build_metadata(self, running: list[ScheduledRequest]) -> ConnectorMetadata:
        """The orders of a step in which these requests compute; loads are those since the last step."""
        orders = ConnectorMetadata(self._loads)
        self._loads = []
        self._wait_s = self._rules.wait_s
        for one in running:
            entry = self._entries.get(one.request_id)
            if entry is None:
                continue
            spans = entry.state_machine.schedule_saves(one.start, one.count, len(one.token_ids))
            if not entry.outdated:
                for span in spans:
                    orders.saves += save_specs(
                        self._sequence(entry, one.token_ids[: span.end]),
                        one.tables(),
                        span,
                        page_tokens=self._rules.page_tokens,
                        block_tokens=self._rules.block_tokens,
                        windows=self._rules.windows,
                        required=entry.request_params.is_prefill,
                        hold=self.pin_blocks,
                        gaps=entry.gaps,
                    )
        return orders

    def finish_request(self, request_id: str, *, computed: int) -> dict[str, object] | None:
        """A request is over, be it aborted: what its answer says in `kv_transfer_params`.

        Args:
            request_id: of the request.
            computed: tokens that are in its blocks.
        """
        entry = self._entries.pop(request_id, None)
        if entry is None or not entry.state_machine.end():
            return None
        tracked = entry.state_machine
        keys: Tokens[str] = ()
        whole = computed >= tracked.prompt_tokens and not entry.outdated and not entry.disabled_reason
        if entry.request_params.is_prefill and whole and self._rules.saves:
            if entry.plan is None or entry.plan.tokens != tracked.prompt_tokens:
                entry.plan = self._plan(entry, entry.prompt)
            keys = entry.plan.promised_keys(entry.gaps)
        return prefill_result(
            entry.request_params,
            producer=self._producer,
            prompt=entry.prompt,
            load_keys=keys,
            cached_tokens=tracked.cached_tokens or 0,
            loaded_tokens=tracked.loaded_tokens,
        )

    def invalidate_stored(self, life: bytes) -> None:
        """The engine's weights may be others from now on: nothing that was stored before is used or added to.

        Args:
            life: 16 to 64 bytes that no other engine has, and this one never had.
        """
        self._life = (ExtraKey(0, ALL_TOKENS, life),)
        for entry in self._entries.values():
            entry.renew(self._life)

    def plan_of(
        self, token_ids: Tokens[int], shared: KVTransferParams | None, extras: Tokens[ExtraKey], known: PageChains = ()
    ) -> GroupedPlan:
        """The pages of a sequence, with the parts of all ranks."""
        return self._search.plan(token_ids, shared, extras, known)

    # ---- what is there

    def _plan(self, entry: RequestState, token_ids: Tokens[int]) -> GroupedPlan:
        plan = self.plan_of(token_ids, entry.request_params.shared_params, entry.extras, entry.pages)
        entry.pages = plan.chains
        return plan

    def _sequence(self, entry: RequestState, token_ids: Tokens[int]) -> TokenSequence:
        """These tokens of a request, for an order to save some; what a page adds is computed once."""
        if not entry.pages or not entry.pages[0] or entry.pages[0][-1].end < len(token_ids):
            entry.pages = self._search.pages(token_ids, entry.request_params.shared_params, entry.extras, entry.pages)
        return entry.sequence(token_ids)

    def _look(self, entry: RequestState, token_ids: Tokens[int]) -> None:
        entry.plan = self._plan(entry, token_ids)
        entry.prefix_hit = None
        entry.lookup = self._search.look_up(entry.plan)

    def _found(self, entry: RequestState) -> int | None:
        """Tokens that are stored, or promised where the engine shall not compute them; None: not known yet."""
        if entry.lookup is not None and (entry.lookup.done() or self._comes(entry.lookup)):
            entry.prefix_hit = entry.lookup.result(0)
            entry.lookup = None
            if entry.prefix_hit.failure is not None:
                self.counts["lookups_failed"] += 1
        hit, plan = entry.prefix_hit, entry.plan
        if plan is None:
            return 0
        promised = self._promised(entry, plan)
        if hit is not None and (hit.tokens >= promised or hit.failure is not None or not self._patient(entry)):
            if promised and entry.patient_until is not None:
                kept = hit.tokens >= promised
                self.counts["promises_broken"] += not kept
                # Where promises are broken, by a store that is full for one, the next are not waited for so long.
                self._promise_s = self._rules.promise_s if kept else max(self._promise_s / 4, _LEAST_PROMISE_S)
                entry.patient_until = None
            if not self._fails(entry):
                return hit.tokens
            return max(hit.tokens, promised or self._failing(entry, plan))
        if entry.lookup is None and self._clock() >= entry.again_at:
            entry.again_at = self._clock() + _AGAIN_S
            entry.lookup = self._search.look_up(plan)
        return None

    def _comes(self, lookup: Job[PrefixHit]) -> bool:
        """Returns whether the answer comes within what is left of the step's patience."""
        if self._wait_s <= 0:
            return False
        since = self._clock()
        with suppress(Exception):
            lookup.result(self._wait_s)
        self._wait_s -= self._clock() - since
        return lookup.done()

    def _patient(self, entry: RequestState) -> bool:
        return entry.patient_until is not None and self._clock() < entry.patient_until

    def _promised(self, entry: RequestState, plan: GroupedPlan) -> int:
        """Returns up to where the sequence is promised by keys that this engine knows."""
        keys = entry.request_params.load_keys
        return plan.promised(keys) if keys else 0

    def _failing(self, entry: RequestState, plan: GroupedPlan) -> int:
        """Returns up to where a request fails for keys that this engine does not know.

        They stand for KV that is not here and will not come, so nobody waits for it.
        """
        told = entry.request_params
        fails = told.params is not None and told.params.on_load_failure == "fail" and bool(told.load_keys)
        return plan.pages[-1].end if fails and plan.pages else 0

    def _fails(self, entry: RequestState) -> bool:
        """Returns whether the request fails where promised KV is not stored: the document may ask to recompute it.

        What was found and cannot be read later on is for vLLM's policy alone, which is one for all requests.
        """
        params = entry.request_params.params
        return self._rules.fails_on_load_error and (params is None or params.on_load_failure != "recompute")

    def _worth(self, entry: RequestState, start: int, end: int) -> bool:
        """Returns whether to load the tokens [start, end). One of the two counters says so where not, once a request.

        What the engine has but for less than a block is computed. So is what would take longer to load; but what is
        promised is not recomputed for that: it was asked for.
        """
        plan = entry.plan
        if start and end - start < self._rules.block_tokens:
            if not entry.small:
                self.counts["loads_small"] += 1
            entry.small = True
            return False
        if plan is None or entry.request_params.is_decode or self._rate is None:
            return True
        if entry.worth:
            entry.worth = self._rate.is_worth_loading(plan.stored_bytes(start, end), end - start)
            if not entry.worth:
                self.counts["loads_skipped"] += 1
        return entry.worth

    def record_load(self, nbytes: int, seconds: float) -> None:
        """A load took so long."""
        if self._rate is not None:
            self._rate.observe(nbytes, seconds)
