"""The one door between JSON and `KVTransferParams`.

Nothing else looks inside a raw document: proxy, connectors and engines hold the model and hand it back here to be
written. `dump(parse(x)) == x` holds as JSON for every valid `x`, unknown members and nulls included.
"""

import re
from collections.abc import Mapping
from typing import Final, cast

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from kvparams import legacy_params
from kvparams.errors import InvalidParams, Problem, UnsupportedVersion
from kvparams.field_types import MAX_LABEL, MAX_MEMBERS, DocumentModel
from kvparams.params import VERSION_FORM, KVTransferParams
from kvparams.validation import parse_json_object, to_invalid_params

__all__ = [
    "DOCUMENT_KEY",
    "DocumentTemplate",
    "dump",
    "dump_json",
    "encode_ids",
    "encode_isolation",
    "kv_transfer_members",
    "parse",
    "read_request",
    "write",
]

DOCUMENT_KEY: Final = "kvparams"
"""The key inside `kv_transfer_params` under which the document travels, beside an engine's native keys."""

_JSON_SPACE: Final = " \t\r\n"
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_MAX_ID: Final = 128
_ID_FORM: Final = bytes.maketrans(b"._~-", b"AAAA")
"""What an identifier may have in it becomes a letter or digit: that is told five times as fast as by an expression."""


def parse(document: Mapping[str, object] | str | bytes) -> KVTransferParams:
    """Read one document.

    Args:
        document: the JSON object, or its text. Never modified, and nothing of it is shared with the result.

    Raises:
        UnsupportedVersion: it declares a version other than `1.y`; nothing else was judged.
        InvalidParams: it breaks the protocol; `problems` lists every fault. Text that is not JSON is one of the kind
            `json`; what is neither an object nor text, or text that spells no object, is one of the kind `type`.
    """
    document = parse_json_object(document) if isinstance(document, str | bytes) else _object(document)
    _check_outline(document)
    try:
        return KVTransferParams.model_validate(document if isinstance(document, dict) else dict(document))
    except ValidationError as error:
        raise to_invalid_params(error) from None


def dump(params: DocumentModel) -> dict[str, object]:
    """The document as a JSON object of its own: changing it does not change `params`."""
    return params.model_dump(mode="json", exclude_unset=True)


def dump_json(params: KVTransferParams) -> bytes:
    """The document as compact JSON text in UTF-8."""
    return params.__pydantic_serializer__.to_json(params, exclude_unset=True)


class DocumentTemplate:
    """A `DocumentTemplate` is validated once and then filled in per request.

    Only the request id, the transfer id and the cache salt vary.
    """

    __slots__ = ("_after", "_before", "_between")

    def __init__(self, params: KVTransferParams) -> None:
        """`params` with any ids and no isolation; its other members, the attempt included, are those of every document.

        Raises:
            ValueError: it has an isolation.
        """
        if params.isolation is not None:
            raise ValueError("a template has no isolation of its own")
        marks = {"request_id": "REQUEST-ID-HERE", "transfer": {**dump(params.transfer), "id": "TRANSFER-ID-HERE"}}
        text = dump_json(parse(dump(params) | marks))
        self._before, _, rest = text.partition(b"REQUEST-ID-HERE")
        self._between, _, self._after = rest.partition(b"TRANSFER-ID-HERE")

    def fill(self, request_id: str, transfer_id: str, cache_salt: str | None = None) -> bytes:
        """The document as compact JSON text.

        Raises:
            InvalidParams: an id holds something that ids may not hold here: letters, digits and `._~-` only, 1 to 128;
                or the salt has not 1 to 256 characters.
        """
        request, transfer = encode_ids(request_id, transfer_id)
        after = self._after
        if cache_salt is not None:
            after = b"%b,%b}" % (after[:-1], encode_isolation(cache_salt))
        return self._before + request + self._between + transfer + after


def encode_ids(request_id: str, transfer_id: str) -> tuple[bytes, bytes]:
    """Encodes both ids, which need no escapes in JSON.

    Raises:
        InvalidParams: as for `DocumentTemplate.fill`.
    """
    try:
        request, transfer = request_id.encode(), transfer_id.encode()
        short = 0 < len(request) <= _MAX_ID and 0 < len(transfer) <= _MAX_ID
        if short and (request + transfer).translate(_ID_FORM).isalnum():
            return request, transfer
    except UnicodeEncodeError:  # half a surrogate pair
        pass
    wrong = ("transfer", "id") if _IDENTIFIER.fullmatch(request_id) else ("request_id",)
    raise InvalidParams((Problem(wrong, "value", "is not an identifier"),))


