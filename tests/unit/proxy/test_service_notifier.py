"""Tests the messages to systemd: what is sent, when, and that nothing else depends on them."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvparams_proxy.service_notifier import ServiceNotifier
from tests.support.waiting import until


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        yield receiver


def received(systemd: socket.socket) -> list[str]:
    found: list[str] = []
    while True:
        try:
            found.append(systemd.recv(4096).decode())
        except BlockingIOError:
            return found


def test_it_tells_that_it_is_ready_and_that_it_stops(systemd: socket.socket) -> None:
    notifier = ServiceNotifier.from_environment({"NOTIFY_SOCKET": systemd.getsockname()})
    notifier.ready("Serving requests")
    notifier.stopping(130.0)
    assert received(systemd) == [
        "READY=1\nSTATUS=Serving requests",
        "STOPPING=1\nSTATUS=Shutting down\nEXTEND_TIMEOUT_USEC=150000000",
    ]


def test_a_name_without_a_file_works_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0kvparams-test-{os.getpid()}")
        receiver.setblocking(False)
        ServiceNotifier.from_environment({"NOTIFY_SOCKET": f"@kvparams-test-{os.getpid()}"}).ready("x")
        assert received(receiver) == ["READY=1\nSTATUS=x"]


async def test_it_tells_that_the_event_loop_is_alive_until_it_is_closed(systemd: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}
    notifier = ServiceNotifier.from_environment(environment)
    notifier.ready("x")
    found = received(systemd)
    assert found == ["READY=1\nSTATUS=x", "WATCHDOG=1"]
    await until(lambda: found.extend(received(systemd)) or found.count("WATCHDOG=1") >= 4)
    notifier.close()
    received(systemd)
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.05, ended.set_result, None)
    await ended
    assert received(systemd) == []


async def test_a_tiny_interval_does_not_keep_the_event_loop_busy(systemd: socket.socket) -> None:
    notifier = ServiceNotifier.from_environment({"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "1"})
    loop = asyncio.get_running_loop()
    began = loop.time()
    notifier.ready("x")
    found: list[str] = []
    await until(lambda: found.extend(received(systemd)) or found.count("WATCHDOG=1") >= 6)
    notifier.close()
    assert loop.time() - began >= 5 * 0.01


@pytest.mark.parametrize(
    "environment",
    [
        {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "1" * 16},
        {"WATCHDOG_USEC": "1" * 400},
        {"WATCHDOG_USEC": "1" * 5000},
        {"WATCHDOG_USEC": "\u0661\u0662"},
        {},
    ],
)
async def test_a_watchdog_that_is_not_meant_hears_nothing(systemd: socket.socket, environment: dict[str, str]) -> None:
    notifier = ServiceNotifier.from_environment({"NOTIFY_SOCKET": systemd.getsockname(), **environment})
    notifier.ready("x")
    assert received(systemd) == ["READY=1\nSTATUS=x"]
    notifier.close()


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_systemd_nothing_happens(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    notifier = ServiceNotifier.from_environment(environment | {"WATCHDOG_USEC": "1"})
    notifier.ready("x")
    notifier.stopping(1.0)
    notifier.close()
    assert not caplog.records


def test_a_socket_that_is_gone_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = ServiceNotifier(str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING):
        notifier.ready("x")
        notifier.stopping(1.0)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "systemd cannot be told the state of this process"
    ]


async def test_a_state_that_finds_no_room_is_sent_once_more(
    systemd: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = ServiceNotifier(systemd.getsockname())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                other.sendto(b"x", systemd.getsockname())
    notifier.ready("a")
    found = received(systemd)
    assert "READY=1\nSTATUS=a" not in found, "or there was room"
    await until(lambda: "READY=1\nSTATUS=a" in received(systemd))
    assert not caplog.records
