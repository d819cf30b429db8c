"""Damage to a stored page, as a failing disk or a stray write would do it: the negative control.

Only the store's contents are damaged, and no engine takes part in it. A file is changed behind the store's back; in a
server, the page is replaced by a damaged one, as anybody can who reaches that server. An engine's own memory cannot be
reached: a peer that has the same pages, but for one, takes that engine's place.
"""

from array import array
from collections.abc import Generator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Final

from kvparams.pages import HEADER_BYTES
from kvparams.params import KVTransferParams
from kvparams_connectors.store import GetOp, PutOp, ResultCode, open_store
from kvparams_connectors.store_url import StoreURL
from reference_engine.shape import ModelShape

__all__ = ["flip_stored_byte", "forged_peer", "is_stored"]

_LARGEST_PAGE: Final = 1 << 20
_NEEDLE_BYTES: Final = 64


def flip_stored_byte(store_url: str, key: str, *, layers: int = ModelShape().layers) -> None:
    """Flip one bit of one stored V element of the page `key`: a number below 1 becomes an enormous one.

    Args:
        store_url: of the store that has it.
        key: of the page, whose elements have 32 bits.
        layers: that it is of.

    Raises:
        LookupError: the page is not stored, or not to be found in the file.
    """
    page = _read(store_url, key)
    if page is None:
        raise LookupError(f"{key} is not stored")
    at = _exponent_of_v(page, layers)
    start = at - at % _NEEDLE_BYTES
    url = StoreURL.parse(store_url)
    if url.scheme != "file":
        damaged = bytearray(page)
        damaged[at] ^= 0x40
        _replace(store_url, key, damaged)
        return
    path = Path(url.path)
    with path.open("r+b") as file, mmap(file.fileno(), 0) as mapped:
        found = mapped.find(page[start : start + _NEEDLE_BYTES])
        if found < 0:
            raise LookupError(f"{key} was not found in {path}")
        mapped[found + at - start] ^= 0x40


@contextmanager
def forged_peer(
    store_url: str, result: KVTransferParams, key: str, *, layers: int = ModelShape().layers
) -> Generator[KVTransferParams]:
    """Prefill's answer, with a peer in the place of the engine that made the pages: it has them too, `key` damaged.
    Arguments as for `flip_stored_byte`.

    Raises:
        LookupError: a page is not there.
    """
    forger = open_store(store_url)
    try:
        assert result.producer is not None
        assert result.producer.address is not None
        keys = result.load_keys or ()
        forger.hint_location(keys, result.producer.address)
        for one in keys:
            room = memoryview(bytearray(_LARGEST_PAGE))
            (found,) = forger.get([GetOp(one, (room,))]).result()
            if found.code is not ResultCode.OK:
                raise LookupError(f"{one} is not to be read from {result.producer.id}: {found.code.value}")
            page = room[: found.nbytes]
            if one == key:
                page[_exponent_of_v(bytes(page), layers)] ^= 0x40
            forger.put([PutOp(one, (page,))]).result()
        producer = result.producer.model_copy(update={"address": forger.address})
        yield result.model_copy(update={"producer": producer})
    finally:
        forger.close()


def is_stored(store_url: str, key: str) -> bool:
    """Returns True if the page is stored, good or not."""
    return _read(store_url, key) is not None


def _exponent_of_v(page: bytes, layers: int) -> int:
    """Returns the position of the exponent of a stored V element below 1."""
    values = array("f", page[HEADER_BYTES:])
    # The last part is V of the last layer. It depends on the context, so the bytes around it stand in one page only;
    # V of the first layer depends on the token alone and stands in every page that has the token.
    last = len(values) - len(values) // (2 * layers)
    element = next(at for at in range(last, len(values)) if 0.5 <= abs(values[at]) < 1)
    return HEADER_BYTES + 4 * element + 3


def _replace(store_url: str, key: str, page: bytearray) -> None:
    store = open_store(store_url)
    try:
        store.delete([key]).result()
        (result,) = store.put([PutOp(key, (memoryview(page),))]).result()
        if result.code is not ResultCode.OK:
            raise LookupError(f"{key} could not be replaced: {result.code.value}")
    finally:
        store.close()


def _read(store_url: str, key: str) -> bytes | None:
    store = open_store(store_url)
    try:
        page = bytearray(_LARGEST_PAGE)
        (result,) = store.get([GetOp(key, (memoryview(page),))]).result()
        return bytes(page[: result.nbytes]) if result.code is ResultCode.OK else None
    finally:
        store.close()
