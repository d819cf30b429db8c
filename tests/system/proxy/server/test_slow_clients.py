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
    network: Network
    context: ServerContext
    socket: Socket
    client: Client
    connections: ClientConnections

    def connect(self) -> tuple[Socket, Client]:
        client = Client()
        return self.network.open(HTTPProtocol(self.context), client), client

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
    loop = VirtualLoop()
    asyncio._set_running_loop(loop)
    connections = ClientConnections(loop, ConnectionLimits(1))
    context = ServerContext(loop, app, {}, {}, connections, lambda error: None)
    network, client = Network(loop, lambda: 0.0), Client()
    socket = network.open(HTTPProtocol(context), client)
    socket.high_water = 0
    yield Edge(loop, network, context, socket, client, connections)
    connections.abort()
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


def test_a_client_that_has_not_taken_its_answer_does_not_make_room(edge: Edge) -> None:
    """Its answer is below the transport's high-water mark, so that its connection counts as idle."""
    edge.socket.high_water = 1 << 16
    edge.socket.stop_taking()
    edge.socket.arrive(HEAD + b"\r\n{}")
    edge.run_for(1.0)
    refused = edge.connect()[1]
    edge.run_for(1.0)
    assert refused.text.startswith(b"HTTP/1.1 503 ")
    edge.socket.take()
    edge.run_for(1.0)
    assert edge.client.text.endswith(b"x" * 100)
    assert not edge.client.is_closed
    socket, served = edge.connect()
    edge.run_for(0.0)
    assert edge.client.is_closed, "the control: it makes room now"
    socket.arrive(LAST)
    edge.run_for(1.0)
    assert served.text.endswith(b"x" * 100)


def test_a_client_that_takes_nothing_keeps_its_place_no_longer_than_an_idle_one(edge: Edge) -> None:
    edge.socket.high_water = 1 << 16
    edge.socket.stop_taking()
    edge.socket.arrive(HEAD + b"\r\n{}")
    edge.run_for(1.0)
    edge.connect()
    edge.run_for(80.0)
    assert len(edge.connections) == 0
    assert edge.client.is_closed
