"""Checks that an engine refuses documents that break the protocol, each with the right answer."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from kvparams_conformance.checks import Checks, NotJudged, expect
from kvparams_conformance.conversation import Reply
from kvparams_conformance.engine_site import EngineTrial
from kvparams_conformance.raw_json import dump
from kvparams_conformance.requirements import vectors_folder

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_PROFILES: Final = ("engine",)


def _expect_refused(reply: Reply, what: str) -> None:
    expect(reply.status == 400, f"{what}: the status is {reply.status}")


async def _refuses(trial: EngineTrial, **changes: Any) -> None:
    reply = await trial.ask({"kvparams": trial.document(**changes)}, max_tokens=1)
    _expect_refused(reply, str(changes)[:120])


def _refused(requirement: str, name: str, sends: str, *cases: Mapping[str, object]) -> None:
    async def check(trial: EngineTrial) -> None:
        for case in cases:
            await _refuses(trial, **case)

    CHECKS.add(requirement, name, sends=sends, expects="the status 400", profiles=_PROFILES)(check)


_T: Final = {"id": "t-1", "attempt": 1}
_refused(
    "3.2",
    "missing",
    "documents without each required member",
    *({name: ...} for name in ("version", "request_id", "transfer", "phase", "mode")),
)
_refused(
    "3.3",
    "types",
    "documents with members of another type",
    {"transfer": {**_T, "attempt": "1"}},
    {"transfer": {**_T, "attempt": True}},
    {"transfer": {**_T, "attempt": 1.0}},
    {"request_id": 7},
    {"load_keys": "k"},
    {"lease": {"ttl_ms": "30000"}},
)
_refused(
    "3.4",
    "bounds",
    "documents with members out of their bounds",
    {"request_id": ""},
    {"request_id": "r" * 257},
    {"transfer": {**_T, "attempt": 0}},
    {"transfer": {**_T, "attempt": 65536}},
    {"transfer": {"id": "t/1", "attempt": 1}},
    {"lease": {"ttl_ms": 0}},
    {"lease": {"ttl_ms": 86_400_001}},
    {"load_keys": ["k" * 129]},
)
_refused(
    "3.5",
    "usage",
    "a document that counts more cached tokens than tokens",
    {"usage": {"prompt_tokens": 1, "cached_tokens": 2}},
)
_refused(
    "5.4",
    "critical",
    "a document whose `must_understand` names an unknown member",
    {"must_understand": ["encryption"]},
    {"must_understand": ["lease.renew"], "lease": {"ttl_ms": 1, "renew": True}},
)
_refused(
    "6.2",
    "version",
    "documents of the versions 2.0, 0.9, 1, 1.10000 and 01.0",
    *({"version": one} for one in ("2.0", "0.9", "1", "1.10000", "01.0")),
)
_refused(
    "18.2",
    "phase",
    "legs with the phase `prefill_result`, `decode_result`, and one that no version has",
    *({"phase": one} for one in ("prefill_result", "decode_result", "warm")),
)
_refused(
    "12.4",
    "size",
    "a document with 257 members, and one with 65,537 keys",
    {f"m{number}": 1 for number in range(257)},
    {"load_keys": ["k"] * 65537},
)


@CHECKS.add(
    "2.5",
    "carrier",
    sends="`kv_transfer_params` that is a list, a number, or text that spells neither object nor null",
    expects="the status 400",
    profiles=_PROFILES,
)
async def check_carrier(trial: EngineTrial) -> None:
    """Sends what is no carrier."""
    carriers: list[Any] = [[], 7, True, "[]", "{", "nul"]
    for carrier in carriers:
        _expect_refused(await trial.ask(carrier), repr(carrier))


@CHECKS.add(
    "2.1",
    "document-as-text",
    sends="a document that is text inside `kv_transfer_params`",
    expects="the status 400",
    profiles=_PROFILES,
)
async def check_document_as_text(trial: EngineTrial) -> None:
    """Sends the document as text."""
    _expect_refused(await trial.ask({"kvparams": json.dumps(trial.document())}), "a document as text")


@CHECKS.add(
    "3.1",
    "json",
    sends="`kv_transfer_params` as text with a name twice, with NaN, and with half a surrogate pair",
    expects="the status 400",
    profiles=_PROFILES,
)
async def check_json(trial: EngineTrial) -> None:
    """Sends text that two parsers read differently."""
    text = json.dumps({"kvparams": trial.document()})
    for wrong in ('{"a":1,"a":2,' + text[1:], '{"a":NaN,' + text[1:], '{"a":"\\ud800",' + text[1:]):
        _expect_refused(await trial.ask(wrong), wrong[:20])


@CHECKS.add(
    "3.12",
    "depth",
    sends="`kv_transfer_params` as text with 100,000 levels",
    expects="the status 400, within two seconds",
    profiles=_PROFILES,
)
async def check_depth(trial: EngineTrial) -> None:
    """Sends what a recursive reader falls over."""
    reply = await trial.ask('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    _expect_refused(reply, "100,000 levels")
    expect(reply.seconds < 2, f"it took {reply.seconds:.1f} s")


@CHECKS.add(
    "18.2",
    "error",
    sends="a document without `version`",
    expects="an error whose `param` is `kv_transfer_params` or begins with it and a dot",
    profiles=_PROFILES,
)
async def check_error(trial: EngineTrial) -> None:
    """Reads the error."""
    reply = await trial.ask({"kvparams": trial.document(version=...)}, max_tokens=1)
    _expect_refused(reply, "a document without `version`")
    error = cast("dict[str, Any]", reply.json.get("error") or {})
    param = str(error.get("param"))
    expect(f"{param}.".startswith("kv_transfer_params."), f"`param` is {param!r}")
    expect(isinstance(error.get("message"), str), "there is no `message`")


@CHECKS.add(
    "1.1", "vectors", sends="every invalid document of the vectors", expects="the status 400", profiles=_PROFILES
)
async def check_vectors(trial: EngineTrial) -> None:
    """Sends the vectors that a document can be sent with."""
    cases = list(_invalid_documents())
    if not cases:
        raise NotJudged("the vectors are not installed")
    for name, document in cases:
        body = {
            "model": trial.engine.model,
            "prompt": "p",
            "max_tokens": 1,
            "kv_transfer_params": {"kvparams": document},
        }
        _expect_refused(await trial.send("/v1/completions", dump(body)), name)


def _invalid_documents() -> Iterator[tuple[str, object]]:
    for file in ("document.json", "prefix.json", "versions.json"):
        path = vectors_folder() / file
        if path.is_file():
            for case in json.loads(path.read_text("utf-8"))["cases"]:
                if not case.get("valid", True) and isinstance(case.get("document"), dict):
                    yield case["name"], case["document"]
