"""Converts native values to members of the document, and back.

A conversion never loses information: a value that the member cannot hold exactly stays a native one.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Final, cast

from pydantic import ValidationError

from kvparams.dialects.message import ABSENT, JSONObject, get_at, parse_path, set_at
from kvparams.dialects.value_types import IntegerType, ValueType
from kvparams.params import PROTOCOL_VERSION, KVTransferParams
from kvparams.tokens import TokenPrefix

__all__ = ["derived_transfer", "from_member", "to_member"]

_BARE: Final[Mapping[str, object]] = {
    "version": PROTOCOL_VERSION,
    "request_id": "r",
    "phase": "prefill",
    "mode": "store",
}
_TRANSFER: Final[Mapping[str, object]] = {"id": "t", "attempt": 1}
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,18}")


def derived_transfer(request_id: str) -> str:
    """The transfer's id where nobody has named one: the same on every leg, because it follows from the request's."""
    if _IDENTIFIER.fullmatch(request_id):
        return request_id
    return f"sha256-{sha256(request_id.encode()).hexdigest()[:32]}"


def to_member(member: str, value: object) -> object:
    """The value of the document's member, as JSON; ABSENT where it cannot have this one."""
    if member == "prefix" and isinstance(value, list):
        ids = cast("list[int]", value)
        try:
            packed = TokenPrefix.pack(ids)
        except (OverflowError, TypeError, ValidationError):
            return ABSENT
        return {"count": packed.count, "packed": packed.packed}
    if member == "transfer.id" and type(value) is int:
        return str(value)
    return value if _accepts(member, value) else ABSENT


def from_member(member: str, value: object, form: ValueType) -> object:
    """The native value of a document's member; ABSENT where the dialect has no words for it.

    An id of the transfer that is no number, for an engine that wants one, becomes a number that follows from it.
    """
    if value is None:
        return None
    if member == "prefix" and isinstance(value, dict):
        try:
            ids = TokenPrefix.model_validate(value).token_ids()
        except ValidationError:
            return ABSENT
        return ABSENT if ids is None else ids.tolist()
    number = next((one for one in getattr(form, "forms", (form,)) if isinstance(one, IntegerType)), None)
    if member == "transfer.id" and isinstance(value, str) and number is not None:
        if _DECIMAL.fullmatch(value) and number.low <= int(value) <= number.high:
            return int(value)
        drawn = int.from_bytes(sha256(value.encode()).digest()[:8])  # the same on every leg
        return number.low + drawn % (number.high - number.low + 1)
    return value if form.find_problem(value, ()) is None else ABSENT


def _accepts(member: str, value: object) -> bool:
    if isinstance(value, str):
        return _judged(member, value)
    return _judge(member, value)


def _judge(member: str, value: object) -> bool:
    document: JSONObject = {**_BARE, "transfer": dict(_TRANSFER)}
    path = parse_path(member)
    if get_at(document, path) is ABSENT:
        if not set_at(document, path, value):
            return False
    else:
        cast("JSONObject", get_at(document, path[:-1]))[cast("str", path[-1])] = value
    try:
        KVTransferParams.model_validate(document)
    except ValidationError:
        return False
    return True


_judged = lru_cache(256)(_judge)
