"""Tests our proxy before stock vLLM engines whose connectors find KV by content: requests carry no parameters."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.processes import Processes
from tests.interop.vllm.engines import counters
from tests.interop.vllm.own_connectors import (
    Alone,
    Pair,
    check,
    example,
    external,
    installed,
    mooncake_store,
    start_pair,
)
from tests.interop.vllm.traffic import answers
from tests.interop.vllm.version import is_earlier
from tests.support.connectors.mooncake_cluster import MASTER, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]


_FINDS_NOTHING = pytest.mark.skipif(
    is_earlier(), reason="0.28's finds nothing without a GPU: tokens are right, and every prompt is computed again"
)
_CONNECTORS = ["ExampleConnector", pytest.param("MooncakeStoreConnector", marks=_FINDS_NOTHING)]


@pytest.fixture(scope="module", params=_CONNECTORS)
def pair(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "ExampleConnector":
            both = [example(name, folder) for name in ("P", "D")]
        else:
            installed("mooncake")
            assert MASTER.exists(), f"{MASTER} is not installed; `make install-vllm` does that"
            cluster = stack.enter_context(Cluster(folder))
            both = [mooncake_store(name, cluster.address, folder) for name in ("P", "D")]
        processes = stack.enter_context(Processes(tmp_path_factory.mktemp("logs")))
        yield start_pair(processes, model, "content", both[0], both[1])


def test_tokens_are_those_of_one_engine_and_decode_found_the_prompts(
    pair: Pair, alone: Alone, record: Callable[[dict[str, object]], None]
) -> None:
    # ExampleConnector of vLLM 0.32.0 offers -32 tokens for a prompt of one that was stored, and decode's engine dies.
    asked = [at for at, ask in enumerate(alone.asks) if isinstance(ask.prompt, str) or len(ask.prompt) > 1]
    assert answers(pair.proxy.url, [alone.asks[at] for at in asked]) == [alone.answers[at] for at in asked]
    assert counters(pair.decode)["vllm:external_prefix_cache_hits_total"] > 0
    loaded = external(pair.decode)
    assert loaded > 0
    record({"prompts": len(asked), "different": 0, "tokens_loaded": loaded})


def test_the_check_finds_the_pair_good(pair: Pair) -> None:
    good = check([pair.prefill], [pair.decode], "content")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "D loaded " in good.stdout
