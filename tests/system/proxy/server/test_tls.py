"""Tests TLS on both sides: peers without a valid certificate are refused, and faults of files are described."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import trustme

from kvparams.instances import Instance, Role
from kvparams_proxy.config.settings import Settings, default_spec_rules
from kvparams_proxy.fleet.registry.credentials import EngineCredentials
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.app import create_app
from kvparams_proxy.server.http_server import ProxyServer, ServerSettings, listen
from kvparams_proxy.tls import EngineTLSSettings, ServerTLSSettings, TLSError, engine_ssl_context, server_ssl_context
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamError, UpstreamLimits
from tests.support.proxy.fixtures import MODELS, Awaited, answer, instance

NIXL = {"remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "127.0.0.1", "remote_port": 1}
ANSWER = {"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 1}, "kv_transfer_params": NIXL}
BODY = json.dumps(ANSWER).encode()
EVENT = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'


class Files:
    """An authority and the PEM files that it gives out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._number = 0
        self.ca = folder / f"{id(self)}-ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, *names: str, **terms: Any) -> tuple[Path, Path]:
        """Certificate and key for these names."""
        self._number += 1
        issued = cast("Any", self._authority).issue_cert(*names, **terms)
        certificate, key = (self._folder / f"{id(self)}-{self._number}.{end}" for end in ("crt", "key"))
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(certificate), append=True)
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key

    def server(self, *names: str, client_ca: Path | None = None, **terms: Any) -> ssl.SSLContext:
        """For a server that has one of these names."""
        return server_ssl_context(ServerTLSSettings(*self.issue(*names, **terms), client_ca))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def strangers(tmp_path: Path) -> Files:
    """Of another authority."""
    return Files(tmp_path)


class Engine:
    """An engine behind https. It keeps the heads it was sent."""

    def __init__(self) -> None:
        self.port = 0
        self.heads: list[bytes] = []

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(answer(MODELS))
                    continue
                self.heads.append(head)
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                if body.get("stream"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
                    writer.write(EVENT * 1000 + b"data: [DONE]\n\n")
                    break
                writer.write(answer(BODY))
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()


Start = Callable[[ssl.SSLContext], Awaitable[Engine]]


@pytest.fixture
def secure(stack: Any) -> Start:
    """Start an engine with this context."""

    async def start(context: ssl.SSLContext) -> Engine:
        engine = Engine()
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=context)
        stack.callback(server.close)
        engine.port = server.sockets[0].getsockname()[1]
        return engine

    return start


async def ask(engine: Engine, tls: EngineTLSSettings, key: Secret | None = None) -> bytes:
    pool = UpstreamConnectionPool(
        engine.url, UpstreamLimits(), engine_ssl_context(tls), server_name=tls.server_name, key=key
    )
    collect = Awaited()
    pool.exchange(pool.request(b"/v1/completions", b"", b"{}"), collect)
    try:
        async with asyncio.timeout(10):
            return (await collect.answer)[1]
    finally:
        pool.close()


async def refused(engine: Engine, tls: EngineTLSSettings) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await ask(engine, tls)
    assert engine.heads == []
    return caught.value


# engines


async def test_a_trusted_engine_answers_and_is_shown_its_key(secure: Start, files: Files) -> None:
    engine = await secure(files.server("localhost"))
    assert await ask(engine, EngineTLSSettings(files.ca), Secret("sk-1")) == BODY
    assert await ask(engine, EngineTLSSettings(files.ca)) == BODY
    assert [b"\r\nauthorization: Bearer sk-1\r\n" in head for head in engine.heads] == [True, False]


async def test_an_engine_with_somebody_elses_certificate_is_never_spoken_to(
    secure: Start, files: Files, strangers: Files
) -> None:
    engine = await secure(strangers.server("localhost"))
    for trust in (EngineTLSSettings(files.ca), EngineTLSSettings()):  # an authority of ours, or those of the system
        error = await refused(engine, trust)
        assert not error.connected
        assert "TLS" in error.reason


