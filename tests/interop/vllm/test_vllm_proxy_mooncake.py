"""Tests our proxy before stock vLLM engines that move KV with MooncakeConnector, over TCP.

It also tests the proxy's questions to vLLM's own bootstrap server and scheduler code. Without a GPU the connector's
worker does not start as it is, so `without_gpu.py` names its device.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from demo.processes import Processes, Server, free_port
from kvparams.dialects.interface import HandoffMissing
from kvparams.dialects.mooncake import MOONCAKE
from kvparams.instances import DataParallelRank
from tests.interop.vllm.engines import CALM, PATIENCE_S, complete, counters, until
from tests.interop.vllm.own_connectors import Alone, Own, Pair, check, external, installed, mooncake, start_pair
from tests.interop.vllm.traffic import answers, mixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]


def test_its_own_bootstrap_server_says_what_the_dialect_reads() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer

    assert MOONCAKE.bootstrap is not None
    port = free_port()  # 0.28 would not say which it took
    server = MooncakeBootstrapServer("127.0.0.1", port)
    server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with pytest.raises(HandoffMissing, match="no worker yet"):
            MOONCAKE.bootstrap.parse_info(url, httpx.get(url + MOONCAKE.bootstrap.path).json())
        worker = {"engine_id": "P", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:9"}
        assert httpx.post(f"{url}/register", json=worker).json() == {"status": "ok"}
        place = MOONCAKE.bootstrap.parse_info(url, httpx.get(url + MOONCAKE.bootstrap.path).json())
        assert place == {"remote_engine_id": "P", "remote_bootstrap_addr": url}
        second = {**worker, "dp_rank": 1, "engine_id": "P_dp1"}
        assert httpx.post(f"{url}/register", json=second).status_code == 200
        answer = httpx.get(url + MOONCAKE.bootstrap.path).json()
        with pytest.raises(HandoffMissing, match="2 data-parallel ranks"):
            MOONCAKE.bootstrap.parse_info(url, answer)
        place = MOONCAKE.bootstrap.parse_info(url, answer, DataParallelRank(1, 2))
        assert place == {"remote_engine_id": "P_dp1", "remote_bootstrap_addr": url}
    finally:
        server.shutdown()


def test_its_own_metadata_takes_our_keys() -> None:
    """What the scheduler half asks of a request's parameters, with those that the dialect makes."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorMetadata

    place = {"remote_engine_id": "P", "remote_bootstrap_addr": "http://127.0.0.1:8998"}
    told = dict(MOONCAKE.decode_keys({}, "transfer-1", place))
    asked: dict[str, Any] = json.loads(MOONCAKE.prefill_keys("transfer-1"))
    meta = MooncakeConnectorMetadata()
    meta.add_new_req(request_id="d", local_block_ids=[[1]], kv_transfer_params=told)
    meta.add_new_req(request_id="p", local_block_ids=[[1]], kv_transfer_params=asked, load_remote_cache=False)
    (pulled,) = meta.reqs_to_recv["P"].values()
    assert (pulled.transfer_id, pulled.remote_bootstrap_addr) == ("transfer-1", "http://127.0.0.1:8998")
    assert meta.reqs_to_send == {"p": ("transfer-1", [[1]])}


def test_the_reason_why_it_does_not_start_without_a_gpu_still_holds() -> None:
    """When this fails, `without_gpu.py` is not needed any more."""
    if torch.accelerator.is_available():
        pytest.fail("there is an accelerator here: start MooncakeConnector as it is, without without_gpu.py")
    with pytest.raises(RuntimeError):
        torch.accelerator.current_device_index()


@pytest.fixture(scope="module")
def prefill() -> Own:
    installed("mooncake")
    return mooncake("P", "kv_producer")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(tmp_path_factory.mktemp("logs")) as found:
        yield found


@pytest.fixture(scope="module")
def pair(model: Path, processes: Processes, prefill: Own) -> Pair:
    return start_pair(processes, model, "mooncake", prefill, mooncake("D", "kv_consumer"))


@pytest.fixture(scope="module")
def together(pair: Pair, processes: Processes, prefill: Own) -> Server:
    """Another proxy before the same engines, which sends both legs at once."""
    more = (*CALM, "--bootstrap", f"P={prefill.bootstrap}", "--mode", "concurrent_legs")
    proxy = processes.proxy([pair.prefill], [pair.decode], *more, connector="mooncake")
    processes.wait_ready(proxy, within_s=PATIENCE_S)
    return proxy


def test_tokens_are_those_of_one_engine_and_decode_had_the_prompts_from_prefill(
    pair: Pair, alone: Alone, record: Callable[[dict[str, object]], None]
) -> None:
    assert answers(pair.proxy.url, alone.asks) == alone.answers
    seen = counters(pair.decode)
    loaded = external(pair.decode)
    assert seen["vllm:external_prefix_cache_hits_total"] > 0
    assert loaded > 10 * seen["vllm:prompt_tokens_by_source_total{source=local_compute}"]
    until(lambda: not counters(pair.prefill)["vllm:kv_cache_usage_perc"])
    record({"connector": "MooncakeConnector", "prompts": len(alone.asks), "different": 0, "tokens_loaded": loaded})


def test_the_check_finds_the_pair_good(pair: Pair, prefill: Own) -> None:
    good = check([pair.prefill], [pair.decode], "mooncake", "--bootstrap", f"P={prefill.bootstrap}")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "D loaded " in good.stdout


def test_both_legs_at_once_have_the_tokens_of_one_engine(
    together: Server, pair: Pair, bare: Server, record: Callable[[dict[str, object]], None]
) -> None:
    """Decode is told where prefill is before prefill has begun, and waits there for the KV."""
    asks = mixed(40, seed=23)
    before = external(pair.decode)
    assert answers(together.url, asks) == answers(bare.url, asks)
    loaded = external(pair.decode) - before
    assert loaded > 1000
    until(lambda: not counters(pair.prefill)["vllm:kv_cache_usage_perc"])
    record({"connector": "MooncakeConnector", "mode": "concurrent_legs", "prompts": len(asks), "different": 0})


def test_a_stop_token_first_does_not_take_the_kv_away(pair: Pair) -> None:
    """A prefill whose one token was the client's stop token would free its KV: the leg does not stop there."""
    prompt = random.Random(9).choices(range(300, 2000), k=200)
    first = complete(pair.prefill.url, prompt, 1, return_token_ids=True)["choices"][0]["token_ids"]
    before = external(pair.decode)
    answer = complete(pair.proxy.url, prompt, 8, return_token_ids=True, stop_token_ids=first)["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"][:1] == first
    assert external(pair.decode) - before >= len(prompt) - 1
