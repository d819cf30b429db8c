"""Checks the mapping of errors, and that hostile JSON of a client is refused."""

import asyncio
import time
from typing import Final

from kvparams_conformance.answers import error_answer, load_keys
from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.conversation import Conversation, ScriptedAnswer
from kvparams_conformance.proxy_checks.helpers import (
    AGGREGATED,
    BOOTSTRAP,
    CONTENT,
    EVERY,
    NIXL,
    STORE,
    expect_answered,
    expect_refused,
    failing_once,
)
from kvparams_conformance.raw_json import dig, dump
from kvparams_conformance.scripted_engine import MODEL
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_SECRET: Final = "10.9.8.7:5600"
_BOTH_S: Final = 2.0
"""The time in which ordinary requests go to both prefill engines, in a proxy that uses both."""


def _expect_error_object(talk: Conversation) -> None:
    reply = talk.replies[-1]
    message = dig(reply.json, "error", "message")
    expect(isinstance(message, str) and message, "the client was sent no `error.message`")
    text = reply.body.decode("utf-8", "replace")
    for secret in (_SECRET, "127.0.0.1"):
        expect(secret not in text, f"the client was sent the address {secret}")


def _refusing(trial: Trial, role: str, status: int, param: str | None = None) -> Conversation:
    return _always(trial, role, error_answer(status, f"kv of {_SECRET} is refused", param))


def _always(trial: Trial, role: str, answer: ScriptedAnswer) -> Conversation:
    if role == "prefill":
        return trial.talk(prefill=lambda _: answer)
    return trial.talk(decode=lambda _: answer)


@CHECKS.add(
    "17.23",
    "kv-refused",
    sends="engines that answer 400 with the `param` `kv_transfer_params`, or with one below it",
    expects="the client gets 502",
    profiles=(STORE,),
    isolated=True,
)
async def check_kv_refused(trial: Trial) -> None:
    """Refuses the document at prefill and at decode."""
    for role in ("prefill", "decode"):
        for param in ("kv_transfer_params", "kv_transfer_params.kvparams.phase"):
            talk = _refusing(trial, role, 400, param)
            expect_refused(talk, await trial.ask(talk), 502, 502)


@CHECKS.add(
    "17.23",
    "unauthorized",
    sends="engines that answer 401 or 403 to the proxy, without credentials of the client",
    expects="the client gets 502",
    profiles=(STORE,),
    isolated=True,
)
async def check_unauthorized(trial: Trial) -> None:
    """Refuses the proxy's credentials."""
    for role in ("prefill", "decode"):
        for status in (401, 403):
            talk = _refusing(trial, role, status)
            expect_refused(talk, await trial.ask(talk), 502, 502)


@CHECKS.add(
    "17.24",
    "client-fault",
    sends="engines that answer 400 or 422 with a `param` of the client's",
    expects="the client gets the same status, after one leg to that role",
    profiles=EVERY,
    isolated=True,
)
async def check_client_fault(trial: Trial) -> None:
    """Refuses the client's own members."""
    for role in ("prefill", "decode"):
        for status in (400, 422):
            talk = _refusing(trial, role, status, "temperature")
            expect_refused(talk, await trial.ask(talk), status, status)
            legs = talk.prefills if role == "prefill" else talk.decodes
            # A decode leg of one token gives the KV back.
            legs = [leg for leg in legs if role == "prefill" or leg.json.get("max_tokens") != 1]
            expect(len(legs) == 1, f"{len(legs)} {role} legs were sent for a fault of the client")


@CHECKS.add(
    "17.21",
    "errors",
    sends="engines that answer 500, and one that names an address",
    expects="the client gets `error.message`, without an address",
    profiles=(STORE,),
    isolated=True,
)
async def check_errors(trial: Trial) -> None:
    """Reads the errors that a client gets."""
    for role, status in (("prefill", 500), ("decode", 500), ("decode", 400)):
        talk = _refusing(trial, role, status)
        expect_refused(talk, await trial.ask(talk), 400, 504)
        _expect_error_object(talk)


@CHECKS.add(
    "17.21",
    "addresses",
    sends="engines that answer 500 and name an address",
    expects="the client gets no address",
    profiles=(NIXL, BOOTSTRAP, CONTENT, AGGREGATED),
    isolated=True,
)
async def check_addresses(trial: Trial) -> None:
    """Looks for addresses in the errors that a client gets."""
    for role in ("prefill", "decode"):
        talk = _refusing(trial, role, 500)
        reply = await trial.ask(talk)
        text = reply.body.decode("utf-8", "replace")
        for secret in (_SECRET, "127.0.0.1"):
            expect(secret not in text, f"the client was sent the address {secret}")


