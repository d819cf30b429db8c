"""Tests that a start that fails at any step closes everything that it has opened."""

import ast
import asyncio
import gc
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from kvparams.instances import Instance, Role
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring
from kvparams_proxy.cli.queue_sidecar import create_decode_node_app
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.config.sharing import share_directory, write_exchange_key
from kvparams_proxy.config.signing import SigningSettings
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.event_loop.clock import StallAwareClock
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.kv_events.consumer import KVEventConsumer
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.queue.consumer import WorkConsumer
from kvparams_proxy.requests.api_keys_file import create_api_key, edit_api_keys
from kvparams_proxy.secret import Secret
from kvparams_proxy.server import lifespan
from kvparams_proxy.server.app import create_app
from kvparams_proxy.server.memory_trimmer import MemoryTrimmer
from kvparams_proxy.telemetry.loop_lag import LoopLag
from kvparams_proxy.telemetry.record_dispatcher import RecordDispatcher
from kvparams_proxy.telemetry.request_log import RequestLog
from kvparams_proxy.telemetry.spans import RequestSpanExporter
from kvparams_proxy.tokenization.service import TokenService
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from tests.support.waiting import until

MODELS = b'{"object":"list","data":[{"id":"stub"}]}'
CLOSED = (
    *(
        StallAwareClock,
        RequestSpanExporter,
        RequestLog,
        RecordDispatcher,
        TokenService,
        KVEventConsumer,
        MemoryTrimmer,
        LoopLag,
        FleetSync,
        UpstreamPools,
        Fleet,
    ),
)
"""Classes whose instances the start has to close."""
EMPTY = {"Fleet", "UpstreamPools"}
"""Those that hold nothing before engines join."""
STEPS = (
    *("StallAwareClock", "Fleet", "FleetSync", "Registry", "UpstreamPools", "EngineAddresses", "Deadlines", "Metrics"),
    *(
        "RequestLog",
        "RecentRequests",
        "RecordDispatcher",
        "EngineTokenizer",
        "TokenService",
        "open_event_consumer",
        "MemoryTrimmer",
        "BodyBudget",
        "KVReleaser",
    ),
    *(
        "QueueDepthReader",
        "ProxyGauges",
        "QueueDepthGauges",
        "PrefixCacheGauges",
        "KVEventGauges",
        "PromptGauges",
        "ExchangeGauges",
    ),
    *("InstanceGauges", "ProductionStackGauges"),
    *(
        "MetricsExposition",
        "LoopLag",
        "StepRunner",
        "TurnBatcher",
        "RetryBudget",
        "response_ids",
        "Tracer",
        "ExecutionResources",
    ),
    *("EndpointNames", "make_prefill_partners", "open_decode_picker"),
    *("RequestHandler", "SharedAdmin", "run_providers", "BootstrapServers", "Prober"),
    *("run_startup_check", "DrainState", "open_live_page"),
)
"""What the start makes, in this order; each fails in turn."""
LATER = {"UpstreamConnectionPool"}
"""What is made when an engine joins; it holds nothing at the start."""

HELPERS = {"EncodingLog", "MediaAffinity", "describe_proxy", "id_maker", "reload_on_change", "role_alone"}
"""What opens nothing."""


class StartError(Exception):
    """What a step raises."""


class Engine(BaseHTTPRequestHandler):
    """Answers probes, and keeps the connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(MODELS)))
        self.end_headers()
        self.wfile.write(MODELS)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


class RecordingLoop(asyncio.SelectorEventLoop):
    """Keeps its timers."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[asyncio.TimerHandle] = []

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        self.timers.append(handle)
        return handle

    def pending(self) -> list[asyncio.TimerHandle]:
        """Returns those that have not run and were not cancelled."""
        return [timer for timer in self.timers if not timer.cancelled() and timer.when() > self.time()]


class Source:
    """A provider that follows something for ever."""

    def __init__(self, name: str, *, fails: bool) -> None:
        self.source = name
        self._fails = fails

    def publish_initial(self, registry: Registry) -> None:
        if self._fails:
            raise StartError

    async def watch(self, registry: Registry) -> NoReturn:
        await asyncio.get_running_loop().create_future()
        raise AssertionError


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    """An engine whose connections are never taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def settings(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Everything that may be open is wanted."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    clients, signing = tmp_path / "clients", tmp_path / "signing"
    with edit_api_keys(clients) as keys:
        _, record = create_api_key("tenant", datetime.now(UTC))
        keys[record.id] = record
    create_keyring(signing, SigningKeyring([SigningKey.new(int(time.time()) - 60)]))
    write_exchange_key(tmp_path)
    prefill = Instance("p0", "1", Role.PREFILL, engine, "nixl", kv_events="tcp://127.0.0.1:9")
    decode = Instance("d0", "1", Role.DECODE, engine, "nixl")
    return Settings(
        (prefill, decode),
        startup_check=True,
        viewer_token=Secret("viewer"),
        policy="cache_aware",
        tokenizers={None: TokenizationMethod.BYTES},
        trace=1.0,
        log_requests=str(tmp_path / "log"),
        client_keys=clients,
        signing=SigningSettings(signing, "pool"),
        sharing=share_directory(tmp_path),
    )


@pytest.fixture
def unclosed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which instances of `CLOSED` are open."""
    names: list[str] = []

    def watch(kind: type[Any]) -> None:
        init, close = kind.__init__, kind.close

        def opened(self: Any, *args: Any, **more: Any) -> None:
            init(self, *args, **more)
            names.append(kind.__name__)

        def closed(self: Any) -> Any:
            names.remove(kind.__name__)
            return close(self)

        monkeypatch.setattr(kind, "__init__", opened)
        monkeypatch.setattr(kind, "close", closed)

    for kind in CLOSED:
        watch(kind)
    return names


