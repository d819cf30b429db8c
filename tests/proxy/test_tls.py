"""Engines behind https: trusted when their certificate is, refused when it is not."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
import trustme

from kvparams.scheduling import Instance, Role
from kvparams_proxy.pool import Pool
from kvparams_proxy.upstream import Collect, UpstreamError, UpstreamLimits

BODY = json.dumps({"choices": []}).encode()


@pytest.fixture
async def secure(stack: AsyncExitStack) -> Callable[[trustme.CA], Awaitable[str]]:
    """Start an engine with a certificate of this authority; its URL."""

    async def start(authority: trustme.CA) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        cast("Any", authority.issue_cert("localhost")).configure_cert(context)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)

        async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        server = await asyncio.start_server(quiet, "127.0.0.1", 0, ssl=context)
        stack.callback(server.close)
        return f"https://localhost:{server.sockets[0].getsockname()[1]}"

    return start


async def ask(url: str, trusted: trustme.CA) -> bytes:
    context = ssl.create_default_context()
    cast("Any", trusted).configure_trust(context)
    pool = Pool(url, UpstreamLimits(), context)
    collect = Collect(asyncio.get_running_loop(), 1000)
    pool.exchange(pool.request(b"/v1/completions", b"", b"{}"), collect)
    try:
        return (await collect.answer)[1]
    finally:
        pool.close()


async def test_a_trusted_engine_answers(secure: Any) -> None:
    authority = trustme.CA()
    assert await ask(await secure(authority), authority) == BODY


async def test_an_engine_with_somebody_elses_certificate_is_never_spoken_to(secure: Any) -> None:
    with pytest.raises(UpstreamError) as caught:
        await ask(await secure(trustme.CA()), trustme.CA())
    assert not caught.value.connected
    assert "TLS" in caught.value.reason


@pytest.mark.parametrize("url", ["ftp://h:1", "http://", "http://h:1/path", "h:1", "http://h:1?x=1"])
async def test_what_is_not_an_engines_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        Pool(url, UpstreamLimits())


def test_an_instance_is_known_by_identity() -> None:
    """A restarted engine is another instance, even if everything that can be read of it is equal."""
    first, again = (Instance("a", "boot", Role.DECODE, "http://h:1", "nixl") for _ in range(2))
    assert first != again
    assert len({first, again}) == 2
