"""Checks the signatures of a proxy that has keys."""

import json
import time
from typing import Any, Final, cast

from kvparams.signing.keyring import SigningKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.verification import UntrustedParams, verify_params
from kvparams_conformance.answers import completion, decode_answer, prefill_answer, prefill_result
from kvparams_conformance.checks import CheckFailed, Checks, expect
from kvparams_conformance.conversation import ScriptedAnswer, SeenLeg
from kvparams_conformance.proxy_checks.helpers import SIGNED, expect_answered
from kvparams_conformance.raw_json import dump
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_PROFILES: Final = (SIGNED,)


def _verify(trial: Trial, leg: SeenLeg, *, skew_s: float = 30.0) -> None:
    """Verifies a leg as an engine does that trusts nothing else."""
    under = trial.site.under
    assert under.keys is not None
    keyring = SigningKeyring.parse(under.keys.read_text())
    now = time.time()
    replay = ReplayWindow(now - 3600)
    try:
        verify_params(leg.carrier, keyring, under.audience, now, replay, skew_s=skew_s)
    except UntrustedParams as error:
        raise CheckFailed(f"{leg.engine} was sent a document that an engine refuses: {error}") from None


def _signature(leg: SeenLeg) -> dict[str, Any]:
    found = leg.document.get("signature")
    expect(isinstance(found, dict), f"{leg.engine} was sent no signature")
    return cast("dict[str, Any]", found)


@CHECKS.add(
    "13.12",
    "signed-legs",
    sends="an ordinary completion",
    expects="both documents are signed, and no native keys are sent without a document",
    profiles=_PROFILES,
)
async def check_signed_legs(trial: Trial) -> None:
    """Looks for a signature on each leg, and for the name of its engine."""
    talk = trial.talk()
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    for leg, member in ((prefill, "producer"), (decode, "consumer")):
        _signature(leg)
        endpoint: dict[str, Any] = leg.document.get(member) or {}
        expect(endpoint.get("id"), f"the signed document for {leg.engine} has no `{member}.id`")


@CHECKS.add(
    "13.4",
    "value",
    sends="completions with and without token ids, and with a salt that needs escapes",
    expects="an engine with the same keys accepts every document",
    profiles=_PROFILES,
)
async def check_value(trial: Trial) -> None:
    """Verifies the signatures of several documents."""
    salts: list[dict[str, Any]] = [{}, {"cache_salt": 'ü"\\\x01/'}]
    for members in salts:
        talk = trial.talk()
        for leg in expect_answered(talk, await trial.ask(talk, **members)):
            _verify(trial, leg)
    talk = trial.talk()
    prompt = [talk.number, 2, 3]
    for leg in expect_answered(talk, await trial.ask(talk, prompt=prompt)):
        _verify(trial, leg)


@CHECKS.add(
    "13.3",
    "unknown-members",
    sends="a prefill_result whose `producer` has nulls, integers of 64 bits and texts in other alphabets",
    expects="an engine with the same keys accepts the decode document",
    profiles=_PROFILES,
)
async def check_unknown_members(trial: Trial) -> None:
    """Verifies a document with members that were handed on."""
    zone = {
        "b": None,
        "a": 18446744073709551615,
        "ü\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"): "\u2028",
    }
    producer = {"id": "p", "incarnation": None, "zone": zone}
    talk = trial.talk(lambda leg: prefill_answer("document", talk, leg, producer=producer))
    _, decode = expect_answered(talk, await trial.ask(talk))
    _verify(trial, decode)


@CHECKS.add(
    "13.5",
    "native",
    sends="a prefill answer with native keys beside the document",
    expects="what decode is sent beside its document has the digest `native`",
    profiles=_PROFILES,
)
async def check_native(trial: Trial) -> None:
    """Verifies the native keys that were handed on, if any were."""

    def answer(leg: SeenLeg) -> ScriptedAnswer:
        params = {"tier": 1, "kvparams": prefill_result(talk, leg)}
        return ScriptedAnswer(body=dump(completion(leg, "p", kv_transfer_params=params)))

    talk = trial.talk(answer)
    for leg in expect_answered(talk, await trial.ask(talk)):
        _verify(trial, leg)


