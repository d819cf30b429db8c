"""Tests encode, prefill and decode by three vLLM engines, with vLLM's own encoder-cache connector over a folder."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server
from tests.interop.vllm.engines import ANSWER_S, CALM, PATIENCE_S, READY_S, start_engine, transfer_config
from tests.interop.vllm.test_vllm_media import make_chat, make_picture
from tests.interop.vllm.version import is_earlier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(is_earlier(), reason="encode-only engines that answer with ec_transfer_params are of 0.32"),
]

_ROOT: Final = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class _Site:
    encode: Server
    decode: Server
    proxy: Server
    encodings: Path
    """The folder of the encoder-cache connector: in it one folder for each medium, named by vLLM's hash."""


def _encoder_cache(folder: Path, role: str) -> tuple[str, str]:
    told = {"ec_connector": "ECExampleConnector", "ec_role": role}
    return "--ec-transfer-config", json.dumps(
        {**told, "ec_connector_extra_config": {"shared_storage_path": str(folder)}}
    )


@pytest.fixture(scope="module")
def site(modules_memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Site]:
    model, encodings = tmp_path_factory.mktemp("vision") / "tiny", tmp_path_factory.mktemp("encodings")
    command = [sys.executable, "-m", "tests.interop.vllm.vision_model", str(model)]
    subprocess.run(command, check=True, cwd=_ROOT, capture_output=True, timeout=300)
    kv = transfer_config(f"file://{modules_memory}/kv?size=64MiB", extra={"trust_media_hashes": True})
    with Processes(tmp_path_factory.mktemp("logs")) as processes:
        encode = start_engine(processes, "E", model, *_encoder_cache(encodings, "ec_producer"), core=0)
        prefill = start_engine(processes, "P", model, *_encoder_cache(encodings, "ec_consumer"), transfer=kv, core=1)
        decode = start_engine(processes, "D", model, transfer=kv, core=0)
        processes.wait_ready(encode, prefill, decode, within_s=READY_S)
        proxy = processes.proxy([prefill], [decode], f"--encode=E={encode.url}", *CALM)
        processes.wait_ready(proxy, within_s=PATIENCE_S)
        yield _Site(encode, decode, proxy, encodings)


def _post(server: Server, body: object) -> httpx.Response:
    path = f"{server.url}/v1/chat/completions"
    response = httpx.post(path, json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)
    assert response.status_code == 200, response.text
    return response


def _tokens(response: httpx.Response) -> list[int]:
    return response.json()["choices"][0]["token_ids"]


def _truth(site: _Site, picture: str) -> list[int]:
    """What decode's engine answers by itself; it shares nothing of this."""
    return _tokens(_post(site.decode, make_chat(picture, cache_salt="own")))


def _encode(site: _Site, picture: str) -> str:
    """Has the encode engine alone encode a picture; returns vLLM's hash of it."""
    said: dict[str, Any] = _post(site.encode, make_chat(picture, max_tokens=1)).json()["ec_transfer_params"]
    (found,) = said
    assert said == {found: {"item_indices": [0], "metadata": {}}}, "as spec/dialects/vectors/ec.json has it"
    assert (site.encodings / found / "encoder_cache.safetensors").is_file()
    return found


def test_a_picture_is_encoded_here_prefilled_there_and_answered_elsewhere(site: _Site) -> None:
    picture = make_picture(51)
    truth = _truth(site, picture)
    assert truth != _truth(site, make_picture(52))
    before = set(site.encodings.iterdir())
    got = _post(site.proxy, make_chat(picture))
    assert _tokens(got) == truth
    assert [got.headers[f"x-kvparams-{role}"] for role in ("encode", "prefill", "decode")] == ["E", "P", "D"]
    assert got.json()["ec_transfer_params"] is None
    assert len(set(site.encodings.iterdir()) - before) == 1
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ]
    plain = _post(site.proxy, make_chat(picture, tools=tools, tool_choice="none"))
    assert plain.headers["x-kvparams-encode"] == "E"


def test_prefill_computes_with_what_the_encode_engine_has_stored(site: _Site) -> None:
    """The control: an encoding of another picture in its place changes the answer, so prefill does not encode."""
    picture, other = make_picture(61), make_picture(62)
    truths = [_truth(site, each) for each in (picture, other)]
    assert truths[0] != truths[1]
    hashes = [_encode(site, each) for each in (picture, other)]
    files = [site.encodings / each / "encoder_cache.safetensors" for each in hashes]
    shutil.copy(files[1], files[0])
    assert _tokens(_post(site.proxy, make_chat(picture))) == truths[1]


def test_without_its_encode_engine_prefill_encodes_itself(site: _Site) -> None:
    """Last in this file: the engine does not come back."""
    picture = make_picture(71)
    truth = _truth(site, picture)
    site.encode.process.kill()
    site.encode.process.wait(PATIENCE_S)
    assert _tokens(_post(site.proxy, make_chat(picture))) == truth
