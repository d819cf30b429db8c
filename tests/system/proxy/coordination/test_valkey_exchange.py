"""Tests real proxies that share a fleet through a real Valkey server, whatever becomes of the server or of them."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from valkey import Valkey

from kvparams.replication.messages import MessageAuthenticator, MessageKind
from kvparams_proxy.config.share_url import parse_share_url
from kvparams_proxy.coordination import valkey_transport
from kvparams_proxy.coordination.valkey_transport import ValkeyTransport
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.processes import Processes
from tests.support.proxy.shared_processes import SharedProcesses
from tests.support.waiting import until


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """Starts a server."""
    with ValkeyServer(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Ends what it has started."""
    with Processes(tmp_path) as started:
        yield started


async def _until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    """Waits for a condition that blocks, and returns how many seconds that took."""
    return await until(lambda: asyncio.to_thread(condition), within_s, pause_s=0.05)


async def test_a_proxy_that_is_killed_is_missed_by_the_others_and_by_nobody_else(
    processes: Processes, valkey: ValkeyServer, tmp_path: Path
) -> None:
    site = SharedProcesses(processes, tmp_path, valkey.url + "?prefix=a", 3, "--policy", "cache_aware")
    await _until(lambda: [site.alive(number) for number in range(3)] == [2, 2, 2])
    await site.ask(60, [0, 1, 2])
    assert site.metric(1, "kvparams_proxy_prefix_cache_blocks") > 0
    site.kill(2)
    took_s = await _until(lambda: [site.alive(number) for number in range(2)] == [1, 1])
    assert took_s < 3.0
    await site.ask(20, [0, 1])
    new = site.start()
    await _until(lambda: site.alive(new) == 2)
    await _until(lambda: site.metric(new, "kvparams_proxy_prefix_cache_blocks") > 0)
    assert not any(site.metric(number, "kvparams_proxy_exchange_refused_total") for number in (0, 1, new))


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_requests_do_not_notice_that_the_server_is_gone(
    processes: Processes, valkey: ValkeyServer, tmp_path: Path, how: str
) -> None:
    site = SharedProcesses(processes, tmp_path, valkey.url + "?prefix=a", 2)
    await _until(lambda: [site.alive(number) for number in range(2)] == [1, 1])
    before = sorted(await site.ask(60, [0, 1]))
    if how == "stopped":
        valkey.stop()
    else:
        valkey.kill()
    await _until(lambda: [site.alive(number) for number in range(2)] == [-1, -1])
    status, document = site.health(0)
    assert (status, document["status"]) == (200, "degraded")
    during = sorted(await site.ask(60, [0, 1]))
    assert during[30] < 3 * before[30] + 0.02
    assert "cannot be reached" in site.log(0)
    if how == "stopped":
        valkey.go_on()
    else:
        valkey.start()  # it is empty now
    await _until(lambda: [site.alive(number) for number in range(2)] == [1, 1])
    assert site.health(0)[1]["status"] == "ok"
    await site.ask(20, [0, 1])


async def test_what_waited_too_long_for_the_server_is_not_sent(valkey: ValkeyServer) -> None:
    """It would be out of date, and the others ask for what they have missed."""
    loop = asyncio.get_running_loop()
    url = parse_share_url(valkey.url)
    sender, receiver = ValkeyTransport(loop, url, 1), ValkeyTransport(loop, url, 2)
    received: list[bytes] = []
    receiver.start(received.append)
    await _until(lambda: receiver.is_connected)
    sender.announce(b"old")
    began = loop.time()
    await _until(lambda: loop.time() - began > 2.2)
    sender.announce(b"new")
    sender.start(lambda message: None)
    await _until(lambda: b"new" in received)
    await sender.close()
    await receiver.close()
    assert received == [b"new"]


