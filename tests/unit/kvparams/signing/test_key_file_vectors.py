"""Tests that key files are read as spec/draft/vectors/key_files.json says."""

import json
from typing import Any

import pytest

from kvparams.signing.keyring import SigningKeyring, SigningKeyringError
from tests.support.kvparams.spec_folder import ROOT

CASES: list[dict[str, Any]] = json.loads((ROOT / "spec" / "draft" / "vectors" / "key_files.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_key_file_is_taken_or_refused_as_the_vector_says(case: dict[str, Any]) -> None:
    if case["valid"]:
        keyring = SigningKeyring.parse(case["text"])
        assert SigningKeyring.parse(keyring.text()).text() == keyring.text()
    else:
        with pytest.raises(SigningKeyringError):
            SigningKeyring.parse(case["text"])
