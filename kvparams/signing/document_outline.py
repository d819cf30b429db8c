"""Documents that are put together from members in canonical form: checked once, then only what differs is filled in.

A proxy writes two documents a request. What most of them have in common is judged and written once (`DocumentOutline`);
what a request brings (its ids, its prefix, what prefill has answered) was judged when it came, and is only written.
Members are text, and the text of a member is written in one place.
"""

from collections.abc import Iterable, Mapping
from typing import Final, cast

from pydantic_core import to_json

from kvparams.codec import DOCUMENT_KEY, dump, encode_ids, encode_isolation
from kvparams.errors import InvalidParams, Problem
from kvparams.field_types import DocumentModel
from kvparams.params import KVTransferParams
from kvparams.signing.canonical_json import canonical_json, canonical_members
from kvparams.tokens import MAX_TOKENS, TokenPrefix, counted_digest

__all__ = [
    "DocumentOutline",
    "encode_member",
    "encode_member_verbatim",
    "encode_prefix_digest",
    "encode_prefix_verbatim",
    "join_members",
    "merge_with_native",
]

_FIRST: Final = b'"%b":' % DOCUMENT_KEY.encode()
_FURTHER: Final = b"," + _FIRST
"""The name of the document beside native keys."""
_PACKED: Final = {"count", "packed"}
_DIGEST: Final = {"count", "digest"}


class DocumentOutline:
    """The members that many documents have in common."""

    __slots__ = ("_attempt", "_members")

    def __init__(self, params: KVTransferParams) -> None:
        """`params` with any ids, and no isolation or signature of its own.

        Raises:
            ValueError: it has one of the two.
            NotCanonical: there is a float in it.
        """
        if params.isolation is not None or params.signature is not None:
            raise ValueError("an outline has no isolation and no signature of its own")
        self._members = canonical_members(params)
        self._attempt = params.transfer.attempt

    def members(self, request_id: str, transfer_id: str, cache_salt: str | None) -> dict[str, bytes]:
        """The document of one request, in pieces, as `kvparams.signing.canonical_json.fragments` has them.

        Raises:
            InvalidParams: as for `kvparams.codec.Template.fill`.
        """
        request, transfer = encode_ids(request_id, transfer_id)
        members = self._members.copy()
        members["request_id"] = b'"request_id":"%b"' % request
        members["transfer"] = b'"transfer":{"attempt":%d,"id":"%b"}' % (self._attempt, transfer)
        if cache_salt is not None:
            members["isolation"] = encode_isolation(cache_salt)
        return members


def encode_member(name: str, value: object) -> bytes:
    """Encodes a member of a document in canonical form, `"name":value`.

    Args:
        name: of a member that the protocol defines.
        value: of the model: a part, a list of keys, a text; bytes are the member already.

    Raises:
        NotCanonical: there is a float in it.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, TokenPrefix):
        if value.model_extra:
            return b'"prefix":%b' % canonical_json(
                {**value.model_extra, "count": value.count, "digest": value.digest_text()}, name
            )
        return b'"prefix":{"count":%d,"digest":"%b"}' % (value.count, value.digest_text().encode())
    return b'"%b":%b' % (
        name.encode(),
        canonical_json(dump(value) if isinstance(value, DocumentModel) else value, name),
    )


def encode_member_verbatim(name: str, value: object) -> bytes:
    """The same in the form that it has, where nobody signs it: floats and all."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, DocumentModel):
        return b'"%b":%b' % (name.encode(), value.__pydantic_serializer__.to_json(value, exclude_unset=True))
    return b'"%b":%b' % (name.encode(), to_json(value))


def encode_prefix_digest(ids: Iterable[int]) -> bytes:
    """The member `prefix` of a prompt, by its digest: as `TokenPrefix.by_digest` would be written.

    Raises:
        InvalidParams: there are more ids than a prefix may have.
    """
    count, digest = counted_digest(ids)
    if count > MAX_TOKENS:
        raise InvalidParams((Problem(("prefix", "count"), "range", f"a prefix has at most {MAX_TOKENS} ids"),))
    return b'"prefix":{"count":%d,"digest":"%b"}' % (count, digest.encode())


def encode_prefix_verbatim(prefix: object) -> bytes | None:
    """The member `prefix` as it is sent, where that is another form than the canonical one; else None."""
    if not isinstance(prefix, TokenPrefix) or prefix.model_fields_set == _DIGEST:
        return None
    if prefix.model_fields_set == _PACKED and not prefix.model_extra:
        return b'"prefix":{"count":%d,"packed":"%b"}' % (prefix.count, cast("str", prefix.packed).encode())
    return encode_member_verbatim("prefix", prefix)


def join_members(members: Mapping[str, bytes], names: Iterable[str]) -> bytes:
    """Returns the text between the braces: these members, in this order."""
    return b",".join([members[name] for name in names])


def merge_with_native(native: bytes, document: bytes) -> bytes:
    """The text of a whole `kv_transfer_params`: a document beside native keys, both as the text of an object."""
    return native[:-1] + (_FIRST if native == b"{}" else _FURTHER) + document + b"}"