@pytest.mark.parametrize("answer", [b":1\r\n", b"*1\r\n$7\r\nmessage\r\n", b"HTTP/1.1 400 Bad\r\n\r\n"])
async def test_a_server_that_speaks_something_else_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(valkey_transport, "_FIRST_PAUSE_S", 0.001)
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(OSError):
            while await reader.read(4096):
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = ValkeyTransport(asyncio.get_running_loop(), parse_share_url(f"valkey://127.0.0.1:{port}"), 1)
    transport.start(lambda message: None)
    try:
        await until(lambda: connections >= 5)  # one to send, the others to receive
    finally:
        await transport.close()
        server.close()
    assert transport.problem


async def test_a_client_that_takes_a_cancellation_for_its_own_does_not_keep_a_proxy_from_ending() -> None:
    url = parse_share_url("valkey://127.0.0.1:1")
    transport = ValkeyTransport(asyncio.get_running_loop(), url, 1)

    begun = asyncio.Event()

    async def stubborn() -> None:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await begun.wait()
    transport._tasks.append(task)  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(5.0):
        await transport.close()
    assert task.cancelled()


async def test_what_others_write_there_is_not_believed(
    processes: Processes, valkey: ValkeyServer, tmp_path: Path
) -> None:
    site = SharedProcesses(processes, tmp_path, valkey.url + "?prefix=a", 2)
    await _until(lambda: [site.alive(number) for number in range(2)] == [1, 1])
    die = random.Random(1)
    stranger = MessageAuthenticator("a", [b"x" * 32])
    for _ in range(200):
        valkey.ask("PUBLISH", "a:all", "".join(die.choices("abc\x01\x7f", k=die.randrange(1, 2000))))
    forged = stranger.seal(MessageKind.HEARTBEAT, 99, 0, 1, time.time(), b"\2\0\0\0{}")
    valkey.ask("PUBLISH", "a:all", forged.decode("latin-1"))
    await _until(lambda: site.metric(0, "kvparams_proxy_exchange_refused_total") >= 200)
    assert [site.alive(number) for number in range(2)] == [1, 1]
    await site.ask(20, [0, 1])
    assert site.log(0).count("is not believed") == 1


async def test_the_server_need_not_be_there_at_the_start(
    processes: Processes, valkey: ValkeyServer, tmp_path: Path
) -> None:
    valkey.kill()
    site = SharedProcesses(processes, tmp_path, valkey.url + "?prefix=a", 2)
    await site.ask(20, [0, 1])
    await _until(lambda: site.alive(0) == -1)
    valkey.start()
    await _until(lambda: [site.alive(number) for number in range(2)] == [1, 1])


async def test_everything_on_the_server_ends_by_itself(
    processes: Processes, valkey: ValkeyServer, tmp_path: Path
) -> None:
    site = SharedProcesses(processes, tmp_path, valkey.url + "?prefix=a", 2)
    await _until(lambda: [site.alive(number) for number in range(2)] == [1, 1])
    await site.ask(20, [0, 1])
    connect: Any = Valkey
    with connect.from_url(valkey.url) as client:
        keys = list(client.scan_iter())
        assert {key.split(b":")[1] for key in keys} == {b"member"}
        assert all(0 < client.ttl(key) <= 10 for key in keys)


async def test_two_sites_on_one_server_do_not_hear_each_other(
    processes: Processes, valkey: ValkeyServer, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    first = SharedProcesses(processes, tmp_path, valkey.url + "?prefix=a", 1)
    with Processes(tmp_path / "b") as others:
        second = SharedProcesses(others, tmp_path / "b", valkey.url + "?prefix=b", 1)
        await _until(lambda: first.health(0)[1]["other_proxies"] == {"reachable": True, "alive": 0})
        await _until(lambda: second.health(0)[1]["other_proxies"] == {"reachable": True, "alive": 0})
        third = SharedProcesses(others, tmp_path / "b", valkey.url + "?prefix=a", 1)  # with keys of its own
        await _until(lambda: "another site uses the same prefix" in first.log(0))
        assert third.alive(0) == 0
