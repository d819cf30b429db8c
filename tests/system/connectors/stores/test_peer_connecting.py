"""Tests that connecting to a name is bounded: the look-up and all addresses share one deadline, in every store."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from demo.processes import free_port
from kvparams_connectors.store import KVStore, ResultCode
from kvparams_connectors.stores.deadline_socket import tcp_socket
from tests.support.connectors.peer_steps import WAIT_S, get, names, peer

HOLES = [f"127.0.0.{number}" for number in range(2, 8)]


@pytest.fixture
def port() -> Iterator[int]:
    """At the first addresses of `HOLES` nobody answers there; at the last one somebody listens."""
    number = free_port()
    sockets = [socket.socket() for _ in HOLES[:-1]]
    for listener, host in zip(list(sockets), HOLES, strict=False):
        listener.bind((host, number))
        listener.listen(0)
        for _ in range(4):  # more than wait to be accepted
            sockets.append(socket.socket())
            sockets[-1].setblocking(False)
            sockets[-1].connect_ex((host, number))
    sockets.append(socket.create_server((HOLES[-1], number)))
    yield number
    for one in sockets:
        one.close()


def named(monkeypatch: pytest.MonkeyPatch, hosts: list[str], *, after: threading.Event | None = None) -> None:
    """The name `node-5` has these addresses, as a headless service has."""
    look_up = socket.getaddrinfo

    def found(host: str, port: int, *more: Any, **named: Any) -> Any:
        if host != "node-5" or named.get("flags"):
            return look_up(host, port, *more, **named)
        if after is not None:
            after.wait(WAIT_S)
        return [one for address in hosts for one in look_up(address, port, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_all_addresses_together_take_no_longer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, HOLES[:-1])
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        tcp_socket("node-5", port, start + 0.5)
    assert 0.4 < time.monotonic() - start < 1.0


def test_one_that_answers_is_reached_behind_some_that_do_not(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, HOLES)
    with tcp_socket("node-5", port, time.monotonic() + 2.0) as sock:
        assert sock.getpeername() == (HOLES[-1], port)


def test_a_look_up_that_takes_for_ever_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    named(monkeypatch, HOLES, after=answer)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="not found in time"):
        tcp_socket("node-5", 1, start + 0.3)
    assert time.monotonic() - start < 1.0
    answer.set()


def test_a_name_that_is_none_is_said() -> None:
    with pytest.raises(OSError, match=r"."):
        tcp_socket("nobody.invalid", 1, time.monotonic() + WAIT_S)


def test_a_peer_of_many_addresses_costs_its_time_once(
    opened: list[KVStore], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, HOLES[:-1])
    store = peer(opened, "127.0.0.1:0", peers="node-5", connect_s=0.3)
    store.hint_location(names([1]), f"node-5:{port}")
    start = time.monotonic()
    assert get(store, [1], deadline_s=2.0) == [ResultCode.MISS]  # settled, too
    assert time.monotonic() - start < 1.0
