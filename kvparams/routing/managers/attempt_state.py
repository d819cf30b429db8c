"""Tracks the attempts of one request's plan: the attempt number, its instances, and the instances that failed."""

from collections.abc import Mapping

from kvparams.instances import Instance, RequestFacts
from kvparams.routing.plan import ExecutionContext, LegFailed, StreamProgress

__all__ = ["AttemptState"]


class AttemptState:
    """The state of one plan, whose steps change it."""

    __slots__ = ("attempt", "context", "decode", "encodings", "failed", "prefill", "request", "sent", "transfer")

    def __init__(self, request: RequestFacts, context: ExecutionContext) -> None:
        self.request = request
        self.context = context
        self.transfer = request.transfer_id
        """The transfer id of this attempt; no attempt before it had the same."""
        self.attempt = 1
        """Its number."""
        self.failed: list[str] = []
        """Ids of the instances that have failed the request."""
        self.sent: StreamProgress | None = None
        """What the client has of the answer already."""
        self.prefill: Instance | None = None
        """The prefill instance that is held for the next leg."""
        self.decode: Instance | None = None
        """The decode instance that is held for the next leg."""
        self.encodings: Mapping[str, bytes | None] | None = None
        """The changes that tell prefill legs of encodings; None before the encode step (`encode_for_prefill`)."""

    def begin_next(self) -> None:
        """Another attempt follows, with a transfer id of its own."""
        self.transfer, self.attempt = self.context.next_transfer(), self.attempt + 1

    def release_prefill(self) -> None:
        """Gives back the prefill instance, if one is held."""
        if self.prefill is not None:
            self.context.release_instance(self.prefill)
            self.prefill = None

    def release_decode(self) -> None:
        """Gives back the decode instance, if one is held."""
        if self.decode is not None:
            self.context.release_instance(self.decode)
            self.decode = None

    def may_retry(self, failure: LegFailed) -> bool:
        """Returns True if another attempt may follow the failure of a leg that answers the client, and takes it.

        It is taken from the attempts that the request may have.
        """
        is_stuck = failure.response_started and failure.progress is None
        return failure.retryable and not is_stuck and self.context.may_retry()
