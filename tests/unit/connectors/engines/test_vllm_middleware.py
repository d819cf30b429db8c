"""Tests what `KVParamsMiddleware` refuses, changes and leaves alone, around an application that is no vLLM."""

import asyncio
import json
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
from kvparams_connectors.engines.vllm.middleware import KVParamsMiddleware
from kvparams_connectors.store_url import StoreError

DOCUMENT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}
OURS = {"kv_connector": "KVParamsConnector", "kv_connector_extra_config": {"store": "memory://"}}
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
        message = await receive()
        length = dict(scope["headers"]).get(b"content-length", b"")
        self.seen.append((message.get("body", b""), length))
        self.left = (await receive())["type"] == "http.disconnect"
        models = b'{"object":"list","data":[]}'
        headers = [(b"content-length", b"%d" % len(models)), (b"x-own", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (models[:5], models[5:]):
            await send({"type": "http.response.body", "body": part, "more_body": part is not models[5:]})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, body: Sequence[bytes], path: str = "/v1/completions", method: str = "POST") -> tuple[int, Any]:
        """Returns status and body of the answer to a request that comes in parts, from a client that leaves then."""
        parts: Messages = [
            {"type": "http.request", "body": part, "more_body": at < len(body) - 1} for at, part in enumerate(body)
        ]
        parts.append({"type": "http.disconnect"})
        sent: Messages = []

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-length", b"%d" % sum(map(len, body))), (b"content-type", b"application/json")]
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

    scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": engine}
    asyncio.run(KVParamsMiddleware(app)(scope, receive, None))  # type: ignore[arg-type]  nothing is sent
    assert seen == [{"type": "http.disconnect"}]


@pytest.mark.parametrize("nested", [False, True])
def test_signatures_are_verified_with_the_keys_of_the_connector(nested: bool, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_keyring(path, SigningKeyring([SigningKey.new(int(time.time()) - 7200)]))
    extra = {"store": "memory://", "verify_with": str(path), "audience": "pool"}
    ours = {"kv_connector": "KVParamsConnector", "kv_connector_extra_config": extra}
    connectors = {"connectors": [{"kv_connector": "NixlConnector"}, ours]}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": connectors}
    engine = Engine(multi if nested else ours)
    signer = Signer(read_keyring(path), "pool", lambda: time.time() + 25)  # the process has begun just now
    good = body(signer.sign(parse(DOCUMENT)))
    assert engine.ask([good])[0] == 200
    for text, reason in ((good, "replayed"), (body({"kvparams": DOCUMENT}), "unsigned"), (body({"x": 1}), "unsigned")):
        status, answer = engine.ask([text])
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")
        assert f"[{reason}]" in answer["error"]["message"]
    assert engine.ask([b'{"prompt": "p"}'])[0] == 200


def test_an_engine_without_our_connector_does_not_start() -> None:
    engine = Engine({"kv_connector": "NixlConnector", "kv_connector_extra_config": {}})
    with pytest.raises(StoreError, match="needs --kv-transfer-config with kv_connector KVParamsConnector"):
        asyncio.run(engine.middleware({"type": "lifespan", "app": engine}, None, None))  # type: ignore[arg-type]
