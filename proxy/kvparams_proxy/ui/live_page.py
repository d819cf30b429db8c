"""Puts the parts of the live page together in one process of the proxy."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import cast

from kvparams.version import __version__
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.telemetry.recent_requests import RecentRequests
from kvparams_proxy.ui.snapshot_feed import SnapshotFeed
from kvparams_proxy.ui.worker_facts import WorkerSources, collect_part
from kvparams_proxy.workers.worker_link import WorkerLink

__all__ = ["open_live_page"]

_Parts = Iterable[Mapping[str, object]]


def open_live_page(
    stack: AsyncExitStack,
    resources: ExecutionResources,
    modes: ActiveModes,
    requests: RecentRequests | None,
    sync: FleetSync | None,
    worker: WorkerLink | None,
) -> SnapshotFeed | None:
    """Opens the feed of the snapshots of this proxy: of all its workers, where there are several.

    Args:
        stack: closes it.
        resources: what executions share.
        modes: the active modes.
        requests: the last ones that have ended; None where there is no token, and so nobody who may look.
        sync: tells other proxies, where there are any.
        worker: connects this process to its supervisor, where it is one of several workers.

    Returns:
        None where nobody may look.
    """
    if requests is None:
        return None
    number = 0 if worker is None else worker.identity.number
    feed = _open_feed(resources.loop, WorkerSources(resources, modes, requests, sync, number), worker)
    stack.push_async_callback(feed.close)
    return feed


def _open_feed(loop: asyncio.AbstractEventLoop, sources: WorkerSources, worker: WorkerLink | None) -> SnapshotFeed:
    async def collect_own() -> _Parts:
        # It is made when the feed asks for the first one, whose time counts.
        return (cast("Mapping[str, object]", collect_part(sources)) for _ in range(1))

    if worker is None:
        return SnapshotFeed(loop, __version__, collect_own)
    worker.attach_part(lambda: json.dumps(collect_part(sources), separators=(",", ":")).encode())
    collect_all = worker.collect_parts

    async def collect() -> _Parts:
        return (json.loads(line) for line in await collect_all())

    return SnapshotFeed(loop, __version__, collect)
