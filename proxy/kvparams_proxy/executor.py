"""Owns a request from its first byte to the release of the last thing it holds.

A manager says which legs to run; this runs them, hands the answer to the client, and whatever happens gives back load
and connections. The one rule: nobody else in the proxy starts, aborts or ends a leg.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final, cast

from kvparams.coordination import Leg, LegAnswer, RequestManager
from kvparams.dialects import Dialect, HandoffMissing, NotSplittable
from kvparams.errors import InvalidParams, JSONTextError
from kvparams.jsontext import edit
from kvparams.scheduling import Instance, Role
from kvparams_proxy.connection import Exchange
from kvparams_proxy.corrections import Corrections, load_answer, prompt_details
from kvparams_proxy.downstream import Downstream
from kvparams_proxy.errors import ProxyError, engine_refusal
from kvparams_proxy.fleet import Fleet
from kvparams_proxy.intake import Inbound
from kvparams_proxy.metrics import Metrics
from kvparams_proxy.pool import Pool
from kvparams_proxy.relay import Ended, Relay
from kvparams_proxy.settings import Settings
from kvparams_proxy.upstream import Collect, Head, UpstreamError, UpstreamFull, UpstreamTimeout
from kvparams_proxy.watch import Watch

__all__ = ["Execution", "Resources"]

_log: Final = logging.getLogger(__name__)
_JSON: Final = b"content-type: application/json\r\n"


class ClientGone(Exception):
    """The client left; nobody is there to be told anything."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What executions share."""

    loop: asyncio.AbstractEventLoop
    fleet: Fleet
    manager: RequestManager
    dialects: Mapping[str, Dialect]
    pools: Mapping[str, Pool]
    """By instance id."""
    metrics: Metrics
    settings: Settings
    new_id: Callable[[], str]
    """Makes a transfer id, never the same twice."""
    watch: Watch


