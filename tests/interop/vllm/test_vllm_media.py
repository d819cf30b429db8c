"""Tests images through the proxy and the store: no image is answered from another one with the same client name."""

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server
from tests.interop.vllm.engines import (
    ANSWER_S,
    CALM,
    PATIENCE_S,
    READY_S,
    SAVED,
    counters,
    start_engine,
    transfer_config,
    until,
)
from tests.interop.vllm.version import is_earlier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(is_earlier(), reason="the only model with images that runs without a GPU is of 0.32"),
]

_ROOT: Final = Path(__file__).parents[3]
_TEXT: Final = "What is a lease of a page in the store of an engine? " * 8
"""With an image more than a page, and the image is in the first one."""
_LOADED: Final = "vllm:kvparams_tokens_loaded_total"
_OFF: Final = "vllm:kvparams_requests_off_total"


@dataclass(frozen=True, slots=True)
class _Engines:
    prefill: Server
    decode: Server
    proxy: Server
    untrusting: Server
    """Of the same store, with settings as they are by default."""


@pytest.fixture(scope="module")
def engines(modules_memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Engines]:
    folder = tmp_path_factory.mktemp("vision") / "tiny"
    command = [sys.executable, "-m", "tests.interop.vllm.vision_model", str(folder)]
    subprocess.run(command, check=True, cwd=_ROOT, capture_output=True, timeout=300)
    store = f"file://{modules_memory}/kv?size=64MiB"

    with Processes(tmp_path_factory.mktemp("logs")) as processes:
        started = [
            start_engine(
                processes,
                name,
                folder,
                "--enable-scale-out",
                transfer=transfer_config(
                    store, engine_id=name, extra={"trust_media_hashes": True} if name in "PD" else {}
                ),
                core=core,
            )
            for core, name in enumerate(("P", "D", "open"))
        ]
        processes.wait_ready(*started, within_s=READY_S)
        proxy = processes.proxy(started[:1], started[1:2], *CALM)
        processes.wait_ready(proxy, within_s=PATIENCE_S)
        yield _Engines(started[0], started[1], proxy, started[2])


def make_picture(seed: int) -> str:
    """The URL of a picture that holds it."""
    pixels = np.random.default_rng(seed).integers(0, 255, (56, 56, 3), np.uint8)
    file = io.BytesIO()
    image: Any = import_module("PIL.Image").fromarray(pixels)
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_chat(picture: str | None, name: str | None = None, **more: object) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "image_url", "image_url": None if picture is None else {"url": picture}}
    if name is not None:
        part["uuid"] = name
    content = [part, {"type": "text", "text": _TEXT}]
    told = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**told, "messages": [{"role": "user", "content": content}], **more}


def _post(server: Server, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)


def _answer(server: Server, body: object, path: str = "/v1/chat/completions") -> list[int]:
    response = _post(server, path, body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def _rendered(server: Server, picture: str) -> dict[str, Any]:
    """What the engine makes of the chat: the body of `/inference/v1/generate`, with its own hash of the picture."""
    response = _post(server, "/v1/chat/completions/render", make_chat(picture))
    assert response.status_code == 200, response.text
    body = {name: value for name, value in response.json().items() if value is not None}
    return {**body, "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}


def _hash_of(server: Server, picture: str) -> str:
    return _rendered(server, picture)["features"]["mm_hashes"]["image"][0]


def test_pictures_are_shared_through_the_store(engines: _Engines) -> None:
    """The control: their pages are stored under vLLM's hashes, and found."""
    picture = make_picture(1)
    truth = _answer(engines.untrusting, make_chat(picture))
    assert truth != _answer(engines.untrusting, make_chat(make_picture(2)))
    before = counters(engines.decode)[_LOADED]
    assert _answer(engines.proxy, make_chat(picture)) == truth
    assert counters(engines.decode)[_LOADED] >= before + 128


def test_a_picture_under_the_hash_of_another_one_is_answered_as_what_it_is(engines: _Engines) -> None:
    """And so is the other one, whoever asks later."""
    mine, others = make_picture(11), make_picture(21)
    truths = [_answer(engines.untrusting, make_chat(picture)) for picture in (mine, others)]
    name = _hash_of(engines.untrusting, others)
    assert _answer(engines.proxy, make_chat(mine, name)) == truths[0]
    assert _answer(engines.proxy, make_chat(others)) == truths[1]
    for engine in (engines.prefill, engines.decode):
        assert _answer(engine, make_chat(others, cache_salt="own")) == truths[1]  # its own caches hold what they should


def test_pictures_beside_token_ids_are_answered_as_what_they_are(engines: _Engines) -> None:
    mine, others = make_picture(31), make_picture(32)
    truths = [_answer(engines.untrusting, make_chat(picture)) for picture in (mine, others)]
    rendered, path = _rendered(engines.untrusting, mine), "/inference/v1/generate"
    name = _hash_of(engines.untrusting, others)
    ids = rendered["token_ids"][16:]  # without those of the image, which the engine puts before the text
    part = {"type": "image_url", "url": mine, "uuid": name}
    named = {**rendered, "token_ids": ids, "features": None, "content_parts": [part]}
    assert _answer(engines.proxy, named, path) == truths[0]
    rendered["features"]["mm_hashes"]["image"] = [name]
    assert _answer(engines.proxy, rendered, path) == truths[0]
    assert _answer(engines.proxy, make_chat(others)) == truths[1]


def test_a_name_alone_is_refused_by_the_proxy(engines: _Engines) -> None:
    response = _post(engines.proxy, "/v1/chat/completions", make_chat(None, "cat"))
    assert response.status_code == 400
    assert "send the content" in response.json()["error"]["message"]


def test_an_engine_that_clients_reach_stores_no_pictures_unless_it_is_told_to(engines: _Engines) -> None:
    """Nobody can tell it whether the hash that it has is of the picture."""
    mine, others = make_picture(41), make_picture(42)
    truth = _answer(engines.decode, make_chat(others, cache_salt="own"))
    name = _hash_of(engines.untrusting, others)
    before = counters(engines.untrusting)
    for body in (make_chat(mine, name), make_chat(mine, "cat"), make_chat(mine)):
        _answer(engines.untrusting, body)

    def off() -> float:
        text = {"model": "tiny", "messages": [{"role": "user", "content": _TEXT * 2}], "max_tokens": 1}
        _post(engines.untrusting, "/v1/chat/completions", text)  # counters come with later steps
        return counters(engines.untrusting)[_OFF] - before[_OFF]

    until(lambda: off() == 3, seen=off)
    until(lambda: counters(engines.untrusting)[SAVED] > before[SAVED], seen=off)  # the text
    assert counters(engines.untrusting)[SAVED] - before[SAVED] <= 2
    assert _answer(engines.decode, make_chat(others)) == truth
