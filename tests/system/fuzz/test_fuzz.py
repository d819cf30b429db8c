"""Fuzzes the reader of documents, and the detection, translation and explanation of dialects.

Every input is read or refused with one of our errors, in bounded time and memory. A soak runs ten minutes for each.
"""

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, cast

import pytest

from kvparams import KVParamsError, dump, dump_json, legacy_params, parse, read_request
from kvparams.cli.descriptions import describe_document, describe_message
from kvparams.cli.input_files import find_document, recognize_message, to_message
from kvparams.dialects.detection import detect_dialect
from kvparams.dialects.message import DialectMessage
from kvparams.dialects.registry import load_tables
from kvparams.dialects.translation import decode_message, encode_message, translate_params
from kvparams.errors import JSONTextError
from kvparams.instances import Instance, Role
from kvparams.jsontext.document import load_object, loads
from kvparams.jsontext.editing import edit
from kvparams.params import KVTransferParams
from kvparams.routing.handoff_verifier import HandoffRefused, HandoffVerifier
from kvparams.signing.canonical_json import canonical_document
from tests.support.kvparams.spec_folder import DIALECTS, VECTORS
from tests.system.fuzz.campaign import FOUND, Campaign
from tests.system.fuzz.mutation import spoiled_json

Effort = Callable[[int, int], int]
Record = Callable[[dict[str, object]], None]

TABLES = load_tables()
PINS = HandoffVerifier(TABLES.values())
ENGINE = Instance("p0", "b", Role.PREFILL, "http://10.0.0.7:8000", "nixl")


def documents() -> list[bytes]:
    """Every document of the vectors, and what stands beside some."""
    found: list[bytes] = []
    for path in sorted(VECTORS.glob("*.json")):
        for case in json.loads(path.read_bytes())["cases"]:
            found += [
                json.dumps(case[name]).encode() for name in ("document", "kv_transfer_params", "trio") if name in case
            ]
            if isinstance(case.get("text"), str):
                found.append(case["text"].encode("utf-8", "surrogatepass"))
    return [one for one in found if len(one) < 1 << 14]


def messages() -> list[bytes]:
    """Every message of the dialects' vectors, whole and its body alone."""
    found: list[bytes] = []
    for path in sorted([*(VECTORS / "dialects").glob("*.json"), *(DIALECTS / "vectors").glob("*.json")]):
        for case in json.loads(path.read_bytes())["cases"]:
            found += [json.dumps(case["message"]).encode(), json.dumps(case["message"]["body"]).encode()]
    return found


def kinds(error: KVParamsError) -> Hashable:
    """In which way something was refused."""
    problems = getattr(error, "problems", ())
    shown = {(*(part for part in one.path if isinstance(part, str) and len(part) < 24), one.kind) for one in problems}
    return type(error).__name__, frozenset(list(shown)[:3])


def read(data: bytes) -> Hashable:
    """As a document, as `kv_transfer_params`, as the trio, and as text that is edited."""
    ways: list[Hashable] = []
    try:
        params = parse(data)
    except KVParamsError as error:
        ways.append(kinds(error))
    else:
        assert parse(dump_json(params)) == params
        assert parse(dump(params)) == params
        ways.append((params.phase, len(params.model_fields_set)))
        try:
            canonical_document(dump(params))
        except KVParamsError as error:
            ways.append(kinds(error))
    try:
        value = loads(data)
    except JSONTextError:
        return tuple(ways)
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        for one in (given, {"kvparams": given}, json.dumps(given)):
            try:
                read_request(one, request_id="r")
            except KVParamsError as error:
                ways.append(kinds(error))
        try:
            legacy_params.read_legacy_params(given)
        except KVParamsError as error:
            ways.append(kinds(error))
        edited(data, given)
    return tuple(ways)


def edited(data: bytes, value: dict[str, Any]) -> None:
    """What is changed in the text is what is changed in the value, and nothing else."""
    document, spans = load_object(data)
    assert document == value
    removed = next(iter(spans), None)
    changes: dict[str, bytes | None] = {"added_7f3c": b"[1]"}
    if removed is not None and removed.isascii() and removed.isidentifier():
        changes[removed] = None
    after = loads(edit(data, spans, changes))
    assert after == {name: one for name, one in document.items() if name not in changes} | {"added_7f3c": [1]}


def judged(data: bytes) -> Hashable:
    """Sniffed, explained, translated, and held against an instance."""
    try:
        value = loads(data)
    except JSONTextError:
        return "no JSON"
    if not isinstance(value, dict):
        return "no object"
    found = cast("dict[str, Any]", value)
    ways: list[Hashable] = []
    try:
        document = find_document(found)
        if document is not None:
            describe_document(parse(document), ())
        message = to_message(found)
        given = recognize_message(message, TABLES.values(), None, None, found)
        lines, right = describe_message(given)
        assert lines
        ways.append((given.table.name, given.phase, right))
    except KVParamsError as error:
        return kinds(error)
    try:
        detect_dialect(given.message, TABLES.values())
        params = decode_message(given.table, given.message, given.phase)
        assert encode_message(given.table, params) == given.message
        ways += [target(name, given.table.name, params) for name in TABLES]
    except KVParamsError as error:
        ways.append(kinds(error))
    ways.append(held(given.message))
    return tuple(ways)


def target(name: str, source: str, params: KVTransferParams) -> Hashable:
    """Said in another dialect."""
    try:
        return len(translate_params(TABLES[source], TABLES[name], params).lost)
    except KVParamsError as error:
        return kinds(error)


def held(message: DialectMessage) -> Hashable:
    native = message.body.get("kv_transfer_params")
    try:
        PINS.verify(ENGINE, cast("dict[str, Any]", native) if isinstance(native, dict) else message.body)
    except HandoffRefused as refused:
        return refused.reason
    return "its own"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reader_of_documents_reads_or_refuses(effort: Effort, record: Record) -> None:
    """Spec-mandated, 1.0#12.4."""
    campaign = Campaign("document", spoiled_json, read, documents())
    seen = campaign.last(effort(4, 600), seed=1)
    assert campaign.inputs > 100
    assert len(campaign.ways) > 50  # it has not been fed the same again and again
    record(seen)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sniffer_and_the_translator_say_something_or_refuse(effort: Effort, record: Record) -> None:
    campaign = Campaign("message", spoiled_json, judged, messages())
    seen = campaign.last(effort(6, 600), seed=2)
    assert campaign.inputs > 50
    assert len(campaign.ways) > 30
    record(seen)


def test_inputs_that_once_went_wrong_go_well() -> None:
    for name, run in {"document": read, "message": judged}.items():
        for path in sorted(FOUND.glob(f"{name}-*")):
            run(path.read_bytes())


def test_a_campaign_notices_a_crash_a_hang_and_a_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr("tests.system.fuzz.campaign.FOUND", tmp_path)
    monkeypatch.setattr("tests.system.fuzz.campaign.HANG_S", 0.05)
    monkeypatch.setattr("tests.system.fuzz.campaign.LOOKED_AT", 1)
    monkeypatch.setattr("tests.system.fuzz.campaign.PEAK_BYTES", 1 << 16)

    def hang(_: bytes) -> Hashable:
        while True:
            pass

    def crash(data: bytes) -> Hashable:
        return data[0]

    def flood(_: bytes) -> Hashable:
        return len(bytearray(1 << 20))

    for run, said in ((crash, "IndexError"), (hang, "TimeoutError"), (flood, "it took 1 MiB")):
        with pytest.raises(AssertionError, match=said):
            Campaign("control", spoiled_json, run, [b""]).last(0.1, 0)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b""]
