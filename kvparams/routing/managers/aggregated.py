"""No split: one engine does both, and nothing is said of KV."""

from collections.abc import Mapping

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.managers.encode_step import encode_media
from kvparams.routing.managers.manager_options import ManagerOptions
from kvparams.routing.plan import AcquireInstance, ExecutionContext, Leg, LegFailed, Plan, StreamProgress, as_instance
from kvparams.signing.signer import Signer

__all__ = ["Aggregated"]


class Aggregated:
    """An `Aggregated` manager sends the whole request to one engine.

    Another engine takes over where it fails before its first byte, or continues the stream where its position is known.
    It also runs requests that cannot be split, on an engine of either role: those compute a whole prompt, too. Only
    aggregated engines are told of encodings: others may have no connector that reads them.
    """

    def __init__(
        self, signer: Signer | None = None, options: ManagerOptions | None = None, *, role: Role = Role.AGGREGATED
    ) -> None:
        """`role`: of the engines that answer."""
        self.roles = (role,)

    def legs(
        self,
        request: RequestFacts,
        context: ExecutionContext,
        sent: StreamProgress | None = None,
        chosen: Instance | None = None,
    ) -> Plan:
        """Plans the one leg of the request, as `DisaggregatedRequestManager.legs` describes.

        `sent` is the part of the answer that the client already has; `chosen` is the instance that answers, if known.
        """
        failed: list[str] = []
        encodings: Mapping[str, bytes | None] = {}
        if self.roles[0] is Role.AGGREGATED:
            encodings = yield from encode_media(request, context)
        while True:
            instance = chosen or as_instance((yield AcquireInstance(self.roles[0], failed)))
            chosen = None
            try:
                yield Leg(instance, encodings, answers_client=True, resume_from=sent)
            except LegFailed as failure:
                if (
                    not failure.retryable
                    or (failure.response_started and failure.progress is None)
                    or not context.may_retry()
                ):
                    raise
                failed.append(instance.id)
                sent = failure.progress if failure.response_started else sent
            else:
                return
