"""Prefill, then decode: the plan that most pairs of engines need, with what it does when one of them fails.

The one rule: no I/O here. A manager is a generator of steps; it is told how each ended and says what comes next.
"""

import math
from collections.abc import Mapping
from typing import Final

from pydantic_core import to_json

from kvparams.codec import Template, parse, read_request
from kvparams.dialects import Dialect, HandoffMissing
from kvparams.outline import Outline, beside, member, prefix_by_digest, sent_member, sent_prefix
from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Mode, Phase
from kvparams.plan import Choose, Context, KVLease, Leg, LegAnswer, LegFailed, Plan, Sent
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams.trust.canonical import NotCanonical
from kvparams.trust.signing import Native, Signer
from kvparams.versions import downgrade, for_reader

__all__ = ["OneEngine", "PrefillThenDecode"]

_HANDED_ON: Final = ("producer", "prefix", "load_keys", "lease")
"""What a decode leg is told of prefill's result."""
_TTL: Final = {"ttl_ms"}
_REMEMBERED: Final = 4096
"""Templates kept at most: one for each pair of instances that ever met, and each incarnation."""


_FIRST_PREFILL: Final = Choose(Role.PREFILL)
_FIRST_DECODE: Final = Choose(Role.DECODE)


class PrefillThenDecode:
    """Prefill with one token, then decode with the client's own limits; decode is chosen when prefill is done.

    Prefill fails: another P. Decode fails before its first byte: another D with the same KV if that may be fetched
    again and is still leased, else prefill again. After it: on from what was sent, where the executor says from where.
    What the connector cannot carry (several answers over NIXL), and what needs the whole prompt computed where it is
    answered, one decode engine answers alone.
    """

    roles = (Role.PREFILL, Role.DECODE)

    def __init__(self, signer: Signer | None = None) -> None:
        """`signer`: signs the documents of all legs."""
        self._signer = signer
        self._templates: dict[tuple[bool, Phase, Mode, int, Instance, Instance | None], Template | Outline] = {}

    def legs(self, request: RequestFacts, context: Context) -> Plan:
        """See `RequestManager.legs`."""
        if request.prompt_scored:
            yield from OneEngine(Role.DECODE).legs(request, context)
            return
        transfer, attempt = request.transfer_id, 1
        failed: list[str] = []
        sent: Sent | None = None
        while True:
            prefill: Instance = yield Choose(Role.PREFILL, failed) if failed else _FIRST_PREFILL  # pyright: ignore[reportAssignmentType]
            speech = context.dialect(prefill)
            if not speech.splits(request):
                context.give_back(prefill)
                yield from OneEngine(Role.DECODE).legs(request, context)
                return
            place = None if speech.bootstrap is None else context.place(prefill)
            known = _known(request, sent)
            text = speech.prefill_keys(transfer)
            asked = Native(text) if self._signer is None else self._signer.native(text)
            params = self._document(asked, request, transfer, attempt, "prefill", speech.mode, prefill, None, known)
            try:
                answer: LegAnswer = yield Leg(  # pyright: ignore[reportAssignmentType]
                    prefill, {**context.one_token(), **params}, answers_client=False, resumed=sent
                )
            except GeneratorExit:  # the client has left
                _drop(prefill, context, speech, transfer, attempt)
                raise
            except LegFailed as failure:
                if failure.claimed:
                    _drop(prefill, context, speech, transfer, attempt)
                if not failure.another or not context.may_retry():
                    raise
                failed.append(prefill.id)
                transfer, attempt = context.next_transfer(), attempt + 1
                continue

            try:
                keys = speech.decode_keys(answer.kv_transfer_params, transfer, place)
                context.pin(prefill, keys)
                native = self._native(keys)
            except HandoffMissing:
                _drop(prefill, context, speech, transfer, attempt)
                raise
            answered_s = context.now()
            lease = KVLease(prefill, answered_s + speech.lease_s, transfer, attempt, speech.abandon(native.text))
            context.hold(lease)
            result = read_request(answer.kv_transfer_params, request_id=request.request_id)
            if result is not None:
                _check(result, request.request_id, transfer, attempt, speech.mode)
                if result.producer is not None and result.producer.address is not None:
                    context.pin(prefill, {"address": result.producer.address})
                if result.lease is not None:
                    lease = lease._replace(until_s=answered_s + result.lease.ttl_ms / 1000)
                    context.hold(lease)
            while True:
                try:
                    decode: Instance = yield Choose(Role.DECODE, failed) if failed else _FIRST_DECODE  # pyright: ignore[reportAssignmentType]
                except LegFailed:  # it has waited for room for too long
                    if not context.may_retry():
                        raise
                    break
                now_s = context.now()
                if now_s >= lease.until_s:  # so it has, by a moment
                    context.give_back(decode)
                    if not context.may_retry():
                        raise LegFailed("the KV was given up before a decode engine had room", another=False)
                    break
                handed = known if result is None else known | _handed_on(result, decode.version, now_s - answered_s)
                params = self._document(
                    native, request, transfer, attempt, "decode", speech.mode, prefill, decode, handed
                )
                try:
                    yield Leg(decode, params, answers_client=True, resumed=sent)
                except LegFailed as failure:
                    if not failure.another or (failure.begun and failure.sent is None) or not context.may_retry():
                        raise
                    failed.append(decode.id)
                    if failure.begun:
                        sent = failure.sent
                        break
                    if failure.claimed:
                        if not speech.reusable:
                            break
                        transfer, attempt = context.next_transfer(), attempt + 1
                else:
                    return
            transfer, attempt = context.next_transfer(), attempt + 1

    def _native(self, keys: Mapping[str, object]) -> Native:
        """Native keys of a decode leg."""
        if self._signer is None:
            return Native(to_json(keys))
        try:
            return self._signer.native(keys)
        except NotCanonical as error:
            raise HandoffMissing(f"what the prefill engine answered cannot be signed: {error}") from error

    def _document(
        self,
        native: Native,
        request: RequestFacts,
        transfer: str,
        attempt: int,
        phase: Phase,
        mode: Mode,
        producer: Instance,
        consumer: Instance | None,
        known: dict[str, object],
    ) -> dict[str, bytes | None]:
        """What changes in the client's body so that one leg has native keys and our document; `known` are the members
        that this request alone has, but for the salt: that one all have where clients have keys."""
        signer = self._signer
        plain = signer is None and not known
        kind = plain, phase, mode, attempt, producer, consumer
        template = self._templates.get(kind)
        if template is None:
            if len(self._templates) >= _REMEMBERED:
                self._templates.clear()
            params = _params(request, transfer, attempt, phase, mode, producer, consumer)
            template = self._templates[kind] = Template(params) if plain else Outline(params)
        if isinstance(template, Template):
            text = template.fill(request.request_id, transfer, request.cache_salt)
            return {"kv_transfer_params": beside(native.text, text)}
        members = template.members(request.request_id, transfer, request.cache_salt)
        if signer is None:
            members.update((name, sent_member(name, value)) for name, value in known.items())
            return {"kv_transfer_params": beside(native.text, b"{%b}" % b",".join(members.values()))}
        members.update((name, member(name, value)) for name, value in known.items())
        return {"kv_transfer_params": signer.carrier(native, members, sent_prefix(known.get("prefix")))}


