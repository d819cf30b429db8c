"""Tests what probes find out about engines, and that a misbehaving engine cannot harm the prober."""

import argparse
import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
import trustme

from kvparams.instances import Instance, Role, RoundRobin
from kvparams_proxy.cli.proxy_command import COMMAND
from kvparams_proxy.event_loop.step_runner import StepRunner
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.waiting import until

GOOD = b'b\r\n{"data":[]}\r\n0\r\n\r\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def answering(stack: Any) -> Any:
    """Start an engine that answers probes with these bytes, again and again, a tick apart."""

    async def start(first: bytes, again: bytes) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(first)
                while again:
                    writer.write(again)
                    await writer.drain()
                    await asyncio.sleep(0.01)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        stack.callback(server.close)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    return start


class Proxied:
    """A fleet that is probed, and its connections."""

    def __init__(self, fleet: Fleet, pools: UpstreamPools) -> None:
        self.fleet = fleet
        self.pools = pools

    @property
    def ready(self) -> list[bool]:
        return [member.ready for member in self.fleet.members]


@asynccontextmanager
async def probed(
    *urls: str,
    every_s: float = 0.5,
    tls: ssl.SSLContext | None = None,
    connections: int = 8,
    key: Secret | None = None,
    steps: StepRunner | None = None,
) -> AsyncGenerator[Proxied]:
    """Probe these engines; the first round must end. When it is over, nothing is left."""
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks()
    instances = [instance(f"p{number}", url) for number, url in enumerate(urls)]
    fleet = Fleet(instances, {role: RoundRobin() for role in Role}, loop.time, loop.call_later)
    pools = UpstreamPools(
        lambda instance: UpstreamConnectionPool(instance.url, UpstreamLimits(connections=connections), tls, key=key)
    )
    for member in fleet.members:
        pools.joined(member)
    fleet.add_listener(pools)
    async with asyncio.timeout(10):
        async with Prober(fleet, every_s, pools, steps=steps):
            yield Proxied(fleet, pools)
        fleet.close()
        pools.close()
        await until(lambda: not pools.open_connections)
        await until(lambda: not asyncio.all_tasks() - others - {asyncio.current_task()})


def instance(id: str, url: str) -> Instance:
    return Instance(id, "b", Role.PREFILL, url, "nixl")


async def ready(*urls: str) -> list[bool]:
    """Who is found ready by the first round."""
    async with probed(*urls) as proxied:
        return proxied.ready


