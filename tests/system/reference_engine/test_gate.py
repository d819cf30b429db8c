"""Tests the reference engine with `--verify-with`: it accepts signed documents, once, and nothing else."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvparams import parse
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring, read_keyring
from kvparams.signing.signer import Signer
from reference_engine.__main__ import main
from reference_engine.ask import RequestError
from reference_engine.cache import PagedCache
from reference_engine.kv import KVSharing, RequestVerifier
from reference_engine.metrics import Metrics
from reference_engine.requests import read_completion
from reference_engine.shape import ModelShape
from tests.support.kvparams.spec_folder import SPEC

DOCUMENT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "release",
    "mode": "store",
}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "signing-keys.json"
    create_keyring(path, SigningKeyring([SigningKey.new(int(time.time()) - 60)]))
    return path


def sharing(gate: RequestVerifier | None) -> KVSharing:
    shape = ModelShape()
    return KVSharing(
        role="both",
        instance_id="e",
        store_url=None,
        model_name="m",
        shape=shape,
        cache=PagedCache(shape.layers, 4, 16, shape.kv_heads, shape.head_dim),
        page_tokens=64,
        verify=True,
        metrics=Metrics(),
        gate=gate,
    )


def test_only_what_was_signed_is_believed_and_only_once(keys: Path) -> None:
    engine = sharing(RequestVerifier(keys, "pool-a", time.time, since=time.time() - 60))
    signer = Signer(read_keyring(keys), "pool-a", time.time)
    carrier = signer.sign(parse(DOCUMENT))
    assert engine.read_control(carrier).phase == "release"
    with pytest.raises(RequestError, match="used before"):
        engine.read_control(carrier)
    with pytest.raises(RequestError, match="carries no signature"):
        engine.read_control({"kvparams": DOCUMENT})
    with pytest.raises(RequestError, match="carries no signature"):
        engine.read({"kvcache_load_keys": ["k"]}, "r", None, [[1]])
    with pytest.raises(RequestError, match="phase 'release' does not belong"):  # believed, and then judged
        engine.read(signer.sign(parse(DOCUMENT)), "r", None, [[1]])
    assert engine.read(None, "r", None, [[1]]).params is None
    assert engine.ready
    assert sharing(None).read_control({"kvparams": DOCUMENT}).phase == "release"  # the control


def test_an_engine_that_has_just_begun_is_not_ready_to_believe_anybody(keys: Path) -> None:
    """Spec-mandated, 1.0#13.9: one before it may have accepted what is signed now."""
    carrier = Signer(read_keyring(keys), "pool-a", time.time).sign(parse(DOCUMENT))
    engine = sharing(RequestVerifier(keys, "pool-a", time.time, since=time.time()))
    assert not engine.ready
    with pytest.raises(RequestError, match="used before"):
        engine.read_control(carrier)
    assert sharing(None).ready


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    said = subprocess.run([sys.executable, "-c", _BEGAN], capture_output=True, text=True, check=True, timeout=60).stdout
    began_at, asked_at = map(float, said.split())
    assert before - 0.1 <= began_at < asked_at - 0.2  # its clock ticks 100 times a second
    assert began_at < time.time()


_BEGAN = """
import time
asleep_until = time.monotonic() + 0.3
while time.monotonic() < asleep_until:
    pass
from kvparams_connectors.engines.process_start import process_start_time
print(process_start_time(), time.time())
"""


def test_native_keys_that_stand_elsewhere_are_not_acted_on(keys: Path) -> None:
    """Spec-mandated, 1.0#13.15: of every dialect, those that stand outside `kv_transfer_params`."""
    engine = sharing(RequestVerifier(keys, "pool-a", time.time, since=time.time() - 60))
    seen: set[str] = set()
    for path in (SPEC / "vectors" / "dialects").glob("*.json"):
        for case in json.loads(path.read_bytes())["cases"]:
            message = case["message"]
            body = {name: value for name, value in message["body"].items() if name != "kv_transfer_params"}
            if not case["valid"] or not (body or message.get("headers")):
                continue
            ask = read_completion(json.dumps(body | {"model": "m", "prompt": "p"}).encode(), "m", 4096)
            handoff = engine.read(ask.kv_transfer_params, message["request_id"], None, ask.prompts)
            assert (handoff.params, handoff.shared) == (None, None)
            seen.add(path.stem)
            if body:  # the control: where they belong they are seen
                with pytest.raises(RequestError, match="carries no signature"):
                    engine.read(body, message["request_id"], None, ask.prompts)
    assert {"sglang", "trtllm", "llm-d", "neuron"} <= seen


def test_the_flags_are_checked_at_the_start(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", "--verify-with", str(keys)]) == 2
    assert "needs --audience" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--port", "0", "--clock-skew", "301"])
    assert "from 0 to 300" in capsys.readouterr().err
    keys.chmod(0o644)
    assert main(["--port", "0", "--verify-with", str(keys), "--audience", "a"]) == 2
    assert "chmod 600" in capsys.readouterr().err
