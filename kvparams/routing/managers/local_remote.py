"""Beside an engine: one leg runs on the engine that the request came to, the other on a remote one.

Who is local is the fleet's matter: a sidecar's fleet has one engine of its own role, and the remote ones of the other.
The plans are those of a proxy; what differs is who is chosen first. Whatever happens to the remote leg, the client has
one connection and one answer.
"""

from collections.abc import Mapping
from typing import Final

from kvparams.instances import Role
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.signing.signer import Signer

__all__ = ["LOCAL_MANAGERS", "DecodeLocalPrefillRemote", "PrefillLocalDecodeRemote"]

LOCAL_MANAGERS: Final[Mapping[Role, str]] = {
    Role.PREFILL: "prefill_local_decode_remote",
    Role.DECODE: "decode_local_prefill_remote",
}
"""The name of the one that is meant for beside an engine of each role."""


class PrefillLocalDecodeRemote(PrefillThenDecode):
    """A `PrefillLocalDecodeRemote` manager serves clients that talk to the prefill side.

    The local engine computes the prompt, a remote decode engine is chosen for its result, and the stream of that one
    goes through the local proxy.
    """

    def __init__(self, signer: Signer | None = None, options: ManagerOptions | None = None) -> None:
        super().__init__(signer, options, decode_first=False)


class DecodeLocalPrefillRemote(PrefillThenDecode):
    """The client talks to decode's side: room on its engine is taken first, then a remote prefill engine is asked."""

    def __init__(self, signer: Signer | None = None, options: ManagerOptions | None = None) -> None:
        super().__init__(signer, options, decode_first=True)
