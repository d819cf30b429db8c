"""A connector for vLLM that does nothing: what having any connector costs, beside what ours costs.

vLLM loads `NullConnector` by its module path.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # vLLM's own classes, as far as they matter here

    class KVConnectorBase_V1:
        """vllm/distributed/kv_transfer/kv_connector/v1/base.py."""

    class SupportsHMA:
        """Stands for the class of the same file."""

    class KVConnectorMetadata:
        """Stands for the class of the same file."""

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

__all__ = ["NullConnector"]


class _Nothing(KVConnectorMetadata):
    """A `_Nothing` carries no orders."""


class NullConnector(KVConnectorBase_V1, SupportsHMA):
    """Every hook that must be there, empty."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> _Nothing:
        return _Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None
