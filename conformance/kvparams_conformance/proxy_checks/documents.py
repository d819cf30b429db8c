"""Checks the documents of both legs: valid, of one request and transfer, with the right prefix and salt."""

import re
import struct
from hashlib import sha256
from typing import Any, Final

from kvparams import TokenPrefix
from kvparams_conformance.answers import prefill_answer
from kvparams_conformance.checks import CheckFailed, Checks, expect
from kvparams_conformance.conversation import ScriptedAnswer, SeenLeg
from kvparams_conformance.proxy_checks.helpers import (
    DOCUMENT,
    WITH_RESULT,
    expect_answered,
    parse_document,
)
from kvparams_conformance.raw_json import dig, dump
from kvparams_conformance.scripted_engine import MODEL
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()


@CHECKS.add(
    "2.1",
    "documents",
    sends="an ordinary completion",
    expects="the member `kvparams` of `kv_transfer_params` of both legs is an object",
    profiles=DOCUMENT,
)
async def check_places(trial: Trial) -> None:
    """Looks for the document on both legs."""
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk)):
        expect(isinstance(leg.carrier.get("kvparams"), dict), f"{leg.engine} was sent no object as `kvparams`")


@CHECKS.add(
    "3.2",
    "documents",
    sends="a completion, a chat and a stream",
    expects="both documents of each are valid",
    profiles=DOCUMENT,
)
async def check_validity(trial: Trial) -> None:
    """Parses the documents of three kinds of requests."""
    for members, path in (({}, "/v1/completions"), ({"stream": True}, "/v1/completions"), ({}, "/v1/chat/completions")):
        talk = trial.talk()
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, **members}
        if "chat" in path:
            asked["messages"] = [{"role": "user", "content": f"{talk.tag} Who?"}]
        else:
            asked["prompt"] = f"{talk.tag} Who?"
        for leg in expect_answered(talk, await trial.ask(talk, dump(asked), path=path)):
            parse_document(leg)


@CHECKS.add(
    "17.8",
    "phases",
    sends="an ordinary completion",
    expects="the prefill leg has the phase `prefill` and the mode `store`, the decode leg `decode` and `store`",
    profiles=DOCUMENT,
)
async def check_phases(trial: Trial) -> None:
    """Reads phase and mode."""
    talk = trial.talk()
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    for leg, phase in ((prefill, "prefill"), (decode, "decode")):
        found = leg.document.get("phase"), leg.document.get("mode")
        expect(found == (phase, "store"), f"{leg.engine} was sent the phase and mode {found}")


@CHECKS.add(
    "4.1",
    "one-transfer",
    sends="an ordinary completion",
    expects="`request_id` and `transfer` are the same on both legs",
    profiles=DOCUMENT,
)
async def check_one_transfer(trial: Trial) -> None:
    """Compares the two documents of a try."""
    talk = trial.talk()
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    for name in ("request_id", "transfer"):
        told = prefill.document.get(name), decode.document.get(name)
        expect(
            told[0] is not None and told[0] == told[1], f"`{name}` is {told[0]!r} at prefill and {told[1]!r} at decode"
        )


@CHECKS.add(
    "17.5",
    "request-id",
    sends="requests with `X-Request-Id` and without",
    expects="each leg has the header `X-Request-Id` with the `request_id` of its document",
    profiles=DOCUMENT,
)
async def check_request_id(trial: Trial) -> None:
    """Compares the header and the document of each leg."""
    for headers in ([], [("x-request-id", "req-7.A_b-c")]):
        talk = trial.talk()
        for leg in expect_answered(talk, await trial.ask(talk, headers=headers)):
            told = leg.head.get("x-request-id")
            wanted = leg.document.get("request_id")
            expect(told == wanted, f"{leg.engine} was sent X-Request-Id {told!r} and `request_id` {wanted!r}")


