"""The settings of the endpoint picker beside those of the proxy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from kvparams_proxy.config.discovery_url import KubernetesSource

__all__ = ["PARTNER_DIALECTS", "PartnerDialect", "PickerSettings", "PickerTLS"]

PartnerDialect = Literal["signed", "llm-d", "both"]
"""How a decode engine's sidecar is told who computes the prompt: in a signed header, in llm-d's, or in both."""
PARTNER_DIALECTS: Final[tuple[str, ...]] = get_args(PartnerDialect)


@dataclass(frozen=True, slots=True)
class PickerTLS:
    """The files (PEM) of a server that speaks TLS."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """The authorities that must have issued the data plane's certificate (mTLS)."""


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """The settings that an operator decides."""

    host: str = "127.0.0.1"
    port: int = 9002
    tls: PickerTLS | None = None
    fallbacks: int = 2
    """How many endpoints are named behind the chosen one, for the data plane's retries."""
    partner_dialect: PartnerDialect = "signed"
    objectives: Mapping[str, int] = field(default_factory=dict[str, int])
    """The priorities of requests by the objective that they name."""
    pool: KubernetesSource | None = None
    """The InferencePool whose objectives are read from the Kubernetes API, too."""
    max_streams: int = 10_000
    """Requests at once; the data plane is told that there is no room for more."""
