"""vLLM's worker and our transfers: its tensors become a layout, its steps begin loads and make saves.

The one rule: until the tensors are known and understood there is no connector, and an engine whose tensors are not
understood does not start.
"""

import logging
from collections.abc import Mapping
from typing import Final, Protocol

import torch

from kvparams_connectors.connector import KVStoreConnector
from kvparams_connectors.engines.vllm.engine import cache_group, cpu_form, group_spec, layer_index, read_share
from kvparams_connectors.engines.vllm.geometry import layer_range
from kvparams_connectors.engines.vllm.interface import CacheConfig, EngineConfig
from kvparams_connectors.engines.vllm.orders import StepOrders
from kvparams_connectors.engines.vllm.selftest import run_self_test
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.vllm.tally import flat
from kvparams_connectors.engines.vllm.transfers import Finished, Transfers
from kvparams_connectors.jobs import Lane
from kvparams_connectors.layout import PagedKVLayout
from kvparams_connectors.layout_forms import LayoutError
from kvparams_connectors.seal_keys import read_seal_keys
from kvparams_connectors.stores.guard.store import open_guarded

__all__ = ["Platform", "WorkerHalf"]

_LOGGER: Final = logging.getLogger(__name__)


class Platform(Protocol):
    """What only vLLM knows of the process."""

    def tensor_rank(self) -> int: ...
    def cpu_kernel(self, config: EngineConfig, block_size: int, head_size: int) -> str: ...


class WorkerHalf:
    """What the connector does in one of vLLM's workers."""

    def __init__(self, config: EngineConfig, cache: CacheConfig, settings: VLLMSettings, platform: Platform) -> None:
        """Raises LayoutError or StoreError if this engine cannot share its KV."""
        self._config, self._cache, self._settings, self._platform = config, cache, settings, platform
        self._share: Final = read_share(config, cache, settings, tensor_rank=platform.tensor_rank())
        self._seals: Final = None if settings.seal_keys is None else read_seal_keys(settings.seal_keys)
        self._store: Final = open_guarded(settings.store)
        self._connector: KVStoreConnector | None = None
        self._transfers: Transfers | None = None
        self._aside: Lane | None = None
        self._last = Finished()
        self._before: dict[str, int] = {}
        self._told = False

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's `register_kv_caches`.

        Raises:
            LayoutError: the tensors are not understood, or the self-test failed.
        """
        settings, share = self._settings, self._share
        group = cache_group(self._cache)
        spec = group_spec(self._config, group)
        names = sorted(group.layer_names, key=layer_index)
        layer_range([layer_index(name) for name in names], share.namespace.geometry.layers)
        strange = sorted(set(caches) - set(names))
        if strange:
            raise LayoutError(f"vLLM has caches that no group of layers names: {', '.join(strange)}")
        tensors = [caches[name] for name in names]
        if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
            raise LayoutError("layers of this model share their cache, which is not known here; switch the store off")
        form = None
        if tensors[0].device.type == "cpu":
            form = cpu_form(self._platform.cpu_kernel(self._config, spec.block_size, spec.k_dim))
        layout = PagedKVLayout.from_engine(tensors, spec, form=form, rectangle=share.rectangle)
        page_bytes = layout.payload_bytes(settings.page_tokens)
        connector = KVStoreConnector(
            self._store, share.namespace, layout, settings.connector(share.grid, page_bytes), seals=self._seals
        )
        if settings.self_test:
            run_self_test(
                connector,
                self._store,
                tensors,
                page_tokens=settings.page_tokens,
                block_size=spec.block_size,
                deadline_s=settings.deadline_s,
            )
        self._before = flat(connector.stats())  # the self-test is nobody's traffic
        self._connector = connector
        if layout.device.type == "cpu":
            self._aside = Lane("kvparams-copy")
        self._transfers = Transfers(connector, spec.block_size, aside=self._aside, patience_s=settings.deadline_s)
        _LOGGER.info("KV is shared in pages of %d tokens, %s", settings.page_tokens, share.rectangle)

    def begin_loads(self, orders: StepOrders) -> None:
        """vLLM's `start_load_kv`."""
        if orders.loads:
            self._ready().begin(orders)

    def save(self, orders: StepOrders) -> None:
        """vLLM's `wait_for_save`: when it returns, the blocks may be used again but for those that are kept."""
        if orders.saves:
            self._ready().save(orders)

    def finished(self) -> set[str]:
        """Requests whose loads have ended; `bad_blocks`, `measured` and `copied` then say more of what has ended."""
        self._last = Finished() if self._transfers is None else self._transfers.finished()
        return self._last.request_ids

    @property
    def bad_blocks(self) -> set[int]:
        """Of the requests that `finished` named last."""
        return self._last.bad_blocks

    @property
    def measured(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the loads that `finished` named last."""
        return self._last.loads

    @property
    def copied(self) -> list[int]:
        """Save orders that have ended when `finished` was asked last."""
        return self._last.copied

    def counts(self) -> dict[str, int] | None:
        """Counters of the connector and of the transfers, since the start; None: nothing has changed since."""
        if self._connector is None or self._transfers is None:
            return None
        idle = self._transfers.idle  # before the counters are read: what ends now is counted the next time
        if idle and self._told:
            return None
        self._told = idle
        now = flat(self._connector.stats())
        ours = {name: count - self._before.get(name, 0) for name, count in now.items()}
        return {**ours, **self._transfers.counts}

    def shutdown(self) -> None:
        """Wait, within bounds, for what is under way, and let go of the store."""
        if self._aside is not None:
            self._aside.close()
        if self._connector is not None:
            self._connector.close()
        self._store.close()

    def _ready(self) -> Transfers:
        if self._transfers is None:
            raise RuntimeError("vLLM ordered a transfer before it said where its KV cache is")
        return self._transfers
