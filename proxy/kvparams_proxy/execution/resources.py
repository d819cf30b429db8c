"""What all executions of a proxy share; made when the app starts, and passed on."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvparams.dialects import Dialect
from kvparams.retries import RetryBudget
from kvparams.scheduling import Role
from kvparams.trust.pinning import Pins
from kvparams_proxy.execution.privacy import Addresses
from kvparams_proxy.execution.releases import Releases
from kvparams_proxy.execution.watch import Watch
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.loopclock import Clock
from kvparams_proxy.settings import Settings
from kvparams_proxy.steprunner import StepRunner
from kvparams_proxy.telemetry.ledger import Ledger
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.tracing import Tracer
from kvparams_proxy.together import Together
from kvparams_proxy.tokens.service import TokenService
from kvparams_proxy.upstream.pools import Pools

if TYPE_CHECKING:
    from kvparams_proxy.execution.executor import Execution
    from kvparams_proxy.fleet.prefixes import Prefixes

__all__ = ["Resources"]


@dataclass(frozen=True, slots=True)
class Resources:
    """What executions share."""

    loop: asyncio.AbstractEventLoop
    fleet: Fleet
    dialects: Mapping[str, Dialect]
    pools: Pools
    metrics: Metrics
    ledger: Ledger
    """Where every request that is over is told; `metrics` reads it too."""
    settings: Settings
    new_id: Callable[[], str]
    """Makes a transfer id, never the same twice."""
    asked: Together
    """Where requests that have come begin to be executed ..."""
    answered: Mapping[Role, Together]
    """... and where they go on with the answers of engines of that role."""
    running: "set[Execution]"
    """The executions that have not ended."""
    steps: StepRunner
    """Does long work, such as reading a long body, a little in each turn of the event loop."""
    clock: Clock
    """What time-outs of engines are measured by."""
    watch: Watch
    retries: RetryBudget
    releases: Releases
    addresses: Addresses
    pins: Pins
    tokens: TokenService | None = None
    """Without one nobody looks for token ids that the client did not send."""
    tracer: Tracer | None = None
    """Without one the client's trace context passes through untouched."""
    prefixes: "Prefixes | None" = None
    """What prefill engines are believed to have cached, where the policy looks at it: the fleet's."""
