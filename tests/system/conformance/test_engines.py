"""Tests that the reference engine keeps the profiles `engine` and `signed-engine`, and that a wrong one does not."""

import asyncio
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvparams.cli import main
from kvparams_conformance.checks import CheckResult, select_checks
from kvparams_conformance.engine_checks import engine_checks
from kvparams_conformance.engine_site import Engine, first_model
from kvparams_conformance.runner import run_engine_checks
from tests.support.processes import Processes, free_ports


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "signing-keys.json"
    assert main(["signing-keys", "create", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def engines(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of an engine, and of one that wants signatures."""
    folder = tmp_path_factory.mktemp("engines")
    ports = free_ports(2)
    options: list[list[str]] = [[], ["--verify-with", str(keys), "--audience", "pool", "--clock-skew", "1"]]
    with Processes(folder) as processes:
        for port, more in zip(ports, options, strict=True):
            store = f"file://{folder}/kv-{port}?size=32MiB"
            command = [sys.executable, "-m", "reference_engine", "--role", "both", "--port", str(port), "--id", "e0"]
            url = f"http://127.0.0.1:{port}/health"
            processes.start(f"engine-{port}", [*command, "--store", store, *more], ready=[url], ready_s=100)
        yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"


def judged(profile: str, engine: Engine, *only: str) -> list[CheckResult]:
    return asyncio.run(run_engine_checks(select_checks(engine_checks(), (profile,), only), engine))


def failures(results: list[CheckResult]) -> list[str]:
    assert len(results) > 10
    return [f"{result.check.id}: {result.message}" for result in results if result.verdict != "pass"]


def test_the_reference_engine_keeps_the_profile(engines: tuple[str, str]) -> None:
    model = asyncio.run(first_model(engines[0]))
    assert model is not None
    assert failures(judged("engine", Engine(engines[0], model, instance="e0"))) == []


def test_the_reference_engine_derives_no_address_from_an_id(engines: tuple[str, str]) -> None:
    model = asyncio.run(first_model(engines[0]))
    assert model is not None
    results = judged("engine", Engine(engines[0], model, instance="e0"), "3.11", "3.14")
    assert sorted((one.check.requirement, one.verdict) for one in results) == [("3.11", "pass"), ("3.14", "pass")]


def test_the_reference_engine_keeps_the_profile_of_signatures(engines: tuple[str, str], keys: Path) -> None:
    model = asyncio.run(first_model(engines[1]))
    assert model is not None
    assert failures(judged("signed-engine", Engine(engines[1], model, instance="e0", keys=keys))) == []


def test_an_engine_that_believes_everything_fails_the_profile_of_signatures(
    engines: tuple[str, str], keys: Path
) -> None:
    """Negative control: the engine without keys."""
    engine = Engine(engines[0], asyncio.run(first_model(engines[0])) or "", instance="e0", keys=keys)
    found = {result.check.id: result.verdict for result in judged("signed-engine", engine)}
    assert found.pop("13.8/accepted") == "pass"
    assert {*found.values()} == {"fail"}


class _Yes(BaseHTTPRequestHandler):
    """Answers 200 and an empty object to everything."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def test_an_engine_that_accepts_everything_fails_every_refusal() -> None:
    """Negative control."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Yes) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        results = judged("engine", Engine(f"http://127.0.0.1:{server.server_address[1]}", "m"))
        server.shutdown()
        thread.join()
    passed = {result.check.id for result in results if result.verdict == "pass"}
    # What it does not do wrong: it answers at once, computes nothing, and connects to nobody.
    harmless = {"2.3/null-text", "3.10/recompute", "3.11/id", "3.14/address", "4.4/unknown-transfer", "8.6/prefix"}
    assert passed <= harmless | {"12.3/foreign-salt", "18.4/release", "18.5/ordinary"}
    assert len(results) - len(passed) >= 20
