"""Gives back KV that nobody will fetch: one small request to an engine, after its own request has ended.

A release is tried once, within a bounded time. If it fails, the KV is counted as orphaned and ends with its lease.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from kvparams.codec import dump_json, parse
from kvparams.dialects.interface import ReleaseRequest
from kvparams.instances import Instance, Role
from kvparams.jsontext.editing import edit
from kvparams.params import KVTransferParams, Mode
from kvparams.routing.pairing import may_pair
from kvparams.routing.plan import KVLease
from kvparams.signing.canonical_json import NotCanonical, canonical_members
from kvparams.signing.document_outline import merge_with_native
from kvparams.signing.signer import NoSigningKey, Signer
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError, UpstreamTimeout

__all__ = ["AbandonedKV", "KVReleaser"]

_log: Final = logging.getLogger(__name__)
_TIMEOUT_S: Final = 10.0
_MOST: Final = 256
"""At one time. More would be a flood of its own."""
_MOST_WAITING: Final = 4096
"""Each holds its request's body; the rest ends with its lease."""
_ANSWER_BYTES: Final = 1 << 20
_PATH: Final = b"/v1/kvparams"


class AbandonedKV(NamedTuple):
    """KV that nobody will fetch, and its request."""

    lease: KVLease
    abandon: ReleaseRequest
    mode: Mode
    """How the KV travels."""
    path: bytes
    """Of the request's legs, as are the next two."""
    inbound: ParsedRequest
    one_token: Mapping[str, bytes | None]
    """Makes a minimal leg of the client's body."""
    headers: bytes
    credentials: bytes
    """The client's, for engines that have no key of their own."""


class KVReleaser:
    """Runs KV releases, a bounded number at a time, and queues the others."""

    def __init__(
        self,
        fleet: Fleet,
        pools: UpstreamPools,
        watch: Deadlines,
        now: Callable[[], float],
        signer: Signer | None = None,
    ) -> None:
        """`signer`: signs what is sent, where documents are signed."""
        self._signer = signer
        self._fleet = fleet
        self._pools = pools
        self._watch = watch
        self._now = now
        self._running: set[_RunningRelease] = set()
        self._waiting: deque[AbandonedKV] = deque()
        self._settled = asyncio.Event()
        self._settled.set()
        self.released = 0
        """Transfers whose KV an engine was told to free, and said yes."""
        self.orphaned = 0
        """Transfers whose KV may stay until its lease ends: nobody could be told, or whoever was to fetch it failed."""

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def leases(self) -> Iterable[KVLease]:
        """The leases of KV whose engines are being told, or will be, to free it."""
        yield from (release.lease for release in self._running)
        yield from (held.lease for held in self._waiting)

    def release(self, held: AbandonedKV) -> None:
        """Releases the KV as soon as few enough releases are running."""
        if len(self._running) < _MOST:
            self._tell(held)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(held)
        else:
            self.orphaned += 1

    def on_release_end(self, release: "_RunningRelease", well: bool) -> None:
        """Starts waiting releases after one has ended."""
        self._watch.stop(release)
        self._running.discard(release)
        if well:
            self.released += 1
        else:
            self.orphaned += 1
        while self._waiting and len(self._running) < _MOST:
            self._tell(self._waiting.popleft())
        if not self:
            self._settled.set()

    async def wait_settled(self) -> None:
        """Waits until no engine is left to be told."""
        await self._settled.wait()

    def _tell(self, held: AbandonedKV) -> None:
        lease, abandon, _, path, inbound, one_token, headers, credentials = held
        instance = self._producer(lease) if abandon.role is Role.PREFILL else self._anyone(abandon.role, held)
        pool = self._pools.get(instance.id) if instance is not None else None
        if pool is None or instance is None or self._now() >= lease.until_s:
            self.orphaned += 1
            return
        if not pool.has_own_key:
            headers += credentials
        params = self._params(held, instance)
        if params is None:
            self.orphaned += 1
            return
        if abandon.leg:
            changes = {**inbound.changes, **one_token, "kv_transfer_params": params}
            request = pool.request(path, headers, edit(inbound.body, inbound.member_spans, changes))
        else:
            request = pool.request(_PATH, headers, b'{"kv_transfer_params":%b}' % params)
        release = _RunningRelease(self, instance.id, lease)
        self._running.add(release)
        self._settled.clear()
        self._watch.start(release, _TIMEOUT_S)
        release.exchange = pool.exchange(request, ResponseCollector(_ANSWER_BYTES, release.ended), once=abandon.leg)

    def _params(self, held: AbandonedKV, instance: Instance) -> bytes | None:
        """Returns the text of `kv_transfer_params`, or None where it should be signed and cannot be."""
        abandon = held.abandon
        if self._signer is None:
            return abandon.native if abandon.leg else merge_with_native(b"{}", dump_json(_document(held, instance)))
        try:
            native = self._signer.encode_native(abandon.native if abandon.leg else b"{}")
            return self._signer.encode_carrier(native, canonical_members(_document(held, instance)))
        except (NoSigningKey, NotCanonical) as error:
            _log.error("%s", error)
            return None

    def _producer(self, lease: KVLease) -> Instance | None:
        """Returns the member that holds the KV, unless it has left: another may have its name."""
        id, url = lease.producer.id, lease.producer.url
        here = (member.instance for member in self._fleet.members)
        return next((instance for instance in here if instance.id == id and instance.url == url), None)

    def _anyone(self, role: Role, held: AbandonedKV) -> Instance | None:
        """Returns the least busy instance that can take the release, suspected only if no other is left.

        It must speak the producer's dialect, serve the model, and be able to be paired with the producer.
        """
        model, producer = held.inbound.facts.model, held.lease.producer
        able = [
            member
            for member in self._fleet.members
            if member.instance.role is role
            and member.instance.dialect == producer.dialect
            and may_pair(member.instance, producer)
            and member.is_usable()
            and member.serves(model)
        ]
        able = [member for member in able if member.available] or able
        busy = Counter(release.instance_id for release in self._running)
        return min(able, key=lambda member: member.in_flight + busy[member.instance.id]).instance if able else None


class _RunningRelease:
    __slots__ = ("_owner", "exchange", "instance_id", "lease")

    def __init__(self, owner: KVReleaser, instance_id: str, lease: KVLease) -> None:
        self._owner = owner
        self.instance_id = instance_id
        self.lease = lease
        self.exchange: ExchangeHandle | None = None

    def expire(self) -> None:
        """Ends a release that takes too long. For a decode leg that is an abort, which frees the KV as well."""
        if self.exchange is not None:
            self.exchange.abort(UpstreamTimeout("took too long"))

    def ended(self, head: ResponseHead, _raw: bytes, error: UpstreamError | None) -> None:
        """Ends the release once its engine has answered or failed."""
        self.exchange = None
        self._owner.on_release_end(self, error is None and head.status == 200)


def _document(held: AbandonedKV, instance: Instance) -> KVTransferParams:
    """Builds the params that release a transfer, or those of a leg that fetches the KV once more. All are of 1.0."""
    lease = held.lease
    members: dict[str, object] = {
        "version": instance.version,
        "request_id": held.inbound.facts.request_id,
        "transfer": {"id": lease.transfer_id, "attempt": lease.attempt},
        "phase": "decode" if held.abandon.leg else "release",
        "mode": held.mode,
    }
    if held.abandon.leg:
        members["consumer"] = {"id": instance.id}
    return parse(members)
