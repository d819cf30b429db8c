"""Tests what clients see while the picker is gone, hangs or comes back, and how its health is told."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc import aio
from grpc_health.v1 import health_pb2

from kvparams_proxy.ext_proc import messages as ext_proc
from tests.support.gateway import filters, start_picker
from tests.support.processes import Processes
from tests.support.recording_engine import RecordingEngine
from tests.support.waiting import stays_true_for, until
from tests.system.picker.conftest import AGGREGATED, Site, StartSite

SERVING, NOT_SERVING = 1, 2
_grpc: Any = grpc
_aio: Any = aio
_pb: Any = health_pb2


def fail_open(config: dict[str, Any]) -> None:
    """Has Envoy go on without the picker."""
    filters(config)[0]["typed_config"]["failure_mode_allow"] = True


def fail_open_buffered(config: dict[str, Any]) -> None:
    """Has Envoy go on without the picker, also where it has shown it a request."""
    fail_open(config)
    ext = filters(config)[0]["typed_config"]
    ext["message_timeout"] = "1s"
    ext["processing_mode"].update({"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"})


async def test_without_its_picker_the_gateway_refuses_at_once(site: Site) -> None:
    assert (await site.complete()).status_code == 200  # control
    os.kill(site.picker.pid, signal.SIGKILL)
    answers = await asyncio.gather(*(site.complete() for _ in range(5)))
    assert all(answer.status_code >= 500 for answer in answers)
    assert sum(len(engine.requests) for engine in site.engines) == 1


async def test_a_gateway_that_fails_open_goes_on_without_its_picker(start_site: StartSite) -> None:
    site = await start_site(change=fail_open_buffered)
    os.kill(site.picker.pid, signal.SIGKILL)
    answers = [await site.complete() for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert min(len(engine.requests) for engine in site.engines) == 3  # round robin, Envoy's own
    # A client still cannot choose its engine, nor name a prefill partner.
    steering = {"x-gateway-destination-endpoint": site.engines[0].endpoint, "x-kvparams-prefill-partner": "forged"}
    for _ in range(4):
        assert (await site.complete(headers=steering)).status_code == 200
    assert [len(engine.requests) for engine in site.engines] == [5, 5]
    got = [each for engine in site.engines for each in engine.requests]
    assert not any(name in each.headers for each in got for name in steering)


@pytest.mark.parametrize("change", [fail_open, fail_open_buffered])
async def test_requests_that_run_while_the_picker_is_killed_end(
    change: Callable[[dict[str, Any]], None], start_site: StartSite
) -> None:
    site = await start_site("--aggregated-requests", "1", change=change)
    for engine in site.engines:
        engine.go_on.clear()
    running = [asyncio.ensure_future(site.complete(str(number))) for number in range(4)]
    await until(lambda: sum(engine.running for engine in site.engines) == 2)
    os.kill(site.picker.pid, signal.SIGKILL)
    for engine in site.engines:
        engine.go_on.set()
    async with asyncio.timeout(10):
        statuses = sorted(answer.status_code for answer in await asyncio.gather(*running))
    # In full duplex, what Envoy has shown to the picker cannot go on without it.
    assert statuses == [200] * 4 if change is fail_open_buffered else all(s in (200, 500) for s in statuses)


async def test_a_request_that_takes_long_survives_keepalive(start_site: StartSite) -> None:
    def pings(config: dict[str, Any]) -> None:
        (options,) = config["static_resources"]["clusters"][1]["typed_extension_protocol_options"].values()
        keepalive = {"interval": "0.2s", "timeout": "2s"}
        options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"] = keepalive

    site = await start_site(change=pings)
    for engine in site.engines:
        engine.go_on.clear()
    running = asyncio.ensure_future(site.complete())
    await until(lambda: sum(engine.running for engine in site.engines) == 1)
    # A gRPC server ends a connection after three pings without data, unless it is told to bear them.
    await stays_true_for(2.5, lambda: not running.done(), pause_s=0.1)
    for engine in site.engines:
        engine.go_on.set()
    assert (await running).status_code == 200


@pytest.mark.slow
async def test_a_picker_that_hangs_is_noticed(site: Site) -> None:
    assert (await site.complete()).status_code == 200
    os.kill(site.picker.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(15):
            hung = await site.complete()
    finally:
        os.kill(site.picker.pid, signal.SIGCONT)
    assert hung.status_code >= 500
    await until(lambda: _answers(site), 15)


@pytest.mark.slow
@pytest.mark.parametrize("change", [fail_open, fail_open_buffered])
async def test_a_picker_that_hangs_is_passed_by_where_the_gateway_fails_open(
    change: Callable[[dict[str, Any]], None], start_site: StartSite
) -> None:
    site = await start_site(change=change)
    assert (await site.complete()).status_code == 200
    os.kill(site.picker.pid, signal.SIGSTOP)
    try:
        first = await site.complete()
        await until(lambda: _answers(site), 20)
        assert [(await site.complete()).status_code for _ in range(3)] == [200] * 3
    finally:
        os.kill(site.picker.pid, signal.SIGCONT)
    assert first.status_code == 200 or change is fail_open
    before = await site.metric('kvparams_picker_picks_total{result="picked"}')
    await until(lambda: _picks_again(site, before), 15)


async def test_a_picker_that_was_started_again_is_used_again(
    site: Site, processes: Processes, engines: tuple[RecordingEngine, ...]
) -> None:
    os.kill(site.picker.pid, signal.SIGKILL)
    assert (await site.complete()).status_code >= 500
    named = [part for each in engines for part in ("--aggregated", each.url)]
    await asyncio.to_thread(start_picker, processes, "again", *AGGREGATED, *named, port=site.picker.grpc_port)
    await until(lambda: _answers(site), 15)


async def test_a_picker_that_is_told_to_stop_lets_streams_end(site: Site) -> None:
    for engine in site.engines:
        engine.go_on.clear()
    running = asyncio.ensure_future(site.complete())
    await until(lambda: sum(engine.running for engine in site.engines) == 1)
    os.kill(site.picker.pid, signal.SIGTERM)
    assert (await site.complete("another")).status_code >= 500  # nothing new is picked
    await stays_true_for(1.5, lambda: not running.done() and not _is_gone(site.picker.pid), pause_s=0.1)
    for engine in site.engines:
        engine.go_on.set()
    assert (await running).status_code == 200
    await until(lambda: _is_gone(site.picker.pid), 10)


@pytest.mark.parametrize("flags", [("--grace", "0.5"), ()], ids=["grace", "second signal"])
async def test_a_picker_cuts_what_runs_too_long(flags: tuple[str, ...], start_site: StartSite) -> None:
    site = await start_site(*flags)
    for engine in site.engines:
        engine.go_on.clear()
    running = asyncio.ensure_future(site.complete())
    await until(lambda: sum(engine.running for engine in site.engines) == 1)
    os.kill(site.picker.pid, signal.SIGTERM)
    if not flags:
        await stays_true_for(0.5, lambda: not _is_gone(site.picker.pid), pause_s=0.1)
        os.kill(site.picker.pid, signal.SIGTERM)
    await until(lambda: _is_gone(site.picker.pid), 10)
    for engine in site.engines:
        engine.go_on.set()
    assert (await running).status_code >= 200  # it ends


@pytest.mark.parametrize("service", ["", "readiness", ext_proc.SERVICE])
async def test_health_follows_the_engines(
    service: str, processes: Processes, engines: tuple[RecordingEngine, ...]
) -> None:
    picker = await asyncio.to_thread(start_picker, processes, "picker", *AGGREGATED, "--aggregated", engines[0].url)
    async with _aio.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel:
        await until(lambda: _is(channel, service, SERVING))
        await engines[0].close()
        await until(lambda: _is(channel, service, NOT_SERVING))
        assert await health(channel, "liveness") == SERVING
        with pytest.raises(_aio.AioRpcError, match="NOT_FOUND"):
            await health(channel, "nobody")
        await engines[0].listen()
        await until(lambda: _is(channel, service, SERVING))


async def test_tls_and_client_certificates(
    processes: Processes, tmp_path: Path, engines: tuple[RecordingEngine, ...]
) -> None:
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("gateway.test")
    paths = {name: tmp_path / f"{name}.pem" for name in ("certificate", "key", "ca")}
    server.cert_chain_pems[0].write_to_path(paths["certificate"])
    server.private_key_pem.write_to_path(paths["key"])
    authority.cert_pem.write_to_path(paths["ca"])
    flags = [f"--grpc-{name}={paths[name]}" for name in ("certificate", "key")] + [f"--grpc-client-ca={paths['ca']}"]
    picker = await asyncio.to_thread(
        start_picker, processes, "picker", *AGGREGATED, "--aggregated", engines[0].url, *flags
    )
    root = authority.cert_pem.bytes()
    own = (client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes())
    known = _grpc.ssl_channel_credentials(root, *own)
    target = f"127.0.0.1:{picker.grpc_port}"
    async with _aio.secure_channel(target, known) as channel:
        assert await health(channel, "") == SERVING
    async with _aio.secure_channel(target, _grpc.ssl_channel_credentials(root)) as channel:
        with pytest.raises(_aio.AioRpcError, match="UNAVAILABLE"):
            await health(channel, "")
    async with _aio.insecure_channel(target) as channel:
        with pytest.raises(_aio.AioRpcError, match="UNAVAILABLE"):
            await health(channel, "")


async def health(channel: Any, service: str) -> int:
    """Asks the health service."""
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=_pb.HealthCheckRequest.SerializeToString,
        response_deserializer=_pb.HealthCheckResponse.FromString,
    )
    answer = await check(_pb.HealthCheckRequest(service=service), timeout=5)
    status: int = answer.status
    return status


async def _is(channel: Any, service: str, status: int) -> bool:
    return await health(channel, service) == status


async def _answers(site: Site) -> bool:
    return (await site.complete()).status_code == 200


async def _picks_again(site: Site, before: float) -> bool:
    await site.complete()
    return await site.metric('kvparams_picker_picks_total{result="picked"}') > before


def _is_gone(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