@CHECKS.add(
    "17.22",
    "prefill-fails",
    sends="one prefill engine that answers 500, 502, 503 or 504, or closes the connection, before it answers or within",
    expects="the client is answered with the KV of the other prefill engine, of which decode alone is told",
    profiles=(STORE,),
    isolated=True,
)
async def check_prefill_fails(trial: Trial) -> None:
    """Lets the first prefill leg fail in each way."""
    half = dump({"id": "cmpl-p", "kv_transfer_params": None})[:-5]
    faults = [*(ScriptedAnswer(status, b"{}") for status in (500, 502, 503, 504))]
    faults += [ScriptedAnswer(end="close", wait_s=1.2), ScriptedAnswer(body=half, end="cut")]
    others = 0
    for fault in faults:
        both = await _uses_both_prefills(trial)
        talk = failing_once(trial, fault)
        expect_answered(talk, await trial.ask(talk))
        others += _expect_other_try(talk, f"{fault.status} {fault.end}", both=both)
    expect(others, "every further prefill leg went to the engine that had failed")


async def _uses_both_prefills(trial: Trial) -> bool:
    """Waits until ordinary requests go to both prefill engines: one that has failed may be left alone for a while."""
    seen: set[str] = set()
    until = time.monotonic() + _BOTH_S
    while len(seen) < 2 and time.monotonic() < until:
        talk = trial.site.begin(None, None, None)
        body = dump({"model": MODEL, "prompt": f"{talk.tag} Who?", "max_tokens": 8})
        await trial.site.ask(talk, body, path="/v1/completions", headers=(), timeout_s=2.0, leave_when=None)
        seen |= {leg.engine for leg in talk.prefills}
        await asyncio.sleep(0.02)
    return len(seen) == 2


def _expect_other_try(talk: Conversation, shown: str, *, both: bool) -> bool:
    """Checks that there was one more prefill leg, and that decode is told of its KV.

    Returns whether it went to the other engine, as it has to if both are in use.
    """
    expect(len(talk.prefills) >= 2, f"no second prefill leg was sent ({shown})")
    first, second = talk.prefills[:2]
    is_other = first.engine != second.engine
    expect(is_other or not both, f"the second prefill leg went to {second.engine} as well ({shown})")
    for leg in talk.decodes:
        told = leg.document.get("load_keys")
        known = [load_keys(talk, one) for one in talk.prefills[1:]]
        is_known = told is None or told in known  # whether any keys are handed on is 17.14's
        expect(leg.document and is_known, f"decode was told the keys {told!r} after the failed try ({shown})")
        expect(leg.transfer_id != first.transfer_id, f"decode was told the transfer of the failed try ({shown})")
    return is_other


@CHECKS.add(
    "17.22",
    "no-json",
    sends="one prefill engine that answers what is no JSON",
    expects="the client is answered, by another try or with a 5xx, and no decode leg is promised KV of the first",
    profiles=(STORE,),
    isolated=True,
)
async def check_prefill_no_json(trial: Trial) -> None:
    """Lets the first prefill leg answer rubbish."""
    talk = failing_once(trial, ScriptedAnswer(body=b"\x00 no json"))
    reply = await trial.ask(talk)
    expect(reply.ended == "whole", "the client was not answered")
    expect(reply.status == 200 or reply.status >= 500, f"the client got the status {reply.status}")
    first = talk.prefills[0].transfer_id
    expect(all(leg.transfer_id != first for leg in talk.decodes), "decode was told the transfer of the failed try")
    expect(reply.status != 200 or talk.decodes, "the client got 200 without a decode leg")


@CHECKS.add(
    "17.22",
    "bounded-tries",
    sends="prefill engines that all answer 503, or decode engines that do",
    expects="the client gets a 5xx after at most 16 legs",
    profiles=EVERY,
    isolated=True,
)
async def check_bounded_tries(trial: Trial) -> None:
    """Counts the legs of a request that cannot succeed."""
    for role in ("prefill", "decode"):
        faults = [ScriptedAnswer(503, b'{"error":{"message":"busy"}}')]
        if (
            trial.site.under.carrier == "document"
        ):  # others leave such an engine alone for a minute, and all checks wait
            faults.append(ScriptedAnswer(end="close"))
        for fault in faults:
            talk = _always(trial, role, fault)
            expect_refused(talk, await trial.ask(talk), 500, 504)
            expect(len(talk.legs) <= 16, f"{len(talk.legs)} legs were sent")
            known = trial.site.under.carrier in ("bootstrap", "aggregated") or role == "decode"
            expect(known or not talk.decodes, "a decode leg was sent although every prefill leg had failed")


