"""Provides a KVParamsTier without verification, the control of tests that damage stored chunks."""

from typing import ClassVar

from kvparams_connectors.engines.vllm_tier import tier


class KVParamsTier(tier.KVParamsTier):
    """Uses whatever the store gives back."""

    verifies: ClassVar[bool] = False
