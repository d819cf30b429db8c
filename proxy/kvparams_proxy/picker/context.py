"""Holds what all streams of a picker share: the fleet, the intake, names of endpoints, and how partners are told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvparams.dialects.shared_keys import DATA_PARALLEL_RANK
from kvparams.instances import Instance, Role
from kvparams.signing.partner_claim import PARTNER_HEADER, PartnerClaim, PartnerSigner
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.ext_proc.messages import ResponseMaker
from kvparams_proxy.fleet.endpoint_names import EndpointNames
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.picker.handlers import PickHandler
from kvparams_proxy.picker.metrics import PickerMetrics
from kvparams_proxy.picker.objectives import OBJECTIVE_HEADER, ObjectiveSource
from kvparams_proxy.picker.pick import Destination, Pick
from kvparams_proxy.picker.settings import PickerSettings
from kvparams_proxy.requests.authentication import APIKeyAuthenticator
from kvparams_proxy.server.prefill_partners import LLM_D_PARTNER_HEADER

__all__ = ["PickerContext"]

_AUTHORIZATION: Final = "authorization"
_RETRY_S: Final = 1
_ANSWERING: Final = (Role.AGGREGATED, Role.DECODE)


@dataclass(frozen=True, slots=True)
class PickerContext:
    """The parts that streams share."""

    settings: PickerSettings
    resources: ExecutionResources
    modes: ActiveModes
    handlers: Mapping[str, PickHandler]
    """By path."""
    keys: APIKeyAuthenticator | None
    registry: Registry
    endpoints: EndpointNames
    metrics: PickerMetrics
    objectives: ObjectiveSource | None
    signer: PartnerSigner | None
    is_draining: Callable[[], bool]

    @property
    def removed(self) -> list[str]:
        """Returns the headers that no engine sees, whatever the client sends."""
        return [] if self.keys is None else [_AUTHORIZATION]

    def objective_priority(self, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
        """Returns the priority of the objective that a request names. Where clients have keys, the keys have it."""
        if self.objectives is None or self.keys is not None:
            return None
        name = next((value for name, value in headers if name == OBJECTIVE_HEADER), None)
        return None if name is None else self.objectives.priority(name.decode("latin-1"))

    def name_endpoints(self, pick: Pick, destination: Destination) -> list[str]:
        """Returns the endpoints that a request may go to, the chosen one first; none where that has no address yet."""
        first = self.endpoints.endpoint(destination.instance)
        if first is None:
            return []
        headers = self._engine_headers(destination.instance)  # whoever is tried next gets the same ones
        others = (
            self.endpoints.endpoint(each)
            for each in pick.alternatives(self.settings.fallbacks)
            if self._engine_headers(each) == headers
        )
        return list(dict.fromkeys([first, *(endpoint for endpoint in others if endpoint is not None)]))

    def request_headers(self, pick: Pick, destination: Destination) -> dict[str, bytes]:
        """Returns the headers that the request gets."""
        headers = {"x-request-id": pick.facts.request_id.encode(), **self._engine_headers(destination.instance)}
        if pick.trace_context is not None:
            name, _, value = pick.trace_context.leg_traceparent_header().rstrip().partition(b": ")
            headers[name.decode()] = value
        if destination.partner is not None:
            headers.update(self._partner_headers(pick, destination.partner))
        return headers

    def count_served(self, served: str | None, named: Sequence[str], maker: ResponseMaker) -> Instance | None:
        """Counts a response by the endpoint that made it. Returns its instance if it is not the first one named."""
        if maker != "engine":
            self.metrics.served["unreached" if maker == "nobody" else "gateway"] += 1
            return None
        if served is None:
            self.metrics.served["unknown"] += 1
            return None
        if served == named[0]:
            self.metrics.served["primary"] += 1
            return None
        self.metrics.served["fallback" if served in named else "unlisted"] += 1
        return self.endpoints.find(served, *_ANSWERING)

    def unnamed_error(self) -> ProxyError:
        """Returns the error of a request whose engine's name has led to no address yet."""
        said = "the address of the chosen engine is not known yet; try again later"
        return ProxyError(503, "service_unavailable", said, code="no_address", retry_after_s=_RETRY_S)

    def _engine_headers(self, instance: Instance) -> dict[str, bytes]:
        """Returns the headers that only this engine gets: its key, and its data-parallel rank."""
        key = self.registry.credentials_for(instance.id).key
        headers = {} if key is None else {_AUTHORIZATION: b"Bearer %b" % key.reveal().encode()}
        if instance.rank is not None:
            headers[DATA_PARALLEL_RANK.name] = b"%d" % instance.rank.index
        return headers

    def _partner_headers(self, pick: Pick, partner: Instance) -> dict[str, bytes]:
        endpoint = self.endpoints.endpoint(partner)
        if endpoint is None:  # the sidecar chooses
            return {}
        self.metrics.partners += 1
        headers: dict[str, bytes] = {}
        if self.signer is not None:
            headers[PARTNER_HEADER] = self.signer.sign(PartnerClaim(pick.facts.request_id, endpoint)).encode()
        if self.settings.partner_dialect != "signed":
            headers[LLM_D_PARTNER_HEADER] = endpoint.encode()
        return headers
