"""spec.md and engine.md: examples are run, numbers are in order, every MUST has a proof or a stated reason."""

import hashlib
import hmac
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from kvparams import dump, errors, parse, read_request, trio
from kvparams.coordination import PrefillThenDecode
from kvparams.dialects.store import STORE
from kvparams.jsontext import edit, fields
from kvparams.params import KNOWN_PATHS
from kvparams.plan import LegAnswer
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams.trust.canonical import canonical, canonical_json, native_members
from kvparams.trust.keyring import Keyring, SigningKey
from kvparams.trust.replay import ReplayWindow
from kvparams.trust.verifying import REASONS, verify
from kvparams.versions import SPOKEN
from kvparams_proxy.clients.endpoints import one_token
from tests.kvparams.planning import Table

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "spec" / "draft" / "spec.md").read_text()
ENGINE = (ROOT / "spec" / "draft" / "engine.md").read_text()
FENCES = re.findall(r"^```([^\n]+)\n(.*?)^```$", SPEC, re.MULTILINE | re.DOTALL)
REQUIREMENTS: list[str] = re.findall(r"^- \*\*(draft#\d+\.\d+)\*\* ", SPEC, re.MULTILINE)
UNPROVEN = {
    "draft#3.9": "of engines: no clock is read here",
    "draft#3.10": "of engines: shown by the reference engine's tests",
    "draft#3.11": "of engines: nothing here makes an address",
    "draft#3.13": "of proxies: shown by the proxy's tests",
    "draft#3.14": "of readers of pages: shown by the peer store's tests",
    "draft#3.7": "of proxies: belongs to the request's life cycle",
    "draft#4.1": "of proxies: shown by the proxy's tests",
    "draft#4.2": "of engines: shown by the reference engine's tests",
    "draft#4.3": "of proxies: belongs to the request's life cycle",
    "draft#4.4": "of engines: belongs to the request's life cycle",
    "draft#10.2": "of engines: shown by the connector's tests",
    "draft#11.2": "of engines: shown by the connector's tests",
    "draft#12.1": "of proxies: shown by the proxy's tests",
    "draft#12.2": "of proxies: shown by the proxy's tests",
    "draft#12.3": "of engines: nothing here opens a connection",
    "draft#12.5": "of proxies and engines: nothing here logs",
    "draft#16.3": "of readers of events: shown with their feeding",
    "draft#16.4": "of proxies: nothing here answers a request",
    "draft#16.5": "of proxies: nothing here makes a seed or answers a client",
}
"""What this package cannot show, because it is about those who use it."""


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
    found = trio.read(text)
    written = trio.write(found.to_params("r", "t"), batched=found.batched, native=found.native)
    assert written == json.loads(text)


def test_the_models_that_an_engine_names_say_what_it_speaks() -> None:
    (text,) = fences("models")
    assert tuple(json.loads(text)["kvparams_versions"]) == SPOKEN


def test_the_signed_example_is_what_it_says_step_by_step() -> None:
    (text,) = fences("signed")
    forms = {info: found for info, found in FENCES if info.startswith("text ")}
    native, document = forms["text native"].rstrip("\n").encode(), forms["text canonical"].rstrip("\n").encode()
    carrier = json.loads(text)
    signature = carrier["kvparams"]["signature"]
    assert canonical_json(native_members(carrier)) == native
    assert canonical(carrier["kvparams"]) == document
    assert signature["native"] == f"sha256:{hashlib.sha256(native).hexdigest()}"
    tag = hmac.new(bytes(range(32)), b"kvparams signature 1\n" + document, "sha256").hexdigest()
    assert signature["value"] == tag
    keyring = Keyring([SigningKey("a", bytes(range(32)), signature["iat"])])
    assert verify(carrier, keyring, "pool-a", signature["iat"], ReplayWindow(0)) is not None


def test_the_reasons_stand_in_the_text_in_the_order_in_which_they_are_looked_for() -> None:
    section = SPEC.split("## 13. Signature")[1]
    assert tuple(re.findall(r"^[0-9]+\. `(\w+)`: ", section, re.MULTILINE)) == REASONS


