"""Reads what one stored value says about itself, for `kvparams store inspect`.

It shows everything but the content, for a page is somebody's prompt.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvparams.page_auth import PAGE_AUTH_METHODS, TenantPageAuthKeys
from kvparams.pages import HeaderClaim, read_claim, verify
from kvparams_connectors.store import GetOp, KVStore, ResultCode
from kvparams_connectors.store_url import StoreError

__all__ = ["InspectedValue", "fetch_value", "inspect_value"]

_DEADLINE_S: Final = 10.0
_MAX_BYTES: Final = 1 << 30
_KEY: Final = re.compile(
    r"kv1\.(?P<namespace>[0-9a-f]{16})\.(?P<chain>[0-9a-f]{64})\.(?P<tokens>[0-9]{1,10})"
    r"\.L(?P<layers>[0-9]{1,5}-[0-9]{1,5})\.H(?P<heads>[0-9]{1,5}-[0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class InspectedValue:
    """Names and values to show, and what is wrong."""

    fields: Sequence[tuple[str, str]]
    problems: Sequence[str]


def fetch_value(store: KVStore, key: str) -> memoryview | None:
    """The whole value of `key`; None if there is none.

    Raises:
        StoreError: the store failed, or the value is larger than anything that a page can be.
    """
    (found,) = store.get([GetOp(key, ())], _DEADLINE_S).result()  # without room: it is told how much is needed
    if found.code is ResultCode.MISS:
        return None
    if found.code not in (ResultCode.OK, ResultCode.TOO_LARGE):
        raise StoreError(f"the lookup of the key ended with {found.code.value}")
    if found.nbytes > _MAX_BYTES:
        raise StoreError(f"the value has {found.nbytes} bytes; values of more than {_MAX_BYTES} bytes are not read")
    target = memoryview(bytearray(found.nbytes))
    (got,) = store.get([GetOp(key, (target,))], _DEADLINE_S).result()
    if got.code is ResultCode.MISS:
        return None
    if got.code is not ResultCode.OK:
        raise StoreError(f"reading the key ended with {got.code.value}")
    return target[: got.nbytes]


def inspect_value(key: str, value: memoryview, keys: TenantPageAuthKeys | None = None) -> InspectedValue:
    """Judge a value.

    Args:
        key: under which it was stored.
        value: all of it.
        keys: of the tenant, to check a tag with.
    """
    fields = [("key", key), ("bytes", str(value.nbytes))]
    try:
        claim = read_claim(value)
    except ValueError as error:
        return InspectedValue(fields, [f"no page: {error}"])
    page, part = claim.identity, claim.identity.shard
    methods = {flags: method for method, flags in PAGE_AUTH_METHODS.items()}
    fields += [
        ("namespace", page.namespace.hex()),
        ("chain", page.chain.hex()),
        ("tokens", str(page.tokens)),
        ("layers", f"{part.layer_start} to {part.layer_end - 1}"),
        ("heads", f"{part.head_start} to {part.head_end - 1}"),
        ("payload", f"{page.payload_bytes} bytes"),
        ("tag", methods.get(claim.flags, f"flags {claim.flags:#x}") if claim.flags else "none"),
    ]
    if claim.flags:
        fields.append(("key of the tag", claim.key_id.hex()))
    return InspectedValue(fields, [*_checked(value, claim, keys), *_key_problems(key, claim)])


def _checked(value: memoryview, claim: HeaderClaim, keys: TenantPageAuthKeys | None) -> list[str]:
    refusal = verify(value, claim.identity, keys)
    if refusal is None:
        return []
    if refusal.reason == "locked" and keys is None:
        return ["the tag and the payload were not checked; add --seal-keys FILE"]
    return [f"{refusal.reason}: {refusal.message}"]


def _key_problems(key: str, claim: HeaderClaim) -> list[str]:
    """Returns whether the page is the one that its key names."""
    match = _KEY.fullmatch(key)
    if match is None:
        return ["the key is not a page key"]
    page, part = claim.identity, claim.identity.shard
    said = {
        "namespace": page.namespace[:8].hex(),
        "chain": page.chain.hex(),
        "tokens": str(page.tokens),
        "layers": f"{part.layer_start}-{part.layer_end}",
        "heads": f"{part.head_start}-{part.head_end}",
    }
    return [
        f"the {name} of the key is {match[name][:16]}, but that of the header is {text[:16]}"
        for name, text in said.items()
        if match[name] != text
    ]