class OneEngine:
    """No split: one engine answers, and nothing is said of KV. Another one where it fails before its first byte."""

    def __init__(self, role: Role) -> None:
        """`role` is whose engines can do this work alone."""
        self.roles = (role,)

    def legs(self, request: RequestFacts, context: Context) -> Plan:
        """See `RequestManager.legs`."""
        failed: list[str] = []
        while True:
            instance: Instance = yield Choose(self.roles[0], failed)  # pyright: ignore[reportAssignmentType]
            try:
                yield Leg(instance, {}, answers_client=True)
            except LegFailed as failure:
                if not failure.another or failure.begun or not context.may_retry():
                    raise
                failed.append(instance.id)
            else:
                return


def _known(request: RequestFacts, sent: Sent | None) -> dict[str, object]:
    known: dict[str, object] = {}
    ids = request.token_ids if sent is None else [*sent.prompt_ids, *sent.answer_ids]
    if ids is not None:
        known["prefix"] = prefix_by_digest(ids)
    return known


def _check(result: KVTransferParams, request_id: str, transfer: str, attempt: int, mode: Mode) -> None:
    """Refuse a document that answers something else: its KV would be another prompt's.

    Raises:
        HandoffMissing: it does.
    """
    named = result.transfer
    if result.phase != "prefill_result" or result.mode != mode:
        raise HandoffMissing(f"the prefill engine answered with {result.phase}, {result.mode}")
    if result.request_id != request_id or named.id != transfer or named.attempt != attempt:
        raise HandoffMissing("the prefill engine answered with the document of another request or try")


def _handed_on(result: KVTransferParams, version: str, passed_s: float) -> dict[str, object]:
    """What a decode engine that speaks this version is told of prefill's result, and what of it it must understand;
    of the lease what is left of it, `passed_s` after it came.

    Raises:
        LossyDowngrade: it cannot be told what it must understand.
    """
    result = for_reader(result, version)
    handed: dict[str, object] = {name: getattr(result, name) for name in _HANDED_ON if name in result.model_fields_set}
    lease = result.lease
    if lease is not None:
        left_ms = max(lease.ttl_ms - math.ceil(passed_s * 1000), 1)
        if lease.model_fields_set == _TTL and not lease.model_extra:  # nearly always; a copy takes far longer
            handed["lease"] = b'"lease":{"ttl_ms":%d}' % left_ms
        else:
            handed["lease"] = lease.model_copy(update={"ttl_ms": left_ms})
    critical = [path for path in result.must_understand or () if path.partition(".")[0] in handed]
    return {**handed, "must_understand": critical} if critical else handed


def _drop(prefill: Instance, context: Context, speech: Dialect, transfer: str, attempt: int) -> None:
    """A prefill that broke off may have left something behind."""
    abandon = speech.abandon(None)
    if abandon is not None:
        context.hold(KVLease(prefill, context.now() + speech.lease_s, transfer, attempt, abandon))


def _params(
    request: RequestFacts,
    transfer: str,
    attempt: int,
    phase: Phase,
    mode: Mode,
    producer: Instance,
    consumer: Instance | None,
) -> KVTransferParams:
    members: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "request_id": request.request_id,
        "transfer": {"id": transfer, "attempt": attempt},
        "phase": phase,
        "mode": mode,
        "producer": {"id": producer.id},  # which run of it, only the engine itself can say
    }
    if consumer is not None:
        members["consumer"] = {"id": consumer.id}
    return parse(downgrade(members, (consumer or producer).version))
