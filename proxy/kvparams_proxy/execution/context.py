"""What one request holds and may still do: what its plan asks, and the KV it must not leave behind.

The one rule: KV that is held for it is fetched, given back or counted as orphaned; nothing else becomes of it.
"""

from collections.abc import Mapping, Sequence

from kvparams.dialects import Dialect, Place
from kvparams.lifecycle import Lifecycle
from kvparams.plan import KVLease
from kvparams.scheduling import Instance, Role
from kvparams.trust.pinning import HandoffRefused
from kvparams_proxy.clients.endpoints import Endpoint, one_token
from kvparams_proxy.clients.intake import Inbound
from kvparams_proxy.execution.releases import Held
from kvparams_proxy.execution.resources import Resources
from kvparams_proxy.telemetry.account import Account

__all__ = ["PlanContext"]


class PlanContext:
    """A `kvparams.plan.Context`. Everything is answered at once."""

    __slots__ = (
        "_account",
        "_attempts",
        "_endpoint",
        "_inbound",
        "_life",
        "_resources",
        "_weighs",
        "claimed",
        "credentials",
        "lines",
        "producer",
    )

    def __init__(
        self,
        resources: Resources,
        endpoint: Endpoint,
        inbound: Inbound,
        life: Lifecycle,
        account: Account,
        upstream_headers: bytes,
        authorization: bytes | None,
    ) -> None:
        """
        Args:
            resources: what executions share.
            endpoint: the request's.
            inbound: the request.
            life: where its loads and its lease are kept.
            account: where its retries and transfers are told.
            upstream_headers: see `Execution`.
            authorization: see `Execution`.
        """
        self._resources = resources
        self._endpoint = endpoint
        self._inbound = inbound
        self._life = life
        self._account = account
        self._attempts = 0
        self._weighs = False
        """Whether its plan looks at what is cached."""
        self.lines = b"x-request-id: %b\r\n%b" % (inbound.facts.request_id.encode(), upstream_headers)
        """Headers of every leg."""
        self.credentials = b"" if authorization is None else b"authorization: %b\r\n" % authorization
        """One more, for engines that have no key of their own."""
        self.claimed = False
        """Whether an engine may have been told to fetch the KV that is held."""
        self.producer: Instance | None = None
        """The prefill instance whose KV the leg that was sent last is to fetch."""

    # the plan's questions

    def dialect(self, instance: Instance) -> Dialect:
        """See `Context.dialect`."""
        return self._resources.dialects[instance.dialect]

    def place(self, instance: Instance) -> Place | None:
        """See `Context.place`."""
        return self._resources.fleet.place(instance)

    def pin(self, instance: Instance, said: Mapping[str, object]) -> None:
        """See `Context.pin`."""
        resources = self._resources
        pool = resources.pools.get(instance.id)
        try:
            resources.pins.check(instance, said, () if pool is None else pool.reached)
        except HandoffRefused as refused:
            resources.metrics.handoffs_refused[refused.reason] += 1
            raise

    def source(self, instance: Instance) -> str | None:
        """See `Context.source`."""
        prefixes = self._resources.prefixes
        found = None if prefixes is None else prefixes.source(self._inbound.facts)
        if found is None:
            return None
        other, address = found
        try:
            self.pin(other, {"address": address})
        except HandoffRefused:
            return None
        return address

    def one_token(self) -> Mapping[str, bytes | None]:
        """See `Context.one_token`."""
        inbound = self._inbound
        return one_token(self._endpoint.kind, inbound.body, inbound.spans, inbound.sampling)

    def now(self) -> float:
        """See `Context.now`."""
        return self._resources.loop.time()

    def there(self, role: Role) -> bool:
        """See `Context.there`."""
        return self._resources.fleet.there(role, self._inbound.facts.model)

    def elsewhere(self, instance: Instance, failed: Sequence[str]) -> bool:
        """See `Context.elsewhere`."""
        return self._resources.fleet.elsewhere(instance, self._inbound.facts, failed)

    def cached(self, role: Role) -> Mapping[str, int]:
        """See `Context.cached`."""
        self._weighs = True
        return self._resources.fleet.cached(role, self._inbound.facts)

    def answered(self, route: Sequence[Instance]) -> None:
        """All has gone well; the last of the route has answered."""
        if self._weighs and route[-1].role is Role.DECODE:
            account = self._account
            said = (account.prompt_tokens, account.cached_tokens) if len(route) == 1 else (None, None)
            self._resources.fleet.decoded(route[-1], self._inbound.facts, *said)

    def may_retry(self) -> bool:
        """See `Context.may_retry`: as many as the settings say for one request, and as all of them together may."""
        metrics = self._resources.metrics
        if self._attempts >= self._resources.settings.retries:
            metrics.retries_denied += 1
            return False
        self._attempts += 1
        if not self._resources.retries.take():
            metrics.retries_denied += 1
            return False
        metrics.retries += 1
        self._account.retries += 1
        return True

    def next_transfer(self) -> str:
        """See `Context.next_transfer`."""
        return self._account.transferred(self._resources.new_id())

    def hold(self, lease: KVLease) -> None:
        """See `Context.hold`."""
        held = self._life.lease
        if held is not None and held.transfer_id != lease.transfer_id:
            self.abandon(gone=False)
        self._life.lease = lease
        self.claimed = False

    def give_back(self, instance: Instance) -> None:
        """See `Context.give_back`."""
        self._life.loads.remove(instance)
        self._resources.fleet.release(instance, self._inbound.facts)

    # the executor's

    def claim(self) -> bool:
        """A leg is about to be sent that answers the client; whether an engine may fetch the KV for it only once."""
        lease = self._life.lease
        self.producer = None if lease is None else lease.producer
        if lease is None or self._resources.dialects[lease.producer.dialect].reusable:
            return False
        self.claimed = True
        return True

    def abandon(self, *, gone: bool) -> None:
        """KV that is held for this request will not be fetched. `gone`: because its client has left.

        Where a leg was to fetch it, the engine that was sent this leg has done so, or frees it as it is aborted. Nobody
        else may: the blocks may be another request's by then.
        """
        lease, self._life.lease = self._life.lease, None
        if lease is None or lease.abandon is None:
            return
        releases = self._resources.releases
        if self.claimed:
            releases.orphaned += not gone
        elif self.now() >= lease.until_s:
            releases.orphaned += 1
        else:
            trace = self._account.trace
            headers = self.lines if trace is None else self.lines + trace.line()
            path = self._endpoint.path.encode()
            mode = self._resources.dialects[lease.producer.dialect].mode
            cut = self.one_token()
            releases.start(Held(lease, lease.abandon, mode, path, self._inbound, cut, headers, self.credentials))
