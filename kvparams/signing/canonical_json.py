"""The canonical form: one sequence of bytes for everything that is the same JSON, so that it can be signed.

Any holder of the parsed dictionary can make it: names sorted, no white space, integers as decimal digits, one escaping
of text, UTF-8. There are no floats in a document's, because no two languages write them alike, and among native keys
they stand by their bits; token ids stand there by their digest, whatever form the prefix has. A value that cannot be
written in exactly one way is refused, never rounded.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import isfinite
from struct import pack
from typing import Final, cast

from pydantic_core import PydanticSerializationError, to_json

from kvparams.codec import DOCUMENT_KEY, parse
from kvparams.errors import KVParamsError
from kvparams.native import NATIVE
from kvparams.params import KVTransferParams
from kvparams.tokens import TokenPrefix

__all__ = [
    "UNSIGNED_MEMBERS",
    "NotCanonical",
    "canonical_document",
    "canonical_json",
    "canonical_members",
    "native_members",
    "sha256_digest",
]

UNSIGNED_MEMBERS: Final = frozenset((DOCUMENT_KEY, "prompt_token_ids"))
"""Members of `kv_transfer_params` that are no native keys: our document, which is signed itself, and the prompt, which
vLLM 0.32.0 takes away before its connectors see it (renderers/online_renderer.py); `prefix` says which it is."""

_MAX_DEPTH: Final = 64
_LOWEST: Final = -(2**63)
_HIGHEST: Final = 2**64 - 1
_NAMES: Final = frozenset((str,))
_PLAIN: Final = frozenset((str, bool, type(None)))
_MAX_LISTS: Final = 32
_KINDS: Final = bytes(48 if chr(n).isdecimal() else n if chr(n) in ",-[]" else 88 for n in range(128)) + b"X" * 128
"""Of a list's text: `0` for each digit, `X` for what is in no list of integers, nor of lists of such."""
_LONG: Final = b"0" * 19
"""Digits of a number that may be out of bounds."""

JSONPath = tuple[str | int, ...]


class NotCanonical(KVParamsError, ValueError):
    """The value has no canonical form. `path` leads to what is at fault; no value is repeated."""

    def __init__(self, path: JSONPath, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path)) or 'the value'}: {self.reason}"


def canonical_document(document: Mapping[str, object] | KVTransferParams) -> bytes:
    """The bytes that a signature covers: the whole document, but for `signature.value`.

    Args:
        document: never modified. What is not a model yet is judged first.

    Raises:
        InvalidParams: it is no document.
        NotCanonical: there is a float in it, or a number that is none of 64 bits.
    """
    params = document if isinstance(document, KVTransferParams) else parse(document)
    found = canonical_members(params)
    return b"{%b}" % b",".join([found[name] for name in sorted(found)])


def canonical_members(params: KVTransferParams) -> dict[str, bytes]:
    """Returns the canonical form in pieces: by name, `"name":value`.

    Joined by commas in the order of their names, the pieces are the text between the braces.

    Raises:
        NotCanonical: as for `canonical_document`.
    """
    members: dict[str, object] = params.model_dump(mode="json", exclude_unset=True, exclude={"prefix"})
    if "prefix" in params.model_fields_set:
        members["prefix"] = None if params.prefix is None else _by_digest(params.prefix)
    if isinstance(signature := members.get("signature"), dict):
        cast("dict[str, object]", signature).pop("value", None)
    return {name: b"%b:%b" % (canonical_json(name), canonical_json(value, name)) for name, value in members.items()}


def native_members(kv_transfer_params: Mapping[str, object]) -> dict[str, object]:
    """Returns the native members that an engine's own connectors use beside the document."""
    return {name: value for name, value in kv_transfer_params.items() if name not in UNSIGNED_MEMBERS}


def sha256_digest(text: bytes) -> str:
    """`sha256:` and 64 hexadecimal digits, of a canonical form."""
    return f"sha256:{sha256(text).hexdigest()}"


