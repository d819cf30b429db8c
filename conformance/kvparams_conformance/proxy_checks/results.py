"""Checks what a proxy makes of a `prefill_result`: refuse a wrong one, hand on the right members of a good one."""

from typing import Any, Final

from kvparams_conformance.answers import completion, load_keys, prefill_answer, prefill_result
from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.conversation import Conversation, ScriptedAnswer, SeenLeg
from kvparams_conformance.proxy_checks.helpers import (
    DOCUMENT,
    NIXL,
    WITH_RESULT,
    expect_answered,
    expect_refused,
    expect_unseen,
)
from kvparams_conformance.raw_json import dump
from kvparams_conformance.site import Trial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_FOREIGN: Final = "198.51.100.66"


def _answering(trial: Trial, **changes: Any) -> Conversation:
    """Begins a conversation in which each prefill engine answers with these members changed."""
    carrier = trial.site.under.carrier
    talk = trial.talk(lambda leg: prefill_answer(carrier, talk, leg, **changes))
    return talk


async def _expect_unused(trial: Trial, **changes: Any) -> None:
    """Checks that a result is not used: the client gets a 5xx, and no decode leg is told its keys."""
    talk = _answering(trial, **changes)
    reply = await trial.ask(talk)
    expect(talk.prefills, "no prefill leg was sent")
    expect(not any(leg.document.get("load_keys") for leg in talk.decodes), "decode was told the keys of that answer")
    expect_refused(talk, reply, 500, 504)


def _wrong(name: str, sends: str) -> Any:
    return CHECKS.add(
        "4.6",
        name,
        sends=f"a prefill_result with {sends}",
        expects="no decode leg is told its keys, and the client gets a 5xx",
        profiles=DOCUMENT,
        isolated=True,
    )


@_wrong("phase", "the phase `prefill`, `decode` or `decode_result`")
async def check_wrong_phase(trial: Trial) -> None:
    """Answers with other phases."""
    for phase in ("prefill", "decode", "decode_result"):
        await _expect_unused(trial, phase=phase)


@_wrong("request-id", "another `request_id`")
async def check_wrong_request_id(trial: Trial) -> None:
    """Answers for another request."""
    await _expect_unused(trial, request_id="another-request")


@_wrong("transfer", "another `transfer.id`, or another `attempt`")
async def check_wrong_transfer(trial: Trial) -> None:
    """Answers for another transfer, and for another try of the same."""
    await _expect_unused(trial, transfer={"id": "another-transfer", "attempt": 1})
    carrier = trial.site.under.carrier

    def answer(leg: SeenLeg) -> ScriptedAnswer:
        transfer = {**leg.document.get("transfer", {}), "attempt": 77}
        return prefill_answer(carrier, talk, leg, transfer=transfer)

    talk = trial.talk(answer)
    reply = await trial.ask(talk)
    expect(not talk.decodes or not talk.decodes[0].document.get("load_keys"), "decode was told of the attempt 77")
    expect_refused(talk, reply, 500, 504)


@_wrong("mode", "another `mode`")
async def check_wrong_mode(trial: Trial) -> None:
    """Answers with the mode `pull`."""
    await _expect_unused(trial, mode="pull")


@CHECKS.add(
    "17.13",
    "no-result",
    sends="a prefill answer without a document",
    expects="the client gets a 5xx, and decode is promised no KV",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_no_result(trial: Trial) -> None:
    """Answers as an engine whose connector is not loaded."""
    answers: list[dict[str, Any]] = [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}]
    for params in answers:
        talk = _answering_bare(trial, params)
        reply = await trial.ask(talk)
        expect(not any(leg.document for leg in talk.decodes), "decode was promised KV that nobody has spoken of")
        expect_refused(talk, reply, 500, 504)


