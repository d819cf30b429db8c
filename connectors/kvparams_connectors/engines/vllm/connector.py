"""`KVParamsConnector`: what vLLM loads, by module path or as a plugin; `settings.py` says how to configure it.

vLLM makes one in its scheduler and one in each worker, and each is one half. Nothing happens here; each hook is a line
that asks a half.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from kvparams_connectors.engines.log_forwarding import forward_logs
from kvparams_connectors.engines.vllm.connector_metadata import ConnectorMetadata
from kvparams_connectors.engines.vllm.connector_stats import (
    TransferCounts,
    TransferCountsMetrics,
    WorkerMetadata,
    count_changes,
)
from kvparams_connectors.engines.vllm.interface import (
    BlockPool,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    SchedulerOutput,
    VllmConfig,
    VLLMRequest,
)
from kvparams_connectors.engines.vllm.scheduler_connector import SchedulerConnector
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.vllm.worker_connector import WorkerConnector

if TYPE_CHECKING:  # vLLM's own classes, as far as they matter here

    class KVConnectorBase_V1:
        """vllm/distributed/kv_transfer/kv_connector/v1/base.py."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...
        def _get_connector_metadata(self) -> Any: ...

    class SupportsHMA:
        """Stands for the class of the same file that marks support for groups of layers."""

    class KVConnectorMetadata:
        """Stands for the class of the same file."""

    class KVConnectorRole:
        """Stands for the class of the same file."""

        SCHEDULER: Any
        WORKER: Any

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )

__all__ = ["KVParamsConnector", "VLLMConnectorMetadata"]


_BASE: Final = import_module(KVConnectorBase_V1.__module__)
_TRANSFER_RESULTS: Final = getattr(_BASE, "KVConnectorTransferResults", None)
"""How vLLM is told that requests' loads have failed; since 0.32."""
_ANSWERED: Final = "kvparams_answered"
"""An attribute of vLLM's request."""


class VLLMConnectorMetadata(KVConnectorMetadata):
    """The orders of a step, as vLLM carries them to the workers."""

    def __init__(self, orders: ConnectorMetadata) -> None:
        self.orders: Final = orders


class _VLLMProcess:
    """Describes what vLLM knows of the process."""

    def tensor_rank(self) -> int:
        state: Any = import_module("vllm.distributed.parallel_state")
        return int(state.get_tensor_model_parallel_rank())

    def cpu_kernel(self, config: VllmConfig, block_size: int, head_size: int) -> str:
        module = import_module("vllm.v1.attention.backends.cpu_attn")
        kernel = getattr(module, "_get_attn_isa", None)
        if kernel is None:
            return "of a version that is not known"
        return str(kernel(config.model_config.dtype, block_size, head_size, config.cache_config.cache_dtype))


class KVParamsConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Hooks take `**kwargs` where some of vLLM's runners pass more."""

    verifies: ClassVar[bool] = True
    """False uses whatever the store gives back: a subclass shows what verification is good for."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        forward_logs(logging.getLogger("vllm"))
        transfer = vllm_config.kv_transfer_config
        settings = VLLMSettings.of(None if transfer is None else transfer.kv_connector_extra_config)
        settings = settings.of_rank(vllm_config.parallel_config.data_parallel_rank_local or 0)
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        self._reported: dict[str, int] = {}
        tells = _TRANSFER_RESULTS is not None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerConnector(vllm_config, kv_cache_config, settings, tells_failures=tells)
        else:
            self._worker = WorkerConnector(
                vllm_config,
                kv_cache_config,
                settings,
                _VLLMProcess(),
                tells_failures=tells,
                verifies=self.verifies,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved in time is computed by whoever wants it."""
        return False

    # ---- in the scheduler

    @property
    def _planner(self) -> SchedulerConnector:
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Tells the scheduler half where blocks of requests are looked up."""
        self._planner.bind(kv_cache_manager)
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Tells the scheduler half which pool holds the blocks."""
        self._planner.bind_pool(gpu_block_pool)

    def on_new_request(self, request: VLLMRequest) -> None:
        """Tells the scheduler half of a request."""
        self._planner.new_request(request)

    def get_num_new_matched_tokens(self, request: VLLMRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many more tokens are stored, and whether they are loaded meanwhile."""
        return self._planner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: VLLMRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Tells the scheduler half which blocks a request has."""
        self._planner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> VLLMConnectorMetadata:
        """Returns the orders of a step."""
        return VLLMConnectorMetadata(self._planner.build_metadata(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Tells the scheduler half what workers have done."""
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerMetadata):
            self._planner.update_from_workers(news.loads, news.copied)

    def has_pending_push_work(self) -> bool:
        """Returns whether the engine must go on stepping, because saves have still to copy blocks."""
        return self._scheduler is not None and self._scheduler.has_pinned_blocks

    def has_pending_block_frees(self) -> bool:
        """Returns whether saves hold blocks that would spare a preemption once they are free."""
        return self._scheduler is not None and self._scheduler.blocks_other_requests

    def request_finished(self, request: VLLMRequest, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether blocks stay, and what the answer says."""
        return False, self._answer(request)

    def request_finished_all_groups(
        self, request: VLLMRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether blocks stay, and what the answer says, where layers have groups."""
        return False, self._answer(request)

    def _answer(self, request: VLLMRequest) -> dict[str, Any] | None:
        """Returns the members of the answer, from the first of several connectors under MultiConnector.

        If two connectors wrote the same name, vLLM's engine would end
        (vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py, 0.32).
        """
        says = self._planner.request_finished(request)
        if says is None or hasattr(request, _ANSWERED):
            return None
        setattr(request, _ANSWERED, True)
        return says

    def reset_cache(self) -> bool:
        """True: done, for vLLM takes False for a failure and ends the update of its weights with an error."""
        self._planner.reset()
        return True

    # ---- in a worker

    @property
    def _mover(self) -> WorkerConnector:
        assert self._worker is not None
        return self._worker

    @property
    def _orders(self) -> ConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, VLLMConnectorMetadata)
        return metadata.orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Gives the worker half the tensors of its layers."""
        self._mover.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins the loads of a step."""
        self._mover.begin_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request computes only when its load is over."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: a page is saved when all layers are computed."""

    def wait_for_save(self) -> None:
        """Begins the saves of a step."""
        self._mover.save(self._orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose transfers have ended."""
        return None, self._mover.take_finished() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, with what failed as a whole; asked since 0.32."""
        assert _TRANSFER_RESULTS is not None
        _, received = self.get_finished(finished_req_ids)
        return _TRANSFER_RESULTS(finished_recving=received or set(), failed_recving=self._mover.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks that could not be loaded."""
        return self._mover.bad_blocks

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Returns what this worker tells the scheduler."""
        mover = self._mover
        return (
            WorkerMetadata(mover.load_samples, mover.copied_pins) if mover.load_samples or mover.copied_pins else None
        )

    # ---- in both

    def get_kv_connector_stats(self) -> TransferCounts | None:
        """Returns the counts since the last call, or None."""
        now = self._planner.counts() if self._scheduler is not None else self._mover.counts()
        return None if now is None else count_changes(self._reported, now)

    def shutdown(self) -> None:
        """Ends both halves."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: Mapping[str, Any] | None = None) -> TransferCounts:
        """Returns counts that vLLM has carried here."""
        return TransferCounts(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> TransferCountsMetrics:
        """Returns what shows the counts in /metrics."""
        return TransferCountsMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
