"""Tests a proxy with signing keys: every leg and every release is signed, and the keys change while it runs."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvparams import parse
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import change_keyring, create_keyring, read_keyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.verification import UntrustedParams, verify_params
from kvparams_proxy.config.signing import ReloadingSigner, SigningSettings
from kvparams_proxy.config_errors import ConfigError
from tests.system.proxy.test_legs import ANSWER, CLIENT, NIXL, answering
from tests.unit.proxy.cli.test_command import asked

RESULT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill_result",
    "mode": "store",
    "load_keys": ["k1"],
}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "signing-keys.json"
    create_keyring(path, SigningKeyring([SigningKey.new(int(time.time()) - 60)]))
    return path


class Engine:
    """What an engine of the pool believes."""

    def __init__(self, keys: Path) -> None:
        self.keys = keys
        self.replay = ReplayWindow(time.time() - 60)

    def believes(self, body: bytes) -> Any:
        ring = read_keyring(self.keys)
        return verify_params(json.loads(body)["kv_transfer_params"], ring, "pool-a", time.time(), self.replay)


@pytest.mark.parametrize("dialect", ["nixl", "store"])
async def test_both_legs_are_signed_and_believed_once(scripted: Any, proxy: Any, keys: Path, dialect: str) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL | {"kvparams": RESULT}}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], dialect, signing=SigningSettings(keys, "pool-a"))
    for client in (CLIENT, CLIENT | {"prompt": list(range(40)), "cache_salt": "s"}):
        assert (await running.client.post("/v1/completions", json=client)).status_code == 200
    engine = Engine(keys)
    bodies = [*prefill.bodies, *decode.bodies]
    found = [engine.believes(body) for body in bodies]
    assert [one.phase for one in found] == ["prefill", "prefill", "decode", "decode"]
    assert len({one.signature.nonce for one in found}) == 4
    for body in bodies:
        with pytest.raises(UntrustedParams, match="replayed"):
            engine.believes(body)
    changed = json.loads(decode.bodies[0])
    changed["kv_transfer_params"]["remote_host"] = "evil.example"
    with pytest.raises(UntrustedParams):
        Engine(keys).believes(json.dumps(changed).encode())


@pytest.mark.parametrize(("dialect", "path"), [("nixl", b"/v1/completions"), ("store-drop", b"/v1/kvparams")])
async def test_a_release_is_signed_too(scripted: Any, proxy: Any, keys: Path, dialect: str, path: bytes) -> None:
    """Spec-mandated, 1.0#13.12: decode refuses, so KV is given back."""
    refused = asyncio.Event()

    async def refuse(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        if refused.is_set():
            told.set()
        refused.set()

    told = asyncio.Event()
    good = answering(ANSWER | {"kv_transfer_params": NIXL | {"kvparams": RESULT}})

    async def prefilling(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await good(body, reader, writer)
        if len(prefill.bodies) == 2:
            told.set()

    prefill = await scripted(prefilling)
    decode = await scripted(refuse)
    running = await proxy([prefill.url], [decode.url], dialect, signing=SigningSettings(keys, "pool-a"))
    assert (await running.client.post("/v1/completions", json=CLIENT)).status_code == 400
    async with asyncio.timeout(10):
        await told.wait()
    engine, body = (decode, decode.bodies[1]) if dialect == "nixl" else (prefill, prefill.bodies[1])
    assert engine.heads[1].split(b" ")[1] == path
    found = Engine(keys).believes(body)
    assert found.phase == ("decode" if dialect == "nixl" else "release")
    if dialect == "nixl":  # 1.0#13.12
        assert found.consumer == parse(json.loads(decode.bodies[0])["kv_transfer_params"]["kvparams"]).consumer
    assert found.mode == ("pull" if dialect == "nixl" else "store")
    first = parse(json.loads(prefill.bodies[0])["kv_transfer_params"]["kvparams"])
    assert found.transfer == first.transfer


async def test_what_could_not_be_signed_is_counted(scripted: Any, proxy: Any, tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    create_keyring(path, SigningKeyring([SigningKey.new(int(time.time()) + 1000)]))
    engine = await scripted(answering(ANSWER))
    running = await proxy([engine.url], [engine.url], signing=SigningSettings(path, "pool-a"))
    assert (await running.client.post("/v1/completions", json=CLIENT)).status_code == 503
    assert await running.metric('kvparams_proxy_handoffs_refused_total{reason="unsigned"}') == 1
    assert await running.metric("kvparams_proxy_handoffs_refused_total") == 1


async def test_a_time_with_a_fraction_is_signed_as_the_double_that_it_is(scripted: Any, proxy: Any, keys: Path) -> None:
    """vLLM's NIXL answers with one (`remote_blocks_expiry_time`)."""
    timed = NIXL | {"remote_blocks_expiry_time": 12345.75}
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": timed}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], signing=SigningSettings(keys, "pool-a"))
    assert (await running.client.post("/v1/completions", json=CLIENT)).status_code == 200
    (body,) = decode.bodies
    assert json.loads(body)["kv_transfer_params"]["remote_blocks_expiry_time"] == 12345.75
    later = body.replace(b"12345.75", b"12345.76")
    assert later != body
    with pytest.raises(UntrustedParams, match="native"):
        Engine(keys).believes(later)
    assert Engine(keys).believes(body).phase == "decode"


async def test_what_cannot_be_signed_is_not_sent(scripted: Any, proxy: Any, keys: Path) -> None:
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL | {"later": 2**64}}))
    decode = await scripted(answering(ANSWER))
    running = await proxy([prefill.url], [decode.url], signing=SigningSettings(keys, "pool-a"))
    got = await running.client.post("/v1/completions", json=CLIENT)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "handoff_missing")
    assert "cannot be signed" in got.json()["error"]["message"]
    assert decode.bodies == []


