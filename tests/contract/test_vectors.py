"""Compares three judges of the same vectors: the schema, this SDK, and the verdicts in the vectors."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kvparams import InvalidParams, UnsupportedVersion, dump, dump_json, legacy_params, parse, read_request
from kvparams.keys import ExtraKey, Geometry, KVShard, Namespace, chain_pages, page_key
from kvparams.page_auth import PAGE_AUTH_METHODS, PageAuthKeys, PageAuthMethod, TenantPageAuthKeys
from kvparams.pages import HEADER_BYTES, PAGE_REFUSAL_REASONS, page_identity, seal, verify
from kvparams.versions import LossyDowngrade, NoCommonVersion, downgrade, negotiate
from tests.support.kvparams.spec_folder import VECTORS

Case = dict[str, Any]


@cache
def cases(kind: str) -> list[Case]:
    files = [json.loads(path.read_bytes()) for path in sorted(VECTORS.glob("*.json"))]
    return [case for content in files if content["kind"] == kind for case in content["cases"]]


def name_of(case: Case) -> str:
    return case["name"]


def same(one: object, other: object) -> bool:
    """Equal as JSON: 1, 1.0 and true differ."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def problems(error: InvalidParams) -> list[Case]:
    return ordered([{"path": list(problem.path), "kind": problem.kind} for problem in error.problems])


def ordered(found: list[Case]) -> list[Case]:
    return sorted(found, key=json.dumps)


def test_every_kind_of_vector_is_there() -> None:
    """Guards the tests below against an empty list of cases."""
    kinds = {json.loads(path.read_bytes())["kind"] for path in VECTORS.glob("*.json")}
    assert kinds == {
        "carrier",
        "document",
        "trio",
        "keys",
        "pages",
        "signature",
        "events",
        "chain",
        "versions",
    }
    assert {kind for kind in kinds if len(cases(kind)) > 10} == kinds


@pytest.mark.parametrize("case", cases("document"), ids=name_of)
def test_the_sdk_judges_every_document_as_the_vector_says(case: Case) -> None:
    """Spec-mandated, 1.0#1.1."""
    given = case["document"] if "document" in case else case["text"]
    if case["valid"]:
        params = parse(given)
        written = given if "document" in case else json.loads(given)
        assert same(dump(params), written)
        assert same(json.loads(dump_json(params)), written)
        assert parse(dump_json(params)) == params
        return
    with pytest.raises(InvalidParams) as caught:
        parse(given)
    assert problems(caught.value) == ordered(case["problems"])
    is_version = case["problems"][0]["kind"] == "version"
    assert isinstance(caught.value, UnsupportedVersion) is is_version


@pytest.mark.parametrize("case", [one for one in cases("document") if "document" in one], ids=name_of)
def test_the_schema_judges_every_document_as_the_vector_says(
    case: Case, schema_accepts: Callable[[object], bool]
) -> None:
    """Spec-mandated, 1.0#1.1: as far as a schema can say it."""
    assert schema_accepts(case["document"]) is (case["valid"] or case.get("beyond_schema", False))


@pytest.mark.parametrize("case", [one for one in cases("document") if "document" in one], ids=name_of)
def test_a_document_is_judged_the_same_as_text_and_inside_a_request(case: Case) -> None:
    """Spec-mandated, 1.0#2.1: inside `kv_transfer_params` only the start of the paths differs."""
    text = json.dumps(case["document"])
    wrapped = json.dumps({"do_remote_decode": True, "kvparams": case["document"]})
    if case["valid"]:
        assert parse(text) == parse(text.encode()) == read_request(wrapped) == parse(case["document"])
        return
    with pytest.raises(InvalidParams) as plain:
        parse(text)
    with pytest.raises(InvalidParams) as inside:
        read_request(wrapped)
    assert problems(plain.value) == ordered(case["problems"])
    moved = [{"path": ["kvparams", *one["path"]], "kind": one["kind"]} for one in case["problems"]]
    assert problems(inside.value) == ordered(moved)


@pytest.mark.parametrize("case", cases("carrier"), ids=name_of)
def test_the_sdk_reads_every_carrier_as_the_vector_says(case: Case) -> None:
    """Spec-mandated, 1.0#2: what is no text in the vector is also read as its text."""
    value = case["kv_transfer_params"]
    for given in [value] if isinstance(value, str) else [value, json.dumps(value)]:
        if case["valid"]:
            found = read_request(given, request_id="r", transfer_id="t")
            assert same(None if found is None else dump(found), case["document"])
            continue
        with pytest.raises(InvalidParams) as caught:
            read_request(given, request_id="r", transfer_id="t")
        assert problems(caught.value) == ordered(case["problems"])


