"""`KVParamsTier`: what vLLM's TieringOffloadingSpec loads by module path; `settings.py` says how to configure it.

vLLM makes one, in its scheduler, and calls it from the scheduler's thread alone. The tier waits for a store only where
vLLM allows it: when it starts, drains and ends.
"""

import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from kvparams_connectors.engines.log_forwarding import forward_logs
from kvparams_connectors.engines.vllm_tier.chunk_layout import chunk_layout_of
from kvparams_connectors.engines.vllm_tier.chunk_lookup import ChunkLookup
from kvparams_connectors.engines.vllm_tier.chunk_pipeline import ChunkTransferResult, HostRows, OffloadChunkPipeline
from kvparams_connectors.engines.vllm_tier.interface import OffloadingSpec, ReqContext, TransferJob
from kvparams_connectors.engines.vllm_tier.interface_check import require_known_interface
from kvparams_connectors.engines.vllm_tier.settings import TierSettings
from kvparams_connectors.engines.vllm_tier.tier_stats import COUNTERS, FAILED, REFUSED, TierStats
from kvparams_connectors.jobs import Job
from kvparams_connectors.stores.guard.store import open_guarded

if TYPE_CHECKING:  # vLLM's own classes, as far as they matter here

    class SecondaryTierManager:
        """vllm/v1/kv_offload/tiering/base.py."""

        tier_type: str
        locality: Any

        def __init__(
            self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None
        ) -> None: ...

    class JobResult:
        """Stands for the class of the same file."""

        def __init__(
            self,
            job_id: int,
            success: bool,
            successful_keys: Collection[bytes] | None = None,
            transfer_time: float | None = None,
            transfer_bytes: int | None = None,
        ) -> None: ...

    class LookupResult:
        """vllm/v1/kv_offload/base.py."""

        MISS: Any
        HIT: Any
        RETRY: Any

    class RequestOffloadingContext:
        """Stands for the class of the same file."""

    class OffloadingCounterMetadata:
        """Stands for the class of the same file."""

        def __init__(self, documentation: str, labelnames: tuple[str, ...] = ()) -> None: ...

    class OffloadingConnectorStats:
        """vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py."""

        def is_empty(self) -> bool: ...
        def increase_counter(self, counter_name: str, value: int, labelvalues: tuple[str, ...] = ()) -> None: ...

    class Medium:
        """Stands for the class of the same file as LookupResult."""

        STORAGE: Any

    class Locality:
        """Stands for the class of the same file."""

        def __init__(self, value: str) -> None: ...

    class CacheHitSource:
        """vllm/v1/metrics/cache_hit_source.py."""

        EXTERNAL_UNSPECIFIED: Any

    VLLM_VERSION: str = ""
    current_platform: Any = None

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload import base as _base
    from vllm.v1.kv_offload import config as _config
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering import base as _tiering
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
    from vllm.version import __version__ as VLLM_VERSION

    require_known_interface(
        VLLM_VERSION, SecondaryTierManager, {**vars(_config), **vars(_base), **vars(_tiering)}
    )  # before vLLM makes one: a method that is new and abstract would be a TypeError without a word of advice

    from vllm.v1.metrics.cache_hit_source import CacheHitSource

__all__ = ["KVParamsTier"]

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _TierJob:
    """A job of vLLM's."""

    keys: tuple[bytes, ...]
    job: Job[ChunkTransferResult]
    load: bool