async def test_an_engine_with_another_name_is_never_spoken_to(secure: Start, files: Files) -> None:
    engine = await secure(files.server("decode-0.example"))
    error = await refused(engine, EngineTLSSettings(files.ca))
    assert not error.connected
    assert "example" not in error.reason
    assert await ask(engine, EngineTLSSettings(files.ca, server_name="decode-0.example")) == BODY


async def test_an_engine_with_an_expired_certificate_is_never_spoken_to(secure: Start, files: Files) -> None:
    ended = datetime.now(UTC) - timedelta(days=1)
    engine = await secure(files.server("localhost", not_before=ended - timedelta(days=1), not_after=ended))
    assert not (await refused(engine, EngineTLSSettings(files.ca))).connected


async def test_an_engine_that_asks_who_we_are_is_shown_it(secure: Start, files: Files, strangers: Files) -> None:
    engine = await secure(files.server("localhost", client_ca=files.ca))
    await refused(engine, EngineTLSSettings(files.ca))
    await refused(engine, EngineTLSSettings(files.ca, *strangers.issue("proxy.example")))
    assert await ask(engine, EngineTLSSettings(files.ca, *files.issue("proxy.example"))) == BODY


async def test_an_engine_that_speaks_only_old_tls_is_never_spoken_to(secure: Start, files: Files) -> None:
    """The control: a client that still takes it is answered."""
    engine = await secure(old(files.server("localhost")))
    assert not (await refused(engine, EngineTLSSettings(files.ca))).connected
    lax = old(engine_ssl_context(EngineTLSSettings(files.ca)))
    async with httpx.AsyncClient(verify=lax, trust_env=False) as client:
        assert (await client.get(engine.url + "/v1/models")).status_code == 200


