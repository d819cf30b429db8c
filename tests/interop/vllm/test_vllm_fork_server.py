"""Tests that the engines of the fork server of these tests are processes like any other."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.processes import ProcessError, Processes, Server
from tests.interop.vllm.engines import ANSWER_S, ENVIRONMENT, READY_S, complete, start_engine, until
from tests.interop.vllm.fork_server import SOCKET, ForkedProcess, ForkRequest, fork_engine, running_fork_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPT = list(range(10, 90))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Server]:
    with Processes(tmp_path) as processes:
        started = start_engine(processes, "forked", model)
        assert isinstance(started.process, ForkedProcess)
        processes.wait_ready(started, within_s=READY_S)
        yield started


def _is_refused(server: Server) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0


def test_it_answers_as_an_engine_that_was_started_as_ever(engine: Server, model: Path, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        ordinary = start_engine(processes, "ordinary", model, forked=False)
        assert not isinstance(ordinary.process, ForkedProcess)
        processes.wait_ready(ordinary, within_s=READY_S)
        said = [complete(server.url, PROMPT)["choices"][0]["text"] for server in (engine, ordinary)]
    assert said[0] == said[1]


def test_it_leads_a_session_and_its_end_is_told(engine: Server) -> None:
    assert os.getsid(engine.process.pid) == engine.process.pid
    assert engine.process.poll() is None
    engine.process.terminate()
    assert engine.process.wait(ANSWER_S) == 0
    assert engine.process.poll() == engine.process.returncode == 0
    assert "Application startup complete" in engine.tail()


def test_nobody_listens_for_a_server_that_was_killed(engine: Server) -> None:
    """Its core is a fork of it, and lets go of its sockets."""
    assert not _is_refused(engine)
    engine.process.kill()
    assert engine.process.wait(ANSWER_S) == -signal.SIGKILL
    assert _is_refused(engine)


def test_engines_end_with_their_fork_server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Processes(tmp_path) as processes:
        with running_fork_server(tmp_path, ENVIRONMENT) as path:
            monkeypatch.setenv(SOCKET, path)
            engine = start_engine(processes, "forked", model)
            processes.wait_ready(engine, within_s=READY_S)
        assert engine.process.wait(ANSWER_S) is not None
        until(lambda: _is_refused(engine))


def test_a_fork_server_that_cannot_import_vllm_is_an_error_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no such library')")
    request = ForkRequest([], {}, str(tmp_path / "log"))
    failing = running_fork_server(tmp_path, {"PYTHONPATH": str(tmp_path)})
    with failing as path, pytest.raises(ProcessError, match="no such library"):
        fork_engine(path, request)
