"""Provides a KVParamsConnector without verification: it uses whatever the store gives back.

The demo damages stored pages and asks an engine with this connector too, to show what verification is good for.
"""

from typing import ClassVar

from kvparams_connectors.engines.vllm import connector

__all__ = ["KVParamsConnector"]


class KVParamsConnector(connector.KVParamsConnector):
    """Uses whatever the store gives back."""

    verifies: ClassVar[bool] = False