def test_requirements_are_numbered_in_order() -> None:
    sections = [int(number) for number in re.findall(r"^## (\d+)\. ", SPEC, re.MULTILINE)]
    assert sections == list(range(1, len(sections) + 1))
    numbers = [tuple(map(int, requirement.removeprefix("draft#").split("."))) for requirement in REQUIREMENTS]
    assert numbers == sorted(set(numbers))
    for section in {section for section, _ in numbers}:
        own = [number for found, number in numbers if found == section]
        assert own == list(range(1, len(own) + 1))


def test_every_must_has_a_number_and_every_number_a_must() -> None:
    """RFC 2119 words stand nowhere but in numbered sentences, apart from the sentence that introduces them."""
    for line in SPEC.splitlines():
        has_must = re.search(r"\bMUST\b", line) is not None
        numbered = line.startswith("- **draft#")
        introduction = line.startswith(("The words MUST", "Every sentence with a MUST", "`vectors/` holds"))
        assert has_must == (numbered or introduction), line


def test_every_requirement_is_proven_or_says_why_not() -> None:
    """In both directions: no test or vector names a requirement that is not there."""
    sources = [*(ROOT / "spec" / "draft" / "vectors").glob("*.json"), *(ROOT / "tests" / "kvparams").glob("test_*.py")]
    named: set[str] = set()
    for path in sources:
        if path.name != Path(__file__).name:
            named |= set(re.findall(r"draft#\d+\.\d+", path.read_text()))
    assert named <= set(REQUIREMENTS)
    assert set(REQUIREMENTS) - named == set(UNPROVEN)


def test_every_known_member_stands_in_the_text() -> None:
    for path in KNOWN_PATHS:
        assert (
            f"`{path}`" in SPEC or f"`{path.rpartition('.')[2]}`" in SPEC or f'"{path.rpartition(".")[2]}"' in SPEC
        ), path


def test_every_kind_of_problem_stands_in_the_text() -> None:
    table = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", SPEC.split("## 7. Errors")[1].split("## 8.")[0], re.MULTILINE)
    assert set(table) == set(get_args(errors.ProblemKind))


def test_the_legs_in_the_engine_page_are_those_that_are_planned() -> None:
    """Ours: what an engine is told to expect is made by the code that a proxy runs."""
    legs = {
        kind: json.loads(text)
        for kind, text in re.findall(r"^```json (\w+)\n(.*?)^```$", ENGINE, re.MULTILINE | re.DOTALL)
    }
    assert list(legs) == ["prefill", "answer", "decode"]
    client = {name: value for name, value in legs["decode"].items() if name != "kv_transfer_params"}
    body = json.dumps(client | {"n": 1, "best_of": 1, "min_tokens": 1, "stream_options": {}}).encode()
    facts = RequestFacts("7f3c9a", "0192a1c8-7f3c", "m", 1, 1, client["prompt"], None)
    fleet = [
        Instance(name, "seen by the proxy alone", role, "http://h:1", "store")
        for role, name in ((Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-1"))
    ]
    table = Table(STORE, fleet, one_token=one_token("completions", body, fields(body)))
    answer = LegAnswer(legs["answer"]["kv_transfer_params"])
    prefill, decode = table.run(PrefillThenDecode().legs(facts, table), lambda _: answer)
    assert json.loads(edit(body, fields(body), prefill.changes)) == legs["prefill"]
    plain = json.dumps(client).encode()
    assert json.loads(edit(plain, fields(plain), decode.changes)) == legs["decode"]


def test_the_engine_page_names_requirements_that_are_there() -> None:
    assert set(re.findall(r"draft#\d+\.\d+", ENGINE)) <= set(REQUIREMENTS)
    assert "MUST" not in ENGINE  # requirements have numbers, and stand in spec.md


def test_the_readme_explains_every_kind_of_vector() -> None:
    readme = (ROOT / "spec" / "README.md").read_text()
    kinds: set[Any] = {
        json.loads(path.read_bytes())["kind"] for path in (ROOT / "spec" / "draft" / "vectors").glob("*.json")
    }
    assert set(re.findall(r'`"kind": "(\w+)"`', readme)) == kinds
