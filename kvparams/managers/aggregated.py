"""No split: one engine does both, and nothing is said of KV."""

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

    def legs(
        self, request: RequestFacts, context: Context, sent: Sent | None = None, chosen: Instance | None = None
    ) -> Plan:
        """See `DisaggregatedRequestManager.legs`. `sent`: what the client has of the answer already; `chosen`: who
        answers, where that is known."""
        failed: list[str] = []
        while True:
            if chosen is None:
                chosen = yield Choose(self.roles[0], failed)  # pyright: ignore[reportAssignmentType]
            assert chosen is not None
            instance, chosen = chosen, None
            try:
                yield Leg(instance, {}, answers_client=True, resumed=sent)
            except LegFailed as failure:
                if not failure.another or (failure.begun and failure.sent is None) or not context.may_retry():
                    raise
                failed.append(instance.id)
                sent = failure.sent if failure.begun else sent
            else:
                return
