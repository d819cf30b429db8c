"""No split: one engine does both, and nothing is said of KV."""

from collections.abc import Sequence

from kvparams.managers.options import Options
from kvparams.plan import Choose, Context, Leg, LegFailed, Plan, Sent
from kvparams.scheduling import Instance, RequestFacts, Role
from kvparams.trust.signing import Signer

__all__ = ["Aggregated"]


class Aggregated:
    """One engine answers; another one where it fails before its first byte, or from where it came where that is known.

    It also runs what cannot be split, on an engine of either role: those compute a whole prompt, too.
    """

    def __init__(
        self, signer: Signer | None = None, options: Options | None = None, *, role: Role = Role.AGGREGATED
    ) -> None:
        """`role`: of the engines that answer."""
        self.roles = (role,)

    def legs(self, request: RequestFacts, context: Context, sent: Sent | None = None, near: Sequence[str] = ()) -> Plan:
        """See `DisaggregatedRequestManager.legs`. `sent`: what the client has of the answer already; `near`: as for
        `Choose`."""
        failed: list[str] = []
        while True:
            instance: Instance = yield Choose(self.roles[0], failed, near=near)  # pyright: ignore[reportAssignmentType]
            try:
                yield Leg(instance, {}, answers_client=True, resumed=sent)
            except LegFailed as failure:
                if not failure.another or (failure.begun and failure.sent is None) or not context.may_retry():
                    raise
                failed.append(instance.id)
                sent = failure.sent if failure.begun else sent
            else:
                return
