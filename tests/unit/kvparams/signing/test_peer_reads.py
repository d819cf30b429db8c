"""Tests how prefill engines describe their memory and learn of others' (`spec/extensions/peers.md`)."""

import json
import re
from typing import Any, Final

import pytest

from kvparams import dump, parse
from kvparams.peer_reads import PEERS_EXTENSION, READS_EXTENSION, peer_source, peer_source_members, readable_address
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.signer import Signer
from kvparams.signing.verification import UntrustedParams, verify_params
from tests.support.kvparams.spec_folder import EXTENSIONS

VECTORS: Final[dict[str, Any]] = json.loads((EXTENSIONS / "vectors" / "peers.json").read_text())
LEG: Final[dict[str, object]] = VECTORS["legs"][0]["document"]


@pytest.mark.parametrize("vector", VECTORS["answers"], ids=lambda each: each["name"])
def test_whoever_reads_from_others_says_where_they_read_from_it(vector: dict[str, Any]) -> None:
    assert readable_address(vector["kv_transfer_params"]) == vector["readable"]


@pytest.mark.parametrize("vector", VECTORS["legs"], ids=lambda each: each["name"])
def test_whoever_is_told_reads_there_and_nobody_else(vector: dict[str, Any]) -> None:
    params = parse(vector["document"])
    assert peer_source(params) == vector["source"]
    assert peer_source(parse(dump(params))) == vector["source"]


def test_what_is_said_and_told_is_what_the_page_shows() -> None:
    text = (EXTENSIONS / "peers.md").read_text()
    shown = {name: json.loads(code) for name, code in re.findall(r"^```json (\w+)\n(.*?)^```$", text, re.M | re.S)}
    answer, leg = (shown[name]["kv_transfer_params"]["kvparams"] for name in ("answer", "leg"))
    address = answer["producer"]["address"]
    assert parse(answer).extensions == READS_EXTENSION
    assert readable_address(shown["answer"]["kv_transfer_params"]) == address
    assert peer_source(parse(leg)) == address
    assert leg["extensions"] == peer_source_members(address)["extensions"]
    assert f"`{PEERS_EXTENSION}`" in (EXTENSIONS / "README.md").read_text()


def test_where_to_read_is_signed_like_all_the_rest() -> None:
    """Whoever changes it on the way, or adds it, is not believed."""
    ring, now = SigningKeyring([SigningKey("k", bytes(32), 0)]), 1000.0
    signer = Signer(keyring=ring, audience="pool", now=lambda: now)
    plain = {name: value for name, value in LEG.items() if name != "extensions"}
    for before, after in (
        (peer_source_members("10.0.0.5:7400"), peer_source_members("10.0.0.6:7400")),
        ({}, peer_source_members("10.0.0.6:7400")),
    ):
        carrier = signer.sign(parse({**plain, **before}))
        believed = verify_params(carrier, ring, "pool", now, ReplayWindow(now - 100))
        assert believed is not None
        assert peer_source(believed) == ("10.0.0.5:7400" if before else None)
        document: dict[str, Any] = carrier["kvparams"]  # pyright: ignore[reportAssignmentType]
        with pytest.raises(UntrustedParams, match="forged"):
            verify_params({**carrier, "kvparams": {**document, **after}}, ring, "pool", now, ReplayWindow(now - 100))
