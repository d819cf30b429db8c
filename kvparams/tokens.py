"""The prefix of a prompt as token ids: packed, by digest, or listed.

All three forms describe the same bytes, the ids as little-endian 32-bit unsigned integers; a digest is SHA-256 over
exactly these.
"""

import sys
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated, Final, Self, cast

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    StringConstraints,
    TypeAdapter,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvparams.field_types import DocumentModel, TokenId, list_to_tuple

__all__ = ["MAX_TOKENS", "Digest", "TokenPrefix", "counted_digest", "pack", "token_digest", "unpack"]

MAX_TOKENS: Final = 2_097_152
"""Token ids in one prefix; packed they fill 11 MB of text."""
_BASE64: Final = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$"
"""Standard alphabet, padded, unused bits zero: one text for one content."""

Packed = Annotated[str, StringConstraints(max_length=4 * -(-4 * MAX_TOKENS // 3), pattern=_BASE64)]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=MAX_TOKENS, fail_fast=True), list_to_tuple(MAX_TOKENS)]


def pack(ids: Iterable[int]) -> bytes:
    """The ids as little-endian 32-bit unsigned integers, 4 bytes each.

    An `array("I")` costs nothing to pack; a list of 8,000 about 45 microseconds.

    Raises:
        OverflowError: an id is negative or larger than 2^32 - 1.
    """
    return _swapped(_packed(ids)).tobytes()


def unpack(packed: bytes) -> "array[int]":
    """The ids that `pack` packed, as an `array("I")`. `len(packed)` is a multiple of 4."""
    return _swapped(array("I", packed))


def token_digest(packed: "bytes | array[int]") -> str:
    """`"sha256:"` and 64 lower-case hexadecimal digits over packed ids."""
    return f"sha256:{sha256(packed).hexdigest()}"


def counted_digest(ids: Iterable[int]) -> tuple[int, str]:
    """Returns the number of ids, and their digest."""
    packed = _swapped(_packed(ids))
    return len(packed), token_digest(packed)


def _packed(ids: Iterable[int]) -> "array[int]":
    if isinstance(ids, array) and ids.typecode == "I":
        return ids
    return array("I", ids if isinstance(ids, list) else list(ids))


def _swapped(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        return ids
    swapped = array("I", ids)
    swapped.byteswap()
    return swapped


class TokenPrefix(DocumentModel, frozen=True):
    """The token ids at the start of a prompt that a document speaks of.

    In JSON `{"count", "packed"}`, `{"count", "digest"}`, `{"count", "ids"}`, or a plain list of ids; it is written back
    in the form it came in. Make one with `pack`, `by_digest` or `listed`; whichever it is, `digest_text`, `token_ids`
    and `covers` answer.
    """

    count: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    """How many ids; for a plain list its length."""
    packed: Packed | None = None
    """Base64 of the ids as little-endian u32."""
    digest: Digest | None = None
    ids: TokenIds | None = None

    @classmethod
    def pack(cls, ids: Iterable[int]) -> Self:
        """With all ids inside, 4 bytes each before base64."""
        raw = pack(ids)
        if len(raw) > 4 * MAX_TOKENS:
            return cls(count=len(raw) // 4)  # refused there, in the model's words
        text = b2a_base64(raw, newline=False).decode()  # of the right form by construction: not judged once more
        return cls.model_construct({"count", "packed"}, count=len(raw) // 4, packed=text)

    @classmethod
    def by_digest(cls, ids: Iterable[int]) -> Self:
        """With 71 characters in place of the ids, for readers that have the prompt anyway."""
        count, digest = counted_digest(ids)
        return cls(count=count, digest=digest)

    @classmethod
    def listed(cls, ids: Iterable[int]) -> Self:
        """As a plain list, the form of vLLM #12957."""
        return cls.model_validate(list(ids))

    def token_ids(self) -> "array[int] | None":
        """The ids as an `array("I")`, or None where only their digest is known."""
        if self.packed is not None:
            return unpack(a2b_base64(self.packed))
        return None if self.ids is None else array("I", self.ids)

    def digest_text(self) -> str:
        """The digest, computed where the document holds the ids themselves."""
        if self.digest is not None:
            return self.digest
        if self.packed is not None:
            return token_digest(a2b_base64(self.packed))
        return token_digest(pack(cast("array[int]", self.token_ids())))

    def covers(self, ids: Iterable[int]) -> bool:
        """Returns True if `ids`, a whole prompt, begins with this prefix."""
        raw = pack(ids)[: 4 * self.count]
        return len(raw) == 4 * self.count and token_digest(raw) == self.digest_text()

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, list):
            ids = _TOKEN_IDS.validate_python(value)
            return cls.model_construct({"ids"}, count=len(ids), ids=ids)
        prefix = handler(value)
        if isinstance(value, dict):  # not one of ours, which was judged when it was made
            prefix._check()
        return prefix

    def _check(self) -> None:
        forms = sum(form is not None for form in (self.packed, self.digest, self.ids))
        if forms != 1:
            raise PydanticCustomError("conflict", "exactly one of packed, digest and ids says which tokens")
        if self.packed is not None and len(self.packed) // 4 * 3 - self.packed[-2:].count("=") != 4 * self.count:
            raise PydanticCustomError("conflict", "the length of packed is not that of count ids")
        if self.ids is not None and len(self.ids) != self.count:
            raise PydanticCustomError("conflict", "ids does not hold count entries")

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> object:
        return handler(self) if "count" in self.model_fields_set else list(self.ids or ())


_TOKEN_IDS: Final = TypeAdapter(TokenIds, config=ConfigDict(strict=True))