@CHECKS.add(
    "17.5",
    "same-header",
    sends="an ordinary completion",
    expects="both legs have the same `X-Request-Id`",
    profiles=("nixl-proxy",),
    choice=True,
)
async def check_same_header(trial: Trial) -> None:
    """Compares the headers of the legs."""
    talk = trial.talk()
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    ids = prefill.head.get("x-request-id"), decode.head.get("x-request-id")
    expect(ids[0] is not None and ids[0] == ids[1], f"X-Request-Id is {ids[0]!r} at prefill and {ids[1]!r} at decode")


@CHECKS.add(
    "3.15",
    "transfer-ids",
    sends="twenty requests with the same `X-Request-Id`",
    expects="twenty transfer ids, each with room for 96 random bits and with nothing of the client's id",
    profiles=DOCUMENT,
)
async def check_transfer_ids(trial: Trial) -> None:
    """Collects ids of transfers."""
    found: set[str] = set()
    given = "clients-own-id-4711"
    for _ in range(20):
        talk = trial.talk()
        prefill, _ = expect_answered(talk, await trial.ask(talk, headers=[("x-request-id", given)]))
        found.add(prefill.transfer_id or "")
    expect(len(found) == 20, f"20 requests have {len(found)} transfer ids")
    for one in found:
        expect(len(one) >= 16, f"the transfer id {one!r} has no room for 96 random bits")
        expect("4711" not in one, f"the transfer id {one!r} holds the client's id")


@CHECKS.add(
    "3.13",
    "incarnation",
    sends="an ordinary completion to engines that do not tell their incarnation before they answer",
    expects="the prefill document has no `incarnation`",
    profiles=DOCUMENT,
)
async def check_incarnation(trial: Trial) -> None:
    """Looks for an invented incarnation."""
    talk = trial.talk()
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    endpoints: list[dict[str, Any]] = [prefill.document.get("producer") or {}, decode.document.get("consumer") or {}]
    for endpoint in endpoints:
        expect(endpoint.get("incarnation") is None, f"`incarnation` is {endpoint.get('incarnation')!r}")


@CHECKS.add(
    "8.4",
    "digest",
    sends="a prompt of token ids",
    expects="if the documents have a `prefix`, it is that of these ids",
    profiles=DOCUMENT,
)
async def check_digest(trial: Trial) -> None:
    """Computes the digest of the prompt."""
    talk = trial.talk()
    ids = [talk.number, 0, 1, 255, 256, 4294967295]
    body = dump({"model": MODEL, "prompt": ids, "max_tokens": 8})
    wanted = "sha256:" + sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()
    for leg in expect_answered(talk, await trial.ask(talk, body)):
        found: object = leg.document.get("prefix")
        expect(found is not None, f"{leg.engine} was sent no `prefix`")
        try:
            prefix = TokenPrefix.model_validate(found)
        except ValueError:
            raise CheckFailed(f"{leg.engine} was sent a `prefix` that breaks the protocol") from None
        expect(prefix.count == len(ids), f"`count` is {prefix.count} for {len(ids)} ids")
        expect(prefix.digest == wanted, f"the digest is {prefix.digest} instead of {wanted}")


@CHECKS.add(
    "17.9",
    "text-prompt",
    sends="a prompt of text, and a list of two prompts of token ids",
    expects="the documents have no `prefix`",
    profiles=DOCUMENT,
)
async def check_no_prefix(trial: Trial) -> None:
    """Sends prompts whose token ids are not one list."""
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk)):
        expect(leg.document.get("prefix") is None, f"{leg.engine} was sent a `prefix` for a prompt of text")
    talk = trial.talk()
    body = dump({"model": MODEL, "prompt": [[talk.number, 1], [2, 3]], "max_tokens": 8})
    for leg in expect_answered(talk, await trial.ask(talk, body)):
        expect(leg.document.get("prefix") is None, f"{leg.engine} was sent a `prefix` for two prompts")


