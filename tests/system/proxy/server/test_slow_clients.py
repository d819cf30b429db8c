"""Tests how long the proxy waits for a client that does not take its answer, on a virtual clock."""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvparams_proxy.server.connections import ClientConnections, ConnectionLimits
from kvparams_proxy.server.http_protocol import HTTPProtocol, ServerContext
from tests.support.virtual_loop import VirtualLoop
from tests.system.simulation.network import Network, Socket

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
LAST = b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Client:
    """The client's end of the connection."""

    def __init__(self) -> None:
        self.text = b""
        self.is_closed = False

    def received(self, data: bytes) -> None:
        assert not self.is_closed, data
        self.text += data

    def closed(self) -> None:
        self.is_closed = True


class Edge(NamedTuple):
    """A server with one connection."""

    loop: VirtualLoop
    socket: Socket
    client: Client
    connections: ClientConnections

    def run_for(self, seconds: float) -> None:
        self.loop.run_until(self.loop.time() + seconds)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with 100 bytes once the body has come."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
    await send({"type": "http.response.body", "body": b"x" * 100})


@pytest.fixture
def edge() -> Iterator[Edge]:
    loop, client = VirtualLoop(), Client()
    asyncio._set_running_loop(loop)
    connections = ClientConnections(loop, ConnectionLimits(10))
    context = ServerContext(loop, app, {}, {}, connections, lambda error: None)
    socket = Network(loop, lambda: 0.0).open(HTTPProtocol(context), client)
    socket.high_water = 0
    yield Edge(loop, socket, client, connections)
    socket.abort()
    loop.run_until(loop.time() + 2.0)
    asyncio._set_running_loop(None)
    assert loop.faults == []
    assert not connections.tasks


@pytest.mark.parametrize("takes", [True, False])
def test_an_app_does_not_wait_for_ever_for_a_client_that_stopped_before_its_body_was_whole(
    edge: Edge, takes: bool
) -> None:
    """The transport pauses once, at the interim response. No later call tells that the client is still slow."""
    edge.socket.stop_taking()
    edge.socket.arrive(HEAD + b"expect: 100-continue\r\n\r\n")
    edge.run_for(1.0)
    edge.socket.arrive(b"{}")
    edge.run_for(50.0)
    assert not edge.client.is_closed
    assert len(edge.connections.tasks) == 1, "the app waits"
    if takes:
        edge.socket.take()
    edge.run_for(15.0)
    assert edge.client.is_closed is not takes
    assert edge.connections.expired_count == (0 if takes else 1)
    assert edge.client.text.endswith(b"x" * 100) is takes
    assert not edge.connections.tasks


@pytest.mark.parametrize("behind", [b"", LAST])
@pytest.mark.parametrize("takes", [True, False])
def test_a_slow_client_has_as_long_for_its_last_answer_whatever_it_has_sent_behind(
    edge: Edge, behind: bytes, takes: bool
) -> None:
    edge.socket.stop_taking()
    edge.socket.arrive(LAST + behind)
    edge.run_for(50.0)
    assert not edge.client.is_closed
    if takes:
        edge.socket.take()
    edge.run_for(15.0)
    assert edge.client.is_closed
    assert edge.client.text.endswith(b"x" * 100) is takes


def test_a_client_that_has_its_last_answer_may_stay_for_a_moment_only(edge: Edge) -> None:
    edge.socket.arrive(LAST + LAST)
    edge.run_for(0.0)
    assert edge.client.is_closed
    assert edge.client.text.endswith(b"x" * 100)
    assert len(edge.connections) == 1, "it may still read"
    edge.run_for(4.0)
    assert len(edge.connections) == 0
