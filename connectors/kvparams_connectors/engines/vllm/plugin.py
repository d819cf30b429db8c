"""Registered under the entry point group `vllm.general_plugins`: makes `"kv_connector": "KVParamsConnector"` enough.

vLLM calls it in every process, some of them more than once. It imports nothing heavy, and a second call changes
nothing.
"""

from importlib import import_module
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Tell vLLM where the connector is."""
    factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    try:
        factory.register_connector(
            "KVParamsConnector", "kvparams_connectors.engines.vllm.connector", "KVParamsConnector"
        )
    except ValueError:  # it was told before
        return
