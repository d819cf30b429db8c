"""Tests the stub engines of the router benchmarks (`benchmarks/native/stub_engine.c`)."""

import json
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.native_build import compiled
from tests.support.processes import Processes, free_ports, http_get
from tests.support.waiting import wait_until


@dataclass
class Stub:
    """A prefill and a decode engine."""

    prefill: int
    decode: int

    def ask(self, port: int, body: bytes, path: str = "/v1/completions") -> bytes:
        """Returns the body of an answer; the connection is closed after it."""
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        return self.send(port, head.encode() + body).partition(b"\r\n\r\n")[2]

    def send(self, port: int, *pieces: bytes) -> bytes:
        """Returns all that comes back for these pieces, each in a packet of its own."""
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                connection.sendall(piece)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def counters(self, port: int) -> dict[str, int]:
        return json.loads(http_get(f"http://127.0.0.1:{self.prefill}/stats")[1])[str(port)]


@pytest.fixture
def stub(tmp_path: Path) -> Generator[Stub]:
    """Engines that run for one test."""
    prefill, decode = free_ports(2)
    command = [str(compiled("stub_engine")), "--prefill", str(prefill), "--decode", str(decode)]
    with Processes(tmp_path) as processes:
        processes.start("stub", command, ready=[f"http://127.0.0.1:{prefill}/health"])
        yield Stub(prefill, decode)


def test_a_prefill_leg_is_answered_with_the_blocks_that_the_decode_leg_then_names(stub: Stub) -> None:
    body = {"prompt": "a " * 400, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = json.loads(stub.ask(stub.prefill, json.dumps(body).encode()))
    params: dict[str, Any] = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert len(params["remote_block_ids"][0]) == -(-answer["usage"]["prompt_tokens"] // 16)
    decode = {"prompt": "a " * 400, "max_tokens": 3, "kv_transfer_params": params}
    answer = json.loads(stub.ask(stub.decode, json.dumps(decode).encode()))
    assert answer["choices"][0]["text"] == " tok" * 3
    assert (stub.counters(stub.prefill)["prefill"], stub.counters(stub.decode)["decode_with_kv"]) == (1, 1)


def test_a_leg_without_kv_params_is_counted_as_a_request_and_nothing_else(stub: Stub) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = json.loads(stub.ask(stub.decode, json.dumps(chat).encode(), "/v1/chat/completions"))
    assert answer["choices"][0]["message"]["content"] == " tok tok"
    counted = stub.counters(stub.decode)
    assert (counted["requests"], counted["prefill"], counted["decode_with_kv"], counted["bootstrap"]) == (1, 0, 0, 0)


def test_of_two_members_of_one_name_the_last_counts(stub: Stub) -> None:
    body = b'{"prompt":"a","max_tokens":9,"stream":true,"max_tokens":2,"stream":false}'
    assert json.loads(stub.ask(stub.decode, body))["usage"]["completion_tokens"] == 2


def test_engines_report_the_share_of_a_prompt_that_they_are_told_to_have_cached(stub: Stub) -> None:
    http_get(f"http://127.0.0.1:{stub.prefill}/set?itl_ms=0.0&cached=0.5")
    usage = json.loads(stub.ask(stub.prefill, b'{"prompt":"%b"}' % (b"a" * 400)))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 2


def test_a_prefill_engine_of_sglang_answers_one_token(stub: Stub) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 5, "bootstrap_room": 7}).encode()
    assert json.loads(stub.ask(stub.prefill, body))["usage"]["completion_tokens"] == 1
    assert json.loads(stub.ask(stub.decode, body))["usage"]["completion_tokens"] == 5
    assert stub.counters(stub.decode)["bootstrap"] == 1


def test_a_request_may_come_in_any_pieces_and_in_chunks(stub: Stub) -> None:
    whole = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        b'7\r\n{"promp\r\n15\r\nt":"a","max_tokens":2\r\n1\r\n}\r\n0\r\n\r\n'
    )
    for pieces in ([whole], [whole[at : at + 1] for at in range(len(whole))]):
        head, _, answer = stub.send(stub.decode, *pieces).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert json.loads(answer)["usage"]["completion_tokens"] == 2


def test_two_requests_on_one_connection_are_answered_in_order(stub: Stub) -> None:
    bodies = [json.dumps({"prompt": "a", "max_tokens": count}).encode() for count in (1, 2)]
    heads = ["POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n{}\r\n"] * 2
    wire = b"".join(
        head.format(len(body), close).encode() + body
        for head, body, close in zip(heads, bodies, ("", "connection: close\r\n"), strict=True)
    )
    answers = stub.send(stub.decode, wire)
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.index(b'"completion_tokens":1') < answers.index(b'"completion_tokens":2')


def test_a_stream_is_paced_and_a_client_that_leaves_is_counted(stub: Stub) -> None:
    http_get(f"http://127.0.0.1:{stub.decode}/set?itl_ms=20")
    body = json.dumps({"prompt": "a", "max_tokens": 6, "stream": True}).encode()
    start = time.monotonic()
    assert stub.ask(stub.decode, body).count(b"data: ") == 7
    assert time.monotonic() - start >= 0.12
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", stub.decode)) as connection:
        connection.sendall(head + body)
        assert connection.recv(20)
    wait_until(lambda: stub.counters(stub.decode)["aborted"] == 1, 5)
    assert stub.counters(stub.decode)["live"] == 0


def test_a_render_answer_has_an_id_for_each_word(stub: Stub) -> None:
    found = json.loads(stub.ask(stub.decode, b'{"prompt": "one two two "}', "/v1/completions/render"))[0]
    assert len(found["token_ids"]) == 4  # the member's name is a word, too
    assert found["token_ids"][2] == found["token_ids"][3] != found["token_ids"][1]
    assert stub.counters(stub.decode)["requests"] == 0