@pytest.mark.parametrize("case", cases("trio"), ids=name_of)
def test_the_sdk_judges_every_trio_as_the_vector_says(case: Case, schema_accepts: Callable[[object], bool]) -> None:
    """Spec-mandated, 1.0#9: also as JSON text."""
    if not case["valid"]:
        for value in (case["trio"], json.dumps(case["trio"])):
            with pytest.raises(InvalidParams) as caught:
                legacy_params.read_legacy_params(value)
            assert problems(caught.value) == ordered(case["problems"])
        return
    for value in (case["trio"], json.dumps(case["trio"])):
        found = legacy_params.read_legacy_params(value)
        documents = found.to_params("r", "t")
        assert same([dump(params) for params in documents], case["documents"])
        assert same(
            legacy_params.write_legacy_params(documents, batched=found.batched, native=found.native),
            case["trio"],
        )
        assert all(schema_accepts(document) for document in case["documents"])


@pytest.mark.parametrize("case", cases("versions"), ids=name_of)
def test_the_sdk_speaks_the_version_that_the_vector_says(case: Case) -> None:
    """Spec-mandated, 1.0#6.6, 1.0#6.7, 1.0#6.8."""
    if "ours" not in case:
        added = {version: frozenset(paths) for version, paths in case["added"].items()}
        if "lost" not in case:
            assert same(downgrade(case["document"], case["to"], added), case["downgraded"])
            return
        with pytest.raises(LossyDowngrade) as caught:
            downgrade(case["document"], case["to"], added)
        assert list(caught.value.members) == case["lost"]
    elif case["version"] is not None:
        assert negotiate(case["ours"], case["theirs"]) == case["version"]
    else:
        with pytest.raises(NoCommonVersion):
            negotiate(case["ours"], case["theirs"])


def namespace_of(given: Case) -> Namespace:
    rest = dict(given)
    shape = Geometry(**{name: rest.pop(name) for name in ("layers", "kv_heads", "k_dim", "v_dim")})
    return Namespace(geometry=shape, **rest)


@pytest.mark.parametrize("case", cases("keys"), ids=name_of)
def test_the_sdk_derives_the_keys_that_the_vector_says(case: Case) -> None:
    """Spec-mandated, 1.0#10.1: the vectors were computed from the words of the spec, by other code."""
    namespace = namespace_of(case["namespace"])
    extras = [ExtraKey(one["start"], one["end"], bytes.fromhex(one["digest"])) for one in case["extras"]]
    pages = chain_pages(namespace, case["token_ids"], extras)
    assert namespace.digest.hex() == case["namespace_digest"]
    assert [page.chain.hex() for page in pages] == case["chains"]
    assert [page_key(namespace, page, KVShard(**case["rectangle"])) for page in pages] == case["keys"]


@pytest.mark.parametrize("case", cases("pages"), ids=name_of)
def test_the_sdk_judges_every_stored_page_as_the_vector_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec-mandated, 1.0#11.1, 1.0#11.3 to 1.0#11.7."""
    namespace = namespace_of(case["namespace"])
    index: int = case["page"]
    page = chain_pages(namespace, case["token_ids"])[index]
    identity = page_identity(namespace, page, KVShard(**case["rectangle"]))
    stored = bytes.fromhex(case["stored"])
    methods: dict[int, PageAuthMethod] = {flags: method for method, flags in PAGE_AUTH_METHODS.items()}
    sealed: Case = case.get("sealed", {"flags": PAGE_AUTH_METHODS["hmac-sha256"], "random": ""})
    secrets = [bytes.fromhex(key) for key in case.get("keys", [])]
    keys = PageAuthKeys(secrets, methods[sealed["flags"]]).for_tenant(namespace.cache_salt) if secrets else None
    refusal = verify(memoryview(stored), identity, keys)
    assert (None if refusal is None else refusal.reason) == case["refused"]
    if refusal is None and (keys is None or "sealed" in case):

        def the_same_salt(_: TenantPageAuthKeys) -> bytes:
            return bytes.fromhex(sealed["random"])

        monkeypatch.setattr(TenantPageAuthKeys, "new_salt", the_same_salt)
        buffer = bytearray(bytes(HEADER_BYTES) + bytes.fromhex(case["payload"]))
        seal(memoryview(buffer), identity, keys)
        assert buffer == stored


def test_every_reason_to_refuse_a_page_has_a_vector() -> None:
    assert {one["refused"] for one in cases("pages")} == {None, *PAGE_REFUSAL_REASONS}
