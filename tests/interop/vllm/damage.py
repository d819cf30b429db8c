"""Changes stored pages behind an engine's back."""

from typing import Final

from kvparams.pages import HEADER_BYTES
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode
from tests.interop.vllm.engines import until

__all__ = ["flip", "is_there", "replace_value", "value_of"]

_MAX_BYTES: Final = 1 << 20


def value_of(store: KVStore, key: str) -> bytearray:
    """What is stored, once it is."""
    is_there(store, key)
    buffer = bytearray(_MAX_BYTES)
    (result,) = store.get([GetOp(key, (memoryview(buffer),))]).result()
    assert result.code is ResultCode.OK
    return buffer[: result.nbytes]


def is_there(store: KVStore, key: str) -> None:
    """Wait until it is stored: engines save behind their answers."""
    until(lambda: store.exists([key]).result()[0].code is ResultCode.OK)


def replace_value(store: KVStore, key: str, value: bytearray) -> None:
    """Put another value in its place."""
    is_there(store, key)
    store.delete([key]).result()
    (result,) = store.put([PutOp(key, (memoryview(value),))]).result()
    assert result.code is ResultCode.OK


def flip(store: KVStore, key: str) -> None:
    """Make one number of a page enormous: a bit of its exponent."""
    value = value_of(store, key)
    at = next(at for at in range(HEADER_BYTES + 4003, len(value), 4) if not value[at] & 0x40)
    value[at] ^= 0x40
    replace_value(store, key, value)
