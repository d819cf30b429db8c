"""Tests that a proxy takes over the listening socket of its predecessor, or gets it from systemd, and loses nothing."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvparams_proxy.listening.activation import ActivationError, take_activated_sockets
from kvparams_proxy.listening.takeover import (
    Predecessor,
    TakeoverError,
    TakeoverOffer,
    check_takeover_directory,
)
from tests.support.proxy.load import Connection, Load, loaded
from tests.support.proxy.served import serving
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until
from tests.system.proxy.config.test_shutdown import Asked

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
COMMAND = (sys.executable, "-m", "kvparams", "proxy")


class Knocker:
    """Sends each request over a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers = 0
        self.failures: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                connection = await Connection.open(self.port)
                try:
                    assert (await connection.ask()).status == 200
                finally:
                    connection.close()
            except (OSError, asyncio.IncompleteReadError) as error:
                self.failures.append(repr(error))
            self.answers += 1


async def more(load: Load, knocker: Knocker) -> None:
    """Waits until both have had some more answers."""
    answers, knocks = load.answers + 20, knocker.answers + 20
    await until(lambda: load.answers >= answers and knocker.answers >= knocks, 20.0)


@pytest.mark.parametrize(
    "workers",
    [
        ("1", "1", "1"),
        pytest.param(("1", "2"), marks=pytest.mark.slow),
        pytest.param(("2", "2"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
async def test_a_successor_takes_over_and_no_connection_is_refused(
    stub: StubEngines, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    flags = ("--takeover", str(tmp_path / "run"), "--log-requests", "off", "--startup-check", "off")
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(stub, *flags, "--workers", workers[0]))
        knocker = Knocker(first.port)
        knocking = asyncio.create_task(knocker.run())
        stack.callback(knocking.cancel)
        async with loaded(first.port, 8) as load:
            await more(load, knocker)
            running, clients = first, [first.client]
            for count in workers[1:]:
                stub.delays.itl_ms = 200
                streams = [await Asked.begin(running, 300) for _ in range(10)]
                successor = await stack.enter_async_context(
                    serving(stub, *flags, "--port", str(first.port), "--workers", count)
                )
                assert successor.port == first.port
                await more(load, knocker)
                stub.delays.itl_ms = 1
                ends = await asyncio.gather(*(each.rest() for each in streams))
                assert all(text.count("data: [DONE]") == 1 and "error" not in text for text in ends)
                clients.append(successor.client)
                for client in clients:  # idle connections may stay for 75 s
                    await client.get("/health")
                said = await running.output()
                assert running.process.returncode == 0
                assert "the successor serves; this proxy accepts no more connections" in said
                running = successor
                await more(load, knocker)
        knocking.cancel()
    assert (load.lost, load.refused, set(load.statuses), knocker.failures) == ([], 0, {200}, [])
    assert list((tmp_path / "run").iterdir()) in ([], [tmp_path / "run" / "takeover.sock"])


async def test_without_the_option_the_port_is_taken(stub: StubEngines) -> None:
    """The control."""
    async with serving(stub, "--log-requests", "off") as served:
        other = await asyncio.create_subprocess_exec(
            *COMMAND, *ENGINES, "--port", str(served.port), stderr=asyncio.subprocess.PIPE
        )
        _, said = await other.communicate()
        assert other.returncode == 1
        assert b"in use" in said


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_if_the_successor_fails_to_start_the_predecessor_goes_on(
    stub: StubEngines, tmp_path: Path, workers: str
) -> None:
    """It gets the sockets, and is killed before it serves; or has fewer workers than there are sockets."""
    flags = ("--takeover", str(tmp_path / "run"), "--log-requests", "off", "--startup-check", "off")
    async with serving(stub, *flags, "--workers", workers) as served:
        connection = await asyncio.to_thread(Predecessor.find, tmp_path / "run")
        assert connection is not None
        assert [one.getsockname()[1] for one in connection.sockets] == [served.port] * int(workers)
        for one in connection.sockets:
            one.close()
        connection.close()
        if workers == "2":
            other = await asyncio.create_subprocess_exec(*COMMAND, *ENGINES, *flags, stderr=asyncio.subprocess.PIPE)
            _, said = await other.communicate()
            assert other.returncode == 1
            assert b"2 sockets are given for one process" in said
        for _ in range(20):
            one = await Connection.open(served.port)
            assert (await one.ask()).status == 200
            one.close()
        served.process.send_signal(signal.SIGTERM)
        output = await served.output()
    assert "the successor has not started; this proxy goes on" in output
    assert not (tmp_path / "run" / "takeover.sock").exists()


def test_the_directory_is_for_this_user_alone(tmp_path: Path) -> None:
    good = check_takeover_directory(tmp_path / "new")
    assert good.stat().st_mode & 0o777 == 0o700
    for mode in (0o750, 0o701, 0o777):
        good.chmod(mode)
        with pytest.raises(TakeoverError, match="who alone may enter it"):
            check_takeover_directory(good)
    good.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(good)
    with pytest.raises(TakeoverError, match="is no directory"):
        check_takeover_directory(link)
    with pytest.raises(TakeoverError, match="cannot be used"):
        check_takeover_directory(tmp_path / "a" / "b")


async def test_only_one_successor_takes_over(tmp_path: Path) -> None:
    folder = check_takeover_directory(tmp_path / "run")
    taken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = TakeoverOffer(folder, [listener, listener], lambda: taken.append(1))
        offer.open()
        try:
            found = [await asyncio.to_thread(Predecessor.find, folder) for _ in range(2)]
            told = [await one.tell_serving() for one in found if one is not None]
            assert told == [True, False]
            assert taken == [1]
            for one in found:
                assert one is not None
                (copy,) = one.sockets
                with copy:
                    assert copy.getsockname() == listener.getsockname()
        finally:
            offer.close()
    assert await asyncio.to_thread(Predecessor.find, folder) is None


async def test_after_a_successor_that_died_as_it_served_another_one_may_come(tmp_path: Path) -> None:
    folder = check_takeover_directory(tmp_path / "run")
    taken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = TakeoverOffer(folder, [listener], lambda: taken.append(1))
        offer.open()
        try:
            first = await asyncio.to_thread(Predecessor.find, folder)
            assert first is not None
            with pytest.MonkeyPatch.context() as patch:
                loop = asyncio.get_running_loop()

                async def gone(*_: object) -> None:
                    raise BrokenPipeError

                connection = vars(first)["_connection"]
                patch.setattr(loop, "sock_sendall", gone, raising=True)
                connection.setblocking(False)
                connection.send(b"R")
                async with asyncio.timeout(5):
                    assert await loop.sock_recv(connection, 1) == b""
            assert not taken
            second = await asyncio.to_thread(Predecessor.find, folder)
            assert second is not None
            assert await second.tell_serving()
            await until(lambda: taken == [1])
            for each in (first, second):
                each.close()
                for copy in each.sockets:
                    copy.close()
        finally:
            offer.close()


async def test_a_process_of_another_user_gets_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this process can tell; the control is the test above."""
    folder = check_takeover_directory(tmp_path / "run")
    taken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = TakeoverOffer(folder, [listener], lambda: taken.append(1))
        offer.open()
        real = os.geteuid()
        monkeypatch.setattr("kvparams_proxy.listening.takeover.os.geteuid", lambda: real + 1)
        with pytest.raises(TakeoverError, match="another user"):
            await asyncio.to_thread(Predecessor.find, folder)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(asker, str(folder / "takeover.sock"))
            assert await loop.sock_recv(asker, 1) == b""
        offer.close()
    assert taken == []


# systemd


async def activated(*argv: str, count: int = 1) -> tuple[asyncio.subprocess.Process, list[socket.socket]]:
    """Starts a proxy as systemd does, with listening sockets from descriptor 3 on."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    descriptors = [one.fileno() for one in listeners]
    program = (
        "import os, sys\n"
        f"for number, each in enumerate({descriptors}): os.dup2(each, 100 + number)\n"
        f"for number in range({count}): os.dup2(100 + number, 3 + number)\n"
        f"os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='{count}')\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *COMMAND, *argv),
        pass_fds=descriptors,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    return process, listeners


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_connections_that_systemd_has_accepted_before_the_start_are_served(
    stub: StubEngines, workers: str
) -> None:
    engines = [f"--{engine.role}={engine.url}" for engine in stub.engines]
    process, (listener,) = await activated(*engines, "--workers", workers, "--log-requests", "off")
    port = listener.getsockname()[1]
    with listener:
        waiting = [await Connection.open(port) for _ in range(5)]
        for one in waiting:
            one.send()
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                statuses = [(await one.receive()).status for one in waiting]
                assert f":{port}, engines".encode() in await process.stdout.readline()
            assert set(statuses) <= {200, 503}  # engines may not have answered a probe yet
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                await process.communicate()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass  # nobody is refused while systemd starts the next one
        finally:
            for one in waiting:
                one.close()
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def test_more_sockets_than_processes_are_refused_in_words() -> None:
    process, listeners = await activated(*ENGINES, count=2)
    _, said = await process.communicate()
    for one in listeners:
        one.close()
    assert process.returncode == 1
    assert b"2 sockets are given for one process" in said


def test_sockets_for_another_process_are_left_alone() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http", "OTHER": "x"}
    assert take_activated_sockets(environment) == []
    assert environment == {"OTHER": "x"}, "workers must not take them for theirs"


def test_what_is_no_listening_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        monkeypatch.setattr("kvparams_proxy.listening.activation._FIRST", os.dup(other.fileno()))
        with pytest.raises(ActivationError, match="is no listening TCP socket"):
            take_activated_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
        number = os.dup(listener.fileno())
        monkeypatch.setattr("kvparams_proxy.listening.activation._FIRST", number)
        (found,) = take_activated_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
        with found:
            assert found.getsockname() == listener.getsockname()
            assert not os.get_inheritable(found.fileno())
