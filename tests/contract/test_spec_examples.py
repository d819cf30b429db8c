"""Runs the examples of spec.md, and compares its lists with the code."""

import hashlib
import hmac
import json
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

from kvparams import dump, errors, legacy_params, parse, read_request
from kvparams.params import KNOWN_PATHS
from kvparams.signing.canonical_json import canonical_document, canonical_json, native_members
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.verification import UNTRUSTED_REASONS, verify_params
from kvparams.versions import SUPPORTED_VERSIONS
from tests.support.kvparams.spec_folder import SPEC as FOLDER
from tests.support.kvparams.spec_folder import VECTORS

SPEC = (FOLDER / "spec.md").read_text()
FENCES = re.findall(r"^```([^\n]+)\n(.*?)^```$", SPEC, re.MULTILINE | re.DOTALL)


def fences(kind: str) -> list[str]:
    return [text for info, text in FENCES if info == f"json {kind}"]


def test_every_example_says_what_it_is() -> None:
    assert {info for info, _ in FENCES} == {
        *("json document", "json request", "json trio", "json signed", "json models", "text native", "text canonical"),
    }


@pytest.mark.parametrize("text", fences("document"))
def test_every_document_in_the_text_is_valid(text: str, schema_accepts: Callable[[object], bool]) -> None:
    document = json.loads(text)
    assert dump(parse(text)) == document
    assert schema_accepts(document)


def test_the_examples_of_one_request_belong_together() -> None:
    """Ours: the three legs in section 4 speak of the same transfer and the same tokens."""
    legs = [parse(text) for text in fences("document")[:3]]
    assert [leg.phase for leg in legs] == ["prefill", "prefill_result", "decode"]
    assert len({(leg.request_id, leg.transfer) for leg in legs}) == 1
    assert len({leg.prefix.digest_text() for leg in legs if leg.prefix is not None}) == 1


@pytest.mark.parametrize("text", fences("request"))
def test_every_request_in_the_text_carries_a_document(text: str) -> None:
    assert read_request(json.loads(text)["kv_transfer_params"]) is not None


@pytest.mark.parametrize("text", fences("trio"))
def test_every_trio_in_the_text_is_valid(text: str) -> None:
    found = legacy_params.read_legacy_params(text)
    written = legacy_params.write_legacy_params(found.to_params("r", "t"), batched=found.batched, native=found.native)
    assert written == json.loads(text)


def test_the_models_that_an_engine_names_say_what_it_speaks() -> None:
    (text,) = fences("models")
    assert tuple(json.loads(text)["kvparams_versions"]) == SUPPORTED_VERSIONS


def test_the_signed_example_is_what_it_says_step_by_step() -> None:
    (text,) = fences("signed")
    forms = {info: found for info, found in FENCES if info.startswith("text ")}
    native, document = forms["text native"].rstrip("\n").encode(), forms["text canonical"].rstrip("\n").encode()
    carrier = json.loads(text)
    signature = carrier["kvparams"]["signature"]
    assert canonical_json(native_members(carrier)) == native
    assert canonical_document(carrier["kvparams"]) == document
    assert signature["native"] == f"sha256:{hashlib.sha256(native).hexdigest()}"
    tag = hmac.new(bytes(range(32)), b"kvparams signature 1\n" + document, "sha256").hexdigest()
    assert signature["value"] == tag
    keyring = SigningKeyring([SigningKey("a", bytes(range(32)), signature["iat"])])
    assert verify_params(carrier, keyring, "pool-a", signature["iat"], ReplayWindow(0)) is not None


def test_the_reasons_stand_in_the_text_in_the_order_in_which_they_are_looked_for() -> None:
    section = SPEC.split("## 13. Signature")[1]
    assert tuple(re.findall(r"^[0-9]+\. `(\w+)`: ", section, re.MULTILINE)) == UNTRUSTED_REASONS


def test_every_known_member_stands_in_the_text() -> None:
    for path in KNOWN_PATHS:
        assert (
            f"`{path}`" in SPEC or f"`{path.rpartition('.')[2]}`" in SPEC or f'"{path.rpartition(".")[2]}"' in SPEC
        ), path


def test_every_kind_of_problem_stands_in_the_text() -> None:
    table = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", SPEC.split("## 7. Errors")[1].split("## 8.")[0], re.MULTILINE)
    assert set(table) == set(get_args(errors.ProblemKind))


def test_the_readme_explains_every_kind_of_vector() -> None:
    readme = (VECTORS / "README.md").read_text()
    kinds: set[Any] = {json.loads(path.read_bytes())["kind"] for path in VECTORS.rglob("*.json")}
    assert set(re.findall(r'`"kind": "(\w+)"`', readme)) == kinds
