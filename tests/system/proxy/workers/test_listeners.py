"""Tests which worker gets a connection, and that none is lost in the queue of a worker that exits."""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvparams_proxy.workers.listeners import WorkerListeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has groups of listening sockets")
CONNECTIONS = 96


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listening(stack: ExitStack, workers: int, port: int = 0) -> WorkerListeners:
    return stack.enter_context(WorkerListeners.open("127.0.0.1", port, workers, 128))


def connect(stack: ExitStack, port: int, number: int = CONNECTIONS) -> None:
    for _ in range(number):
        stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))


def accepted(stack: ExitStack, listener: socket.socket) -> int:
    """Accepts all connections that wait; their number."""
    listener.setblocking(False)
    number = 0
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return number
        stack.enter_context(connection)
        number += 1


def test_connections_go_to_all_workers(stack: ExitStack) -> None:
    listeners = listening(stack, 4)
    connect(stack, listeners.port)
    found = [accepted(stack, listeners[number]) for number in (1, 2, 3, 4)]
    assert sum(found) == CONNECTIONS
    assert min(found) > CONNECTIONS // 16, found  # a chance of one in a million otherwise


@pytest.mark.parametrize("up", [(1,), (2, 4), (1, 3, 4)])
def test_connections_go_only_to_workers_that_are_up(stack: ExitStack, up: tuple[int, ...]) -> None:
    listeners = listening(stack, 4)
    listeners.steer(up)
    connect(stack, listeners.port)
    found = {number: accepted(stack, listeners[number]) for number in (1, 2, 3, 4)}
    assert sum(found.values()) == CONNECTIONS
    assert {number for number, connections in found.items() if connections} == set(up), found
    listeners.steer(())  # nobody is up: they wait everywhere
    connect(stack, listeners.port)
    assert all(accepted(stack, listeners[number]) for number in (1, 2, 3, 4))


def test_a_port_is_taken_by_one_proxy_alone(stack: ExitStack) -> None:
    port = listening(stack, 3).port
    for workers in (1, 2):
        with pytest.raises(OSError, match="in use"):
            listening(stack, workers, port)


def test_a_group_alone_would_admit_another_proxy(stack: ExitStack) -> None:
    """The control: two proxies that only share the port would each get a part of the requests."""
    first = stack.enter_context(socket.create_server(("127.0.0.1", 0), reuse_port=True))
    stack.enter_context(socket.create_server(first.getsockname(), reuse_port=True))


def test_connections_wait_for_the_successor_of_a_worker(stack: ExitStack) -> None:
    """A worker's copy of the socket is closed while connections wait for it."""
    listeners = listening(stack, 2)
    copy = listeners[1].dup()
    listeners.steer((1,))
    connect(stack, listeners.port, 5)
    copy.close()
    assert accepted(stack, listeners[1]) == 5


def test_connections_of_a_socket_that_nobody_keeps_are_reset(stack: ExitStack) -> None:
    """The control."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
    listener.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_where_there_are_no_groups_workers_share_a_socket(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    listeners = listening(stack, 3)
    listeners.steer((2,))
    connect(stack, listeners.port, 5)
    assert accepted(stack, listeners[1]) == 5
    assert listeners[1] is listeners[3]
