"""Names the device and the event of vLLM's two Mooncake connectors where there is no GPU.

Both connectors ask CUDA for a device number or an event, and use neither with host memory. All other code is the
connectors' own, as vLLM 0.32.0 has it.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as store_connector

__all__ = ["MooncakeConnector", "MooncakeStoreConnector"]


class _Event:
    """Of work that is done when the call returns, as all work of a CPU is."""

    def record(self, stream: object = None) -> None:
        """Done."""

    def synchronize(self) -> None:
        """Done."""

    def query(self) -> bool:
        """Done."""
        return True


@contextmanager
def _answered() -> Generator[None]:
    with patch("torch.accelerator.current_device_index", lambda: 0), patch.object(torch.cuda, "Event", _Event):
        yield


class MooncakeConnector(mooncake_connector.MooncakeConnector):
    """Asks for its device when it is made."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with _answered():
            super().__init__(vllm_config, role, kv_cache_config)


class MooncakeStoreConnector(store_connector.MooncakeStoreConnector):
    """Makes an event for each step that saves."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        with _answered():
            super().__init__(vllm_config, role, kv_cache_config)

    def wait_for_save(self) -> None:
        """Its own, with an event that needs no GPU."""
        with _answered():
            super().wait_for_save()
