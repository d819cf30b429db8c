"""Checks that an engine believes only what a holder of the key has made for it, and only once."""

import asyncio
import time
from typing import Any, Final

from kvparams_conformance.checks import Checks, NotJudged, expect
from kvparams_conformance.conversation import Reply
from kvparams_conformance.engine_site import EngineTrial, sign
from kvparams_conformance.raw_json import dig

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_REASONS: Final = (
    "unsigned",
    "algorithm",
    "uncanonical",
    "forged",
    "audience",
    "lifetime",
    "early",
    "expired",
    "replayed",
)


def _add(requirement: str, name: str, sends: str, expects: str) -> Any:
    return CHECKS.add(requirement, name, sends=sends, expects=expects, profiles=("signed-engine",))


def _expect_refused(reply: Reply, reason: str | None) -> None:
    expect(reply.status == 400, f"the status is {reply.status}")
    said = str(dig(reply.json, "error", "message")).lower()
    named = [one for one in _REASONS if f"[{one}]" in said]
    expect(
        reason is None or not named or named == [reason], f"the engine names the reason {named}, and it is {reason!r}"
    )


def _expect_accepted(reply: Reply) -> None:
    said = dig(reply.json, "error", "message")
    expect(reply.status == 200, f"the status is {reply.status}: {said!s:.200}")


async def _ask(trial: EngineTrial, carrier: object, **members: Any) -> Reply:
    return await trial.ask(carrier, **{"max_tokens": 1, **members})


@_add("13.8", "accepted", "a signed leg, and one with native keys", "both are accepted")
async def check_accepted(trial: EngineTrial) -> None:
    """Sends what a proxy sends."""
    for native in ({}, {"tier": 1, "note": "ü", "load": 0.5}):
        _expect_accepted(await _ask(trial, sign(trial.engine, trial.document(), native)))


@_add("13.8", "unsigned", "a document without a signature, and native keys without a document", "400, `unsigned`")
async def check_unsigned(trial: EngineTrial) -> None:
    """Sends what nobody has signed."""
    for carrier in ({"kvparams": trial.document()}, {"do_remote_prefill": True, "remote_host": "10.0.0.7"}):
        _expect_refused(await _ask(trial, carrier), "unsigned")


@_add("13.8", "algorithm", "a signature with another `alg`", "400, `algorithm`")
async def check_algorithm(trial: EngineTrial) -> None:
    """Names an algorithm that does not exist."""
    _expect_refused(await _ask(trial, sign(trial.engine, trial.document(), alg="none")), "algorithm")


@_add("13.7", "key", "signatures by an unknown key, by one that has ended, and by one that has not begun", "400")
async def check_key(trial: EngineTrial) -> None:
    """Signs with keys that may not sign now."""
    now = time.time()
    wrong = [key.kid for key in trial.engine.keyring if not key.is_valid_at(now, 300)]
    for kid in wrong:
        _expect_refused(await _ask(trial, sign(trial.engine, trial.document(), kid=kid)), None)
    carrier = sign(trial.engine, trial.document())
    carrier["kvparams"]["signature"]["kid"] = "nobody"
    _expect_refused(await _ask(trial, carrier), None)


@_add("13.8", "forged", "a signed document of which one member was changed", "400, `forged`")
async def check_forged(trial: EngineTrial) -> None:
    """Changes what was signed."""
    carrier = sign(trial.engine, trial.document(load_keys=["k1"]))
    carrier["kvparams"]["load_keys"] = ["k2"]
    _expect_refused(await _ask(trial, carrier), "forged")
    carrier = sign(trial.engine, trial.document())
    carrier["kvparams"]["later"] = None
    _expect_refused(await _ask(trial, carrier), "forged")


@_add("13.5", "native", "a signed document beside native keys that were changed, or added", "400")
async def check_native(trial: EngineTrial) -> None:
    """Changes what stands beside the document."""
    for native, added in (({"remote_host": "a"}, {"remote_host": "b"}), ({}, {"remote_host": "b"})):
        carrier = sign(trial.engine, trial.document(), native)
        _expect_refused(await _ask(trial, {**carrier, **added}), None)


