"""Writes the KV members of legs: native keys beside the document, from cached templates.

A document is validated once for each pair of instances; the values of a request were validated when it came.
"""

from collections.abc import Mapping
from typing import Final

from kvparams.codec import DocumentTemplate, parse
from kvparams.dialects.interface import Dialect, HandoffMissing
from kvparams.instances import Instance, RequestFacts
from kvparams.jsontext.writing import write_json
from kvparams.params import PROTOCOL_VERSION, KVTransferParams, Mode, Phase
from kvparams.routing.plan import StreamProgress
from kvparams.signing.canonical_json import NotCanonical
from kvparams.signing.document_outline import (
    DocumentOutline,
    encode_member,
    encode_member_verbatim,
    encode_prefix_digest,
    encode_prefix_verbatim,
    merge_with_native,
)
from kvparams.signing.signer import EncodedNativeKeys, Signer
from kvparams.versions import downgrade

__all__ = ["LegDocuments", "add_prompt_ids", "request_members"]

_REMEMBERED: Final = 4096
"""Templates kept at most: one for each pair of instances that ever met, and each incarnation."""


class LegDocuments:
    """A `LegDocuments` writes all documents of one manager."""

    __slots__ = ("_asked", "_signer", "_templates")

    def __init__(self, signer: Signer | None = None) -> None:
        """`signer`: signs them."""
        self._signer = signer
        self._asked = EncodedNativeKeys(b"{}")
        """The last that came as text: those of prefill legs are the same for most requests."""
        self._templates: dict[
            tuple[bool, Phase, Mode, int, Instance, Instance | None], DocumentTemplate | DocumentOutline
        ] = {}

    def native_from_text(self, text: bytes) -> EncodedNativeKeys:
        """Native keys as a dialect writes them, as the text of an object."""
        if self._signer is not None:
            return self._signer.encode_native(text)
        if text != self._asked.text:
            self._asked = EncodedNativeKeys(text)
        return self._asked

    def native_from_engine(self, keys: Mapping[str, object]) -> EncodedNativeKeys:
        """Native keys that came from an engine.

        Raises:
            HandoffMissing: they cannot be signed.
        """
        if self._signer is None:
            return EncodedNativeKeys(write_json(keys))
        try:
            return self._signer.encode_native(keys)
        except NotCanonical as error:
            raise HandoffMissing(f"what the prefill engine answered cannot be signed: {error}") from error

    def leg_changes(
        self,
        native: EncodedNativeKeys,
        request: RequestFacts,
        transfer: str,
        attempt: int,
        phase: Phase,
        mode: Mode,
        producer: Instance,
        consumer: Instance | None,
        known: Mapping[str, object],
    ) -> dict[str, bytes | None]:
        """Returns the changes of the client's body that give one leg its native keys and the document.

        `known` are the members that this request alone has, but for the salt: that one all have where clients have
        keys.
        """
        signer = self._signer
        plain = signer is None and not known
        kind = plain, phase, mode, attempt, producer, consumer
        template = self._templates.get(kind)
        if template is None:
            if len(self._templates) >= _REMEMBERED:
                self._templates.clear()
            params = _params(request, transfer, attempt, phase, mode, producer, consumer)
            template = self._templates[kind] = DocumentTemplate(params) if plain else DocumentOutline(params)
        if isinstance(template, DocumentTemplate):
            text = template.fill(request.request_id, transfer, request.cache_salt)
            return {"kv_transfer_params": merge_with_native(native.text, text)}
        members = template.members(request.request_id, transfer, request.cache_salt)
        if signer is None:
            members.update((name, encode_member_verbatim(name, value)) for name, value in known.items())
            return {"kv_transfer_params": merge_with_native(native.text, b"{%b}" % b",".join(members.values()))}
        members.update((name, encode_member(name, value)) for name, value in known.items())
        return {
            "kv_transfer_params": signer.encode_carrier(native, members, encode_prefix_verbatim(known.get("prefix")))
        }


def request_members(request: RequestFacts, sent: StreamProgress | None) -> dict[str, object]:
    """The members that a request itself brings: its prefix, where its token ids are known."""
    ids = request.token_ids if sent is None else [*sent.prompt_ids, *sent.answer_ids]
    return {} if ids is None else {"prefix": encode_prefix_digest(ids)}


def add_prompt_ids(speech: Dialect, native: bytes, request: RequestFacts, sent: StreamProgress | None) -> bytes:
    """Returns native keys with the token ids of the prompt, for a dialect that carries them, where they are known."""
    name = speech.prompt_ids_key
    ids = request.token_ids if sent is None else [*sent.prompt_ids, *sent.answer_ids]
    if name is None or ids is None:
        return native
    return b"{%b,%b" % (encode_member(name, list(ids)), native[1:])


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
