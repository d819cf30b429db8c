"""Checks of translators: messages of each dialect become documents, and documents messages, as the vectors say."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, cast

from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.reader_checks.judging import expect_answer, expect_problems, read_vectors
from kvparams_conformance.reader_site import ReaderTrial
from kvparams_conformance.requirements import vectors_folder

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_PROFILES: Final = ("translator",)
_NIXL: Final = "ai.vllm.nixl"
_LARGE: Final = {"lowest": -(2**63), "int64": 2**63 - 1, "uint64": 2**64 - 1}


def _add(requirement: str, name: str, sends: str, expects: str) -> Any:
    return CHECKS.add(requirement, name, sends=sends, expects=expects, profiles=_PROFILES)


def _add_vectors(dialect: str) -> None:
    @_add(
        "15.1",
        dialect,
        f"every vector of the dialect {dialect}",
        "each valid message becomes its document, and that document the message; the others are refused",
    )
    async def check(trial: ReaderTrial) -> None:
        for case in read_vectors(f"dialects/{dialect}.json")["cases"]:
            about = {"dialect": dialect, "engine": case.get("engine")}
            answer = await trial.ask("read", **about, phase=case["phase"], message=case["message"])
            if not case["valid"]:
                expect_problems(answer, case["problems"], case["name"])
                continue
            expect_answer(answer, "document", case["document"], case["name"])
            answer = await trial.ask("write", **about, document=case["document"])
            expect_answer(answer, "message", case["message"], f"{case['name']}, written")


for _path in sorted((vectors_folder() / "dialects").glob("*.json")):
    _add_vectors(_path.stem)


def _message(native: Mapping[str, object] | None = None, request_id: str = "7f3c") -> dict[str, Any]:
    """Returns a prefill leg for vLLM's NixlConnector with further native keys."""
    return {"request_id": request_id, "body": {"kv_transfer_params": {"do_remote_decode": True, **(native or {})}}}


def _document(request_id: str = "7f3c", transfer_id: str = "7f3c", **members: Any) -> dict[str, Any]:
    """Returns the document of such a leg, with some members changed."""
    made = {"version": "1.0", "request_id": request_id, "transfer": {"id": transfer_id, "attempt": 1}}
    return made | {"phase": "prefill", "mode": "pull"} | members


async def _expect_kept(trial: ReaderTrial, native: dict[str, Any]) -> None:
    """Checks that native keys become an extension of the document, and come back as they were."""
    document = _document(extensions={_NIXL: native})
    answer = await trial.ask("read", dialect="nixl", phase="prefill", message=_message(native))
    expect_answer(answer, "document", document, "read")
    answer = await trial.ask("write", dialect="nixl", document=document)
    expect_answer(answer, "message", _message(native), "written")


@_add("2.2", "native-keys", "a message with native keys that no table has", "each comes back as it was")
async def check_native_keys(trial: ReaderTrial) -> None:
    """Sends keys of a later engine."""
    await _expect_kept(trial, {"later": {"a": [1, "ü", {"b": False}]}, "Later": 0.5, "": "no name"})


@_add("3.6", "integers", "native keys of -2^63, 2^63 - 1 and 2^64 - 1", "all digits come back")
async def check_integers(trial: ReaderTrial) -> None:
    """Sends integers that no double holds."""
    await _expect_kept(trial, {**_LARGE, "deep": [_LARGE]})


@_add("5.1", "nulls", "a message and a document with nulls, and without them", "nulls stay null, absent members absent")
async def check_nulls(trial: ReaderTrial) -> None:
    """Sends nulls that say nothing, and are kept."""
    await _expect_kept(trial, {"remote_host": None, "later": {"a": None, "b": [None]}})
    await _expect_kept(trial, {"remote_host": None})
    await _expect_kept(trial, {"later": 1})


@_add("5.2", "unknown", "a document whose extension has unknown members at every depth", "each is in the message")
async def check_unknown(trial: ReaderTrial) -> None:
    """Sends members of a later table, deep inside."""
    native = {"later": {"a": {"b": [{"c": {"d": "e"}}]}}}
    answer = await trial.ask("write", dialect="nixl", document=_document(extensions={_NIXL: native}))
    expect_answer(answer, "message", _message(native), "written")


@_add(
    "15.2",
    "places",
    "native keys that begin with `@`, members of the body and a header",
    "they stand in the extension under `@@`, `@body` and `@headers`, and come back",
)
async def check_places(trial: ReaderTrial) -> None:
    """Sends keys whose names the extension uses itself."""
    message = _message({"@body": 1, "@@x": 2})
    message["body"]["cache_tier"] = {"a": 1}
    message["headers"] = {"x-later": "7"}
    kept = {"@@body": 1, "@@@x": 2, "@body": {"cache_tier": {"a": 1}}, "@headers": {"x-later": "7"}}
    document = _document(extensions={_NIXL: kept})
    answer = await trial.ask("read", dialect="nixl", phase="prefill", message=message)
    expect_answer(answer, "document", document, "read")
    answer = await trial.ask("write", dialect="nixl", document=document)
    expect_answer(answer, "message", message, "written")


@_add(
    "15.3",
    "request-ids",
    "messages whose request id is an identifier, and whose request id is none",
    "the transfer has the request id, or `sha256-` and 32 digits of its digest; the attempt is 1",
)
async def check_request_ids(trial: ReaderTrial) -> None:
    """Sends request ids of a client's making."""
    for request_id in ("7f3c", "a~b._-9", "x" * 128, "x" * 129, "a/b", "cmpl:7", "#"):
        plain = len(request_id) <= 128 and all(one.isalnum() or one in "._~-" for one in request_id)
        transfer = request_id if plain else f"sha256-{sha256(request_id.encode()).hexdigest()[:32]}"
        answer = await trial.ask("read", dialect="nixl", phase="prefill", message=_message(request_id=request_id))
        expect_answer(answer, "document", _document(request_id, transfer), request_id[:20])
        answer = await trial.ask("write", dialect="nixl", document=_document(request_id, transfer))
        expect_answer(answer, "message", _message(request_id=request_id), f"{request_id[:20]}, written")


@_add(
    "15.4",
    "lost",
    "documents with a member that the dialect cannot express",
    "`lost` names it and nothing else, and there is no message",
)
async def check_lost(trial: ReaderTrial) -> None:
    """Sends what NixlConnector has no key for."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"load_keys": ["k"]}, "load_keys"),
        ({"lease": {"ttl_ms": 30000}}, "lease"),
        ({"prefix": {"count": 3, "ids": [1, 2, 3]}}, "prefix"),
        ({"transfer": {"id": "7f3c", "attempt": 2}}, "transfer"),
        ({"mode": "push"}, "mode"),
        ({"later": 1}, "later"),
        ({"extensions": {"com.example.tiers": {"a": 1}}}, "extensions"),
    ]
    for members, name in cases:
        answer = await trial.ask("write", dialect="nixl", document=_document(**members))
        expect("message" not in answer, f"a document with {members} became a message")
        lost: Any = answer.get("lost")
        named = list(map(str, cast("list[object]", lost))) if isinstance(lost, list) else []
        is_told = bool(named) and all(f"{one}.".startswith(f"{name}.") for one in named)
        expect(is_told, f"`lost` is {lost!r}, and {name} alone is lost")
