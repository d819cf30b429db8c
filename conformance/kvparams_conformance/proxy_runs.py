"""Prepares what a run of a proxy needs: how its profile speaks of KV, and keys to sign with."""

import time
from pathlib import Path
from secrets import token_hex
from typing import Final

from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams_conformance.answers import Carrier

__all__ = ["carrier_of", "write_signing_keys"]

_CARRIERS: Final[dict[str, Carrier]] = {
    "store-proxy": "document",
    "signed": "document",
    "nixl-proxy": "nixl",
    "bootstrap-proxy": "bootstrap",
    "content-proxy": "content",
    "aggregated-proxy": "aggregated",
}
_DAY_S: Final = 86_400


def carrier_of(profile: str) -> Carrier:
    """Returns how the engines of a profile speak of KV."""
    return _CARRIERS[profile]


def write_signing_keys(path: Path) -> Path:
    """Writes a file of three keys: one that has ended, one of today and one of tomorrow. Only the second may sign."""
    now = int(time.time())
    times = ((now - 3 * _DAY_S, now - _DAY_S), (now - _DAY_S, None), (now + _DAY_S, None))
    keys = [SigningKey(f"key-{token_hex(4)}", bytes.fromhex(token_hex(32)), begin, end) for begin, end in times]
    path.touch(0o600)
    path.write_text(SigningKeyring(keys).text())
    return path
