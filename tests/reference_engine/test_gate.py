"""The reference engine with `--verify-with`: it believes signed documents, once, and nothing else."""

import time
from pathlib import Path

import pytest

from kvparams import parse
from kvparams.trust.keyfile import create_keyring, read_keyring
from kvparams.trust.keyring import Keyring, SigningKey
from kvparams.trust.signing import Signer
from reference_engine.__main__ import main
from reference_engine.ask import RequestError
from reference_engine.cache import PagedCache
from reference_engine.kv import Gate, KVSharing
from reference_engine.metrics import Metrics
from reference_engine.shape import ModelShape

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
    create_keyring(path, Keyring([SigningKey.new(int(time.time()) - 60)]))
    return path


def sharing(gate: Gate | None) -> KVSharing:
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
    engine = sharing(Gate(keys, "pool-a", time.time))
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
    assert sharing(None).read_control({"kvparams": DOCUMENT}).phase == "release"  # the control


def test_the_flags_are_checked_at_the_start(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", "--verify-with", str(keys)]) == 2
    assert "needs --audience" in capsys.readouterr().err
    keys.chmod(0o644)
    assert main(["--port", "0", "--verify-with", str(keys), "--audience", "a"]) == 2
    assert "chmod 600" in capsys.readouterr().err
