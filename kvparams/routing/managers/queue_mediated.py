"""Through a queue: the client talks to prefill's side, and whichever decode engine has room takes the rest.

To the plan the queue is the fleet's one decode instance, reached over a broker and never full; who really runs the leg,
the queue decides. The plan knows nothing of the broker; a lost leg is a failed leg.
"""

from kvparams.instances import Role
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.signing.signer import Signer

__all__ = ["QueueMediated"]


class QueueMediated(PrefillThenDecode):
    """A `QueueMediated` manager prefills first and queues the result for decode.

    If no prefill engine is left, decode computes the whole request, because a request at this node has nowhere else to
    go.
    """

    roles = (Role.DECODE,)

    def __init__(self, signer: Signer | None = None, options: ManagerOptions | None = None) -> None:
        super().__init__(signer, options, decode_first=False, decode_alone=True)