async def test_without_a_key_for_this_time_nothing_is_sent(scripted: Any, proxy: Any, tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    create_keyring(path, SigningKeyring([SigningKey.new(int(time.time()) + 1000)]))
    prefill = await scripted(answering(ANSWER | {"kv_transfer_params": NIXL}))
    running = await proxy([prefill.url], [prefill.url], signing=SigningSettings(path, "pool-a"))
    got = await running.client.post("/v1/completions", json=CLIENT)
    assert (got.status_code, got.json()["error"]["code"]) == (503, "no_signing_key")
    assert prefill.bodies == []


def test_a_signer_takes_the_keys_of_its_file_as_they_change(keys: Path) -> None:
    signer = ReloadingSigner(SigningSettings(keys, "pool-a"))
    document = parse(RESULT)

    def kid() -> str:
        carrier = signer.signer.sign(document)
        found: Any = verify_params(carrier, read_keyring(keys), "pool-a", time.time(), ReplayWindow(0))
        return found.signature.kid

    before = kid()
    with change_keyring(keys) as held:
        held[0] = SigningKeyring([SigningKey("newer", bytes(32), int(time.time()) - 5), *held[0]])
    signer.reload_if_changed()
    assert kid() == "newer" != before
    keys.write_text("garbage")
    signer.reload_if_changed()
    assert signer.signer.sign(document)


def test_the_settings_are_checked_at_the_start(keys: Path) -> None:
    engines = ["--prefill", "http://h:1", "--decode", "http://h:2"]
    signed = asked(*engines, "--sign-with", str(keys), "--audience", "pool-a")
    assert signed.settings.signing == SigningSettings(keys, "pool-a")
    assert asked(*engines).settings.signing is None
    keys.chmod(0o644)
    for words, said in (
        (["--sign-with", str(keys)], "need both"),
        (["--audience", "a"], "need both"),
        (["--sign-with", str(keys), "--audience", "a"], "chmod 600"),
    ):
        with pytest.raises(ConfigError, match=said):
            asked(*engines, *words)
    keys.chmod(0o600)
    with pytest.raises(ConfigError, match="visible ASCII"):
        asked(*engines, "--sign-with", str(keys), "--audience", "a b")
