"""The URLs of `--discover`: where engines are found that nobody lists by hand.

kubernetes://NAMESPACE?selector=app%3Dvllm            pods; `resource=endpointslices`, `port=8000`
kubernetes://NAMESPACE?pool=NAME                      the pods of an InferencePool of the Gateway API
dns://prefill.example:8000?role=prefill               A and AAAA records
dns+srv://_vllm._tcp.example?role=decode              SRV records, which say the ports
"""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kvparams.instances import Role
from kvparams.settings_model import did_you_mean, must_be_one_of

__all__ = ["DNSSource", "DiscoverySource", "KubernetesSource", "parse_discovery_url"]

RESOURCES: Final = ("pods", "endpointslices")
_SCHEMES: Final = ("kubernetes", "dns", "dns+srv")
_SHORT_SCHEMES: Final = {"k8s": "kubernetes", "kube": "kubernetes", "srv": "dns+srv"}
_MAX_PORT: Final = 65535
_LONGEST_SELECTOR: Final = 2048
_POOL: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """Pods or endpoint slices of one namespace."""

    selector: str = ""
    """As `kubectl get --selector` takes it."""
    namespace: str | None = None
    """That of the service account or of the kubeconfig's context, if not said."""
    ports: tuple[int, ...] = (8000,)
    """Of engines whose pod does not say it. Behind several ports of one pod are data-parallel ranks."""
    resource: str = RESOURCES[0]
    """One of `RESOURCES`."""
    pool: str | None = None
    """The name of the InferencePool that says selector and ports."""


@dataclass(frozen=True, slots=True)
class DNSSource:
    """The addresses of one name."""

    name: str
    role: Role
    port: int | None
    """None: SRV records say it."""
    connector: str | None = None
    """That of `--connector`, if not said."""


DiscoverySource = KubernetesSource | DNSSource


def parse_discovery_url(text: str) -> DiscoverySource:
    """Parses the URL.

    Raises:
        ValueError: what is wrong and what to write instead.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("must be a URL such as kubernetes://NAMESPACE?selector=app%3Dvllm") from None
    if parts.scheme not in _SCHEMES:
        nearest = did_you_mean(_SHORT_SCHEMES.get(parts.scheme, parts.scheme), _SCHEMES).replace("? ", "://?")
        known = ", ".join(f"{each}://" for each in _SCHEMES)
        raise ValueError(f"must begin with {known}{f'; {nearest}' if nearest else ''}")
    if parts.path.strip("/") or parts.fragment or parts.username is not None:
        raise ValueError("has a host and settings behind ?, and nothing else")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = ("selector", "resource", "port", "pool") if parts.scheme == "kubernetes" else ("role", "connector")
    for name in settings:
        if name not in known:
            raise ValueError(f"{name!r} is no setting of it; {did_you_mean(name, known)}it has {' and '.join(known)}")
    if parts.scheme == "kubernetes":
        return _kubernetes(parts.hostname, settings)
    if not parts.hostname:
        raise ValueError("must name a host, such as dns://prefill.example:8000?role=prefill")
    if (port is None) is (parts.scheme == "dns"):
        raise ValueError("dns:// needs a port, such as dns://prefill.example:8000; with dns+srv:// the records say it")
    try:
        role = Role(must_be_one_of(settings.get("role"), Role))
    except ValueError as error:
        raise ValueError(f"role {error}") from None
    return DNSSource(parts.hostname, role, port, settings.get("connector"))


def _kubernetes(namespace: str | None, settings: dict[str, str]) -> KubernetesSource:
    pool = settings.get("pool")
    if pool is not None:
        if len(settings) > 1:
            raise ValueError("pool says selector and port: write nothing beside it")
        if not _POOL.fullmatch(pool):
            raise ValueError("pool must be the name of an InferencePool")
        return KubernetesSource(namespace=namespace or None, pool=pool)
    selector = settings.get("selector", "")
    if not selector or len(selector) > _LONGEST_SELECTOR or not selector.isprintable():
        raise ValueError("needs selector=LABELS, written as in a URL: selector=app%3Dvllm for app=vllm, or pool=NAME")
    port = settings.get("port", "8000")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) <= _MAX_PORT:
        raise ValueError(f"port must be from 1 to {_MAX_PORT}")
    try:
        resource = must_be_one_of(settings.get("resource", RESOURCES[0]), RESOURCES)
    except ValueError as error:
        raise ValueError(f"resource {error}") from None
    return KubernetesSource(selector, namespace or None, (int(port),), resource)
