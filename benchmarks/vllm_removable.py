"""Our connector, which can be taken out of a vLLM that runs, and put back: what it costs, in one process.

Two engines that are alike differ by some percent, as their memory lies; one engine with its connector and without it
does not. vLLM loads `RemovableConnector` by its module path. It is taken out and put back only while the engine has
nothing to do.
"""

import inspect
import signal
import sys
from typing import Any

from kvparams_connectors.engines.vllm.connector import KVParamsConnector

__all__ = ["RemovableConnector"]


class RemovableConnector(KVParamsConnector):
    """Wraps the connector; SIGUSR1 takes it out, SIGUSR2 puts it back.

    vLLM holds it in two places, one for each half (vllm/v1/core/sched/scheduler.py and
    vllm/distributed/kv_transfer/kv_transfer_state.py, 0.32).
    """

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        scheduler = frame.f_back.f_locals["self"]  # vLLM's `Scheduler`, in the middle of being made
        state = sys.modules["vllm.distributed.kv_transfer.kv_transfer_state"]
        workers: list[Any] = []

        def take_out(*_: object) -> None:
            scheduler.connector = None
            workers.append(vars(state)["_KV_CONNECTOR_AGENT"])
            vars(state)["_KV_CONNECTOR_AGENT"] = None

        def put_back(*_: object) -> None:
            scheduler.connector = self
            vars(state)["_KV_CONNECTOR_AGENT"] = workers.pop()

        signal.signal(signal.SIGUSR1, take_out)
        signal.signal(signal.SIGUSR2, put_back)
