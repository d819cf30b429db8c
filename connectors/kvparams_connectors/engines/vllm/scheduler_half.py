"""vLLM's scheduler and our book of requests: this file only says one in the other's words.

The one rule: no decision is made here.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

from kvparams.keys import Extra
from kvparams.params import Endpoint
from kvparams.trust.gate import Gate
from kvparams.trust.keyring import KeyringError
from kvparams_connectors.engines.vllm.content import media_extras, why_off
from kvparams_connectors.engines.vllm.documents import Handoff, new_incarnation, read_handoff
from kvparams_connectors.engines.vllm.engine import read_shares
from kvparams_connectors.engines.vllm.entries import ALL_TOKENS
from kvparams_connectors.engines.vllm.groups import read_groups
from kvparams_connectors.engines.vllm.holding import Holds
from kvparams_connectors.engines.vllm.identity import Adapters
from kvparams_connectors.engines.vllm.interface import (
    BlockPool,
    CacheConfig,
    EngineConfig,
    KVBlocks,
    KVCacheManager,
    Request,
    SchedulerOutput,
)
from kvparams_connectors.engines.vllm.lookup_store import open_lookup_store
from kvparams_connectors.engines.vllm.ordering import Tables
from kvparams_connectors.engines.vllm.orders import StepOrders
from kvparams_connectors.engines.vllm.resets import PrefixCacheResets
from kvparams_connectors.engines.vllm.scheduling import Book, Rules, Running
from kvparams_connectors.engines.vllm.searching import Prefixes
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.vllm.tables import BlockTables
from kvparams_connectors.engines.vllm.tally import UNTRUSTED
from kvparams_connectors.process import began
from kvparams_connectors.rates import LoadRate
from kvparams_connectors.settings import StoreError

__all__ = ["SchedulerHalf"]

_LOGGER: Final = logging.getLogger(__name__)
_LOOKUP_WAIT_S: Final = 0.0004
"""Of a step. vLLM's engine sleeps for 0.001 s where nothing could be scheduled (vllm/v1/engine/core.py, 0.32)."""


