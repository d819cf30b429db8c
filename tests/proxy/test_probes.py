"""What the proxy finds out about its engines, and what engines cannot do to it meanwhile."""

import argparse
import asyncio
from typing import Any

import pytest

from kvparams.scheduling import Instance, Role, RoundRobin
from kvparams_proxy.command import COMMAND
from kvparams_proxy.fleet import Fleet
from kvparams_proxy.probes import Prober

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


async def ready(*urls: str) -> list[bool]:
    """Who is found ready by the first round, which must end."""
    instances = [Instance(f"p{number}", "b", Role.PREFILL, url, "nixl") for number, url in enumerate(urls)]
    fleet = Fleet(instances, {role: RoundRobin() for role in Role})
    async with asyncio.timeout(5), Prober(fleet, 0.5, None):
        return [member.ready for member in fleet.members]


async def test_an_engine_that_never_ends_its_answer_holds_nobody_up(answering: Any) -> None:
    good = await answering(HEAD + b'b\r\n{"data":[]}\r\n0\r\n\r\n', b"")
    dripping = await answering(HEAD, b"1\r\n \r\n")
    flooding = await answering(HEAD, b"100000\r\n" + b" " * 0x100000 + b"\r\n")
    assert await ready(good, dripping, flooding, "http://127.0.0.1:1") == [True, False, False, False]


async def test_engines_are_asked_directly_whatever_proxy_the_environment_names(
    answering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the data path does."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert await ready(await answering(HEAD + b'b\r\n{"data":[]}\r\n0\r\n\r\n', b"")) == [True]


@pytest.mark.parametrize(
    "given",
    [
        ["--prefill", "http://h:99999"],
        ["--prefill", "http://h:1?x=1"],
        ["--prefill", "ftp://h:1"],
        ["--prefill", "a b=http://h:1"],
        ["--prefill", "a=http://h:1", "--decode", "a=http://h:2"],
    ],
)
def test_what_cannot_be_an_engine_is_refused_before_anything_starts(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    assert COMMAND.run(parser.parse_args(given)) == 2
    assert given[1].split("=")[0] in capsys.readouterr().err