async def test_an_engine_that_never_ends_its_answer_holds_nobody_up(answering: Any) -> None:
    good = await answering(HEAD + GOOD, b"")
    dripping = await answering(HEAD, b"1\r\n \r\n")
    flooding = await answering(HEAD, b"100000\r\n" + b" " * 0x100000 + b"\r\n")
    assert await ready(good, dripping, flooding, "http://127.0.0.1:1") == [True, False, False, False]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", True),  # somebody is there, who does not say
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nno!", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n" + b"[" * 60000, False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 30\r\n\r\nno", False),
        (b"\x00\x01\x02\x03", False),
        (b"", False),
    ],
)
async def test_who_is_ready(answering: Any, answer: bytes, expected: bool) -> None:
    assert await ready(await answering(answer, b"")) == [expected]


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_refuses_its_key_is_not_ready_and_that_is_said_once(
    listen: Any, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Without a key of its own it is: clients may bring theirs."""
    asked = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                asked += 1
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)
        writer.close()

    url = url_of(await listen(refuse))
    async with probed(url, every_s=0.02, key=Secret("sk-1")) as proxied:
        await until(lambda: asked > 3)
        assert proxied.ready == [False]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"prefill p0 gets no requests (probe): it refuses the proxy's API key ({status})"
    ]
    assert await ready(url) == [True]


async def test_what_an_engine_serves_is_learnt(answering: Any) -> None:
    models = b'{"data":[{"id":"a"},{"id":7},{"id":"b"},3]}'
    url = await answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(models) + models, b"")
    async with probed(url) as proxied:
        assert proxied.fleet.models() == ["a", "b"]


async def test_engines_are_asked_directly_whatever_proxy_the_environment_names(
    answering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the data path does."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert await ready(await answering(HEAD + GOOD, b"")) == [True]


Listen = Callable[..., Awaitable[asyncio.Server]]


@pytest.fixture
def listen(stack: Any) -> Listen:
    """Serve what a handler says."""

    async def start(handle: Any, port: int = 0, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        server = await asyncio.start_server(handle, "127.0.0.1", port, ssl=tls)
        stack.callback(server.close)
        return server

    return start


def url_of(server: asyncio.Server, scheme: str = "http", host: str = "127.0.0.1") -> str:
    return f"{scheme}://{host}:{server.sockets[0].getsockname()[1]}"


class Counted:
    """A good engine that keeps its connections, and counts."""

    def __init__(self) -> None:
        self.connections = 0
        self.open = 0
        self.probes: list[bytes] = []
        self.silent = False

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                self.probes.append(await reader.readuntil(b"\r\n\r\n"))
                if not self.silent:
                    writer.write(HEAD + GOOD)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


async def test_a_probe_is_one_get_on_a_connection_that_is_kept(listen: Any) -> None:
    engine = Counted()
    async with probed(url_of(await listen(engine)), every_s=0.02):
        await until(lambda: len(engine.probes) > 3)
        assert engine.connections == 1
        assert engine.probes[0].startswith(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1")


async def test_an_engine_that_stops_answering_is_not_ready_until_it_does_again(listen: Any) -> None:
    engine = Counted()
    async with probed(url_of(await listen(engine)), every_s=0.05) as proxied:
        (member,) = proxied.fleet.members
        before = member.instance
        engine.silent = True
        await until(lambda: not member.ready)
        engine.silent = False
        await until(lambda: member.ready)
        assert member.instance.incarnation != before.incarnation


async def test_who_was_not_reachable_for_a_leg_is_asked_soon(listen: Any) -> None:
    """Not only when its next probe would be due."""
    engine = Counted()
    async with probed(url_of(await listen(engine)), every_s=60.0) as proxied:
        (member,) = proxied.fleet.members
        proxied.fleet.record_failure(member.instance, connected=False)
        assert not member.ready
        await until(lambda: member.ready)
        assert len(engine.probes) == 2


async def test_who_joins_is_asked_at_once_and_who_leaves_no_more(listen: Any) -> None:
    engines = [Counted(), Counted(), Counted()]
    urls = [url_of(await listen(engine)) for engine in engines]
    async with probed(urls[0], every_s=0.02) as proxied:
        fleet = proxied.fleet
        added = fleet.add(instance("new", urls[1]))
        await until(lambda: added.ready)
        replaced = fleet.replace(instance("new", urls[2]))
        await until(lambda: replaced.ready)
        await until(lambda: engines[1].open == 0)
        probes = len(engines[1].probes)
        fleet.remove("new")
        await until(lambda: engines[2].open == 0)
        last = len(engines[2].probes)
        asked = len(engines[0].probes)
        await until(lambda: len(engines[0].probes) > asked + 3)  # the control: this one is asked on
        assert (len(engines[1].probes), len(engines[2].probes)) == (probes, last)


async def test_who_leaves_while_it_is_asked_is_not_said_to_be_missing(
    listen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Counted()
    async with probed(url_of(await listen(engine)), every_s=0.05) as proxied:
        engine.silent = True
        asked = len(engine.probes)
        await until(lambda: len(engine.probes) > asked)
        proxied.fleet.remove("p0")
        await until(lambda: not engine.open)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_the_end_cuts_off_a_probe_that_is_under_way(listen: Any) -> None:
    engine = Counted()
    async with probed(url_of(await listen(engine)), every_s=0.02):
        engine.silent = True
        asked = len(engine.probes)
        await until(lambda: len(engine.probes) > asked)
    await until(lambda: not engine.open)


@pytest.mark.parametrize("trusted", [True, False])
async def test_an_engine_behind_tls_is_believed_only_when_its_certificate_is_trusted(
    listen: Any, trusted: bool
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cast("Any", authority.issue_cert("localhost")).configure_cert(context)
    client = ssl.create_default_context()
    cast("Any", authority if trusted else trustme.CA()).configure_trust(client)
    server = await listen(Counted(), tls=context)
    async with probed(url_of(server, "https", "localhost"), tls=client) as proxied:
        assert proxied.ready == [trusted]


@pytest.mark.parametrize(
    "given",
    [
        ["--prefill", "http://h:99999"],
        ["--prefill", "http://h:1?x=1"],
        ["--prefill", "ftp://h:1"],
        ["--prefill", "a b=http://h:1"],
    ],
)
def test_what_cannot_be_an_engine_is_refused_before_anything_starts(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    assert COMMAND.run(parser.parse_args(given)) == 2
    assert "--prefill number 1: [NAME=]URL must be" in capsys.readouterr().err
