"""Holds SGLang's own request class and storage controllers, with our backend, to the profile `engine`.

A whole SGLang server needs a GPU. What runs here is the path of a prompt's KV: SGLang reads the request, names the
pages, and its controllers store and load them through our backend. A small HTTP server stands for the rest: its tokens
are the bytes of the prompt, and its answer is a digest of them.

SGLang 0.5.23 has no `kv_transfer_params`: it drops the member, documents never reach a storage backend, and pages are
found by content. `WITHOUT_DOCUMENTS` says which requirements of the profile that costs.
"""

import asyncio
import json
from array import array
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

import pytest
import torch

from kvparams_conformance.checks import CheckResult, select_checks
from kvparams_conformance.engine_checks import engine_checks
from kvparams_conformance.engine_site import Engine as EngineUnderTest
from kvparams_conformance.engine_site import EngineTrial
from kvparams_conformance.runner import run_engine_checks
from tests.interop.sglang.engine import Engine
from tests.interop.sglang.pools import Shape, extra_config, of_sglang, parallel

# The first one compiles SGLang's hash, a minute on a slow machine.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

_PAGE: Final = 16
_MODELS: Final = b'{"object": "list", "data": [{"id": "tiny", "object": "model"}]}'
NO_DOCUMENT: Final = "SGLang's requests have no `kv_transfer_params`: whatever stands there is dropped unread"
WITHOUT_DOCUMENTS: Final = {
    "1.1/vectors": NO_DOCUMENT,
    "2.1/document-as-text": NO_DOCUMENT,
    "2.4/trio-beside": "no document comes back",
    "2.5/carrier": NO_DOCUMENT,
    "2.5/text": "no document comes back",
    "3.1/json": NO_DOCUMENT,
    "3.2/missing": NO_DOCUMENT,
    "3.3/types": NO_DOCUMENT,
    "3.4/bounds": NO_DOCUMENT,
    "3.5/usage": NO_DOCUMENT,
    "3.10/fail": "HiCache computes what it does not find",
    "3.12/depth": NO_DOCUMENT,
    "5.3/unknown": "no document comes back",
    "5.4/critical": NO_DOCUMENT,
    "6.1/later": "no document comes back",
    "6.2/version": NO_DOCUMENT,
    "12.3/salts": "no document comes back; see the test of salts below",
    "12.4/size": NO_DOCUMENT,
    "18.1/models": "a storage backend has no part in SGLang's answer to /v1/models",
    "18.2/error": NO_DOCUMENT,
    "18.2/phase": NO_DOCUMENT,
    "18.3/prefill-result": "no document comes back",
}
"""What fails, and why: each for want of a document in SGLang, none for what is done with KV."""
SKIPPED: Final = {"4.4/unknown-transfer", "18.4/release"}
HELD: Final = {
    "2.3/null-text",
    "3.10/recompute",
    "3.11/id",
    "3.14/address",
    "8.6/prefix",
    "12.3/foreign-salt",
    "18.5/ordinary",
}


class _Served:
    """Answers completions from SGLang's request class, page names and controllers."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, Lock()
        self._request: Any = of_sglang("entrypoints.openai.protocol:CompletionRequest")
        self._key: Any = of_sglang("mem_cache.radix_cache:RadixKey")

    def complete(self, body: bytes) -> dict[str, Any]:
        """Returns the answer to a completion. Raises ValueError if SGLang refuses the request."""
        request = self._request.model_validate_json(body)
        prompt = request.prompt
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        key = self._key(array("q", ids[: len(ids) // _PAGE * _PAGE]), cache_salt=request.cache_salt)
        with self._lock:
            cached = self._engine.load(key)[1] if len(key) else 0
            if len(key) > cached:
                self._engine.store(key, 1)
        text = sha256(json.dumps(ids).encode()).hexdigest()[: request.max_tokens]
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
        return {"choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where SGLang's classes are served, with our backend on a file."""
    folder: Path = tmp_path_factory.mktemp("store")
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    config = extra_config(f"file://{folder}/kv?size=64MiB")
    with parallel():
        engine = Engine("plain", Shape(tokens=4096, page_size=_PAGE, layers=1), distributed.new_group([0]), config)
        served = _Served(engine)
        served.complete(json.dumps({"model": "tiny", "prompt": "p" * _PAGE, "max_tokens": 1}).encode())  # compiles

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(200, _MODELS)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path != "/v1/completions":
                    self.answer(404, b"{}")
                    return
                try:
                    self.answer(200, json.dumps(served.complete(body)).encode())
                except ValueError as error:
                    self.answer(400, json.dumps({"error": {"message": str(error)}}).encode())

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_address[1]}"
            server.shutdown()
            thread.join()
        engine.controller.detach_storage_backend()
    distributed.destroy_process_group()


def test_what_of_the_profile_sglang_keeps_and_what_it_cannot(url: str) -> None:
    checks = select_checks(engine_checks(), ("engine",), ())
    results: list[CheckResult] = asyncio.run(run_engine_checks(checks, EngineUnderTest(url, "tiny")))
    found = {
        verdict: {one.check.id for one in results if one.verdict == verdict} for verdict in ("pass", "fail", "skip")
    }
    assert found == {"pass": HELD, "fail": {*WITHOUT_DOCUMENTS}, "skip": SKIPPED}


def test_kv_is_shared_under_one_salt_and_under_no_other(url: str) -> None:
    """Spec-mandated, 1.0#12.3, without a document: SGLang's salt is part of the names of pages."""
    engine = EngineUnderTest(url, "tiny")
    cached = asyncio.run(_cached_tokens(engine, ["a", "a", "b", "b", None, None]))
    whole = cached[1]
    assert whole >= _PAGE
    assert cached == [0, whole, 0, whole, 0, whole]


async def _cached_tokens(engine: EngineUnderTest, salts: list[str | None]) -> list[int]:
    trial = EngineTrial(engine)
    prompt = trial.prompt()
    replies = [await trial.ask(prompt=prompt, cache_salt=salt) for salt in salts]
    return [reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