@CHECKS.add(
    "3.3",
    "broken-result",
    sends="a prefill_result whose `ttl_ms` is text",
    expects="it is refused: the client gets a 5xx",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_broken_result(trial: Trial) -> None:
    """Answers with a document that breaks the protocol."""
    await _expect_unused(trial, lease={"ttl_ms": "30000"})


@CHECKS.add(
    "6.2",
    "major-version",
    sends="a prefill_result of the version 2.0",
    expects="it is refused: the client gets a 5xx",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_major_version(trial: Trial) -> None:
    """Answers as an engine of another major version."""
    await _expect_unused(trial, version="2.0")


@CHECKS.add(
    "5.4",
    "must-understand",
    sends="a prefill_result whose `must_understand` names an unknown member",
    expects="it is refused: the client gets a 5xx",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_must_understand(trial: Trial) -> None:
    """Answers with a member that the proxy does not know, and must."""
    await _expect_unused(trial, must_understand=["encryption"], encryption={"key": 1})


@CHECKS.add(
    "6.9",
    "must-understand",
    sends="a prefill_result whose `must_understand` names `lease.ttl_ms`",
    expects="the decode document names it too",
    profiles=DOCUMENT,
)
async def check_names_handed_on(trial: Trial) -> None:
    """Answers with a name that the proxy knows."""
    talk = _answering(trial, must_understand=["lease.ttl_ms"])
    _, decode = expect_answered(talk, await trial.ask(talk))
    told = decode.document.get("must_understand")
    expect(told == ["lease.ttl_ms"], f"decode was told `must_understand` {told!r}")


@CHECKS.add(
    "17.14",
    "handed-on",
    sends="a prefill_result with `producer`, `prefix`, `load_keys`, `lease`, `usage` and unknown members",
    expects="decode is told the first four as they came, and nothing else of it",
    profiles=DOCUMENT,
)
async def check_handed_on(trial: Trial) -> None:
    """Compares the members of the result with those of the decode document."""
    prefix = {"count": 3, "digest": "sha256:4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"}
    usage = {"prompt_tokens": 3, "saved_bytes": 46667}
    talk = _answering(trial, prefix=prefix, usage=usage, later={"steer": "46667"}, store_keys=["46667"])
    prefill, decode = expect_answered(talk, await trial.ask(talk))
    told = decode.document
    expect(told.get("load_keys") == load_keys(talk, prefill), f"decode was told `load_keys` {told.get('load_keys')!r}")
    expect(told.get("prefix") == prefix, f"decode was told `prefix` {told.get('prefix')!r}")
    wanted = {"id": f"{prefill.engine}-{talk.tag}", "incarnation": "1763640000-12"}
    expect(told.get("producer") == wanted, f"decode was told `producer` {told.get('producer')!r}")
    expect("lease" in told, "decode was told no `lease`")
    expect_unseen([decode], "46667")


@CHECKS.add(
    "5.1",
    "null",
    sends="a prefill_result with null members, and one without `load_keys`",
    expects="decode is told the nulls, and no `load_keys`",
    profiles=DOCUMENT,
)
async def check_null(trial: Trial) -> None:
    """Compares nulls and absent members."""
    talk = _answering(trial, producer={"id": "p-own", "incarnation": None}, load_keys=None, prefix=None)
    _, decode = expect_answered(talk, await trial.ask(talk))
    told = decode.document.get("producer")
    expect(told == {"id": "p-own", "incarnation": None}, f"decode was told `producer` {told!r}")
    for name in ("prefix", "load_keys"):
        expect(
            decode.document.get(name, ...) is None, f"decode was told `{name}` {decode.document.get(name, 'absent')!r}"
        )
    talk = _answering(trial, load_keys=...)
    _, decode = expect_answered(talk, await trial.ask(talk))
    expect("load_keys" not in decode.document, "decode was told `load_keys`, which prefill has left out")


@CHECKS.add(
    "5.2",
    "unknown",
    sends="unknown members in `producer` and `lease` of a prefill_result",
    expects="decode is told them as they came",
    profiles=DOCUMENT,
)
async def check_unknown(trial: Trial) -> None:
    """Compares unknown members of members that are handed on."""
    more = {"zone": {"a": [1, None, "ü"]}}
    talk = _answering(trial, producer={"id": "p", **more}, lease={"ttl_ms": 30000, **more})
    _, decode = expect_answered(talk, await trial.ask(talk))
    for name in ("producer", "lease"):
        told: dict[str, Any] = decode.document.get(name) or {}
        expect(told.get("zone") == more["zone"], f"decode was told `{name}` {told!r}")


@CHECKS.add(
    "4.1",
    "empty-keys",
    sends="a prefill_result without keys, and one with an empty list of them",
    expects="decode is told a document without keys, and the client is answered",
    profiles=DOCUMENT,
)
async def check_empty_keys(trial: Trial) -> None:
    """Answers as an engine whose pages are found by content."""
    lists: list[Any] = [..., []]
    for keys in lists:
        talk = _answering(trial, load_keys=keys)
        prefill, decode = expect_answered(talk, await trial.ask(talk))
        expect(not decode.document.get("load_keys"), "decode was told keys that prefill has not named")
        expect(decode.transfer_id == prefill.transfer_id, "decode was told another transfer")


@CHECKS.add(
    "12.6",
    "producer-address",
    sends="a prefill_result whose `producer.address` is of another host",
    expects="no decode leg has that address, and the client gets a 5xx",
    profiles=DOCUMENT,
    isolated=True,
)
async def check_producer_address(trial: Trial) -> None:
    """Answers with an address that the operator has not registered."""
    talk = _answering(trial, producer={"id": "p", "address": f"{_FOREIGN}:7000"})
    reply = await trial.ask(talk)
    expect(talk.prefills, "no prefill leg was sent")
    expect_unseen(talk.decodes, _FOREIGN)
    expect_refused(talk, reply, 500, 504)


@CHECKS.add(
    "12.6",
    "native-address",
    sends="prefill answers whose `remote_host`, or a nested `remote_host`, is of another host",
    expects="no decode leg has that address, and the client gets a 5xx",
    profiles=WITH_RESULT,
    isolated=True,
)
async def check_native_address(trial: Trial) -> None:
    """Answers with native keys that name another host."""
    for params in ({"remote_host": _FOREIGN, "remote_port": 5600}, {"peers": [{"remote_host": _FOREIGN}]}):
        talk = _answering_with_native(trial, params)
        reply = await trial.ask(talk)
        expect(talk.prefills, "no prefill leg was sent")
        expect_unseen(talk.decodes, _FOREIGN)
        if trial.site.under.carrier == "nixl":
            expect_refused(talk, reply, 500, 504)


@CHECKS.add(
    "12.7",
    "bounds",
    sends="prefill answers whose `remote_port`, `remote_block_ids` or `tp_size` is out of its bounds",
    expects="no decode leg has the value, and the client gets a 5xx",
    profiles=(NIXL,),
    isolated=True,
)
async def check_bounds(trial: Trial) -> None:
    """Answers with native values that no engine can have."""
    wrong: list[dict[str, object]] = [{"remote_port": 746667}, {"remote_block_ids": [[-46667]]}, {"tp_size": 46667}]
    for params in wrong:
        talk = _answering_with_native(trial, params)
        reply = await trial.ask(talk)
        expect_unseen(talk.decodes, "46667")
        expect_refused(talk, reply, 500, 504)


def _answering_bare(trial: Trial, params: dict[str, Any]) -> Conversation:
    return trial.talk(lambda leg: _bare(leg, params))


def _bare(leg: SeenLeg, params: dict[str, Any]) -> ScriptedAnswer:
    return ScriptedAnswer(body=dump(completion(leg, "p", **params)))


def _answering_with_native(trial: Trial, params: dict[str, Any]) -> Conversation:
    talk = trial.talk(lambda leg: _with_native(trial, talk, leg, params))
    return talk


def _with_native(trial: Trial, talk: Conversation, leg: SeenLeg, params: dict[str, Any]) -> ScriptedAnswer:
    if trial.site.under.carrier == "nixl":
        return prefill_answer("nixl", talk, leg, **params)
    both = {**params, "kvparams": prefill_result(talk, leg)}
    return ScriptedAnswer(body=dump(completion(leg, "p", kv_transfer_params=both)))