class SchedulerHalf:
    """What the connector does in vLLM's scheduler."""

    def __init__(
        self, config: EngineConfig, cache: CacheConfig, settings: VLLMSettings, *, tells_failures: bool = True
    ) -> None:
        """`tells_failures`: see `read_groups`. Raises LayoutError or StoreError if this engine cannot share its KV."""
        transfer = config.kv_transfer_config
        assert transfer is not None
        groups = read_groups(config, cache, page_tokens=settings.page_tokens, tells_failures=tells_failures)
        shares = read_shares(config, groups, settings, tensor_rank=0)
        ranks = config.parallel_config.tensor_parallel_size
        lookup = open_lookup_store(settings.store, ranks=ranks)
        self._store = lookup.store
        fails = transfer.kv_load_failure_policy == "fail"
        if fails and transfer.is_kv_consumer:
            _LOGGER.warning(
                "kv_load_failure_policy is `fail`: a request whose stored KV is damaged or gone ends with an error. "
                "Set it to `recompute` and it is computed instead"
            )
        rules = Rules(
            page_tokens=settings.page_tokens,
            loads=True,
            saves=transfer.is_kv_producer,
            fails=fails,
            promise_s=settings.promise_s,
            block_tokens=groups[0].spec.block_size,
            windows=tuple(group.window for group in groups),
            wait_s=_LOOKUP_WAIT_S,
        )
        address = lookup.address
        prefixes = Prefixes(self._store, shares, settings.deadline_s, own=address)
        producer = Endpoint(id=_visible(transfer.engine_id or "vllm"), incarnation=new_incarnation())
        if address is not None:
            producer = producer.model_copy(update={"address": address})
        rate = None  # every load is worth it
        if settings.recompute_tokens_per_s is not None:
            rate = LoadRate(settings.recompute_tokens_per_s, settings.store_bytes_per_s)
        self.book: Final = Book(prefixes, rules, producer, rate)
        self._keep_on_reset: Final = settings.keep_on_reset
        self._trust_media_hashes: Final = settings.trust_media_hashes
        self._gate: Final = _gate(settings)
        self._malformed = 0
        self._adapters: Final = Adapters()
        self._requests: dict[str, Request] = {}
        self._tables: Final = BlockTables()
        self._ranks: Final = ranks
        self._holds: Holds | None = None
        self._resets: Final = PrefixCacheResets()

    def bind(self, manager: KVCacheManager) -> None:
        """Who knows the blocks of a request."""
        self._tables.bind(manager)

    def bind_pool(self, pool: BlockPool) -> None:
        """Who keeps blocks from being given to others; without it workers copy before a step ends."""
        self._resets.bind(pool)
        self._holds = Holds(pool, self._ranks)
        self.book.hold = self._holds.hold

    @property
    def copying(self) -> bool:
        """Whether blocks are held: the engine must go on, to hear that they are copied."""
        return bool(self._holds)

    @property
    def keeps_others_waiting(self) -> bool:
        """Whether blocks that others could use are held."""
        return bool(self._holds) and self._holds.keeps_others_waiting

    def news(self, loads: Iterable[tuple[int, float]], copied: Iterable[int]) -> None:
        """What workers say: loads that have ended, in bytes and seconds, and save orders that are copied."""
        for nbytes, seconds in loads:
            self.book.measured(nbytes, seconds)
        if self._holds is not None:
            self._holds.copied(copied)

    def new_request(self, request: Request) -> None:
        """A request has come."""
        self._notice_reset()
        self._requests[request.request_id] = request
        try:
            handoff, extras = self._read(request)
            self._malformed += handoff.malformed
            self.book.begin(request.request_id, request.prompt_token_ids or (), handoff, extras)
        except Exception:
            _LOGGER.exception("the store is not used for request %s", request.request_id)

    def _read(self, request: Request) -> tuple[Handoff, tuple[Extra, ...]]:
        """What the request says, and what its KV depends on besides token ids."""
        lora = request.lora_request
        handoff = read_handoff(
            request.kv_transfer_params,
            request_id=request.request_id,
            prompt=request.prompt_token_ids or (),
            cache_salt=request.cache_salt,
            lora=None if lora is None else lora.lora_name,
            admit=None if self._gate is None else partial(self._gate.admit, arrived=request.arrival_time),
        )
        if handoff.off is not None:
            return handoff, ()
        vouched = self._gate is not None and handoff.params is not None
        off = why_off(request, hashes_trusted=vouched or self._trust_media_hashes)
        if off is not None:
            return replace(handoff, off=off), ()
        extras = media_extras(request)
        if lora is not None:
            try:
                extras += (Extra(0, ALL_TOKENS, self._adapters.digest(lora.lora_path)),)
            except (StoreError, OSError) as error:
                return replace(handoff, off=str(error)), ()
        return handoff, extras

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """vLLM's `get_num_new_matched_tokens`."""
        self._notice_reset()
        found = self.book.ask(request.request_id, local, request.all_token_ids, request.num_preemptions)
        if request.skip_reading_prefix_cache:  # it wants the logits of its whole prompt; the book hears of preemptions
            return 0, False
        return found, bool(found)

    def allocated(self, request: Request, blocks: KVBlocks, external: int) -> None:
        """vLLM's `update_state_after_alloc`."""
        tables = blocks.get_block_ids() if external else ()
        self.book.allocated(request.request_id, external, request.all_token_ids, tables)

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """vLLM's `build_connector_meta`."""
        self._notice_reset()
        self._tables.follow(output)
        counts = output.num_scheduled_tokens
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return self.book.step(
            [
                Running(name, start, counts[name], self._requests[name].all_token_ids, self._tables_of(name))
                for name, start in starts.items()
                if name in self._requests and name in counts
            ]
        )

    def finished(self, request: Request) -> dict[str, object] | None:
        """vLLM's `request_finished`: what the answer says."""
        self._requests.pop(request.request_id, None)
        self._tables.forget(request.request_id)
        return self.book.finish(request.request_id, computed=request.num_computed_tokens)

    def _notice_reset(self) -> None:
        """vLLM has perhaps reset its prefix cache since, and said nothing."""
        if self._resets.seen():
            self.reset()

    def reset(self) -> None:
        """vLLM resets its caches: see `VLLMSettings.keep_on_reset`."""
        self._resets.seen()  # it resets its prefix cache, too, and that is the same
        first = not self.book.counts["resets"]
        self.book.counts["resets"] += 1
        if self._keep_on_reset:
            return
        if first:
            _LOGGER.warning(
                "vLLM has reset its caches, perhaps for other weights: what is stored is left alone from now on, and "
                "this engine shares with no other until it is started again. Where weights never change set "
                "keep_on_reset in kv_connector_extra_config"
            )
        self.book.renew(os.urandom(32))

    def counts(self) -> dict[str, int]:
        """Of decisions, since the start."""
        counts = dict(self.book.counts)
        if self._malformed:
            counts[UNTRUSTED + "malformed"] = self._malformed
        if self._gate is not None:
            counts |= {UNTRUSTED + reason: count for reason, count in self._gate.refused.items()}
        return counts

    def shutdown(self) -> None:
        """Let go of the store."""
        self._store.close()

    def _tables_of(self, name: str) -> Callable[[], Tables]:
        return lambda: self._tables.of(name)


def _gate(settings: VLLMSettings) -> Gate | None:
    """Raises StoreError: the keys cannot be used."""
    if settings.verify_with is None or settings.audience is None:
        return None
    try:
        return Gate(settings.verify_with, settings.audience, time.time, since=began())
    except KeyringError as error:
        raise StoreError(f"kv_connector_extra_config.verify_with: {error}") from error


def _visible(name: str) -> str:
    return "".join(letter if "!" <= letter <= "~" else "_" for letter in name)[:256] or "vllm"
