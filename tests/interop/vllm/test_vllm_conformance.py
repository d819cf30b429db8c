"""Holds stock vLLM with `KVParamsConnector` and `KVParamsMiddleware` to the profiles `engine` and `signed-engine`.

Without the middleware vLLM cannot refuse anything: `STOCK` says which requirements that costs, and why.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from demo.processes import Processes, Server
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring
from kvparams_conformance.checks import CheckResult, select_checks
from kvparams_conformance.engine_checks import engine_checks
from kvparams_conformance.engine_site import Engine
from kvparams_conformance.runner import run_engine_checks
from tests.interop.vllm.engines import READY_S, start_engine, transfer_config, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MIDDLEWARE: Final = "kvparams_connectors.engines.vllm.middleware.KVParamsMiddleware"
SKIPPED: Final = {
    "4.4/unknown-transfer": "vLLM does not have the path /v1/kvparams",
    "18.4/release": "vLLM does not have the path /v1/kvparams",
}
SKIPPED_SIGNED: Final = {"13.13/instance": "an engine of vLLM does not know its name in the deployment"}
NO_REFUSAL: Final = "vLLM asks connectors in its scheduler, where a request can no longer be refused"
DICT_ONLY: Final = "vLLM's API takes an object alone"
STOCK: Final = {
    **dict.fromkeys(
        ("1.1/vectors", "2.1/document-as-text", "3.2/missing", "3.3/types", "3.4/bounds", "3.5/usage", "5.4/critical"),
        NO_REFUSAL,
    ),
    **dict.fromkeys(("6.2/version", "12.4/size", "18.2/phase", "18.2/error"), NO_REFUSAL),
    "2.3/null-text": DICT_ONLY,
    "2.5/text": DICT_ONLY,
    "18.1/models": "connectors have no part in vLLM's answer to /v1/models",
}
"""What vLLM with the connector alone fails, and why."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "signing-keys.json"
    now = int(time.time())
    keys = [SigningKey.new(now - 7200), SigningKey.new(now + 86_400)]
    create_keyring(path, SigningKeyring(keys))
    return path


@pytest.fixture(scope="module")
def engines(
    model: Path, modules_memory: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """An engine that believes everybody, one that wants signatures, and one without the middleware."""
    trust = {"verify_with": str(keys), "audience": "pool"}
    options: dict[str, tuple[dict[str, str], bool]] = {
        "plain": ({}, True),
        "signed": (trust, True),
        "stock": ({}, False),
    }
    with Processes(tmp_path_factory.mktemp("conformance")) as processes:
        found: dict[str, Server] = {}
        for core, (name, (extra, refuses)) in enumerate(options.items()):
            store = f"file://{modules_memory}/{name}?size=64MiB"
            transfer = transfer_config(store, policy="fail", extra={"deadline_s": 5, **extra})
            told = ["--enable-prompt-tokens-details", *(["--middleware", MIDDLEWARE] if refuses else [])]
            found[name] = start_engine(processes, name, model, *told, transfer=transfer, core=core % 2)
        processes.wait_ready(*found.values(), within_s=READY_S)
        yield found


def judged(engine: Engine, profile: str, *only: str) -> dict[str, CheckResult]:
    results = asyncio.run(run_engine_checks(select_checks(engine_checks(), (profile,), only), engine))
    assert only or len(results) > 10
    return {result.check.id: result for result in results}


def verdicts(results: dict[str, CheckResult], verdict: str) -> dict[str, str]:
    return {name: result.message for name, result in results.items() if result.verdict == verdict}


def test_vllm_keeps_the_profile_of_engines(engines: dict[str, Server]) -> None:
    results = judged(Engine(engines["plain"].url, "tiny"), "engine")
    skipped = verdicts(results, "skip")
    assert verdicts(results, "fail") == {}
    assert skipped.keys() == SKIPPED.keys()
    assert len(verdicts(results, "pass")) == len(results) - len(skipped)


def test_vllm_without_the_middleware_refuses_nothing(engines: dict[str, Server]) -> None:
    """Negative control: what stock vLLM cannot do is known one by one, and nothing else is wrong."""
    results = judged(Engine(engines["stock"].url, "tiny"), "engine")
    assert verdicts(results, "fail").keys() == STOCK.keys()
    assert len(verdicts(results, "pass")) == len(results) - len(STOCK) - len(SKIPPED)


def test_vllm_keeps_the_profile_of_signatures(engines: dict[str, Server], keys: Path) -> None:
    """What is signed is refused for 30 s: an earlier run of the engine may have accepted it."""
    engine = Engine(engines["signed"].url, "tiny", keys=keys)
    until(lambda: verdicts(judged(engine, "signed-engine", "13.8/accepted"), "pass"))
    results = judged(engine, "signed-engine")
    skipped = verdicts(results, "skip")
    assert verdicts(results, "fail") == {}
    assert skipped.keys() == SKIPPED_SIGNED.keys()
    assert len(verdicts(results, "pass")) == len(results) - len(skipped)