def old(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1 is deprecated"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


# clients


@asynccontextmanager
async def serving(
    engines: tuple[str, str], trust: ssl.SSLContext, tls: ServerTLSSettings, direct: bool
) -> AsyncGenerator[str]:
    """The proxy behind https, in front of a prefill and a decode engine; its URL."""
    urls = zip((Role.PREFILL, Role.DECODE), engines, strict=True)
    rules = replace(default_spec_rules(), credentials=EngineCredentials(tls=trust))
    app = create_app(Settings(tuple(instance(role, url, "nixl") for role, url in urls), spec_rules=rules))
    server = ProxyServer(app, ServerSettings(tls=server_ssl_context(tls), direct=direct))
    listener = listen("127.0.0.1", 0)
    task = asyncio.create_task(server.run(listener))
    async with asyncio.timeout(10):
        await server.started.wait()
    try:
        yield f"https://localhost:{listener.getsockname()[1]}"
    finally:
        server.stop()
        async with asyncio.timeout(10):
            await task


async def test_tls_all_the_way(secure: Start, files: Files, strangers: Files, direct: bool) -> None:
    """Client to proxy and proxy to engines, each side showing who it is; a stream larger than any buffer."""
    engines = [await secure(files.server("localhost", client_ca=files.ca)) for _ in range(2)]
    trust = engine_ssl_context(EngineTLSSettings(files.ca, *files.issue("proxy.example")))
    own = ServerTLSSettings(*files.issue("localhost"), files.ca)
    body = {"model": "stub", "prompt": "x", "max_tokens": 4}
    async with serving((engines[0].url, engines[1].url), trust, own, direct) as url:
        known = engine_ssl_context(EngineTLSSettings(files.ca, *files.issue("client.example")))
        async with httpx.AsyncClient(base_url=url, verify=known, trust_env=False) as client:
            for _ in range(3):
                got = await client.post("/v1/completions", json=body)
                assert (got.status_code, got.json()["choices"]) == (200, ANSWER["choices"])
                got = await client.post("/v1/completions", json=body | {"stream": True})
                assert got.content == EVENT * 1000 + b"data: [DONE]\n\n"
        before = len(engines[0].heads)
        for stranger in (EngineTLSSettings(files.ca), EngineTLSSettings(files.ca, *strangers.issue("client.example"))):
            async with httpx.AsyncClient(base_url=url, verify=engine_ssl_context(stranger), trust_env=False) as client:
                with pytest.raises(httpx.TransportError):
                    await client.post("/v1/completions", json=body)
        async with httpx.AsyncClient(base_url=url.replace("https", "http"), trust_env=False) as client:
            with pytest.raises(httpx.TransportError):
                await client.post("/v1/completions", json=body)
    assert before == len(engines[0].heads) == 6


# files


def test_contexts_verify_and_speak_no_old_tls(files: Files) -> None:
    for trust in (
        EngineTLSSettings(),
        EngineTLSSettings(files.ca),
        EngineTLSSettings(files.ca, *files.issue("x.example")),
    ):
        context = engine_ssl_context(trust)
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    plain, mutual = files.server("x.example"), files.server("x.example", client_ca=files.ca)
    assert (plain.verify_mode, mutual.verify_mode) == (ssl.CERT_NONE, ssl.CERT_REQUIRED)
    assert plain.minimum_version is ssl.TLSVersion.TLSv1_2


def test_what_is_wrong_with_a_file_is_said_with_its_name(tmp_path: Path, files: Files) -> None:
    certificate, key = files.issue("x.example")
    _, other = files.issue("y.example")
    empty, broken, missing = tmp_path / "empty.pem", tmp_path / "broken.pem", tmp_path / "missing.pem"
    empty.write_text("")
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    locked = tmp_path / "locked.pem"
    locked.write_text(
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n"
        "DEK-Info: AES-128-CBC,00000000000000000000000000000000\n\nAAAA\n-----END RSA PRIVATE KEY-----\n"
    )
    cases: list[tuple[Callable[[], object], Path, str]] = [
        (lambda: server_ssl_context(ServerTLSSettings(missing, key)), missing, "No such file"),
        (lambda: server_ssl_context(ServerTLSSettings(certificate, missing)), missing, "No such file"),
        (lambda: server_ssl_context(ServerTLSSettings(certificate, key, missing)), missing, "No such file"),
        (lambda: server_ssl_context(ServerTLSSettings(tmp_path, key)), tmp_path, "directory"),
        (lambda: server_ssl_context(ServerTLSSettings(empty, key)), empty, "no PEM certificate"),
        (lambda: server_ssl_context(ServerTLSSettings(key, certificate)), key, "no PEM certificate"),
        (lambda: server_ssl_context(ServerTLSSettings(certificate, certificate)), certificate, "no PEM private key"),
        (lambda: server_ssl_context(ServerTLSSettings(broken, key)), broken, ""),
        (lambda: server_ssl_context(ServerTLSSettings(certificate, other)), other, "does not belong"),
        (lambda: server_ssl_context(ServerTLSSettings(certificate, locked)), locked, "encrypted"),
        (lambda: server_ssl_context(ServerTLSSettings(certificate, key, broken)), broken, ""),
        (lambda: engine_ssl_context(EngineTLSSettings(missing)), missing, "No such file"),
        (lambda: engine_ssl_context(EngineTLSSettings(empty)), empty, "no PEM certificate"),
        (lambda: engine_ssl_context(EngineTLSSettings(files.ca, certificate, other)), other, "does not belong"),
    ]
    for make, path, why in cases:
        with pytest.raises(TLSError) as caught:
            make()
        assert str(path) in str(caught.value)
        assert why in str(caught.value)
    assert server_ssl_context(ServerTLSSettings(certificate, key))


def test_half_of_a_pair_is_refused(files: Files) -> None:
    certificate, key = files.issue("x.example")
    for pair in ((certificate, None), (None, key)):
        with pytest.raises(TLSError, match="neither"):
            EngineTLSSettings(files.ca, *pair)
    with pytest.raises(TLSError, match="server_name"):
        EngineTLSSettings(server_name="")


# addresses


@pytest.mark.parametrize("url", ["ftp://h:1", "http://", "http://h:1/path", "h:1", "http://h:1?x=1"])
async def test_what_is_not_an_engines_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        UpstreamConnectionPool(url, UpstreamLimits())


def test_an_instance_is_known_by_identity() -> None:
    """A restarted engine is another instance, even if everything that can be read of it is equal."""
    first, again = (Instance("a", "boot", Role.DECODE, "http://h:1", "nixl") for _ in range(2))
    assert first != again
    assert len({first, again}) == 2
