"""Tests a real engine that verifies: it acts on a document signed for its pool once, and ignores any other document."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import pytest

from demo.processes import Processes, Server
from kvparams.codec import parse
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring, read_keyring
from kvparams.signing.signer import Signer
from tests.interop.vllm.engines import READY_S, complete, counters, start_engine, transfer_config, until

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_PROMPT: Final = list(range(300, 900))
_SAVED: Final = "vllm:kvparams_pages_saved_total"
_REFUSED: Final = "vllm:kvparams_requests_untrusted_total{reason="
Native = Mapping[str, object]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "signing-keys.json"
    create_keyring(path, SigningKeyring([SigningKey.new(int(time.time()) - 7200)]))
    return path


@pytest.fixture(scope="module")
def engine(model: Path, modules_memory: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    trust = {"verify_with": str(keys), "audience": "pool"}
    transfer = transfer_config(f"file://{modules_memory}/signed?size=64MiB", extra=trust)
    with Processes(tmp_path_factory.mktemp("signed")) as processes:
        started = start_engine(processes, "signed", model, transfer=transfer)
        processes.wait_ready(started, within_s=READY_S)
        yield started


def document(name: str) -> dict[str, object]:
    transfer = {"id": name, "attempt": 1}
    return {"version": "1.0", "request_id": name, "transfer": transfer, "phase": "prefill", "mode": "store"}


def signed(keys: Path, name: str, audience: str = "pool", off_s: float = 25.0) -> dict[str, object]:
    """By a proxy whose clock is ahead, within what clocks may differ by: the engine has begun just now."""
    native = Signer(read_keyring(keys), audience, lambda: time.time() + off_s).sign(parse(document(name)))
    return dict(native)


def ours(native: Native) -> dict[str, object]:
    return cast("dict[str, object]", native["kvparams"])


def test_only_what_was_signed_for_it_is_acted_on(engine: Server, keys: Path) -> None:
    """Each is answered with the same tokens; only the first, and the client without a document, reach the store."""

    def asked(native: Native | None, prompt: list[int]) -> Any:
        more: dict[str, Any] = {} if native is None else {"kv_transfer_params": native}
        return complete(engine.url, prompt, return_token_ids=True, **more)

    def saved() -> float:
        return counters(engine)[_SAVED]

    good = signed(keys, "good")
    expected = asked(good, _PROMPT)
    assert expected["kv_transfer_params"]["kvparams"]["phase"] == "prefill_result"
    assert len(expected["kv_transfer_params"]["kvparams"]["load_keys"]) >= 2
    until(lambda: saved() >= 2)
    before = saved()
    fresh = signed(keys, "forged")
    unsigned = {name: value for name, value in ours(signed(keys, "unsigned")).items() if name != "signature"}
    refused: dict[str, Native] = {
        "replayed": good,
        "forged": {**fresh, "kvparams": {**ours(fresh), "request_id": "another"}},
        "audience": signed(keys, "audience", audience="other"),
        "expired": signed(keys, "expired", off_s=-3600),
        "unsigned": {"kvparams": unsigned},
        "malformed": {"kvparams": {"version": "1.0"}},
    }
    for index, (reason, native) in enumerate(refused.items()):
        prompt = [1000 + index, *_PROMPT[1:]]  # nothing of it is stored
        answer = asked(native, prompt)
        told = answer.get("kv_transfer_params")
        assert told is None or "kvparams" not in told, reason
        assert len(answer["choices"][0]["token_ids"]) == 16
    assert saved() == before, "nobody writes what others would read"
    asked(None, [2000, *_PROMPT[1:]])  # the control: an ordinary request is stored
    until(lambda: saved() > before)
    found = {name: value for name, value in counters(engine).items() if name.startswith(_REFUSED)}
    assert found == {f"{_REFUSED}{reason}}}": 1.0 for reason in refused}