def canonical_json(value: object, *path: str | int, fractions: list[float] | None = None) -> bytes:
    """The canonical form of any JSON value.

    Args:
        value: as a parser gives it; tuples count as lists.
        path: where it stands, for the error.
        fractions: takes those that are in it, as native keys may have; with one it is no JSON. None: it may have none.

    Raises:
        NotCanonical: see there.
    """
    # Asked once: what it does not take would be walked anew at every level.
    kind = type(value)
    if NATIVE is not None and kind is dict:
        plain = NATIVE.write_object(cast("dict[str, object]", value), True)
        if plain is not None:
            return plain
    return _canonical(value, path, fractions)


def _canonical(value: object, path: JSONPath, fractions: list[float] | None) -> bytes:
    kind = type(value)
    if kind is str:
        try:
            return to_json(value)  # escapes as JSON.stringify does
        except PydanticSerializationError:
            raise NotCanonical(path, "lone surrogates are not Unicode text") from None
    if kind is int:
        number = cast("int", value)
        if not _LOWEST <= number <= _HIGHEST:
            raise NotCanonical(path, f"an integer lies between {_LOWEST} and {_HIGHEST}")
        return b"%d" % number
    if value is None:
        return b"null"
    if kind is bool:
        return b"true" if value else b"false"
    if kind is float:
        if fractions is None:
            raise NotCanonical(path, "a number that is no integer has no canonical form, and cannot be signed")
        if not isfinite(number := cast("float", value)):
            raise NotCanonical(path, "NaN and infinities are not JSON")
        fractions.append(number)
        return b"d%b" % pack(">d", number).hex().encode()
    if len(path) >= _MAX_DEPTH:
        raise NotCanonical(path, f"nested deeper than {_MAX_DEPTH} levels")
    if kind is list or kind is tuple:
        items = cast("Sequence[object]", value)
        plain = _integers(items) if len(items) else b"[]"
        if plain is not None:
            return plain
        return b"[%b]" % b",".join([_canonical(item, (*path, index), fractions) for index, item in enumerate(items)])
    if kind is dict or isinstance(value, Mapping):
        if not _NAMES.issuperset(map(type, cast("Mapping[object, object]", value))):
            raise NotCanonical(path, "a member's name is a string")
        return _object(cast("Mapping[str, object]", value), path, fractions)
    raise NotCanonical(path, f"{kind.__name__} is not a JSON value")


def _object(members: Mapping[str, object], path: JSONPath, fractions: list[float] | None) -> bytes:
    """Neighbours that are no list and no object are written together: a call for each costs more than its text."""
    pieces: list[bytes] = []
    run: dict[str, object] = {}
    try:
        for name in sorted(members):
            member = members[name]
            kind = type(member)
            if kind in _PLAIN or (kind is int and _LOWEST <= cast("int", member) <= _HIGHEST):
                run[name] = member
                continue
            if run:
                pieces.append(to_json(run)[1:-1])
                run = {}
            pieces.append(b"%b:%b" % (to_json(name), _canonical(member, (*path, name), fractions)))
        if run:
            pieces.append(to_json(run)[1:-1])
    except PydanticSerializationError:
        raise NotCanonical(path, "lone surrogates are not Unicode text") from None
    return b"{%b}" % b",".join(pieces)


def _integers(items: Sequence[object]) -> bytes | None:
    """Returns the text of a list of integers and lists of integers, at the speed of C, or None.

    Block ids are such lists. None means that the list may hold other values.
    """
    if type(items[0]) is not int and type(items[0]) is not list:
        return None
    try:
        text = to_json(items)
    except PydanticSerializationError:
        return None
    kinds = text.translate(_KINDS)
    if b"X" in kinds or _LONG in kinds or kinds.count(b"[") > _MAX_LISTS:
        return None
    return text


def _by_digest(prefix: TokenPrefix) -> dict[str, object]:
    """The same prefix in the one form that a signature covers; members that we do not know stay."""
    return {**(prefix.model_extra or {}), "count": prefix.count, "digest": prefix.digest_text()}
