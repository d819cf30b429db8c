"""An ordered list of stores as one: the fastest first, the one that has everything last.

get: each key from the first tier that has it. exists: the first tier, then all others at once for what is missing.
put: into all tiers; with write-through the *last* tier decides what the caller is told, with write-back the *first*
does and the others follow in the background: what is still on its way is lost if the process dies. delete: everywhere.
discard, of what was found damaged: where the bytes came from, and nowhere else. What a slower tier gave is put into the
faster ones in the background, if there is room to stage it.

No thread waits for a tier. A tier's answer, in that tier's thread, asks the next one. So a tier that hangs delays no
other answer, and a job settles only when no tier uses the caller's buffers any more.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvparams_connectors.advice import Advice, advice_from_store
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    Capabilities,
    GetOp,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
    StoreError,
)
from kvparams_connectors.store_url import StoreURL
from kvparams_connectors.stores.guard.store import open_guarded
from kvparams_connectors.stores.tiered.reader import TieredReader
from kvparams_connectors.stores.tiered.settings import TieredSettings
from kvparams_connectors.stores.tiered.staging import StagingArea
from kvparams_connectors.stores.tiered.statistics import TieredCounters, TieredStatistics
from kvparams_connectors.stores.tiered.value_origins import ValueOrigins
from kvparams_connectors.stores.tiered.writer import TieredWriter

if TYPE_CHECKING:
    from kvparams_connectors.arena import Arena

__all__ = ["TieredStatistics", "TieredStore", "open_url"]

_LOGGER: Final = logging.getLogger(__name__)

_MOST_TIERS: Final = 4
_STAGING: Final = 64 << 20
_MOST_RUNNING: Final = 4096
_CLOSE_S: Final = 10.0


class TieredStore(KVStore):
    """Stores in the order in which they are asked; they belong to this one and are closed with it."""

    def __init__(
        self,
        tiers: Sequence[KVStore],
        *,
        write_back: bool = False,
        promote: bool = True,
        staging_bytes: int = _STAGING,
    ) -> None:
        """Takes over the tiers, and allocates the staging memory.

        Args:
            tiers: 2 to 4 stores, the fastest first. Guard those that can fail (`GuardedStore`).
            write_back: whether a put answers after the first tier.
            promote: whether a value that a slower tier gave is put into the faster ones.
            staging_bytes: the size of the memory for values that move in the background, in bytes. A value that finds
                no room there is not promoted; a value that is being put is written through.

        Raises:
            StoreError: there are too few or too many tiers, or one store is two of them.
        """
        if not 2 <= len(tiers) <= _MOST_TIERS:
            raise StoreError(f"tiered store: it has {len(tiers)} tiers; give 2 to {_MOST_TIERS}: l1=...&l2=...")
        if len({id(tier) for tier in tiers}) < len(tiers):
            raise StoreError("tiered store: two of its tiers are the same store")
        self._tiers = tuple(tiers)
        self._moves = StagingArea(staging_bytes if write_back or promote else 1)
        self._counts = TieredCounters(len(tiers))
        self._origins = ValueOrigins(len(tiers))
        self._reads = TieredReader(self._tiers, self._moves, self._counts, self._origins, promote=promote)
        self._writes = TieredWriter(self._tiers, self._moves, self._counts, write_back=write_back)
        self._changed = threading.Condition(threading.Lock())
        self._running = 0
        self._closed = False
        every = [tier.capabilities for tier in tiers]
        self._capabilities = Capabilities(
            persistent=every[-1].persistent,
            shared=every[-1].shared and not write_back,
            max_value_bytes=every[-1].max_value_bytes,
            private_copies=any(not one.shared or one.private_copies for one in every),
            exact_lru=all(one.exact_lru for one in every),
            evicts=every[-1].evicts,
            one_winner=all(one.one_winner for one in every),
            reports_sizes=all(one.reports_sizes for one in every),
        )

    @property
    def capabilities(self) -> Capabilities:
        """The last tier's, for it has everything; with write-back nobody else sees it in time."""
        return self._capabilities

    @property
    def statistics(self) -> TieredStatistics:
        """Returns what was seen until now."""
        return self._counts.statistics()

    @property
    def idle(self) -> bool:
        """Returns whether nothing is on its way in the background."""
        return self._moves.is_idle

    def register(self, arena: "Arena") -> None:
        """Passes on which memory most buffers come from."""
        for tier in self._tiers:
            tier.register(arena)

    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Stores values; see `KVStore.put`."""
        job, admitted = self._begin(len(ops), deadline_s)
        if admitted:
            self._writes.put(job, ops)
        return job

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Reads values; see `KVStore.get`."""
        job, admitted = self._begin(len(ops), deadline_s)
        if admitted:
            self._reads.get(job, ops)
        return job

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Looks keys up; see `KVStore.exists`."""
        job, admitted = self._begin(len(keys), deadline_s)
        if admitted:
            self._reads.exists(job, keys)
        return job

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """OK or MISS only if every tier said one of them: the key is nowhere any more, nor on its way anywhere."""
        job, admitted = self._begin(len(keys), deadline_s)
        if admitted:
            self._writes.delete(job, keys)
        return job

    def advice(self) -> Sequence[Advice]:
        """Every tier's."""
        return [
            replace(advice, finding=f"tier {number}: {advice.finding}")
            for number, tier in enumerate(self._tiers, 1)
            for advice in advice_from_store(tier)
        ]

    @property
    def address(self) -> str | None:
        """The first that a tier has."""
        return next((tier.address for tier in self._tiers if tier.address is not None), None)

    def hint_location(self, keys: Sequence[str], source: str) -> None:
        """Passes a hint on; see `KVStore.hint_location`."""
        for tier in self._tiers:
            tier.hint_location(keys, source)

    def quarantine(self, keys: Sequence[str]) -> None:
        """In the tiers where the bytes are that a get of the key gave last, if they can; the next tier may answer."""
        where = [(key, self._origins.tiers_of(key)) for key in keys]
        for number, tier in enumerate(self._tiers):
            here = [key for key, tiers in where if number in tiers]
            if here:
                tier.quarantine(here)

    def discard(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """There too, and nowhere else: what a faster tier had damaged is no reason to lose a slower one's copy."""
        self.quarantine(keys)
        job, admitted = self._begin(len(keys), deadline_s)
        if admitted:
            self._writes.discard(job, keys, self._origins)
        return job

    def close(self) -> None:
        """Take no more, let what runs and what is being written back end within 10 s, and close the tiers."""
        give_up = time.monotonic() + _CLOSE_S
        with self._changed:
            self._closed = True
            ended = self._changed.wait_for(lambda: not self._running, _CLOSE_S)
        if not self._moves.wait_idle(max(0.0, give_up - time.monotonic())) or not ended:
            _LOGGER.error("a tiered store was closed while a tier was stuck; what was on its way to it may be lost")
        self._reads.close()
        for tier in self._tiers:
            tier.close()

    def _begin(self, count: int, deadline_s: float) -> tuple[Job[Results], bool]:
        """A job, and whether there may be one; then it counts until it has settled."""
        with self._changed:
            admitted = not self._closed and self._running < _MOST_RUNNING
            self._running += admitted
        results = [Result(ResultCode.TIMEOUT if admitted else ResultCode.UNAVAILABLE)] * count
        job = Job(time.monotonic() + deadline_s, results)
        if admitted:
            job.add_settled_callback(self._end)
        else:
            job.finish(results)
        return job, admitted

    def _end(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


def open_url(url: StoreURL) -> KVStore:
    """`tiered:?l1=memory%3A%3Fsize%3D1GiB&l2=valkey%3A%2F%2Fhost%3A6379&write=through`; see `TieredSettings`.

    The tiers' own URLs stand in it percent-encoded, `l1` to `l4`. Every tier but memory is guarded.
    """
    settings = TieredSettings.read(url)
    names = [f"l{number}" for number in range(1, _MOST_TIERS + 1)]
    if url.location or url.path:
        raise StoreError(
            f"tiered store: {url.redacted!r} has a host or path; write tiered:?l1=...&l2=..., with the addresses "
            "in the tiers"
        )
    given = [name for name in names if name in url.settings]
    if given != names[: len(given)] or len(given) < 2:
        raise StoreError(f"tiered store: {url.redacted!r} has {', '.join(given) or 'no tier'}; set l1, l2 and so on")
    parsed = [StoreURL.parse(url.settings[name]) for name in given]
    places: set[tuple[str | None, ...]] = set()
    for name, one in zip(given, parsed, strict=True):
        place = (one.scheme, one.location, one.path, one.settings.get("prefix"))
        if one.scheme == "tiered":
            raise StoreError(f"tiered store: {name} is itself a tiered store; put its tiers into this one")
        if place in places:
            raise StoreError(f"tiered store: {name} is the same store as an earlier tier")
        places.add(place)
    tiers: list[KVStore] = []
    try:
        for one in parsed:
            tiers.append(open_guarded(one.raw))
        return TieredStore(tiers, write_back=settings.write == "back")
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
