"""Reads which prefill engine an endpoint picker has chosen for a request, beside a decode engine.

Invariant: a header leads only to a prefill engine that this fleet has. Whoever forged one would choose among these.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.instances import InstanceRestriction, Role
from kvparams.signing.partner_claim import PARTNER_HEADER, PartnerClaimError, PartnerVerifier
from kvparams_proxy.config.settings import PrefillPartnerMode, Settings
from kvparams_proxy.config.signing import ReloadingSigner
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.endpoint_names import EndpointNames

__all__ = ["LLM_D_PARTNER_HEADER", "PARTNER_HEADERS", "PrefillPartners", "make_prefill_partners"]

LLM_D_PARTNER_HEADER: Final = "x-prefiller-host-port"
"""llm-d-router pkg/common/routing/common.go."""
_SIGNED: Final = PARTNER_HEADER.encode()
_LLM_D: Final = LLM_D_PARTNER_HEADER.encode()
PARTNER_HEADERS: Final = frozenset((_SIGNED, _LLM_D))
Result = Literal[
    "followed", "missing", "unknown", "format", "key", "signature", "audience", "expired", "request", "replay"
]
_RESULTS: Final[tuple[Result, ...]] = get_args(Result)


class PrefillPartners(Collector):
    """Finds the prefill partners of requests, and counts what became of their headers."""

    def __init__(self, mode: PrefillPartnerMode, verifier: PartnerVerifier | None, endpoints: EndpointNames) -> None:
        """`verifier`: None only where headers are llm-d's."""
        self._mode: Final = mode
        self._verifier = verifier
        self._endpoints = endpoints
        self.results: Final[Counter[Result]] = Counter()

    def find(self, headers: dict[bytes, bytes], request_id: str) -> InstanceRestriction | None:
        """Returns the prefill instance that a request should use; None where the choice is free.

        Args:
            headers: those of `PARTNER_HEADERS` that the request has.
            request_id: the request's.

        Raises:
            ProxyError: 403, a partner is required and none is named that can be believed.
        """
        result, ids = self._judge(headers, request_id)
        self.results[result] += 1
        if result == "followed":
            return InstanceRestriction(ids, is_required=False)
        if self._mode == "require":
            said = f"requests come through the endpoint picker here; the header {PARTNER_HEADER} is {_REASONS[result]}"
            raise ProxyError(403, "permission_error", said, code="partner_required")
        return None

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        family = CounterMetricFamily(
            "kvparams_sidecar_partners",
            "Requests by what became of the header that names their prefill engine: followed, missing, unknown (an "
            "engine that this fleet does not have), or why it was not believed.",
            labels=["result"],
        )
        for result in _RESULTS:
            family.add_metric([result], self.results[result])
        yield family

    def _judge(self, headers: dict[bytes, bytes], request_id: str) -> tuple[Result, frozenset[str]]:
        value = headers.get(_LLM_D if self._verifier is None else _SIGNED)
        if value is None:
            return "missing", frozenset()
        endpoint = value.decode("latin-1")
        if self._verifier is not None:
            try:
                endpoint = self._verifier.verify(endpoint, request_id).prefill
            except PartnerClaimError as error:
                return error.reason, frozenset()
        ids = self._endpoints.ids((endpoint,), Role.PREFILL)  # several where it has data-parallel ranks
        return ("followed", ids) if ids else ("unknown", ids)


_REASONS: Final[dict[Result, str]] = {
    "followed": "valid",
    "missing": "missing",
    "unknown": "about an engine that is not known here",
    **dict.fromkeys(("format", "key", "signature", "audience"), "not valid"),
    "expired": "too old",
    "request": "another request's",
    "replay": "used already",
}


def make_prefill_partners(
    settings: Settings, signing: ReloadingSigner | None, endpoints: EndpointNames
) -> PrefillPartners | None:
    """Returns what finds partners, or None where headers are not read.

    Raises:
        ValueError: claims are to be verified, and there are no keys.
    """
    mode = settings.prefill_partner
    if mode == "off":
        return None
    if mode == "llm-d":
        return PrefillPartners(mode, None, endpoints)
    if signing is None or settings.signing is None:
        raise ValueError("prefill partners are believed by their signature: the settings have no signing keys")
    return PrefillPartners(mode, PartnerVerifier(signing.keyring, settings.signing.audience, time.time), endpoints)
