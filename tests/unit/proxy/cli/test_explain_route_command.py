"""Tests `kvparams explain-route` against servers that are no proxy: what it sends and what it says."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvparams.cli import main

TOKEN = "hunter2-do-not-show"
CANDIDATE = {"id": "p0", "in_flight": 0, "tokens_in_flight": 0}
ROUTE: dict[str, object] = {
    "object": "route",
    "policy": "round_robin",
    "role": "prefill",
    "tokens": 7,
    "ids": None,
    "estimated": True,
    "chosen": "p0",
    "decision": "p0: chosen by round_robin",
    "candidates": [CANDIDATE],
    "accuracy": None,
    "alarm": False,
}
CACHE = {"cached": 1, "fetched": 0, "computed": 6, "wait_s": 0, "fetch_s": 0, "compute_s": 0, "first_token_s": 0}


@dataclass
class Server:
    """An HTTP server that gives one answer to everything and keeps the headers of requests."""

    url: str = ""
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, str]] = field(default_factory=list)


def start_server() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def do_GET(self) -> None:
            server.requests.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(server.status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(server.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_port}"
        thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


server = pytest.fixture(start_server, name="server")
other = pytest.fixture(start_server, name="other")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def explain(capsys: pytest.CaptureFixture[str], url: str, token: Path, *more: str) -> tuple[int, str]:
    status = main(["explain-route", url, "--admin-token-file", str(token), "--prompt", "x", *more])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_a_token_file_that_cannot_be_used_is_refused_without_its_text(
    token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token.write_text(f"{TOKEN}\nanother line")
    status, said = explain(capsys, "http://127.0.0.1:1", token)
    assert (status, TOKEN in said, "another" in said) == (2, False, False)
    assert f"--admin-token-file: {token}: a secret must be" in said


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_the_token_stays_here(
    status: int, server: Server, other: Server, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.headers = status, {"location": f"{other.url}/admin/explain-route"}
    found, said = explain(capsys, server.url, token)
    assert (found, other.requests) == (1, [])
    assert "redirect, which is not followed" in said
    assert server.requests[0]["authorization"] == f"Bearer {TOKEN}", "or nothing could leak"


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"<html>", b'{"error": 5}', json.dumps(ROUTE | {"candidates": 5}).encode()]
)
@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_server_that_is_no_proxy_is_told_from_one(
    status: int,
    body: bytes,
    more: tuple[str, ...],
    server: Server,
    token: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.status, server.body = status, body
    found, said = explain(capsys, server.url, token, *more)
    assert found == 1
    assert f"{server.url} is no kvparams proxy, or one of another version" in said


@pytest.mark.parametrize(
    ("changes", "expected", "unexpected"),
    [
        ({}, "about 7 tokens, estimated", "chosen by load"),
        ({"policy": "cache_aware", "candidates": [CANDIDATE | CACHE]}, "about 7 tokens", "with ids"),
        ({"policy": "cache_aware"}, "so engines are chosen by load", "with ids"),
        ({"policy": "cache_aware", "ids": "bytes"}, "about 7 tokens, estimated from the text's bytes", "by load"),
        ({"ids": "client", "estimated": False}, "7 tokens, with ids from client", "about"),
    ],
)
def test_estimates_are_marked_and_only_true_reasons_given(
    changes: dict[str, object],
    expected: str,
    unexpected: str,
    server: Server,
    token: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.body = json.dumps(ROUTE | changes).encode()
    status, said = explain(capsys, server.url, token)
    assert (status, expected in said, unexpected in said) == (0, True, False), said


def test_the_session_goes_with_the_request(server: Server, token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.body = json.dumps(ROUTE).encode()
    explain(capsys, server.url, token, "--session", "s-1")
    explain(capsys, server.url, token)
    assert [each.get("x-session-id") for each in server.requests] == ["s-1", None]


def test_what_a_server_says_cannot_control_the_terminal(
    server: Server, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.body = json.dumps(ROUTE | {"decision": "\x1b[2J"}).encode()
    assert "\x1b" not in explain(capsys, server.url, token)[1]
    server.status, server.body = (
        400,
        json.dumps({"error": {"message": "\x1b[2J", "type": "x", "param": None, "code": None}}).encode(),
    )
    assert "\x1b" not in explain(capsys, server.url, token)[1]


def test_it_says_who_is_left_out_and_what_was_not_looked_at(
    server: Server, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {**CANDIDATE, "id": "p1", "excluded": "no room"}
    notes = ["the external picker is not asked"]
    changes: dict[str, object] = {"candidates": [CANDIDATE, full], "waits": True, "notes": notes}
    server.body = json.dumps(ROUTE | changes).encode()
    status, said = explain(capsys, server.url, token)
    assert status == 0
    assert [line for line in said.splitlines() if "p1" in line and line.endswith("  not now: no room")]
    assert "it would wait for room" in said
    assert "not looked at: the external picker is not asked" in said
    server.body = json.dumps(ROUTE).encode()
    _, said = explain(capsys, server.url, token)
    assert "not now" not in said
    assert "wait" not in said


@pytest.mark.parametrize("load_s", [None, 0, 0.5])
def test_loading_an_adapter_has_a_column_where_there_is_something_to_load(
    load_s: float | None, server: Server, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = CANDIDATE | CACHE | {"first_token_s": 0.25}
    elsewhere = CANDIDATE | CACHE | {"id": "p1", "load_s": load_s, "first_token_s": 0.75}
    server.body = json.dumps(ROUTE | {"policy": "cache_aware", "candidates": [there, elsewhere]}).encode()
    found, said = explain(capsys, server.url, token)
    assert found == 0
    (head,) = [line for line in said.splitlines() if "instance" in line]
    (row,) = [line for line in said.splitlines() if line.split()[:1] == ["p1"]]
    if load_s:
        assert head.split() == ["instance", "cached", "fetched", "wait", "fetch", "load", "compute", "first"]
        assert row.split()[3:] == ["0", "ms", "0", "ms", "500", "ms", "0", "ms", "750", "ms"]
    else:
        assert "load" not in head
        assert row.split()[3:] == ["0", "ms", "0", "ms", "0", "ms", "750", "ms"]
