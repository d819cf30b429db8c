"""vLLM's worker and our transfers: its tensors become a layout, its steps begin loads and make saves.

Until the tensors are known and understood there is no connector, and an engine whose tensors are not understood does
not start.
"""

import logging
from collections.abc import Mapping
from typing import Final, Protocol

import torch

from kvparams_connectors.engines.vllm.connector_metadata import ConnectorMetadata
from kvparams_connectors.engines.vllm.counters import combine_groups
from kvparams_connectors.engines.vllm.interface import KVCacheConfig, VllmConfig
from kvparams_connectors.engines.vllm.layer_groups import LayerGroup, layer_index, read_groups
from kvparams_connectors.engines.vllm.rank_geometry import RankShard, check_layer_range
from kvparams_connectors.engines.vllm.rank_shards import cpu_cache_layout, read_rank_shards
from kvparams_connectors.engines.vllm.self_test import run_self_test
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.vllm.worker_transfers import FinishedTransfers, WorkerTransfers
from kvparams_connectors.jobs import WorkerPool
from kvparams_connectors.stores.guard.store import open_guarded
from kvparams_connectors.transfer.cache_layouts import LayoutError
from kvparams_connectors.transfer.connector import KVStoreConnector
from kvparams_connectors.transfer.layout import PagedKVLayout

__all__ = ["WorkerConnector", "WorkerPlatform"]

_LOGGER: Final = logging.getLogger(__name__)


class WorkerPlatform(Protocol):
    """Describes what only vLLM knows of the process."""

    def tensor_rank(self) -> int:
        """Returns the rank of tensor parallelism."""
        ...

    def cpu_kernel(self, config: VllmConfig, block_size: int, head_size: int) -> str:
        """Returns the name of the attention kernel, on a CPU."""
        ...


class WorkerConnector:
    """Describes what the connector does in one of vLLM's workers."""

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        settings: VLLMSettings,
        platform: WorkerPlatform,
        *,
        tells_failures: bool = True,
        verifies: bool = True,
    ) -> None:
        """Opens the store; `register` takes the tensors.

        Args:
            config: vLLM's configuration.
            cache: vLLM's description of the KV cache.
            settings: the connector's settings.
            platform: what vLLM says about this worker.
            tells_failures: whether vLLM can be told that a load has failed as a whole; see `read_groups`.
            verifies: False uses whatever the store gives back.

        Raises:
            LayoutError: this engine's KV cannot be shared.
            StoreError: the store cannot be opened, or a setting is wrong.
        """
        self._config, self._settings, self._platform = config, settings, platform
        self._verifies: Final = verifies
        self._groups: Final = read_groups(
            config, cache, page_tokens=settings.page_tokens, tells_failures=tells_failures
        )
        self._shares: Final = read_rank_shards(config, self._groups, settings, tensor_rank=platform.tensor_rank())
        self._seals: Final = settings.read_seals()
        self._store: Final = open_guarded(settings.store)
        self._connectors: list[KVStoreConnector] = []
        """By group of layers."""
        self._transfers: WorkerTransfers | None = None
        self._aside: WorkerPool | None = None
        self._last = FinishedTransfers()
        self._before: dict[str, int] = {}
        self._told = 0

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's `register_kv_caches`.

        Raises:
            LayoutError: the tensors are not understood, or the self-test failed.
        """
        names = [name for group in self._groups for name in group.names]
        layers = self._config.model_config.get_total_num_hidden_layers()
        check_layer_range([layer_index(name) for name in names], layers)
        strange = sorted(set(caches) - set(names))
        if strange:
            raise LayoutError(f"vLLM has caches outside its groups of layers: {', '.join(strange)}")
        settings = self._settings
        # Groups lie in the same memory, so each self-test is over before the next begins.
        made = [self._register(group, share, caches) for group, share in zip(self._groups, self._shares, strict=True)]
        self._connectors = made
        self._before = combine_groups(one.stats() for one in made)  # the self-tests are nobody's traffic
        if next(iter(caches.values())).device.type == "cpu":
            self._aside = WorkerPool("kvparams-copy")
        self._transfers = WorkerTransfers(
            made,
            self._groups[0].spec.block_size,
            aside=self._aside,
            patience_s=settings.deadline_s,
            all_or_nothing=any(group.window is not None for group in self._groups) or len(self._groups) > 1,
        )
        _LOGGER.info(
            "KV is shared in pages of %d tokens, %s", settings.page_tokens, [share.shard for share in self._shares]
        )

    def _register(self, group: LayerGroup, share: RankShard, caches: Mapping[str, torch.Tensor]) -> KVStoreConnector:
        """A group's way to the store; see `register`."""
        settings, spec = self._settings, group.spec
        tensors = [caches[name] for name in sorted(group.names, key=layer_index)]
        if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
            raise LayoutError("layers of this model share a cache, which is not supported; turn the store off")
        form = None
        if tensors[0].device.type == "cpu":
            form = cpu_cache_layout(self._platform.cpu_kernel(self._config, spec.block_size, spec.k_dim))
        layout = PagedKVLayout.from_engine(tensors, spec, form=form, rectangle=share.shard)
        page_bytes = layout.payload_bytes(settings.page_tokens)
        connector = KVStoreConnector(
            self._store,
            share.namespace,
            layout,
            settings.connector(share.grid, page_bytes, groups=len(self._groups), verifies=self._verifies),
            seals=self._seals,
        )
        run_self_test(
            connector,
            self._store,
            tensors,
            page_tokens=settings.page_tokens,
            block_size=spec.block_size,
            deadline_s=settings.deadline_s,
        )
        return connector

    def begin_loads(self, orders: ConnectorMetadata) -> None:
        """vLLM's `start_load_kv`."""
        if orders.loads:
            self._ready().begin(orders)

    def save(self, orders: ConnectorMetadata) -> None:
        """vLLM's `wait_for_save`: when it returns, the blocks may be used again but for those that are kept."""
        if orders.saves:
            self._ready().save(orders)

    def take_finished(self) -> set[str]:
        """Returns the requests whose loads have ended.

        `bad_blocks`, `load_samples` and `copied_pins` then have the details.
        """
        self._last = FinishedTransfers() if self._transfers is None else self._transfers.finished()
        return self._last.request_ids

    @property
    def bad_blocks(self) -> set[int]:
        """Returns the bad blocks of the requests that `take_finished` named last."""
        return self._last.bad_blocks

    @property
    def failed(self) -> set[str]:
        """Returns the requests that `take_finished` named last and that loaded nothing."""
        return self._last.failed

    @property
    def load_samples(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the loads that `take_finished` named last."""
        return self._last.loads

    @property
    def copied_pins(self) -> list[int]:
        """Save orders that have ended when `take_finished` was asked last."""
        return self._last.copied

    def counts(self) -> dict[str, int] | None:
        """Counters of the connectors and of the transfers, since the start; None: nothing has changed since."""
        if self._transfers is None:
            return None
        ended = self._transfers.ended()  # before the counters are read: what ends now is counted the next time
        if ended == self._told:
            return None
        self._told = ended
        now = combine_groups(one.stats() for one in self._connectors)
        ours = {name: count - self._before.get(name, 0) for name, count in now.items()}
        return {**ours, **self._transfers.counts}

    def shutdown(self) -> None:
        """Wait, within bounds, for what is under way, and let go of the store."""
        if self._aside is not None:
            self._aside.close()
        for connector in self._connectors:
            connector.close()
        self._store.close()

    def _ready(self) -> WorkerTransfers:
        if self._transfers is None:
            raise RuntimeError("vLLM ordered a transfer before it registered its KV cache")
        return self._transfers
