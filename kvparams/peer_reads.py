"""Prefill engines that read each other's pages: what one says of itself, and what it is told.

An engine whose answer to a prefill leg has `{"reads": true}` under `PEERS_EXTENSION` in `extensions` lets others read
its pages at `producer.address`, reads theirs where it is told to, and keeps what it has read, since decode reads from
it. A prefill leg with `{"address": "host:port"}` there tells it who may have more of the prompt's prefix than it has
itself.

Reading from a peer is a hint. An engine that does not know it, may not use it, or finds nothing, computes the prompt.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, cast

from pydantic import TypeAdapter, ValidationError

from kvparams.codec import DOCUMENT_KEY
from kvparams.field_types import Address
from kvparams.params import KVTransferParams

__all__ = ["PEERS_EXTENSION", "READS_EXTENSION", "peer_source", "peer_source_members", "readable_address"]

PEERS_EXTENSION: Final = "kvparams.peers"
"""The name in `extensions`."""
READS_EXTENSION: Final[Mapping[str, Mapping[str, object]]] = {PEERS_EXTENSION: {"reads": True}}
"""What an engine that does both adds to its answer."""
_ADDRESS: Final = TypeAdapter[str](Address)


def readable_address(kv_transfer_params: object) -> str | None:
    """Returns the address at which an engine lets others read, if it reads from others, too, or None.

    The answer need not have been checked.
    """
    document = _within(kv_transfer_params, DOCUMENT_KEY)
    if _within(document, "extensions", PEERS_EXTENSION, "reads") is not True:
        return None
    return _address(_within(document, "producer", "address"))


def peer_source_members(address: str) -> dict[str, object]:
    """The members of a prefill leg's document that say so."""
    return {"extensions": {PEERS_EXTENSION: {"address": address}}}


def peer_source(params: KVTransferParams) -> str | None:
    """Returns the address at which a prefill leg may find more of its prefix, or None."""
    return (
        _address((params.extensions or {}).get(PEERS_EXTENSION, {}).get("address"))
        if params.phase == "prefill"
        else None
    )


def _within(value: object, *names: str) -> object:
    for name in names:
        if not isinstance(value, dict):
            return None
        value = cast("dict[str, object]", value).get(name)
    return value


def _address(value: object) -> str | None:
    return value if isinstance(value, str) and _well_formed(value) else None


@lru_cache(maxsize=1024)
def _well_formed(text: str) -> bool:
    try:
        _ADDRESS.validate_python(text)
    except ValidationError:
        return False
    return True
