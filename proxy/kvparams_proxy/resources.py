"""What all executions of a proxy share; made when the app starts, and passed on."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvparams.dialects import Dialect
from kvparams.retries import RetryBudget
from kvparams_proxy.fleet import Fleet
from kvparams_proxy.ledger import Ledger
from kvparams_proxy.metrics import Metrics
from kvparams_proxy.pools import Pools
from kvparams_proxy.privacy import Addresses
from kvparams_proxy.releases import Releases
from kvparams_proxy.settings import Settings
from kvparams_proxy.tracing import Tracer
from kvparams_proxy.watch import Watch

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
    watch: Watch
    retries: RetryBudget
    releases: Releases
    addresses: Addresses
    tracer: Tracer | None = None
    """Without one the client's trace context passes through untouched."""
