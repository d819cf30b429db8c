"""vLLM's scheduler and our book of requests: this file only says one in the other's words.

No decision is made here.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

from kvparams.keys import ExtraKey
from kvparams.params import Endpoint
from kvparams.signing.keyring import SigningKeyringError
from kvparams.signing.request_verifier import RequestVerifier
from kvparams_connectors.engines.process_start import process_start_time
from kvparams_connectors.engines.vllm.block_pins import BlockPins
from kvparams_connectors.engines.vllm.block_tables import BlockTables
from kvparams_connectors.engines.vllm.cacheability import media_extras, why_not_cacheable
from kvparams_connectors.engines.vllm.connector_metadata import ConnectorMetadata
from kvparams_connectors.engines.vllm.counters import UNTRUSTED_PREFIX
from kvparams_connectors.engines.vllm.interface import (
    BlockPool,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    SchedulerOutput,
    VllmConfig,
    VLLMRequest,
)
from kvparams_connectors.engines.vllm.layer_groups import read_groups
from kvparams_connectors.engines.vllm.lookup_store import open_lookup_store
from kvparams_connectors.engines.vllm.prefix_cache_resets import PrefixCacheResets
from kvparams_connectors.engines.vllm.prefix_lookup import StorePrefixLookup
from kvparams_connectors.engines.vllm.rank_shards import read_rank_shards
from kvparams_connectors.engines.vllm.request_params import RequestParams, new_incarnation, read_request_params
from kvparams_connectors.engines.vllm.request_state import ALL_TOKENS
from kvparams_connectors.engines.vllm.scheduler_state import ScheduledRequest, SchedulerOptions, SchedulerState
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.vllm.transfer_specs import GroupBlockTables
from kvparams_connectors.engines.weights_identity import Adapters
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.load_rate import LoadRate

__all__ = ["SchedulerConnector"]

_LOGGER: Final = logging.getLogger(__name__)
_LOOKUP_WAIT_S: Final = 0.0004
"""Of a step. vLLM's engine sleeps for 0.001 s where nothing could be scheduled (vllm/v1/engine/core.py, 0.32)."""


