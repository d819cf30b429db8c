"""Puts the proxy around vLLM's app, on prefill's side: `vllm serve --middleware tests.interop.vllm.beside.Beside`."""

import os
from typing import Final

from starlette.types import ASGIApp

from kvparams.instances import Instance, Role
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.sidecar.middleware import DisaggregatedServerMixin

__all__ = ["REMOTE", "Beside"]

REMOTE: Final = "KVPARAMS_TEST_DECODE"
"""The environment variable with the decode engine's URL: vLLM gives a middleware nothing but the app."""


class Beside(DisaggregatedServerMixin):
    """See the module."""

    def __init__(self, app: ASGIApp) -> None:
        here = Instance("S", "1", Role.PREFILL, "http://127.0.0.1:9", "nixl")
        there = Instance("D", "1", Role.DECODE, os.environ[REMOTE], "nixl")
        super().__init__(app, Settings((here, there), local_id=here.id, log_requests="off"))
