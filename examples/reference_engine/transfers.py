"""Tracks the engine's transfers and the KV that it keeps for them, for `release` and `cancel`.

An unknown transfer is no error: nothing happens.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvparams.params import KVTransferParams, Phase
from reference_engine.kv import LEASE_MS, KVSharing
from reference_engine.metrics import Metrics
from reference_engine.sequence import Sequence

__all__ = ["Transfers"]

_MAX_KNOWN: Final = 1024
"""Older ones are left to their lease, that is to the store's eviction."""
_POLL_S: Final = 0.001

_Name = tuple[str, str, Phase]


@dataclass(frozen=True, slots=True)
class _Leg:
    sequences: list[Sequence]
    cancel: Callable[[], None]
    """Ends the leg's answer with an error; nothing once it has ended."""
    until_s: float


class Transfers:
    """The legs with a document. Used by the event loop alone."""

    def __init__(self, sharing: KVSharing, metrics: Metrics) -> None:
        self._sharing, self._metrics = sharing, metrics
        self._legs: OrderedDict[_Name, _Leg] = OrderedDict()

    def begin(self, params: KVTransferParams, sequences: list[Sequence], cancel: Callable[[], None]) -> None:
        """A leg runs from now on. Prefill's is known until it is released or its lease is over."""
        now = time.monotonic()
        while self._legs and (len(self._legs) >= _MAX_KNOWN or next(iter(self._legs.values())).until_s < now):
            self._legs.popitem(last=False)
        self._legs[_name(params, params.phase)] = _Leg(sequences, cancel, now + LEASE_MS / 1000)

    def answered(self, params: KVTransferParams) -> None:
        """A leg has its answer, or nobody waits for it any more."""
        if params.phase == "decode":  # it keeps nothing
            self._legs.pop(_name(params, "decode"), None)

    def cancel(self, params: KVTransferParams) -> None:
        """Both legs of the transfer end, if they run here."""
        for phase in ("prefill", "decode"):
            leg = self._legs.pop(_name(params, phase), None)
            if leg is not None and not all(sequence.ended for sequence in leg.sequences):
                leg.cancel()
                self._metrics.transfers.labels("cancelled").inc()

    async def release(self, params: KVTransferParams) -> None:
        """Prefill's KV is not needed any more: its leg ends if it still runs, and what it saved is dropped."""
        leg = self._legs.pop(_name(params, "prefill"), None)
        if leg is None:
            return
        leg.cancel()
        # It is being aborted, if it still ran: this takes at most what a load may take.
        while not all(sequence.ended for sequence in leg.sequences):  # noqa: ASYNC110  set by the engine's thread
            await asyncio.sleep(_POLL_S)
        sessions = [sequence.kv for sequence in leg.sequences if sequence.kv is not None]
        self._metrics.pages_released.inc(await self._sharing.release(sessions))
        self._metrics.transfers.labels("released").inc()


def _name(params: KVTransferParams, phase: Phase) -> _Name:
    return params.request_id, params.transfer.id, phase