@CHECKS.add(
    "17.11",
    "salt",
    sends="a request with `cache_salt`, and one without",
    expects="`isolation.cache_salt` is the `cache_salt` of the same leg, and absent without one",
    profiles=DOCUMENT,
)
async def check_salt(trial: Trial) -> None:
    """Compares the salt of the request with that of the document."""
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk, cache_salt="salt-of-tenant-9")):
        told = dig(leg.document, "isolation", "cache_salt")
        expect(leg.json.get("cache_salt"), f"{leg.engine} was sent no `cache_salt`")
        expect(
            told == leg.json.get("cache_salt"),
            f"{leg.engine} was sent the salts {leg.json.get('cache_salt')!r} and {told!r}",
        )
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk)):
        told = dig(leg.document, "isolation", "cache_salt")
        expect(told == leg.json.get("cache_salt"), f"{leg.engine} was sent the salt {told!r}, which nobody gave")


@CHECKS.add(
    "17.10",
    "choices",
    sends="a request with `n` 2, `best_of` 2 and two prompts",
    expects="prefill is asked for one answer of each prompt, and decode for what the client asked",
    profiles=DOCUMENT,
)
async def check_choices(trial: Trial) -> None:
    """Sends a request for several answers."""
    talk = trial.talk()
    members: dict[str, Any] = {"prompt": [f"{talk.tag} one", "two"], "n": 2, "best_of": 2}
    prefill, decode = expect_answered(talk, await trial.ask(talk, **members))
    expect("n" not in prefill.json and "best_of" not in prefill.json, "prefill was sent `n` or `best_of`")
    expect(prefill.json.get("prompt") == members["prompt"], "prefill was not sent both prompts")
    for name in members:
        expect(decode.json.get(name) == members[name], f"decode was sent {name} {decode.json.get(name)!r}")
    expect(decode.document.get("load_keys"), "the decode leg has no document with `load_keys`")


@CHECKS.add(
    "6.5",
    "versions",
    sends="requests to engines that speak 1.0",
    expects="the documents declare 1.0",
    profiles=DOCUMENT,
)
async def check_versions(trial: Trial) -> None:
    """Reads the declared versions."""
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk)):
        told = leg.document.get("version")
        expect(told == "1.0", f"{leg.engine} was sent a document of the version {told!r}, and speaks 1.0")


@CHECKS.add(
    "6.1",
    "later-version",
    sends="a `prefill_result` of the version 1.9 with members of that version",
    expects="it is used like one of 1.0",
    profiles=DOCUMENT,
)
async def check_later_version(trial: Trial) -> None:
    """Answers as an engine of a later version."""
    talk = trial.talk(lambda leg: prefill_answer("document", talk, leg, version="1.9", tier={"kept": 1}))
    _, decode = expect_answered(talk, await trial.ask(talk))
    keys = decode.document.get("load_keys")
    expect(keys and talk.tag in str(keys), "decode was not told the keys of the prefill_result")


@CHECKS.add(
    "3.6",
    "integers",
    sends="unknown members of a handed-on member that are 2^63 - 1 and 2^64 - 1",
    expects="decode is told the same digits",
    profiles=WITH_RESULT,
)
async def check_integers(trial: Trial) -> None:
    """Answers with integers that no double holds."""
    wide = {"a": 9223372036854775807, "b": 18446744073709551615, "c": 9007199254740993}

    def answer(leg: SeenLeg) -> ScriptedAnswer:
        if trial.site.under.carrier == "document":
            return prefill_answer("document", talk, leg, lease={"ttl_ms": 30000, "wide": wide})
        return prefill_answer("nixl", talk, leg, wide=wide)

    talk = trial.talk(answer)
    _, decode = expect_answered(talk, await trial.ask(talk))
    found = re.search(rb'"wide"\s*:\s*\{([^}]*)\}', decode.body)
    expect(found is not None, "decode was not told the unknown member")
    digits = re.findall(rb"\d[\d.eE+]*", found[1]) if found else []
    expect(digits == [str(value).encode() for value in wide.values()], f"decode was told {digits}")
