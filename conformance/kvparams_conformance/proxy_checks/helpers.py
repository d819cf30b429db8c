"""Holds what the checks of proxies share: the profiles, and steps that many of them take."""

from typing import Any, Final

from kvparams import InvalidParams, KVTransferParams, parse
from kvparams_conformance.answers import decode_answer, prefill_answer
from kvparams_conformance.checks import CheckFailed, expect
from kvparams_conformance.conversation import Conversation, Reply, Role, ScriptedAnswer, SeenLeg, shorten
from kvparams_conformance.site import Trial

__all__ = [
    "AGGREGATED",
    "ALL",
    "BOOTSTRAP",
    "CONTENT",
    "DOCUMENT",
    "EVERY",
    "NIXL",
    "SIGNED",
    "STORE",
    "TWO_LEGS",
    "WITH_RESULT",
    "Pair",
    "expect_answered",
    "expect_refused",
    "expect_unseen",
    "failing_once",
    "parse_document",
]

STORE: Final = "store-proxy"
NIXL: Final = "nixl-proxy"
BOOTSTRAP: Final = "bootstrap-proxy"
SIGNED: Final = "signed"
CONTENT: Final = "content-proxy"
AGGREGATED: Final = "aggregated-proxy"
ALL: Final = (STORE, NIXL, BOOTSTRAP)
EVERY: Final = (*ALL, CONTENT, AGGREGATED)
"""Also profiles in which nobody speaks of KV; in `aggregated-proxy` one leg is the prefill leg and the decode leg."""
WITH_RESULT: Final = (STORE, NIXL)
"""Profiles in which a prefill engine's answer says where the KV is."""
DOCUMENT: Final = (STORE,)
TWO_LEGS: Final = (*ALL, CONTENT)

Pair = tuple[SeenLeg, SeenLeg]


def failing_once(trial: Trial, fault: ScriptedAnswer, role: Role = "prefill", **changes: Any) -> Conversation:
    """Begins a conversation in which the first leg of a role fails. `changes` are those of prefill's results."""
    carrier = trial.site.under.carrier

    def prefill(leg: SeenLeg) -> ScriptedAnswer:
        is_first = role == "prefill" and len(talk.prefills) == 1
        return fault if is_first else prefill_answer(carrier, talk, leg, **changes)

    def decode(leg: SeenLeg) -> ScriptedAnswer:
        return fault if role == "decode" and len(talk.decodes) == 1 else decode_answer(leg)

    talk = trial.talk(prefill, decode)
    return talk


def expect_answered(talk: Conversation, reply: Reply) -> Pair:
    """Returns the first prefill leg and the first decode leg of a request that has to succeed."""
    expect(not talk.flooded, "the proxy sent more than 64 legs for one request")
    expect(reply.ended == "whole", f"the client's answer ended as `{reply.ended}` after {reply.seconds:.1f} s")
    expect(reply.status == 200, f"the client got the status {reply.status}")
    expect(talk.prefills, "no prefill leg was sent")
    expect(talk.decodes, "no decode leg was sent")
    return talk.prefills[0], talk.decodes[0]


def expect_refused(talk: Conversation, reply: Reply, low: int, high: int) -> None:
    """Checks that the client got an error of these statuses, as an object in JSON."""
    expect(not talk.flooded, "the proxy sent more than 64 legs for one request")
    expect(reply.ended == "whole", f"the client's answer ended as `{reply.ended}` after {reply.seconds:.1f} s")
    expect(low <= reply.status <= high, f"the client got the status {reply.status} instead of {low} to {high}")


def expect_unseen(legs: list[SeenLeg], *texts: str) -> None:
    """Checks that texts occur in no leg."""
    for leg in legs:
        whole = leg.body.decode("utf-8", "replace") + str(leg.head.headers)
        for text in texts:
            expect(text not in whole, f"{leg.engine} was sent {text!r}")


def parse_document(leg: SeenLeg) -> KVTransferParams:
    """Returns the document of a leg."""
    if not leg.document:
        raise CheckFailed(f"the leg to {leg.engine} carries no document")
    try:
        return parse(leg.document)
    except InvalidParams as error:
        problems = "; ".join(map(str, error.problems))
        raise CheckFailed(f"the document sent to {leg.engine} breaks the protocol: {shorten(problems)}") from None
