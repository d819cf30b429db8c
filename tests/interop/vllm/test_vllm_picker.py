"""Tests prefill and decode through Envoy, the picker and a sidecar, with two stock vLLM engines and NixlConnector."""

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from demo.processes import Processes as Engines
from demo.processes import free_port
from kvparams.signing.keyring import SigningKey, SigningKeyring
from tests.interop.vllm.engines import ANSWER_S, CALM, PATIENCE_S, counters
from tests.interop.vllm.own_connectors import Alone, Pair, external, installed, nixl, start_pair
from tests.interop.vllm.traffic import Ask, answers
from tests.support.gateway import Gateway, Picker, start_envoy, start_picker
from tests.support.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_COMPUTED = "vllm:prompt_tokens_by_source_total{source=local_compute}"
_FOLLOWED = 'kvparams_sidecar_partners_total{result="followed"}'


class Site(NamedTuple):
    """The engines, and what stands in front of them."""

    pair: Pair
    sidecar_url: str
    picker: Picker
    gateway: Gateway


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    installed("nixl")
    folder = tmp_path_factory.mktemp("site")
    keys = folder / "keys.json"
    keys.write_text(SigningKeyring([SigningKey.new(int(time.time()) - 600)]).text())
    keys.chmod(0o600)
    signed = ("--sign-with", str(keys), "--audience", "pool-a")
    with Engines(folder) as engines, Processes(folder) as processes:
        pair = start_pair(engines, model, "nixl", nixl("P", "kv_producer"), nixl("D", "kv_consumer"))
        port = free_port()
        command = [sys.executable, "-m", "kvparams", "sidecar", "--role", "decode", "--engine", f"D={pair.decode.url}"]
        command += ["--prefill", f"P={pair.prefill.url}", "--port", str(port), "--log-requests", "off", *signed, *CALM]
        sidecar = engines.start("sidecar", *command, "--prefill-partner", "require", port=port)
        engines.wait_ready(sidecar, within_s=PATIENCE_S)
        flags = ("--prefill", pair.prefill.url, "--decode", sidecar.url, *signed)
        picker = start_picker(processes, "picker", "--policy", "cache_aware", "--tokenizer", "bytes", *flags)
        gateway = start_envoy(processes, folder, "envoy", picker.grpc_port, [port])
        yield Site(pair, sidecar.url, picker, gateway)


def test_tokens_are_those_of_one_engine(site: Site, alone: Alone, record: Callable[[dict[str, object]], None]) -> None:
    before = external(site.pair.decode)
    assert answers(site.gateway.url, alone.asks) == alone.answers
    loaded = external(site.pair.decode) - before
    assert loaded > 0
    record({"through": "Envoy, picker, sidecar", "prompts": len(alone.asks), "different": 0, "tokens_loaded": loaded})
    metrics = httpx.get(f"{site.sidecar_url}/metrics", timeout=ANSWER_S, trust_env=False).text
    followed = next(line for line in metrics.splitlines() if line.startswith(_FOLLOWED))
    assert float(followed.rpartition(" ")[2]) == len(alone.asks)


def test_decode_computes_one_token_of_each_prompt(site: Site) -> None:
    computed, loaded = counters(site.pair.decode)[_COMPUTED], external(site.pair.decode)
    prompts = [random.Random(seed).choices(range(300, 2000), k=512) for seed in range(5)]
    for prompt in prompts:
        body = Ask(prompt).body()
        answer = httpx.post(f"{site.gateway.url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
        assert answer.status_code == 200
    # vLLM 0.32.0 computes the last token of each prompt again, and counts it as loaded.
    assert external(site.pair.decode) - loaded >= 511 * len(prompts)
    assert counters(site.pair.decode)[_COMPUTED] - computed <= len(prompts)


def test_a_request_that_did_not_come_through_the_picker_is_refused(site: Site) -> None:
    body = Ask([300] * 32).body()
    answer = httpx.post(f"{site.sidecar_url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "partner_required")
