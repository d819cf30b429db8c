"""Gives back KV that nobody will fetch: one small request to an engine, after its own request has ended.

The one rule: it is tried once, within a bounded time; what fails is counted as orphaned and ends with its lease.
"""

import logging
from collections.abc import Mapping
from typing import Final

from kvparams.codec import DOCUMENT_KEY, dump_json, parse
from kvparams.dialects import Abandon
from kvparams.jsontext import edit
from kvparams.params import PROTOCOL_VERSION
from kvparams.plan import KVLease
from kvparams.scheduling import Instance, Role
from kvparams_proxy.connection import Exchange
from kvparams_proxy.fleet import Fleet
from kvparams_proxy.intake import Inbound
from kvparams_proxy.pools import Pools
from kvparams_proxy.upstream import Collect, Head, UpstreamError, UpstreamTimeout
from kvparams_proxy.watch import Watch

__all__ = ["Releases"]

_log: Final = logging.getLogger(__name__)
_TIMEOUT_S: Final = 10.0
_MOST: Final = 256
"""At one time. More would be a flood of its own; the rest ends with its lease."""
_ANSWER_BYTES: Final = 1 << 20
_PATH: Final = b"/v1/kvparams"


class Releases:
    """All that run now."""

    def __init__(self, fleet: Fleet, pools: Pools, watch: Watch) -> None:
        self._fleet = fleet
        self._pools = pools
        self._watch = watch
        self._running: set[_Release] = set()
        self.released = 0
        """Transfers whose KV an engine was told to free, and said yes."""
        self.orphaned = 0
        """Transfers whose KV stays until its lease ends: nobody could be told."""

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self,
        lease: KVLease,
        abandon: Abandon,
        path: bytes,
        inbound: Inbound,
        one_token: Mapping[str, bytes | None],
        headers: bytes,
    ) -> None:
        """Tell an engine. `path` and `headers` are those of the request's legs, `one_token` makes a minimal one."""
        instance = lease.producer if abandon.role is Role.PREFILL else self._anyone(abandon.role)
        pool = self._pools.get(instance.id) if instance is not None else None
        if pool is None or len(self._running) >= _MOST:
            self.orphaned += 1
            return
        if abandon.leg:
            changes = {**one_token, "kv_transfer_params": abandon.native}
            request = pool.request(path, headers, edit(inbound.body, inbound.spans, changes))
        else:
            request = pool.request(_PATH, headers, _release_body(lease, inbound))
        release = _Release(self)
        self._running.add(release)
        self._watch.start(release, _TIMEOUT_S)
        release.exchange = pool.exchange(request, Collect(_ANSWER_BYTES, release.ended), once=abandon.leg)

    def ended(self, release: "_Release", well: bool) -> None:
        """For one of them."""
        self._watch.stop(release)
        self._running.discard(release)
        if well:
            self.released += 1
        else:
            self.orphaned += 1

    def _anyone(self, role: Role) -> Instance | None:
        ready = [member for member in self._fleet.members if member.instance.role is role and member.ready]
        return min(ready, key=lambda member: member.in_flight).instance if ready else None


class _Release:
    __slots__ = ("_owner", "exchange")

    def __init__(self, owner: Releases) -> None:
        self._owner = owner
        self.exchange: Exchange | None = None

    def expire(self) -> None:
        """It takes too long; for a decode leg that is an abort, which frees the KV as well."""
        if self.exchange is not None:
            self.exchange.abort(UpstreamTimeout("took too long"))

    def ended(self, head: Head, _raw: bytes, error: UpstreamError | None) -> None:
        self.exchange = None
        self._owner.ended(self, error is None and head.status == 200)


def _release_body(lease: KVLease, inbound: Inbound) -> bytes:
    document = {
        "version": PROTOCOL_VERSION,
        "request_id": inbound.facts.request_id,
        "transfer": {"id": lease.transfer_id, "attempt": lease.attempt},
        "phase": "release",
        "mode": "store",
    }
    return b'{"kv_transfer_params":{"%b":%b}}' % (DOCUMENT_KEY.encode(), dump_json(parse(document)))