class Execution:
    """One request being executed. It watches the client and holds at most one exchange at a time."""

    __slots__ = (
        "_begun",
        "_downstream",
        "_exchange",
        "_gone",
        "_held",
        "_inbound",
        "_path",
        "_resources",
        "_route",
        "_up",
    )

    def __init__(
        self, resources: Resources, path: bytes, inbound: Inbound, upstream_headers: bytes, downstream: Downstream
    ) -> None:
        """`upstream_headers` are whole lines for both legs, X-Request-Id not among them."""
        self._resources = resources
        self._path = path
        self._inbound = inbound
        self._up = b"x-request-id: %b\r\n%b" % (inbound.facts.request_id.encode(), upstream_headers)
        self._downstream = downstream
        self._exchange: Exchange | None = None
        self._gone = False
        self._held: list[Instance] = []
        self._route: list[Instance] = []
        self._begun = perf_counter()

    async def run(self) -> None:
        """Answer the client, in one way or another. Never raises for what engines or clients do."""
        resources = self._resources
        facts = self._inbound.facts
        self._downstream.watch(self)
        legs = resources.manager.legs(facts, self._inbound.spans, self._choose, self._dialect)
        outcome = "failed"
        try:
            resources.fleet.require(resources.manager.roles, facts.model)
            corrections = Corrections(None)
            leg = next(legs)
            while not leg.answers_client:
                answer, corrections = await self._collect(leg)
                leg = legs.send(answer)
            outcome = await self._answer(leg, corrections)
        except ClientGone:
            outcome = "gone"
        except ProxyError as error:
            outcome = self._refuse(error)
        except NotSplittable as error:
            outcome = self._refuse(ProxyError(400, "invalid_request_error", str(error), code="not_supported"))
        except HandoffMissing as error:
            outcome = self._refuse(ProxyError(502, "upstream_error", str(error), code="handoff_missing"))
        except (InvalidParams, JSONTextError):
            message = "the prefill engine's answer is not what the protocol asks for"
            outcome = self._refuse(ProxyError(502, "upstream_error", message, code="bad_prefill_answer"))
        finally:
            legs.close()
            while self._held:
                resources.fleet.release(self._held.pop())
            resources.metrics.outcomes[outcome] += 1

    # the client, as `downstream.Watcher`

    def client_gone(self) -> None:
        """Abort whatever runs for it, now."""
        self._gone = True
        if self._exchange is not None:
            self._exchange.abort(UpstreamError("the client has left"))

    def client_slow(self) -> None:
        """Throttle the engine that writes for it."""
        if self._exchange is not None:
            self._exchange.pause()
            self._resources.watch.stop(self)  # it is the client who is silent now

    def client_ready(self) -> None:
        """Let the engine go on."""
        if self._exchange is not None:
            self._exchange.resume()
            self._heard()

    # what the manager asks for

    def _choose(self, role: Role) -> Instance:
        instance = self._resources.fleet.choose(role, self._inbound.facts)
        self._held.append(instance)
        self._route.append(instance)
        return instance

    def _dialect(self, instance: Instance) -> Dialect:
        return self._resources.dialects[instance.dialect]

    # running legs

    async def _collect(self, leg: Leg) -> tuple[LegAnswer, Corrections]:
        """Run a leg whose answer the manager wants."""
        head, raw = await self._whole_answer(leg, self._resources.settings.prefill_timeout_s)
        if head.status != 200:
            raise engine_refusal(leg.instance.role, head.status, raw)
        document = load_answer(raw)
        params = document.get("kv_transfer_params")
        said = cast("dict[str, object]", params) if isinstance(params, dict) else {}
        return LegAnswer(said), Corrections(prompt_details(document))

    async def _answer(self, leg: Leg, corrections: Corrections) -> str:
        """Run the leg that answers the client; how it went."""
        if self._inbound.stream:
            return await self._stream(leg, corrections)
        head, raw = await self._whole_answer(leg, self._resources.settings.decode_timeout_s)
        return self._send_whole(leg, head, raw, corrections)

    def _send_whole(self, leg: Leg, head: Head, raw: bytes, corrections: Corrections) -> str:
        if head.status != 200:
            raise engine_refusal(leg.instance.role, head.status, raw)
        try:
            body = corrections.whole(raw)
        except JSONTextError as error:
            raise ProxyError(502, "upstream_error", "the decode engine's answer is not JSON") from error
        self._resources.metrics.first_byte.observe(perf_counter() - self._begun)
        self._downstream.head(200, _JSON + self._answer_headers(), len(body))
        self._downstream.body(body)
        self._downstream.end()
        return "ok"

    async def _whole_answer(self, leg: Leg, limit_s: float) -> tuple[Head, bytes]:
        resources = self._resources
        collect = Collect(resources.loop, resources.settings.upstream.answer_bytes)
        begun = perf_counter()
        self._start(leg, collect)
        resources.watch.start(self, limit_s)
        try:
            return await collect.answer
        except UpstreamError as error:
            raise self._failed(leg, error) from error
        finally:
            self._end(leg, begun)

    async def _stream(self, leg: Leg, corrections: Corrections) -> str:
        resources = self._resources
        headers = b"cache-control: no-cache\r\n" + self._answer_headers()
        limit_bytes = resources.settings.upstream.answer_bytes
        heard = partial(resources.watch.start, self, resources.settings.decode_timeout_s)
        relay = Relay(resources.loop, self._downstream, headers, corrections, limit_bytes, heard)
        begun = perf_counter()
        self._start(leg, relay)
        heard()
        try:
            ended = await relay.ended
        finally:
            self._end(leg, begun)
        if relay.begun:
            resources.metrics.first_byte.observe(relay.first_event_at - self._begun)
        if ended is Ended.WELL:
            self._downstream.end()
            return "ok"
        if ended is Ended.ELSEWISE:
            return self._send_whole(leg, relay.head, relay.whole, corrections)
        error = self._failed(leg, relay.error or UpstreamError("the stream ended"))
        if isinstance(error, ClientGone) or ended is Ended.BEFORE_FIRST_EVENT:
            raise error
        self._log_failure(error)
        self._downstream.body(error.event())
        self._downstream.end()
        return "midway"

    def _start(self, leg: Leg, sink: Collect | Relay) -> None:
        if self._gone:
            raise ClientGone
        inbound = self._inbound
        pool = self._resources.pools[leg.instance.id]
        body = edit(inbound.body, inbound.spans, leg.changes)
        self._exchange = pool.exchange(pool.request(self._path, self._up, body), sink)

    def _heard(self) -> None:
        self._resources.watch.start(self, self._resources.settings.decode_timeout_s)

    def expire(self) -> None:
        """For the watch: the engine has been silent for too long."""
        if self._exchange is not None:
            self._exchange.abort(UpstreamTimeout("said nothing for longer than the time-out of its leg"))

    def _end(self, leg: Leg, begun: float) -> None:
        self._resources.watch.stop(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.waiting:  # this task was cancelled: the engine must not go on alone
            exchange.abort(UpstreamError("the request was given up"))
        self._held.remove(leg.instance)
        self._resources.fleet.release(leg.instance)
        self._resources.metrics.legs[leg.instance.role].observe(perf_counter() - begun)

    def _failed(self, leg: Leg, error: UpstreamError) -> ProxyError | ClientGone:
        """What a broken exchange means for the client."""
        if self._gone:
            return ClientGone()
        if isinstance(error, UpstreamFull):
            message = f"the {leg.instance.role} engine is busy: {error.reason}; try again later"
            return ProxyError(503, "service_unavailable", message, code=f"{leg.instance.role}_busy")
        if not error.connected:
            self._resources.fleet.unreachable(leg.instance)
            message = f"the {leg.instance.role} engine cannot be reached: {error.reason}"
            return ProxyError(503, "service_unavailable", message, code=f"{leg.instance.role}_unreachable")
        if isinstance(error, UpstreamTimeout):
            message = f"the {leg.instance.role} engine {error.reason}"
            return ProxyError(504, "timeout", message, code=f"{leg.instance.role}_timeout")
        message = f"the {leg.instance.role} leg failed: {error.reason}"
        return ProxyError(502, "upstream_error", message, code=f"{leg.instance.role}_failed")

    def _refuse(self, error: ProxyError) -> str:
        """Answer with an error. Nothing was answered yet: an error after the first event is one in the stream."""
        if error.status >= 500:
            self._log_failure(error)
        body = error.body()
        self._downstream.head(error.status, _JSON + self._answer_headers(), len(body))
        self._downstream.body(body)
        self._downstream.end()
        return "refused" if error.status < 500 else "failed"

    def _log_failure(self, error: ProxyError) -> None:
        route = " -> ".join(instance.id for instance in self._route) or "no engine"
        said = f"{error.message} ({error.detail[:500]!r})" if error.detail else error.message
        _log.warning("request %s (%s): %s", self._inbound.facts.request_id, route, said)

    def _answer_headers(self) -> bytes:
        lines = b"x-request-id: %b\r\n" % self._inbound.facts.request_id.encode()
        if not self._resources.settings.expose_route:
            return lines
        return lines + b"".join(b"x-kvparams-%b: %b\r\n" % (i.role.encode(), i.id.encode()) for i in self._route)