def encode_isolation(cache_salt: str) -> bytes:
    """The member `isolation` of one who has this salt, name included.

    Raises:
        InvalidParams: it has not 1 to 256 characters.
    """
    try:
        salt = to_json(cache_salt) if 0 < len(cache_salt) <= MAX_LABEL else b""
    except PydanticSerializationError:  # half a surrogate pair
        salt = b""
    if not salt:
        said = f"is not a text of 1 to {MAX_LABEL} characters"
        raise InvalidParams((Problem(("isolation", "cache_salt"), "value", said),))
    return b'"isolation":{"cache_salt":%b}' % salt


def read_request(
    kv_transfer_params: Mapping[str, object] | str | None,
    *,
    request_id: str | None = None,
    transfer_id: str | None = None,
) -> KVTransferParams | None:
    """The document in a request's (or an answer's) `kv_transfer_params`, or None where there is none.

    The trio of vLLM #12957 is read too. It names neither request nor transfer, so the caller does: `request_id` is that
    of the HTTP request, `transfer_id` the same if not given.

    Args:
        kv_transfer_params: the value of the field: an object, null, or the text of either.

    Raises:
        InvalidParams: what is there breaks the protocol; anything else, bytes too, is one problem of the kind `type`.
            Paths lead from `kv_transfer_params`: into the document by way of `kvparams`, into a trio by its member.
            A trio without `request_id` is `missing` at `request_id`, an id that no document can carry is at
            `request_id` or `transfer.id`, and a trio for several prompts, which
            `kvparams.legacy_params.read_legacy_params` reads, is a `conflict` at the empty path.
    """
    if kv_transfer_params is None:
        return None
    if isinstance(kv_transfer_params, str):
        if kv_transfer_params.strip(_JSON_SPACE) == "null":
            return None
        kv_transfer_params = parse_json_object(kv_transfer_params)
    carrier = _object(kv_transfer_params)
    if DOCUMENT_KEY in carrier:
        return _inner(carrier[DOCUMENT_KEY])
    if not legacy_params.has_legacy_members(carrier):
        return None
    if request_id is None:
        raise InvalidParams((Problem(("request_id",), "missing", "the trio has no identity; pass request_id"),))
    found = legacy_params.read_legacy_params(carrier)
    if found.batched:
        raise InvalidParams(
            (Problem((), "conflict", "holds several prompts; read it with kvparams.legacy_params.read_legacy_params"),)
        )
    (params,) = found.to_params(request_id, transfer_id or request_id)
    return params


def kv_transfer_members(kv_transfer_params: object) -> Mapping[str, object]:
    """The members of `kv_transfer_params`, be it an object or the text of one; empty where it is neither."""
    if isinstance(kv_transfer_params, str):
        try:
            return parse_json_object(kv_transfer_params)
        except InvalidParams:
            return {}
    return cast("dict[str, object]", kv_transfer_params) if isinstance(kv_transfer_params, dict) else {}


def write(params: KVTransferParams, native: Mapping[str, object] | None = None) -> dict[str, object]:
    """The value of `kv_transfer_params`: the document beside the engine's `native` keys, which stay as they are."""
    return {**(native or {}), DOCUMENT_KEY: dump(params)}


def _inner(document: object) -> KVTransferParams:
    inner = _object(document, DOCUMENT_KEY)
    try:
        return parse(inner)
    except InvalidParams as error:
        inside = (Problem((DOCUMENT_KEY, *found.path), found.kind, found.message) for found in error.problems)
        raise type(error)(tuple(inside)) from None


def _object(value: object, *path: str) -> Mapping[str, object]:
    if type(value) is not dict and not isinstance(value, Mapping):  # for what is a dictionary it takes long to say so
        raise InvalidParams((Problem(path, "type", "Input should be an object"),))
    return cast("Mapping[str, object]", value)


def _check_outline(document: Mapping[str, object]) -> None:
    """Checks the version and the number of members, before the members themselves are validated."""
    version = document.get("version")
    if isinstance(version, str) and re.fullmatch(VERSION_FORM, version) is None:
        raise UnsupportedVersion((Problem(("version",), "version", "this version is not spoken here; 1.y is"),))
    crowded: list[tuple[str, ...]] = [()] if len(document) > MAX_MEMBERS else []
    for name, part in document.items():
        if isinstance(part, dict) and len(cast("dict[object, object]", part)) > MAX_MEMBERS:
            crowded.append((name,))
    if crowded:
        message = f"an object has at most {MAX_MEMBERS} members"
        raise InvalidParams(tuple(Problem(path, "length", message) for path in crowded))
