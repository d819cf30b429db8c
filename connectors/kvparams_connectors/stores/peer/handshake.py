"""Defines how a connection between peers begins: versions, who runs there, and that both know the secret.

Each side proves with HMAC-SHA256 over its role, both nonces and the run that it has the secret; the secret itself is
never sent. With a secret, no data is sent or accepted before the other side's proof was good. A side without a secret
does not talk to one with a secret.

It proves who began; what follows is neither encrypted nor authenticated. Pages carry checksums, or tags
(`kvparams.page_auth`) where others share the network.
"""

import hmac
import secrets
from struct import Struct
from typing import Final

from kvparams_connectors.stores.peer.channel import PeerChannel
from kvparams_connectors.stores.peer.wire import PeerProtocolError

__all__ = ["RUN_BYTES", "VERSION", "HandshakeRefused", "accept_handshake", "connect_handshake"]

VERSION: Final = 1
RUN_BYTES: Final = 16
_MAGIC: Final = b"KVPR"
_HELLO: Final = Struct("!4sBB16s")
"""Magic, version, whether there is a secret, nonce."""
_WELCOME: Final = Struct("!4sBB16s16s32s")
"""The same, then the run, and a proof."""
_NO_PROOF: Final = bytes(32)


class HandshakeRefused(Exception):
    """The other side answered, and the two do not trust each other."""


def connect_handshake(channel: PeerChannel, secret: bytes) -> bytes:
    """The reader's part; the other side's run.

    Raises:
        HandshakeRefused: only one of the two has a secret, or they are not the same.
        OSError: it is no peer of ours, or it is gone.
    """
    ours = secrets.token_bytes(16)
    channel.send_parts([_HELLO.pack(_MAGIC, VERSION, bool(secret), ours)])
    magic, version, guarded, theirs, run, proof = _WELCOME.unpack(channel.read(_WELCOME.size))
    if magic != _MAGIC:
        raise PeerProtocolError("the other side is not a peer store")
    if version != VERSION:
        raise PeerProtocolError(f"the other side has protocol version {version}, this side has {VERSION}")
    if bool(guarded) != bool(secret):
        raise HandshakeRefused(
            "the other side has a secret, this side has none"
            if guarded
            else "the other side has no secret, this side has one"
        )
    if secret and not hmac.compare_digest(proof, _proof(secret, b"owner", ours, theirs, run)):
        raise HandshakeRefused("the secrets differ")
    channel.send_parts([_proof(secret, b"reader", ours, theirs, run)])
    return run


def accept_handshake(channel: PeerChannel, secret: bytes, run: bytes) -> bool:
    """The part of who is read from; whether the reader may go on. Raises OSError."""
    magic, version, guarded, theirs = _HELLO.unpack(channel.read(_HELLO.size))
    if magic != _MAGIC:
        return False
    ours = secrets.token_bytes(16)
    alike = version == VERSION and bool(guarded) == bool(secret)
    proof = _proof(secret, b"owner", theirs, ours, run) if alike else _NO_PROOF
    channel.send_parts([_WELCOME.pack(_MAGIC, VERSION, bool(secret), ours, run, proof)])
    return alike and hmac.compare_digest(bytes(channel.read(32)), _proof(secret, b"reader", theirs, ours, run))


def _proof(secret: bytes, role: bytes, reader: bytes, owner: bytes, run: bytes) -> bytes:
    return (
        hmac.digest(secret, b"kvparams-peer %d " % VERSION + role + reader + owner + run, "sha256")
        if secret
        else _NO_PROOF
    )