class SchedulerConnector:
    """Describes what the connector does in vLLM's scheduler."""

    def __init__(
        self, config: VllmConfig, cache: KVCacheConfig, settings: VLLMSettings, *, tells_failures: bool = True
    ) -> None:
        """Opens the store, for lookups only.

        Args:
            config: vLLM's configuration.
            cache: vLLM's description of the KV cache.
            settings: the connector's settings.
            tells_failures: whether vLLM can be told that a load has failed as a whole; see `read_groups`.

        Raises:
            LayoutError: this engine's KV cannot be shared.
            StoreError: the store cannot be opened, or a setting is wrong.
        """
        transfer = config.kv_transfer_config
        assert transfer is not None
        groups = read_groups(config, cache, page_tokens=settings.page_tokens, tells_failures=tells_failures)
        shares = read_rank_shards(config, groups, settings, tensor_rank=0)
        ranks = config.parallel_config.tensor_parallel_size
        lookup = open_lookup_store(settings.store, ranks=ranks)
        self._store = lookup.store
        fails = transfer.kv_load_failure_policy == "fail"
        if fails and transfer.is_kv_consumer:
            _LOGGER.warning(
                "kv_load_failure_policy is `fail`, so a request whose stored KV is damaged or gone ends with an "
                "error. Set it to `recompute` to compute the KV instead"
            )
        rules = SchedulerOptions(
            page_tokens=settings.page_tokens,
            loads=True,
            saves=transfer.is_kv_producer,
            fails_on_load_error=fails,
            promise_s=settings.promise_s,
            block_tokens=groups[0].spec.block_size,
            windows=tuple(group.window for group in groups),
            wait_s=_LOOKUP_WAIT_S,
        )
        address = lookup.address
        prefixes = StorePrefixLookup(self._store, shares, settings.deadline_s, own=address)
        producer = Endpoint(id=_visible(transfer.engine_id or "vllm"), incarnation=new_incarnation())
        if address is not None:
            producer = producer.model_copy(update={"address": address})
        rate = None  # every load is worth it
        if settings.recompute_tokens_per_s is not None:
            rate = LoadRate(settings.recompute_tokens_per_s)
        self.state: Final = SchedulerState(prefixes, rules, producer, rate)
        self._keep_on_reset: Final = settings.keep_on_reset
        self._trust_media_hashes: Final = settings.trust_media_hashes
        self._gate: Final = _gate(settings)
        self._malformed = 0
        self._adapters: Final = Adapters()
        self._requests: dict[str, VLLMRequest] = {}
        self._tables: Final = BlockTables()
        self._ranks: Final = ranks
        self._holds: BlockPins | None = None
        self._resets: Final = PrefixCacheResets()

    def bind(self, manager: KVCacheManager) -> None:
        """Sets the object that knows the blocks of a request."""
        self._tables.bind(manager)

    def bind_pool(self, pool: BlockPool) -> None:
        """Sets the pool that keeps blocks from being reused; without it workers copy before a step ends."""
        self._resets.bind(pool)
        self._holds = BlockPins(pool, self._ranks)
        self.state.pin_blocks = self._holds.pin

    @property
    def has_pinned_blocks(self) -> bool:
        """Returns whether blocks are held: the engine must go on, to hear that they are copied."""
        return bool(self._holds)

    @property
    def blocks_other_requests(self) -> bool:
        """Returns whether blocks that others could use are held."""
        return bool(self._holds) and self._holds.blocks_other_requests

    def update_from_workers(self, loads: Iterable[tuple[int, float]], copied: Iterable[int]) -> None:
        """Applies the workers' reports: ended loads, in bytes and seconds, and copied save orders."""
        for nbytes, seconds in loads:
            self.state.record_load(nbytes, seconds)
        if self._holds is not None:
            self._holds.record_copied(copied)

    def new_request(self, request: VLLMRequest) -> None:
        """A request has come."""
        self._notice_reset()
        self._requests[request.request_id] = request
        try:
            handoff, extras = self._read(request)
            self._malformed += handoff.malformed
            self.state.add_request(request.request_id, request.prompt_token_ids or (), handoff, extras)
        except Exception:
            _LOGGER.exception("the store is not used for request %s", request.request_id)

    def _read(self, request: VLLMRequest) -> tuple[RequestParams, tuple[ExtraKey, ...]]:
        """Returns what the request says, and what its KV depends on besides token ids."""
        lora = request.lora_request
        handoff = read_request_params(
            request.kv_transfer_params,
            request_id=request.request_id,
            prompt=request.prompt_token_ids or (),
            cache_salt=request.cache_salt,
            lora=None if lora is None else lora.lora_name,
            admit=None if self._gate is None else partial(self._gate.verify, arrived=request.arrival_time),
        )
        if handoff.disabled_reason is not None:
            return handoff, ()
        vouched = self._gate is not None and handoff.params is not None
        off = why_not_cacheable(request, hashes_trusted=vouched or self._trust_media_hashes)
        if off is not None:
            return replace(handoff, disabled_reason=off), ()
        extras = media_extras(request)
        if lora is not None:
            try:
                extras += (ExtraKey(0, ALL_TOKENS, self._adapters.digest(lora.lora_path)),)
            except (StoreError, OSError) as error:
                return replace(handoff, disabled_reason=str(error)), ()
        return handoff, extras

    def get_num_new_matched_tokens(self, request: VLLMRequest, local: int) -> tuple[int | None, bool]:
        """vLLM's `get_num_new_matched_tokens`."""
        self._notice_reset()
        found = self.state.get_matched_tokens(request.request_id, local, request.all_token_ids, request.num_preemptions)
        if request.skip_reading_prefix_cache:  # it wants the logits of its whole prompt; the book hears of preemptions
            return 0, False
        return found, bool(found)

    def update_state_after_alloc(self, request: VLLMRequest, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM's `update_state_after_alloc`."""
        tables = blocks.get_block_ids() if external else ()
        self.state.update_after_alloc(request.request_id, external, request.all_token_ids, tables)

    def build_metadata(self, output: SchedulerOutput) -> ConnectorMetadata:
        """vLLM's `build_connector_meta`."""
        self._notice_reset()
        self._tables.follow(output)
        counts = output.num_scheduled_tokens
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return self.state.build_metadata(
            [
                ScheduledRequest(name, start, counts[name], self._requests[name].all_token_ids, self._tables_of(name))
                for name, start in starts.items()
                if name in self._requests and name in counts
            ]
        )

    def request_finished(self, request: VLLMRequest) -> dict[str, object] | None:
        """vLLM's `request_finished`: what the answer says."""
        self._requests.pop(request.request_id, None)
        self._tables.forget(request.request_id)
        return self.state.finish_request(request.request_id, computed=request.num_computed_tokens)

    def _notice_reset(self) -> None:
        """vLLM has perhaps reset its prefix cache since, and said nothing."""
        if self._resets.was_reset():
            self.reset()

    def reset(self) -> None:
        """vLLM resets its caches: see `VLLMSettings.keep_on_reset`."""
        self._resets.was_reset()  # it resets its prefix cache, too, and that is the same
        first = not self.state.counts["resets"]
        self.state.counts["resets"] += 1
        if self._keep_on_reset:
            return
        if first:
            _LOGGER.warning(
                "vLLM has reset its caches, perhaps for other weights. From now on this engine does not use "
                "stored KV of before, and shares KV with no other engine until it is restarted. If its weights "
                "never change, set keep_on_reset in kv_connector_extra_config"
            )
        self.state.invalidate_stored(os.urandom(32))

    def counts(self) -> dict[str, int]:
        """Returns the counts of decisions since the start."""
        counts = dict(self.state.counts)
        if self._malformed:
            counts[UNTRUSTED_PREFIX + "malformed"] = self._malformed
        if self._gate is not None:
            counts |= {UNTRUSTED_PREFIX + reason: count for reason, count in self._gate.refused.items()}
        return counts

    def shutdown(self) -> None:
        """Let go of the store."""
        self._store.close()

    def _tables_of(self, name: str) -> Callable[[], GroupBlockTables]:
        return lambda: self._tables.of(name)


def _gate(settings: VLLMSettings) -> RequestVerifier | None:
    """Raises StoreError: the keys cannot be used."""
    if settings.verify_with is None or settings.audience is None:
        return None
    try:
        return RequestVerifier(settings.verify_with, settings.audience, time.time, since=process_start_time())
    except SigningKeyringError as error:
        raise StoreError(f"kv_connector_extra_config.verify_with: {error}") from error


def _visible(name: str) -> str:
    return "".join(letter if "!" <= letter <= "~" else "_" for letter in name)[:256] or "vllm"
