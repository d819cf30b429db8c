"""Provides a real broker for all tests here, pools of queues in it, and engines that follow a script."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop

from demo.processes import Processes
from kvparams_proxy.queue.consumer import WorkConsumer
from kvparams_proxy.queue.queue_upstream import QueueUpstream
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.proxy.fixtures import Script, Scripted
from tests.system.queue.rabbitmq import RabbitMQ


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the nodes run on in production."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """One for the session: it takes seconds to start. Tests leave it running."""
    with RabbitMQ(tmp_path_factory.mktemp("rabbitmq")) as found:
        yield found


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[RabbitMQ]:
    """One that the test may stop, kill and start again."""
    with RabbitMQ(tmp_path / "rabbitmq") as found:
        yield found


@pytest.fixture(scope="session")
def names() -> Iterator[str]:
    """Names of pools, never the same twice."""
    return (f"pool{number}" for number in count())


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one engine that does all the work alone."""
    with Processes(tmp_path_factory.mktemp("single")) as processes:
        server = processes.engine("single")
        processes.wait_ready(server)
        yield server.url


class Nodes:
    """Prefill and decode nodes of one pool, in this process."""

    def __init__(self, broker: RabbitMQ, name: str, stack: AsyncExitStack) -> None:
        self.broker = broker
        self.name = name
        self._url = Secret(broker.url)
        self._stack = stack

    def prefill(self, wait_s: float = 20.0) -> QueueUpstream:
        """A prefill node's way to the decode nodes."""
        way = QueueUpstream(self._url, name=self.name, wait_s=wait_s)
        self._stack.callback(way.close)
        return way

    def consumer(self, engine: str, room: int = 16, silence_s: float = 30.0) -> WorkConsumer:
        """A decode node beside the engine at this URL."""
        pool = UpstreamConnectionPool(engine, UpstreamLimits())
        self._stack.callback(pool.close)
        return WorkConsumer(self._url, pool, name=self.name, room=room, silence_s=silence_s, probe_s=0.2, leave_s=0.2)

    async def decode(self, script: Script, room: int = 16, silence_s: float = 30.0) -> "Decode":
        """One whose engine does as `script` says."""
        engine = Scripted(script)
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        engine.port = server.sockets[0].getsockname()[1]
        self._stack.callback(server.close)
        consumer = await self._stack.enter_async_context(self.consumer(engine.url, room, silence_s))
        return Decode(engine, consumer, server)


class Decode(NamedTuple):
    """A decode node and its engine."""

    engine: Scripted
    consumer: WorkConsumer
    server: asyncio.Server


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def nodes(shared_broker: RabbitMQ, names: Iterator[str], stack: AsyncExitStack) -> Nodes:
    return Nodes(shared_broker, next(names), stack)
