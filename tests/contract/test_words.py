"""Tests what `kvparams explain` says of unknown members, signatures, refusals in native keys, and new dialects."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvparams.cli import main

EXAMPLES = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The lines that are said of a document."""

    def run(document: object, *words: str, status: int = 0) -> list[str]:
        path = tmp_path / "one.json"
        path.write_text(json.dumps(document))
        assert main(["explain", str(path), *words]) == status
        return [line.strip() for line in capsys.readouterr().out.splitlines()]

    return run


def test_members_that_nobody_knows_are_named(explain: Callable[..., list[str]]) -> None:
    transfer = {"id": "t", "attempt": 1, "atempt": 2}
    extensions = {"ai.sglang.pd": {"a": {"version": 1}, "\x1b[31m": 1}, "com.example.tiers": {}}
    said = explain(DOCUMENT | {"transfer": transfer, "\x1b[31m": 1, "extensions": extensions})
    assert sorted(said[said.index("Worth knowing:") + 1 :]) == [
        '"\\u001b[31m": this member is unknown; it is kept unchanged',
        "extensions.com.example.tiers: this extension is unknown; it is kept unchanged",
        "transfer.atempt: this member is unknown; it is kept unchanged",
    ]
    assert 'the extension ai.sglang.pd has a, "\\u001b[31m"' in said
    assert "Worth knowing:" not in explain(DOCUMENT | {"extensions": {"ai.sglang.pd": {}}})


def test_a_typo_is_named_where_it_makes_the_document_invalid(explain: Callable[..., list[str]]) -> None:
    wrong = {"requestid" if name == "request_id" else name: value for name, value in DOCUMENT.items()}
    assert explain(wrong, status=1)[1:] == [
        "request_id: Field required [missing]",
        "requestid: this member is unknown; it is kept unchanged",
    ]


def test_a_signature_is_told_and_not_vouched_for(explain: Callable[..., list[str]]) -> None:
    times = {"iat": 1767225600, "exp": 253402300799}
    names = {"alg": "hmac-sha256", "aud": "pool-a", "kid": "a", "nonce": "n-1", "value": "hush"}
    said = explain(DOCUMENT | {"signature": names | times | {"native": f"sha256:{'0' * 64}"}})
    when = "from 2026-01-01 00:00:00 until 9999-12-31 23:59:59 UTC"
    assert f"signed with key a for pool-a, {when}; not verified here" in said
    assert "hush" not in str(said)


def test_a_native_key_that_says_no_does_not_read_as_yes(explain: Callable[..., list[str]]) -> None:
    keys = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "\x1b[31m": 1}
    said = explain({"kv_transfer_params": keys}, "--dialect", "nixl", "--phase", "prefill")
    where = "kv_transfer_params."
    assert any(line.startswith(f"{where}do_remote_decode = true: ") for line in said)
    assert any(line.startswith(f"{where}do_remote_prefill = false, so not: ") for line in said)
    assert any(line.startswith(f"{where}remote_host = null, nothing said: ") for line in said)
    assert any(line.startswith('"\\u001b[31m": this dialect has no such key') for line in said)


def test_native_keys_beside_a_document_are_mentioned(explain: Callable[..., list[str]]) -> None:
    given = {"kvparams": DOCUMENT, "do_remote_decode": True}
    told = "native keys beside the document were not checked; to check them, add --dialect NAME: do_remote_decode"
    assert explain(given)[-1] == told
    assert not any("native keys" in line for line in explain({"kvparams": DOCUMENT}))


def test_json_that_is_refused_is_wrong_and_not_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"a": 1, "a": 2}')
    assert main(["explain", str(path)]) == 1
    assert "stands twice" in capsys.readouterr().out


def test_a_third_party_registers_a_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explain: Callable[..., list[str]]
) -> None:
    """The example of docs/extending.md, installed as a distribution of somebody else."""
    example = re.search(r"```python\n(from kvparams\.dialects\.table.*?)```", EXAMPLES, re.DOTALL)
    assert example is not None
    (tmp_path / "their_dialect.py").write_text(example.group(1))
    info = tmp_path / "their_dialect-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-dialect\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvparams.dialects]\nacme = their_dialect:ACME\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    said = explain({}, "--dialect", "acme", "--about")
    assert said[0] == "acme: Acme's connector"
    assert any("acme_ticket" in line and "our transfer.id" in line for line in said)
    said = explain({"acme_ticket": "t-1", "acme_port": 7000}, "--dialect", "acme", "--phase", "decode")
    assert any("transfer t-1" in line for line in said)
    said = explain({"acme_ticket": "t-1", "acme_port": 0}, "--dialect", "acme", "--phase", "decode", status=1)
    assert any("acme_port" in line and "[range]" in line for line in said)
