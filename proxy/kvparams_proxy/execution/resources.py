"""The resources that all executions of a proxy share. The app makes them when it starts, and passes them on."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvparams.dialects.interface import Dialect
from kvparams.instances import Role
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams.routing.retries import RetryBudget
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.event_loop.clock import Clock
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.event_loop.step_runner import StepRunner
from kvparams_proxy.event_loop.turn_batcher import TurnBatcher
from kvparams_proxy.execution.decode_picker import DecodePicker
from kvparams_proxy.execution.encoding_log import EncodingLog
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.kv_releaser import KVReleaser
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.response_ids import ResponseIds
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.record_dispatcher import RecordDispatcher
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.telemetry.tracing import Tracer
from kvparams_proxy.tokenization.service import TokenService

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["ExecutionResources", "RunningExecution"]


class RunningExecution(Protocol):
    """An execution that has not ended."""

    @property
    def record(self) -> RequestRecord:
        """Returns its record, which is still being written."""
        ...

    def abort_for_shutdown(self) -> None:
        """Ends the request because the proxy shuts down."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutionResources:
    """The resources that executions share."""

    loop: asyncio.AbstractEventLoop
    fleet: Fleet
    dialects: Mapping[str, Dialect]
    pools: UpstreamPools
    metrics: Metrics
    record_dispatcher: RecordDispatcher
    """Where every request that is over is told; `metrics` reads it too."""
    settings: Settings
    new_id: Callable[[], str]
    """Makes a transfer id, never the same twice."""
    start_batcher: TurnBatcher
    """Where requests that have come begin to be executed ..."""
    response_batchers: Mapping[Role, TurnBatcher]
    """... and where they go on with the answers of engines of that role."""
    running_executions: set[RunningExecution]
    """The executions that have not ended."""
    step_runner: StepRunner
    """Does long work, such as reading a long body, a little in each turn of the event loop."""
    clock: Clock
    """What time-outs of engines are measured by."""
    deadlines: Deadlines
    retry_budget: RetryBudget
    kv_releaser: KVReleaser
    engine_addresses: EngineAddresses
    handoff_verifier: HandoffVerifier
    response_ids: ResponseIds
    """Makes the ids of responses that engines store."""
    encoding_log: EncodingLog
    decode_picker: DecodePicker | None = None
    """Who chooses decode instances, where that is not the fleet's policy."""
    token_service: TokenService | None = None
    """Without one nobody looks for token ids that the client did not send."""
    tracer: Tracer | None = None
    """Without one the client's trace context passes through untouched."""
    prefix_cache: "PrefixCacheModel | None" = None
    """What prefill engines are believed to have cached, where the policy looks at it: the fleet's."""