class KVParamsTier(SecondaryTierManager):
    """See the module."""

    medium: ClassVar[Any] = Medium.STORAGE
    cache_hit_source: ClassVar[Any] = CacheHitSource.EXTERNAL_UNSPECIFIED
    verifies: ClassVar[bool] = True
    """False uses whatever the store gives back: a subclass shows what verification is good for."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: object,
    ) -> None:
        """Opens the store of the tier's settings. The engine does not start if this raises.

        Raises:
            StoreError: the store cannot be opened, or a setting is wrong.
            PageAuthError: the key file of authenticated pages cannot be used.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        forward_logs(logging.getLogger("vllm"))
        told = TierSettings.of(settings)
        self.locality = None if told.locality is None else Locality(told.locality)
        rows: HostRows = np.asarray(primary_kv_view).view(np.uint8)
        self._rows: HostRows | None = rows
        self._form = chunk_layout_of(
            offloading_spec,
            told,
            vllm=VLLM_VERSION,
            platform=str(current_platform.device_name),
            row_bytes=rows.shape[1],
        )
        self._keep_on_reset = told.keep_on_reset
        seals = told.read_seals()
        self._store = open_guarded(told.store)
        self._moving = OffloadChunkPipeline(
            self._store,
            self._form,
            deadline_s=told.deadline_s,
            verify=self.verifies,
            seals=seals,
        )
        self._asking = ChunkLookup(self._store, self._form, lookup_s=told.deadline_s / 5)
        self._transfers: dict[int, _TierJob] = {}
        self._nameless: list[int] = []
        """Jobs of which nothing is stored."""
        self._tally = TierStats()
        self._told_nameless = False
        try:
            self._moving.self_test()
        except BaseException:
            self.shutdown()
            raise

    # ---- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are offered once, when they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> Any:
        """Returns whether a chunk is stored, or that it is not known yet."""
        there = self._asking.is_stored(key, req_context.req_id)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def on_schedule_end(self, context: object) -> None:
        """Asks the store for what this step has looked up."""
        self._asking.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets what a request has looked up."""
        self._asking.forget(req_context.req_id)

    # ---- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store chunks."""
        chunks = [
            (key, int(row))
            for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
            if self._form.is_known_key(key)
        ]
        if len(chunks) != len(job_metadata.keys):
            self._tally.add("chunks_nameless", len(job_metadata.keys) - len(chunks))
            if not self._told_nameless:
                self._told_nameless = True
                _LOGGER.warning(
                    "chunks are not stored, because their hashes are not SHA-256; start vLLM with "
                    "--prefix-caching-hash-algo sha256"
                )
        if not chunks:
            self._nameless.append(job_metadata.job_id)
            return
        assert self._rows is not None
        keys = tuple(key for key, _ in chunks)
        self._transfers[job_metadata.job_id] = _TierJob(keys, self._moving.save(self._rows, chunks), load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to load chunks."""
        assert self._rows is not None
        chunks = [(key, int(row)) for key, row in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)]
        keys = tuple(job_metadata.keys)
        self._transfers[job_metadata.job_id] = _TierJob(keys, self._moving.load(self._rows, chunks), load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended since the last call."""
        results = [JobResult(job_id, success=False) for job_id in self._nameless]
        self._nameless.clear()
        done = [(job_id, transfer) for job_id, transfer in self._transfers.items() if transfer.job.done()]
        for job_id, transfer in done:
            del self._transfers[job_id]
            results.append(self._finished(job_id, transfer))
        return results

    def _finished(self, job_id: int, transfer: _TierJob) -> JobResult:
        try:
            moved = transfer.job.result(0)
        except Exception:  # a defect: the chunks are computed, or not stored
            _LOGGER.exception("a %s failed", "load" if transfer.load else "save")
            moved = ChunkTransferResult()
        self._tally.moved(moved, len(transfer.keys), load=transfer.load)
        whole = len(moved.done) == len(transfer.keys)
        if transfer.load and not whole:
            there = set(moved.done)
            self._asking.mark_missing([key for key in transfer.keys if key not in there])
        some = moved.done if transfer.load and moved.done and not whole else None
        return JobResult(job_id, whole, some, moved.seconds, moved.nbytes)

    def drain_jobs(self) -> None:
        """vLLM resets its caches: see `TierSettings.keep_on_reset`."""
        for transfer in self._transfers.values():
            try:
                transfer.job.result()
            except Exception:  # noqa: BLE001 - it is told when vLLM asks what has finished
                continue
        self._tally.add("resets")
        if self._keep_on_reset:
            return
        if not self._form.epoch:
            _LOGGER.warning(
                "vLLM has reset its caches, perhaps for other weights. This engine does not use the store from "
                "now on, until it is restarted. If its weights never change, set keep_on_reset in secondary_tiers"
            )
        self._form = replace(self._form, epoch=os.urandom(16).hex())
        self._moving.restart(self._form)
        self._asking.restart(self._form)

    def shutdown(self) -> None:
        """Waits, within bounds, for jobs and closes the store."""
        self._moving.close()
        self._store.close()
        self._rows = None

    # ---- counters

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """For vLLM's /metrics."""
        labelled = {name: OffloadingCounterMetadata(text, (label,)) for name, label, text in (REFUSED, FAILED)}
        return {**{name: OffloadingCounterMetadata(text) for name, text in COUNTERS.items()}, **labelled}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Returns the counts since the last call, or None."""
        self._tally.add("lookups_failed", self._asking.failed)
        self._asking.failed = 0
        stats = OffloadingConnectorStats()
        for name, labels, number in self._tally.take():
            stats.increase_counter(name, number, labels)
        return None if stats.is_empty() else stats