@CHECKS.add(
    "13.6",
    "times",
    sends="two completions",
    expects="`iat` is now, `exp` 1 to 3600 s later, and every `nonce` another one",
    profiles=_PROFILES,
)
async def check_times(trial: Trial) -> None:
    """Reads times and nonces of four legs."""
    nonces: list[object] = []
    for _ in range(2):
        talk = trial.talk()
        for leg in expect_answered(talk, await trial.ask(talk)):
            found = _signature(leg)
            expect(abs(found["iat"] - time.time()) < 10, f"`iat` is {found['iat']}, and now is {time.time():.0f}")
            expect(1 <= found["exp"] - found["iat"] <= 3600, f"`exp` is {found['exp'] - found['iat']} s after `iat`")
            nonces.append(found["nonce"])
    expect(len(set(nonces)) == len(nonces), f"{len(nonces)} legs have {len(set(nonces))} nonces")


@CHECKS.add(
    "13.7",
    "key",
    sends="a completion; the key file has an old key, a key of today and one of tomorrow",
    expects="the key of today has signed",
    profiles=_PROFILES,
)
async def check_key(trial: Trial) -> None:
    """Reads the name of the key."""
    under = trial.site.under
    assert under.keys is not None
    wanted = SigningKeyring.parse(under.keys.read_text()).signing_key_at(time.time())
    assert wanted is not None
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk)):
        expect(
            _signature(leg).get("kid") == wanted.kid,
            f"the key {_signature(leg).get('kid')!r} has signed, not {wanted.kid}",
        )


@CHECKS.add(
    "13.8",
    "audience",
    sends="a completion",
    expects="`aud` is the configured pool, and `alg` is `hmac-sha256`",
    profiles=_PROFILES,
)
async def check_audience(trial: Trial) -> None:
    """Reads the audience."""
    talk = trial.talk()
    for leg in expect_answered(talk, await trial.ask(talk)):
        told = _signature(leg)
        expect(told.get("aud") == trial.site.under.audience, f"`aud` is {told.get('aud')!r}")
        expect(told.get("alg") == "hmac-sha256", f"`alg` is {told.get('alg')!r}")


@CHECKS.add(
    "13.6",
    "next-try",
    sends="a decode leg that fails with 503",
    expects="the next leg is signed anew, with another nonce",
    profiles=_PROFILES,
    isolated=True,
)
async def check_next_try(trial: Trial) -> None:
    """Compares the nonces of two tries."""
    talk = trial.talk(decode=lambda leg: ScriptedAnswer(503, b"{}") if len(talk.decodes) == 1 else decode_answer(leg))
    await trial.ask(talk)
    expect(talk.decodes, "no decode leg was sent")
    nonces = [_signature(leg)["nonce"] for leg in talk.legs]
    expect(len(set(nonces)) == len(nonces), f"{len(nonces)} legs have {len(set(nonces))} nonces")


@CHECKS.add(
    "13.2",
    "uncanonical",
    sends="a prefill_result with a number with a fraction, which has no canonical form",
    expects="no decode leg has it, and the client gets a 5xx",
    profiles=_PROFILES,
    isolated=True,
)
async def check_uncanonical(trial: Trial) -> None:
    """Answers with what cannot be signed."""

    def answer(leg: SeenLeg) -> ScriptedAnswer:
        result = prefill_result(talk, leg, producer={"id": "p", "load": 0.5})
        return ScriptedAnswer(body=json.dumps(completion(leg, "p", kv_transfer_params={"kvparams": result})).encode())

    talk = trial.talk(answer)
    reply = await trial.ask(talk)
    expect(
        not any("load" in (leg.document.get("producer") or {}) for leg in talk.decodes), "decode was sent the fraction"
    )
    expect(500 <= reply.status <= 504, f"the client got the status {reply.status}")
