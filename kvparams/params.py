"""`KVTransferParams`: the one document that proxy, prefill engine, decode engine and store agree on.

Protocol 1.0; `spec/1.0/spec.md` says in words what stands here. Absent and null stay apart. A member that was never set
is not written, one that was set to None is written as null, and no member has a default value on the wire.
"""

from typing import Annotated, Final, Literal, Self, get_args

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from kvparams.field_types import (
    MAX_MEMBERS,
    Address,
    Count,
    DocumentModel,
    Identifier,
    JSONValue,
    Label,
    Name,
    StoreKeys,
    UnixSeconds,
    VisibleText,
    list_to_tuple,
)
from kvparams.tokens import Digest, TokenPrefix

__all__ = [
    "KNOWN_PATHS",
    "PROTOCOL_VERSION",
    "VERSION_FORM",
    "Endpoint",
    "Isolation",
    "KVTransferParams",
    "Lease",
    "Mode",
    "OnLoadFailure",
    "Phase",
    "Signature",
    "Transfer",
    "Usage",
]

PROTOCOL_VERSION: Final = "1.0"
"""What documents made here declare. Any `1.y` is read: a minor version only adds."""

Phase = Literal["prefill", "prefill_result", "decode", "decode_result", "release", "cancel"]
"""Which step of the request's life the document belongs to."""
Mode = Literal["store", "pull", "push", "rendezvous"]
"""How the KV travels: through a store; fetched by decode; sent by prefill; both meet at a third place."""
OnLoadFailure = Literal["recompute", "fail"]

VERSION_FORM: Final = r"^1\.(?:0|[1-9][0-9]{0,3})$"

ExtensionName = Annotated[str, StringConstraints(max_length=128, pattern=r"^[a-z0-9-]+(?:\.[a-z0-9-]+)+$")]
"""A domain name reversed, e.g. `com.example.tiers`."""
Extension = Annotated[dict[Name, JSONValue], Field(max_length=MAX_MEMBERS)]


class Transfer(DocumentModel, frozen=True):
    """A `Transfer` is an attempt to move this prompt's KV.

    A retry is a new transfer with a new `id` and `attempt` one higher.
    """

    id: Identifier
    attempt: Annotated[int, Field(ge=1, le=65_535)]


class Endpoint(DocumentModel, frozen=True):
    """An engine instance. One that was restarted is another instance: the same `id`, another `incarnation`."""

    id: VisibleText
    incarnation: Identifier | None = None
    address: Address | None = None
    """Where others can read its pages, `host:port`. Who reads decides by its own settings whether to go there."""


class Lease(DocumentModel, frozen=True):
    """A `Lease` says for how long the producer keeps the KV for the consumer."""

    ttl_ms: Annotated[int, Field(ge=1, le=86_400_000)]
    """Milliseconds, counted from the moment the document is received; clocks of two machines are never compared."""


class Isolation(DocumentModel, frozen=True):
    """An `Isolation` separates KV that must not be shared, although the token ids are equal."""

    cache_salt: Label | None = None
    lora: Label | None = None
    """The adapter's name, as the engine knows it."""


class Usage(DocumentModel, frozen=True):
    """A `Usage` holds the token counts of the leg that did the work."""

    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    """Prompt tokens that were not computed, wherever their KV came from."""
    computed_tokens: Count | None = None
    """Prompt tokens that were computed."""
    loaded_tokens: Count | None = None
    """Prompt tokens whose KV came from outside the engine."""
    loaded_bytes: Count | None = None
    saved_tokens: Count | None = None
    saved_bytes: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt_tokens is not None and (self.cached_tokens or 0) > self.prompt_tokens:
            raise PydanticCustomError("conflict", "cached_tokens is larger than prompt_tokens")
        return self


class Signature(DocumentModel, frozen=True):
    """A `Signature` vouches for the document and for the native keys beside it: see `kvparams.signing`."""

    alg: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9-]*$")]
    """How `value` is made; `hmac-sha256` is what is known here."""
    kid: Identifier
    """The name of the key."""
    aud: VisibleText
    """For whom it is: the name of a pool of engines."""
    iat: UnixSeconds
    """When it was made."""
    exp: UnixSeconds
    """From when on it is worth nothing."""
    nonce: Identifier
    """Never the same twice under one key."""
    native: Digest
    """Of the native keys beside the document, in canonical form."""
    value: Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[!-~]*$")]
    """Over everything else in the document, in canonical form."""


def _understood(path: str) -> str:
    if path not in KNOWN_PATHS:
        raise PydanticCustomError("critical", "must be understood, but is not known to this version of kvparams")
    return path


CriticalPath = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(_understood)]


class KVTransferParams(DocumentModel, frozen=True):
    """The document itself. It travels in `kv_transfer_params` under the key `kvparams`.

    Read one with `kvparams.parse`, write it with `kvparams.dump` or `kvparams.dump_json`. Made directly, a wrong value
    raises pydantic's `ValidationError`; `parse` raises `InvalidParams`.
    """

    version: Annotated[str, StringConstraints(pattern=VERSION_FORM)]
    request_id: VisibleText
    """The same on both legs: the value of `X-Request-Id`."""
    transfer: Transfer
    phase: Phase
    mode: Mode
    prefix: TokenPrefix | None = None
    """The token ids that the KV belongs to; for disaggregated prefill the whole prompt."""
    store_keys: StoreKeys | None = None
    """Under which keys the receiver shall store the KV."""
    load_keys: StoreKeys | None = None
    """Under which keys KV is to be found; in a prefill result, what was just stored."""
    producer: Endpoint | None = None
    """The instance that computes the KV."""
    consumer: Endpoint | None = None
    """The instance that uses it."""
    lease: Lease | None = None
    on_load_failure: OnLoadFailure | None = None
    """What a consumer does when promised KV cannot be had."""
    isolation: Isolation | None = None
    usage: Usage | None = None
    must_understand: Annotated[tuple[CriticalPath, ...], Field(max_length=64), list_to_tuple(64)] | None = None
    """Dotted paths of members, e.g. `lease.ttl_ms`. A reader that does not know one of them refuses the document."""
    signature: Signature | None = None
    """Who vouches for it."""
    extensions: Annotated[dict[ExtensionName, Extension], Field(max_length=64), list_to_tuple(64)] | None = None
    """What others add, by reversed domain name."""


def _paths(part: type[DocumentModel], parent: str = "") -> frozenset[str]:
    found: set[str] = set()
    for name, field in part.model_fields.items():
        found.add(parent + name)
        for choice in (field.annotation, *get_args(field.annotation)):
            if isinstance(choice, type) and issubclass(choice, DocumentModel):
                found |= _paths(choice, f"{parent}{name}.")
    return frozenset(found)


KNOWN_PATHS: Final = _paths(KVTransferParams)
"""Every member that this version knows, as `must_understand` names it."""