@CHECKS.add(
    "17.17",
    "flood",
    sends="a prefill answer of 128 MiB",
    expects="the proxy closes it, and the client gets a 5xx or the answer of another try",
    profiles=(STORE, NIXL),
    isolated=True,
)
async def check_flood(trial: Trial) -> None:
    """Floods the proxy with spaces, then answers the next try."""
    talk = failing_once(trial, ScriptedAnswer(end="flood"))
    reply = await trial.ask(talk, timeout_s=8.0)
    expect(reply.ended == "whole", f"the client's answer ended as `{reply.ended}`")
    expect(reply.status == 200 or reply.status >= 500, f"the client got the status {reply.status}")
    closed = await talk.wait_for(lambda: talk.prefills[0].left_s is not None, 1.0)
    expect(closed, "the proxy has read the whole flood")


@CHECKS.add(
    "17.22",
    "decode-fails",
    sends="one decode engine that answers 503",
    expects="the client is answered by another decode leg, or gets a 5xx",
    profiles=(STORE,),
    isolated=True,
)
async def check_decode_fails(trial: Trial) -> None:
    """Lets the first decode leg fail."""
    talk = failing_once(trial, ScriptedAnswer(503, b"{}"), "decode")
    reply = await trial.ask(talk)
    expect(talk.decodes, "no decode leg was sent")
    expect(reply.ended == "whole", f"the client's answer ended as `{reply.ended}`")
    expect(reply.status == 200 or reply.status >= 500, f"the client got the status {reply.status}")
    answered = "answer" in str(dig(reply.json, "choices", 0, "text"))
    expect(reply.status != 200 or (answered and len(talk.decodes) > 1), "the client got 200 without decode's answer")


_HOSTILE: Final = {
    "twice": '{"model":"m","prompt":"TAG","prompt":"TAG two"}',
    "nan": '{"model":"m","prompt":"TAG","temperature":NaN}',
    "infinity": '{"model":"m","prompt":"TAG","temperature":1e999}',
    "surrogate": '{"model":"m","prompt":"TAG \\ud800"}',
    "cut": '{"model":"m","prompt":"TAG"',
    "more": '{"model":"m","prompt":"TAG"} {"model":"m"}',
    "list": '["TAG"]',
}


def _hostile(name: str, sends: str, *, profiles: tuple[str, ...], keys: tuple[str, ...]) -> None:
    async def check(trial: Trial) -> None:
        for key in keys:
            talk = trial.talk()
            body = _HOSTILE[key].replace("TAG", talk.tag).encode()
            await _expect_no_leg(trial, talk, body)

    expects = "the client gets a 4xx, and no leg is sent"
    CHECKS.add("17.7", name, sends=sends, expects=expects, profiles=profiles)(check)


async def _expect_no_leg(trial: Trial, talk: Conversation, body: bytes) -> None:
    reply = await trial.ask(talk, body)
    expect(not talk.legs, f"{talk.legs[0].engine if talk.legs else ''} was sent a leg")
    expect_refused(talk, reply, 400, 499)


_hostile("no-json", "what is no JSON, or no object", profiles=EVERY, keys=("cut", "more", "list"))
_hostile("key-twice", "a body in which a key stands twice", profiles=EVERY, keys=("twice",))
_hostile(
    "numbers",
    "a body with NaN, and one with a number that no double holds",
    profiles=(STORE,),
    keys=("nan", "infinity"),
)
_hostile("surrogate", "a body with half a surrogate pair", profiles=(STORE,), keys=("surrogate",))


@CHECKS.add(
    "17.7",
    "bytes",
    sends="a body with a byte order mark, with bytes that are no UTF-8, and with 100,000 levels",
    expects="the client gets a 4xx, and no leg is sent",
    profiles=(STORE,),
)
async def check_bytes(trial: Trial) -> None:
    """Sends bodies that parsers disagree about, or fall over."""
    bodies = (
        b'\xef\xbb\xbf{"model":"m","prompt":"TAG"}',
        b'{"model":"m","prompt":"TAG \xff"}',
        b'{"model":"m","prompt":"TAG","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    )
    for body in bodies:
        talk = trial.talk()
        await _expect_no_leg(trial, talk, body.replace(b"TAG", talk.tag.encode()))
