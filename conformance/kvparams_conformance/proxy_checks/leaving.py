"""Checks that a client which leaves at any stage ends the legs, and that KV is given back."""

from collections.abc import Callable
from typing import Any, Final

from kvparams_conformance.answers import decode_answer, stream
from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.conversation import Conversation, Reply, Role, ScriptedAnswer, SeenLeg
from kvparams_conformance.proxy_checks.helpers import DOCUMENT, EVERY, NIXL, TWO_LEGS, parse_document
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_BOUND_S: Final = 1.0
_HANG: Final = ScriptedAnswer(end="hang")


async def _leave(
    trial: Trial, talk: Conversation, role: Role, leaves: Callable[[Reply], bool], **members: Any
) -> SeenLeg:
    """Leaves, and checks that the leg of a role ends within a second. Returns the leg."""
    await trial.ask(talk, leave_when=leaves, timeout_s=6.0, **members)
    legs = talk.of(role)
    expect(legs, f"no {role} leg was sent")
    ended = await talk.wait_for(lambda: all(leg.left_s is not None for leg in talk.of(role)), _BOUND_S + 0.5)
    expect(ended, f"the {role} leg still ran {_BOUND_S:.0f} s after the client had left")
    return legs[0]


@CHECKS.add(
    "17.25",
    "prefill",
    sends="a client that leaves while prefill computes",
    expects="the prefill leg is closed within a second, and no decode leg follows",
    profiles=TWO_LEGS,
    isolated=True,
)
async def check_leaving_at_prefill(trial: Trial) -> None:
    """Leaves as soon as the prefill leg is there."""
    talk = trial.talk(lambda _: _HANG, (lambda _: _HANG) if trial.site.under.carrier == "bootstrap" else None)
    await _leave(trial, talk, "prefill", lambda _: bool(talk.prefills))
    if trial.site.under.carrier != "bootstrap":
        expect(not talk.decodes, "a decode leg was sent for a client that had left")


@CHECKS.add(
    "17.25",
    "decode",
    sends="a client that leaves before decode has answered",
    expects="the decode leg is closed within a second",
    profiles=EVERY,
    isolated=True,
)
async def check_leaving_at_decode(trial: Trial) -> None:
    """Leaves as soon as the decode leg is there."""
    talk = trial.talk(decode=lambda _: _HANG)
    await _leave(trial, talk, "decode", lambda _: bool(talk.decodes))


@CHECKS.add(
    "17.25",
    "stream",
    sends="a client that leaves in the middle of a stream",
    expects="the decode leg is closed within a second",
    profiles=EVERY,
    isolated=True,
)
async def check_leaving_in_stream(trial: Trial) -> None:
    """Leaves after the first event."""
    talk = trial.talk(decode=lambda leg: stream(leg, ["first", "second"], done=False, end="hang"))
    await _leave(trial, talk, "decode", lambda reply: b"first" in reply.body, stream=True)


@CHECKS.add(
    "17.26",
    "given-back",
    sends="a decode leg that fails with 400 before it has fetched the blocks",
    expects="within a second one more decode leg of one token has the same blocks, which frees them",
    profiles=(NIXL,),
    isolated=True,
    choice=True,
)
async def check_given_back(trial: Trial) -> None:
    """Refuses the decode leg, whose KV then waits for its lease on the prefill engine."""

    def decode(leg: SeenLeg) -> ScriptedAnswer:
        if len(talk.decodes) == 1:
            return ScriptedAnswer(400, b'{"error":{"message":"no","param":"temperature"}}')
        return decode_answer(leg)

    talk = trial.talk(decode=decode)
    await trial.ask(talk)
    came = await talk.wait_for(lambda: len(talk.decodes) > 1, _BOUND_S)
    expect(came, "the blocks were left to their lease")
    expect(talk.decodes[1].json.get("max_tokens") == 1, "the leg that frees the blocks is not one of one token")
    held, freed = (leg.carrier.get("remote_block_ids") for leg in talk.decodes[:2])
    expect(held == freed, f"the blocks {held!r} were held, and {freed!r} were freed")


@CHECKS.add(
    "17.26",
    "release",
    sends="a client that leaves after prefill has answered",
    expects="if a `release` is sent, it is valid, of the same transfer, sent once, and not to decode",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_release(trial: Trial) -> None:
    """Leaves while decode computes, and judges what prefill is told."""
    talk = trial.talk(decode=lambda _: _HANG)
    await trial.ask(talk, leave_when=lambda _: bool(talk.decodes), timeout_s=6.0)
    await talk.wait_for(lambda: len(talk.controls) > 1, 0.5)  # a second one would come as soon
    transfers: list[Any] = []
    for leg in talk.controls:
        document = parse_document(leg)
        expect(document.phase in ("release", "cancel"), f"the phase of a release is {document.phase!r}")
        expect(document.transfer.id == talk.prefills[0].transfer_id, "the release is for another transfer")
        expect(document.phase == "cancel" or leg.role == "prefill", "a release was sent to a decode engine")
        transfers.append((document.phase, leg.engine))
    expect(len(transfers) == len(set(transfers)), "the release was sent more than once")
