"""Replaces the randomness of ids, a clock and two measures in the proxy for a simulation, and no decision.

`prepare` is called once, in a process that only simulates.
"""

import asyncio
import functools
import itertools
import logging
import sys
from pathlib import Path
from random import Random
from typing import Any, cast

from kvparams import plugins
from kvparams.routing.retries import RetryBudget
from kvparams_proxy.event_loop import step_runner
from kvparams_proxy.execution import kv_releaser as proxy_releases
from kvparams_proxy.fleet import prefix_cache_model as proxy_prefixes
from kvparams_proxy.fleet import queue_depth_reader as proxy_depths
from kvparams_proxy.queue import broker_connection as proxy_link
from kvparams_proxy.requests import downstream as proxy_downstream
from kvparams_proxy.server import lifespan
from kvparams_proxy.telemetry import request_log as proxy_journal
from kvparams_proxy.upstream import connection_pool as proxy_pool
from kvparams_proxy.upstream.connection import UpstreamConnection
from tests.support.virtual_loop import VirtualLoop

__all__ = ["Budget", "Lines", "Numbers", "prepare"]


class Numbers:
    """Numbers in place of random ids and of addresses in memory: a run has the same ones whatever ran before it."""

    ids = itertools.count()
    connections = itertools.count()

    @classmethod
    def restart(cls) -> None:
        """Begins again, before each run."""
        cls.ids = itertools.count()
        cls.connections = itertools.count()


class Budget(RetryBudget):
    """With the reserve of the scenario."""

    reserve = 200.0
    """Set before each run."""

    def __init__(self) -> None:
        super().__init__(most=Budget.reserve)


class Lines:
    """The request log, without a thread."""

    dropped = 0

    def __init__(self, place: str, lock: Path | None = None) -> None:
        self.place = place
        self.text = ""
        self.closed = False

    def put(self, data: bytes, lines: int) -> None:
        """See `kvparams_proxy.telemetry.line_writer.LineWriter`."""
        self.text += data.decode()

    def close(self, timeout_s: float) -> None:
        """See `kvparams_proxy.telemetry.line_writer.LineWriter`."""
        self.closed = True


class _Numbered(UpstreamConnection):
    """Connections in a set come in the order they were made: two runs are alike."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._number = next(Numbers.connections)

    def __hash__(self) -> int:
        return self._number

    @property
    def busy(self) -> bool:
        """Whether something that comes now is taken for an answer."""
        return self not in cast("Any", self._pool)._idle


class _Listening(logging.Handler):
    """What the proxy logs as its own fault."""

    def emit(self, record: logging.LogRecord) -> None:
        loop = asyncio._get_running_loop()
        error = record.exc_info[1] if record.exc_info else None
        others = (
            "ASGI callable returned without",  # starting or completing: ASGI has no other way to drop a slow client
            "the engine's app failed",
        )
        if isinstance(loop, VirtualLoop) and not record.msg.startswith(others):
            loop.call_exception_handler({"message": f"log: {record.getMessage()}", "exception": error})


class _AioPika:
    """The library: of it our code uses `connect`, and what that returns."""

    @staticmethod
    async def connect(url: str, *, heartbeat: int) -> object:
        """To the broker of this run."""
        return await cast("Any", asyncio.get_running_loop()).broker.connect(url, heartbeat=heartbeat)


def prepare() -> None:
    """Make this process one that only simulates: ids in order, plugins found once, faults heard."""
    plugins.load_plugin = functools.cache(plugins.load_plugin)
    plugins.load_each_plugin = functools.cache(plugins.load_each_plugin)
    plugins.plugin_names = functools.cache(plugins.plugin_names)

    def next_id(_size: int) -> str:
        return f"{next(Numbers.ids):x}"

    for name, module in list(sys.modules.items()):
        if name.startswith("kvparams_proxy") and hasattr(module, "token_hex"):
            cast("Any", module).token_hex = next_id
    cast("Any", lifespan).RetryBudget = Budget
    cast("Any", step_runner).perf_counter = lambda: asyncio.get_running_loop().time()  # a busy machine changes no run
    cast("Any", proxy_releases)._TIMEOUT_S = 1.0
    cast("Any", proxy_downstream).HIGH_WATERMARK_BYTES = 400
    cast("Any", proxy_journal).LineWriter = Lines
    cast("Any", proxy_pool).UpstreamConnection = _Numbered
    cast("Any", proxy_link).aio_pika = _AioPika
    cast("Any", proxy_link).random = lambda: cast("Any", asyncio.get_running_loop()).broker.random()
    cast("Any", proxy_depths).Random = lambda: Random(0)
    cast("Any", proxy_prefixes).PrefixCacheModel.__init__.__defaults__ = (2,)  # prompts are short here
    for name in ("kvparams_proxy", "asyncio"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.addHandler(_Listening())
        logger.propagate = False
