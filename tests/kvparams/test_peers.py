"""What prefill engines say of their memory, and what they are told of others': `spec/extensions/peers.md`."""

import json
import re
from typing import Any, Final

import pytest

from kvparams import dump, parse
from kvparams.peers import PEERS, READS, readable, source, told
from kvparams.trust.keyring import Keyring, SigningKey
from kvparams.trust.replay import ReplayWindow
from kvparams.trust.signing import Signer
from kvparams.trust.verifying import Untrusted, verify
from tests.kvparams.spec_folder import EXTENSIONS

VECTORS: Final[dict[str, Any]] = json.loads((EXTENSIONS / "vectors" / "peers.json").read_text())
LEG: Final[dict[str, object]] = VECTORS["legs"][0]["document"]


@pytest.mark.parametrize("vector", VECTORS["answers"], ids=lambda each: each["name"])
def test_whoever_reads_from_others_says_where_they_read_from_it(vector: dict[str, Any]) -> None:
    assert readable(vector["kv_transfer_params"]) == vector["readable"]


@pytest.mark.parametrize("vector", VECTORS["legs"], ids=lambda each: each["name"])
def test_whoever_is_told_reads_there_and_nobody_else(vector: dict[str, Any]) -> None:
    params = parse(vector["document"])
    assert source(params) == vector["source"]
    assert source(parse(dump(params))) == vector["source"]


def test_what_is_said_and_told_is_what_the_page_shows() -> None:
    text = (EXTENSIONS / "peers.md").read_text()
    shown = {name: json.loads(code) for name, code in re.findall(r"^```json (\w+)\n(.*?)^```$", text, re.M | re.S)}
    answer, leg = (shown[name]["kv_transfer_params"]["kvparams"] for name in ("answer", "leg"))
    address = answer["producer"]["address"]
    assert parse(answer).extensions == READS
    assert readable(shown["answer"]["kv_transfer_params"]) == address
    assert source(parse(leg)) == address
    assert leg["extensions"] == told(address)["extensions"]
    assert f"`{PEERS}`" in (EXTENSIONS / "README.md").read_text()


def test_where_to_read_is_signed_like_all_the_rest() -> None:
    """Whoever changes it on the way, or adds it, is not believed."""
    ring, now = Keyring([SigningKey("k", bytes(32), 0)]), 1000.0
    signer = Signer(keyring=ring, audience="pool", now=lambda: now)
    plain = {name: value for name, value in LEG.items() if name != "extensions"}
    for before, after in ((told("10.0.0.5:7400"), told("10.0.0.6:7400")), ({}, told("10.0.0.6:7400"))):
        carrier = signer.sign(parse({**plain, **before}))
        believed = verify(carrier, ring, "pool", now, ReplayWindow(now - 100))
        assert believed is not None
        assert source(believed) == ("10.0.0.5:7400" if before else None)
        document: dict[str, Any] = carrier["kvparams"]  # pyright: ignore[reportAssignmentType]
        with pytest.raises(Untrusted, match="forged"):
            verify({**carrier, "kvparams": {**document, **after}}, ring, "pool", now, ReplayWindow(now - 100))