def check(begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it in a loop of its own, and checks that nothing of it is left, without the collector's help."""

    async def run(loop: RecordingLoop) -> None:
        before = descriptors()
        await begin()
        for _ in range(10):  # what was cancelled ends in a later turn
            await asyncio.sleep(0)
        assert asyncio.all_tasks(loop) == {asyncio.current_task()}
        assert loop.pending() == []
        await until(lambda: descriptors() == before, 5)

    gc.collect()
    gc.disable()
    threads = set(threading.enumerate())
    try:
        with asyncio.Runner(loop_factory=RecordingLoop) as runner:
            runner.run(run(cast("RecordingLoop", runner.get_loop())))
        for thread in set(threading.enumerate()) - threads:
            thread.join(5)
            assert not thread.is_alive(), thread.name
    finally:
        gc.enable()


def descriptors() -> int:
    """Returns how many this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def start(settings: Settings) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        pass


@pytest.mark.parametrize("step", STEPS)
def test_what_a_step_leaves_is_closed(
    settings: Settings, unclosed: list[str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    reached: list[str] = []

    def fails(*_: object, **__: object) -> NoReturn:
        reached.append(step)
        raise StartError

    async def begin() -> None:
        app = create_app(settings)
        monkeypatch.setattr(lifespan, step, fails)
        with pytest.raises(StartError):
            async with app.router.lifespan_context(app):
                pass

    check(begin)
    assert reached == [step]
    assert set(unclosed) <= (EMPTY if STEPS.index(step) <= STEPS.index("LoopLag") else set())


def test_no_step_is_left_out() -> None:
    """A step that is added to the start is tried as well."""
    tree = ast.parse(inspect.getsource(lifespan))
    imported = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvparams")
        for alias in node.names
    }
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called & imported - HELPERS == {*STEPS, *LATER}


def test_a_source_that_cannot_begin_leaves_nothing(settings: Settings, unclosed: list[str]) -> None:
    """The one before it is followed already."""
    sources = (Source("one", fails=False), Source("two", fails=True))

    async def begin() -> None:
        with pytest.raises(StartError):
            await start(replace(settings, providers=sources))

    check(begin)
    assert unclosed == []


def test_a_log_that_cannot_be_written_leaves_nothing(settings: Settings, unclosed: list[str], tmp_path: Path) -> None:
    async def begin() -> None:
        with pytest.raises(IsADirectoryError):
            await start(replace(settings, log_requests=str(tmp_path)))

    check(begin)
    assert set(unclosed) <= EMPTY


def test_a_start_that_is_cancelled_leaves_nothing(settings: Settings, unclosed: list[str], silent: str) -> None:
    """As by a signal, while an engine has not answered its first probe."""
    slow = Instance("d1", "1", Role.DECODE, silent, "nixl")

    async def begin() -> None:
        starting = asyncio.create_task(start(replace(settings, instances=(*settings.instances, slow))))
        await until(lambda: "Fleet" in unclosed)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()

    check(begin)
    assert unclosed == []


def test_an_end_leaves_nothing(settings: Settings, unclosed: list[str]) -> None:
    """The control: the start opens all of these, and a sound end closes them."""
    opened: list[str] = []

    async def begin() -> None:
        app = create_app(settings)
        async with app.router.lifespan_context(app):
            opened.extend(unclosed)

    check(begin)
    assert sorted(opened) == sorted(kind.__name__ for kind in CLOSED)
    assert unclosed == []


def test_a_decode_node_that_cannot_serve_leaves_nothing(engine: str) -> None:
    """Its server fails behind the start, with a connection to the engine open."""
    local = Instance("d0", "1", Role.DECODE, engine, "store")
    app = create_decode_node_app(Secret("amqp://127.0.0.1:9"), "pool", Settings((local,), local_id="d0"), local)

    async def fails_behind_the_start() -> None:
        async with app.router.lifespan_context(app) as state:
            consumer: WorkConsumer = dict(state or {})["consumer"]
            await until(lambda: consumer.engine_ready)
            raise StartError

    async def begin() -> None:
        with pytest.raises(StartError):
            await fails_behind_the_start()

    check(begin)
