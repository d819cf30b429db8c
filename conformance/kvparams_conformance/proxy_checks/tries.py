"""Checks further tries: their identity, the claim of a transfer, and the lease that is handed on."""

from typing import Any, Final

from kvparams_conformance.answers import prefill_answer
from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.conversation import Conversation, ScriptedAnswer, SeenLeg
from kvparams_conformance.proxy_checks.helpers import DOCUMENT, NIXL, expect_answered, failing_once
from kvparams_conformance.raw_json import dig
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_PAUSE_S: Final = 0.4
_BUSY: Final = ScriptedAnswer(503, b'{"error":{"message":"busy"}}')
_LATE: Final = ScriptedAnswer(503, b"{}", wait_s=_PAUSE_S)


@CHECKS.add(
    "3.7",
    "next-try",
    sends="a first prefill leg that fails with 503",
    expects="the next try has another `transfer.id`, the `attempt` 2 and the same `request_id`",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_next_try(trial: Trial) -> None:
    """Compares the documents of two tries."""
    talk = failing_once(trial, _BUSY)
    expect_answered(talk, await trial.ask(talk))
    expect(len(talk.prefills) >= 2, "no second prefill leg was sent")
    _expect_next(talk.prefills[0], talk.prefills[1])


@CHECKS.add(
    "3.7",
    "no-gap",
    sends="a lease of 0.2 s, and a decode leg that fails with 503 after 0.4 s",
    expects="the legs have the attempts 1 and 2, and none is left out",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_no_gap(trial: Trial) -> None:
    """Lets a try end of which nothing can be used, and looks at the number of the next one."""
    talk = failing_once(trial, _LATE, "decode", lease={"ttl_ms": 200})
    await trial.ask(talk)
    told = [dig(leg.document, "transfer", "attempt") for leg in talk.legs]
    found = list(dict.fromkeys(told))
    expect(found == list(range(1, len(found) + 1)), f"the attempts are {told}")


def _expect_next(first: SeenLeg, second: SeenLeg) -> None:
    told: list[dict[str, Any]] = [leg.document.get("transfer") or {} for leg in (first, second)]
    expect(told[0].get("attempt") == 1, f"the first attempt is {told[0].get('attempt')!r}")
    expect(told[1].get("attempt") == 2, f"the second attempt is {told[1].get('attempt')!r}")
    expect(told[0].get("id") != told[1].get("id"), "both tries have one `transfer.id`")
    ids = [leg.document.get("request_id") for leg in (first, second)]
    expect(ids[0] == ids[1], f"the `request_id` changed from {ids[0]!r} to {ids[1]!r}")


@CHECKS.add(
    "4.3",
    "claimed-transfer",
    sends="a decode leg that fails with 503 after it was sent whole",
    expects="no other decode leg has the same `transfer.id`",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_claimed_transfer(trial: Trial) -> None:
    """Compares the transfers of two decode legs."""
    talk = failing_once(trial, _BUSY, "decode")
    await trial.ask(talk)
    ids = [leg.transfer_id for leg in talk.decodes]
    expect(ids, "no decode leg was sent")
    expect(len(ids) == len(set(ids)), f"{len(ids)} decode legs were sent for {len(set(ids))} transfers")


@CHECKS.add(
    "4.3",
    "claimed-blocks",
    sends="a decode leg that fails with 503 after it was sent whole",
    expects="no other decode leg is told the same blocks, which the first may have fetched",
    profiles=(NIXL,),
    isolated=True,
)
async def check_claimed_blocks(trial: Trial) -> None:
    """Compares the native keys of two decode legs."""
    talk = failing_once(trial, _BUSY, "decode")
    await trial.ask(talk)
    ids = [str(leg.carrier.get("remote_request_id")) for leg in talk.decodes if leg.carrier.get("remote_request_id")]
    expect(len(ids) == len(set(ids)), f"{len(ids)} decode legs were sent for {len(set(ids))} sets of blocks")


@CHECKS.add(
    "3.9",
    "rest-of-lease",
    sends="a lease of 30 s, and a decode leg that fails with 503 after 0.4 s",
    expects="the next decode leg of the same KV is told at least 0.4 s less; none is told more than 30 s",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_rest_of_lease(trial: Trial) -> None:
    """Compares what two decode legs are told of one lease."""
    talk = failing_once(trial, _LATE, "decode")
    await trial.ask(talk)
    expect(talk.decodes, "no decode leg was sent")
    told = [dig(leg.document, "lease", "ttl_ms") for leg in talk.decodes]
    for one in told:
        expect(isinstance(one, int) and 0 < one <= 30000, f"decode was told `ttl_ms` {one!r} of a lease of 30000")
    if len(told) > 1 and len(talk.prefills) == 1:
        most = 30000 - int(_PAUSE_S * 1000) + 20
        expect(told[1] <= most, f"decode was told `ttl_ms` {told[1]} after {_PAUSE_S} s of a lease of 30000")


@CHECKS.add(
    "17.15",
    "lease-over",
    sends="a lease of 0.2 s, and a decode leg that fails with 503 after 0.4 s",
    expects="no further decode leg is told of this KV",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_lease_over(trial: Trial) -> None:
    """Looks for KV that was handed on after its lease."""
    talk = failing_once(trial, _LATE, "decode", lease={"ttl_ms": 200})
    await trial.ask(talk)
    expect(talk.decodes, "no decode leg was sent")
    keys = [str(leg.document.get("load_keys")) for leg in talk.decodes if leg.document.get("load_keys")]
    expect(len(keys) == len(set(keys)), "two decode legs were told the same keys, the second after the lease")


@CHECKS.add(
    "17.16",
    "rounding",
    sends="leases of 1 ms, 2 ms and the longest one",
    expects="`ttl_ms` stays from 1 to what prefill has said",
    profiles=DOCUMENT,
)
async def check_rounding(trial: Trial) -> None:
    """Answers with the bounds of a lease."""
    for given in (1, 2, 86_400_000):
        talk = _with_lease(trial, given)
        await trial.ask(talk)
        for leg in talk.decodes:
            told = dig(leg.document, "lease", "ttl_ms")
            expect(type(told) is int and 1 <= told <= given, f"decode was told `ttl_ms` {told!r} of a lease of {given}")
        if given > 2:
            expect(talk.decodes, "no decode leg was sent")


def _with_lease(trial: Trial, ttl_ms: int) -> Conversation:
    carrier = trial.site.under.carrier
    talk = trial.talk(lambda leg: prefill_answer(carrier, talk, leg, lease={"ttl_ms": ttl_ms}))
    return talk
