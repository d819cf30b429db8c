"""Tests what `KVParamsMiddleware` refuses, changes and leaves alone, around an application that is no vLLM."""

import asyncio
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvparams import parse
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring, read_keyring
from kvparams.signing.signer import Signer
from kvparams_connectors.engines.process_start import process_start_time
from kvparams_connectors.engines.vllm.middleware import MAX_BODY_BYTES, KVParamsMiddleware
from tests.support.waiting import wait_until

DOCUMENT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}
OURS = {"kv_connector": "KVParamsConnector", "kv_connector_extra_config": {"store": "memory://"}}
JSON = [(b"content-type", b"application/json")]
Messages = list[dict[str, Any]]


class Engine:
    """The application behind the middleware, and vLLM's settings beside it."""

    def __init__(self, transfer: dict[str, Any] | None = None, policy: str = "recompute") -> None:
        told = SimpleNamespace(kv_load_failure_policy=policy, **(OURS if transfer is None else transfer))
        self.state = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=told))
        self.seen: list[tuple[bytes, bytes]] = []
        """Body and content-length of each request that has come."""
        self.left = False
        self.middleware = KVParamsMiddleware(self._answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        text, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                await send({"type": "http.response.start", "status": 500, "headers": []})
                raise ConnectionError("the client has left")  # starlette does so too
            text += message.get("body", b"")
            more = message.get("more_body", False)
        length = dict(scope["headers"]).get(b"content-length", b"")
        self.seen.append((bytes(text), length))
        self.left = (await receive())["type"] == "http.disconnect"
        models = b'{"object":"list","data":[]}'
        headers = [(b"content-length", b"%d" % len(models)), (b"x-own", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (models[:5], models[5:]):
            await send({"type": "http.response.body", "body": part, "more_body": part is not models[5:]})
        await send({"type": "http.response.body", "body": b""})

    def ask(
        self,
        body: Sequence[bytes],
        path: str = "/v1/completions",
        method: str = "POST",
        content_type: bytes = b"application/json",
    ) -> tuple[int, Any]:
        """Returns status and body of the answer to a request that comes in parts, from a client that leaves then."""
        parts: Messages = [{"type": "http.request", "body": part, "more_body": True} for part in body[:-1]]
        parts.append({"type": "http.request", **({"body": body[-1]} if body[-1] else {})})  # as ASGI allows
        parts.append({"type": "http.disconnect"})
        sent: Messages = []

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-length", b"%d" % sum(map(len, body))), (b"Content-Type", content_type)]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": self}
        asyncio.run(self.middleware(scope, receive, send))
        content = b"".join(message.get("body", b"") for message in sent)
        assert dict(sent[0]["headers"])[b"content-length"] == b"%d" % len(content)
        return sent[0]["status"], json.loads(content)


def body(carrier: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", "kv_transfer_params": carrier}).encode()


@pytest.mark.parametrize(
    ("carrier", "param"),
    [
        ({"kvparams": {}}, "kv_transfer_params.kvparams.version"),
        ({"kvparams": {**DOCUMENT, "version": "2.0"}}, "kv_transfer_params.kvparams.version"),
        ({"kvparams": {**DOCUMENT, "phase": "release"}}, "kv_transfer_params.kvparams.phase"),
        ({"kvparams": {**DOCUMENT, "on_load_failure": "fail"}}, "kv_transfer_params.kvparams.on_load_failure"),
        ({"kvparams": json.dumps(DOCUMENT)}, "kv_transfer_params.kvparams"),
        ("{", "kv_transfer_params"),
        ('{"a": 1, "a": 2}', "kv_transfer_params"),
        ([], "kv_transfer_params"),
        (7, "kv_transfer_params"),
    ],
)
def test_a_wrong_document_is_refused_and_the_engine_never_sees_it(carrier: object, param: str) -> None:
    engine = Engine()
    status, answer = engine.ask([body(carrier)])
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"]
    assert engine.seen == []


@pytest.mark.parametrize(
    "text",
    [
        body({"kvparams": DOCUMENT}),
        body({"kvparams": {**DOCUMENT, "mode": "pull", "on_load_failure": "fail"}}),  # another connector's
        body({"do_remote_decode": True}),
        body({"kvcache_store_keys": ["a", "b"], "prefix_prompt_ids": [[1], [2]]}),  # a trio: see the connector
        body(None),
        b'{"prompt": "p"}',
        b"no JSON",
        b'{"prompt": "p", "prompt": "\\u0070"}',
    ],
)
def test_everything_else_passes_as_it_came(text: bytes) -> None:
    for parts in ([text], [text[:3], text[3:], b""]):
        engine = Engine()
        assert engine.ask(parts)[0] == 200
        assert engine.seen == [(text, b"%d" % len(text))]
        assert engine.left


def test_a_member_with_an_escape_in_its_name_is_judged_too() -> None:
    text = body({"kvparams": {}}).replace(b"kv_transfer", b"kv\\u005ftransfer")
    assert Engine().ask([text])[0] == 400


def test_a_member_that_stands_twice_is_refused() -> None:
    text = b'{"kv_transfer_params": null, ' + body({"kvparams": DOCUMENT})[1:]
    assert Engine().ask([text])[0] == 400


def test_text_becomes_the_object_that_it_spells() -> None:
    engine = Engine()
    for told, wanted in ((json.dumps({"kvparams": DOCUMENT}), {"kvparams": DOCUMENT}), (" null ", None)):
        assert engine.ask([body(told)])[0] == 200
        text, length = engine.seen.pop()
        assert json.loads(text) == {"model": "m", "prompt": "p", "kv_transfer_params": wanted}
        assert length == b"%d" % len(text)


def test_failing_is_accepted_where_vllm_fails() -> None:
    engine = Engine(policy="fail")
    assert engine.ask([body({"kvparams": {**DOCUMENT, "on_load_failure": "fail"}})])[0] == 200


def test_the_models_say_the_versions() -> None:
    engine = Engine()
    assert engine.ask([b""], "/v1/models", "GET") == (
        200,
        {"object": "list", "data": [], "kvparams_versions": ["1.0"]},
    )
    assert engine.ask([b""], "/health", "GET")[1] == {"object": "list", "data": []}


def test_the_path_of_releases_is_not_answered() -> None:
    engine = Engine()
    assert engine.ask([body({"kvparams": {**DOCUMENT, "phase": "release"}})], "/v1/kvparams")[0] == 200
    assert len(engine.seen) == 1


def test_a_client_that_leaves_before_its_body_is_whole_is_passed_on() -> None:
    engine = Engine()
    parts: Messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    seen: Messages = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def app(_: object, receive: Any, __: object) -> None:
        seen.append(await receive())

    scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON, "app": engine}
    asyncio.run(KVParamsMiddleware(app)(scope, receive, None))  # type: ignore[arg-type]  nothing is sent
    assert seen == [{"type": "http.disconnect"}]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_what_vllm_would_read_in_another_encoding_is_refused(encoding: str) -> None:
    text = body({"kvparams": {}}).decode().encode(encoding)
    assert json.loads(text)["kv_transfer_params"] == {"kvparams": {}}
    engine = Engine()
    status, answer = engine.ask([text])
    assert (status, engine.seen) == (400, [])
    assert "send it as UTF-8" in answer["error"]["message"]


def test_a_byte_order_mark_hides_nothing() -> None:
    text = b"\xef\xbb\xbf" + body({"kvparams": {}})
    assert json.loads(text)["kv_transfer_params"] == {"kvparams": {}}
    assert Engine().ask([text])[0] == 400


@pytest.mark.parametrize(
    "text",
    [
        b'{"temperature": NaN, "prompt": "kv_transfer_params"}',
        b'{"prompt": "\\ud800 kv_transfer_params"}',
        b'{"x": {"kv_transfer_params": 7}, "kv_transfer_params": null}',
        b'{"a": 1, "a": 2, "kv_transfer_params": null}',
        b'["kv_transfer_params", 1]',
        b'{"kv_transfer_params": 7',  # no JSON: vLLM says so
        b'{"kv_transfer_params": 7,',
        b"kv_transfer_params",
        b'"kv_transfer_params"',
        b'\xff{"kv_transfer_params": 7}',
    ],
)
def test_what_has_nothing_to_do_with_the_member_is_for_the_engine_to_judge(text: bytes) -> None:
    engine = Engine()
    assert engine.ask([text])[0] == 200
    assert engine.seen[0][0] == text


def test_faults_elsewhere_do_not_hide_the_member() -> None:
    for told in (b'"t": NaN', b'"t": -Infinity', b'"p": "\\ud800"', b'"p": "\\\\"', b'"p": "}{"', b'"t": [1e999]'):
        for text in (b"{%b, " % told + body(7)[1:], body(7)[:-1] + b", %b}" % told):
            assert Engine().ask([text])[0] == 400, text


def test_only_what_the_engine_reads_as_json_is_judged() -> None:
    engine = Engine()
    for is_json in (b"application/json; charset=utf-8", b"APPLICATION/JSON", b"application/vnd.a+json"):
        assert engine.ask([body(7)], content_type=is_json)[0] == 400
    for other in (b"text/plain", b"multipart/form-data; boundary=x", b"application/jsonp", b""):
        assert engine.ask([body(7)], content_type=other)[0] == 200


def test_a_body_that_is_too_long_is_refused_while_it_comes() -> None:
    engine, part = Engine(), b" " * (1 << 20)
    parts = [part] * (MAX_BODY_BYTES // len(part))
    status, answer = engine.ask([*parts, b"{", b"never read"])
    assert (status, engine.seen) == (413, [])
    assert f"larger than {MAX_BODY_BYTES} bytes" in answer["error"]["message"]
    assert engine.ask(parts)[0] == 200


def test_long_bodies_come_whole_and_in_parts() -> None:
    engine = Engine()
    text = json.dumps({"prompt": "p" * 1_000_000, "kv_transfer_params": json.dumps({"a": list(range(9000))})}).encode()
    assert engine.ask([text[:70_000], text[70_000:]])[0] == 200
    seen, length = engine.seen[0]
    assert (len(seen), length) == (len(text), b"%d" % len(text))
    assert json.loads(seen)["kv_transfer_params"] == {"a": list(range(9000))}


def test_a_long_member_is_judged_within_bounds_or_is_no_document() -> None:
    engine = Engine()
    for long in ({"kvparams": {**DOCUMENT, "x": [7] * 70_001}}, {"kvparams": {**DOCUMENT, "x": "x" * (8 << 20)}}):
        status, answer = engine.ask([body(long)])
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")
    keys = [f"{number:0100}" for number in range(65_536)]
    assert engine.ask([body({"kvparams": {**DOCUMENT, "phase": "decode", "load_keys": keys}})])[0] == 200
    assert engine.ask([body({"kvparams": {}, "other": list(range(50_000))})])[0] == 400
    assert engine.ask([body({"other": list(range(500_000))})])[0] == 200  # another connector's


def test_other_requests_have_their_turn_while_a_long_body_is_judged() -> None:
    strings = b'{"a": [%b""], "kv_transfer_params": {"kvparams": {}}}' % (b'"",' * 1_000_000)
    turns = 0

    async def judged() -> None:
        nonlocal turns
        parts: Messages = [{"type": "http.request", "body": strings}]
        sent: Messages = []

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        async def app(_: object, receive: Any, __: object) -> None:
            assert await receive() == {"type": "http.disconnect"}

        scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON, "app": Engine()}
        task = asyncio.ensure_future(KVParamsMiddleware(app)(scope, receive, send))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        await task
        assert sent[0]["status"] == 400

    asyncio.run(judged())
    assert turns >= len(strings) >> 16


def test_errors_of_the_engine_are_its_own() -> None:
    """Negative control: only after a refusal is nothing left to say."""

    async def app(*_: object) -> None:
        raise ConnectionError("its own")

    scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON, "app": Engine()}
    with pytest.raises(ConnectionError, match="its own"):
        asyncio.run(KVParamsMiddleware(app)(scope, None, None))  # type: ignore[arg-type]  neither is called


@pytest.mark.parametrize("nested", [False, True])
def test_signatures_are_verified_with_the_keys_of_the_connector(nested: bool, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_keyring(path, SigningKeyring([SigningKey.new(int(time.time()) - 7200)]))
    extra = {"store": "memory://", "verify_with": str(path), "audience": "pool"}
    ours = {"kv_connector": "KVParamsConnector", "kv_connector_extra_config": extra}
    connectors = {"connectors": [{"kv_connector": "NixlConnector"}, ours]}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": connectors}
    engine = Engine(multi if nested else ours)
    # What is signed is refused for 30 s from when the process began, and so is what comes from 30 s ahead.
    begun = math.ceil(process_start_time()) + 1
    wait_until(lambda: time.time() >= begun)
    signer = Signer(read_keyring(path), "pool", lambda: max(time.time(), begun + 30))
    good = body(signer.sign(parse(DOCUMENT)))
    assert engine.ask([good])[0] == 200
    for text, reason in ((good, "replayed"), (body({"kvparams": DOCUMENT}), "unsigned"), (body({"x": 1}), "unsigned")):
        status, answer = engine.ask([text])
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")
        assert f"[{reason}]" in answer["error"]["message"]
    assert engine.ask([b'{"prompt": "p"}'])[0] == 200
    keys = [f"{number:0100}" for number in range(65_536)]  # the longest are verified in a thread
    long = body(signer.sign(parse({**DOCUMENT, "phase": "decode", "load_keys": keys})))
    assert [engine.ask([long])[0] for _ in range(2)] == [200, 400]