@_add("13.8", "audience", "a document for another pool", "400, `audience`")
async def check_audience(trial: EngineTrial) -> None:
    """Signs for others."""
    _expect_refused(await _ask(trial, sign(trial.engine, trial.document(), aud="another-pool")), "audience")


@_add("13.13", "instance", "a document for another engine of the pool", "400")
async def check_instance(trial: EngineTrial) -> None:
    """Signs for another instance."""
    if trial.engine.instance is None:
        raise NotJudged("the check needs --instance, the engine's own name")
    phase = "decode" if trial.engine.role == "decode" else "prefill"
    member = "consumer" if phase == "decode" else "producer"
    document = trial.document(phase, **{member: {"id": "another-engine"}})
    _expect_refused(await _ask(trial, sign(trial.engine, document)), None)


@_add("13.6", "lifetime", "documents for 0 and for 3601 seconds", "400")
async def check_lifetime(trial: EngineTrial) -> None:
    """Signs for too long, and for no time."""
    for lifetime_s in (0, 3601):
        _expect_refused(await _ask(trial, sign(trial.engine, trial.document(), lifetime_s=lifetime_s)), "lifetime")


@_add("13.11", "clocks", "documents of 400 s in the future, and expired 400 s ago", "400, `early` and `expired`")
async def check_clocks(trial: EngineTrial) -> None:
    """Signs at other times than now."""
    _expect_refused(await _ask(trial, sign(trial.engine, trial.document(), seconds=400)), "early")
    late = sign(trial.engine, trial.document(), seconds=-1000, lifetime_s=600)
    _expect_refused(await _ask(trial, late), None)


@_add(
    "13.9",
    "replayed",
    "one signed leg twice, one after the other and side by side",
    "one is accepted, the others get 400",
)
async def check_replayed(trial: EngineTrial) -> None:
    """Sends the same bytes again."""
    carrier, prompt = sign(trial.engine, trial.document()), trial.prompt()
    _expect_accepted(await _ask(trial, carrier, prompt=prompt))
    _expect_refused(await _ask(trial, carrier, prompt=prompt), "replayed")
    carrier = sign(trial.engine, trial.document())
    replies = await asyncio.gather(*(_ask(trial, carrier, prompt=prompt) for _ in range(4)))
    statuses = sorted(reply.status for reply in replies)
    expect(statuses == [200, 400, 400, 400], f"the statuses are {statuses}")


@_add(
    "13.10",
    "refused-nonce",
    "a forged document, then the one that it was made from",
    "the second is accepted: a refusal uses up no nonce",
)
async def check_refused_nonce(trial: EngineTrial) -> None:
    """Spoils a document before it arrives."""
    carrier = sign(trial.engine, trial.document(load_keys=["k1"]))
    forged = {**carrier, "kvparams": {**carrier["kvparams"], "load_keys": ["k2"]}}
    _expect_refused(await _ask(trial, forged), "forged")
    _expect_accepted(await _ask(trial, carrier))


@_add(
    "13.14", "prompt-ids", "`prompt_token_ids` beside a document without a `prefix`, and with one of other ids", "400"
)
async def check_prompt_ids(trial: EngineTrial) -> None:
    """Sends ids that the signature does not cover."""
    kinds: list[dict[str, Any]] = [{}, {"prefix": {"count": 3, "ids": [1, 2, 3]}}]
    for changes in kinds:
        carrier = sign(trial.engine, trial.document(**changes))
        _expect_refused(await _ask(trial, {**carrier, "prompt_token_ids": [4, 5, 6]}), None)


@_add("13.2", "uncanonical", "a signed document with a fraction, and native keys with an integer of 65 bits", "400")
async def check_uncanonical(trial: EngineTrial) -> None:
    """Sends what has no canonical form."""
    carrier = sign(trial.engine, trial.document())
    for changed in (
        {**carrier, "kvparams": {**carrier["kvparams"], "later": 0.5}},
        {**carrier, "large": 2**65},
    ):
        _expect_refused(await _ask(trial, changed), None)
