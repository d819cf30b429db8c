"""Endpoints of instances as gateways name them, `ip:port`."""

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvparams.instances import Instance, Role
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.upstream_pools import UpstreamPools

__all__ = ["EndpointNames"]

_PORTS: Final = {"http": 80, "https": 443}
_SPARE: Final = 64


class _URLParts(NamedTuple):
    port: int
    endpoint: str | None
    """None where the host is a name, whose address may change."""


class EndpointNames:
    """Translates between the instances of a fleet and their endpoints."""

    def __init__(self, fleet: Fleet, pools: UpstreamPools) -> None:
        self._fleet = fleet
        self._pools = pools
        self._parts: dict[Instance, _URLParts] = {}
        self._most = _SPARE
        """So many are remembered before those that have left are forgotten."""

    def endpoint(self, instance: Instance) -> str | None:
        """Returns where an instance is reached; None while its name has not led to an address."""
        parts = self._parts.get(instance)
        if parts is None:
            if len(self._parts) >= self._most:
                present = [each.instance for each in self._fleet.members]
                self._parts = {each: self._parts[each] for each in present if each in self._parts}
                self._most = 2 * len(self._parts) + _SPARE
            parts = self._parts[instance] = _split(instance.url)
        if parts.endpoint is not None:
            return parts.endpoint
        pool = self._pools.get(instance.id)
        peers = () if pool is None else pool.peer_addresses
        return _join(peers[-1], parts.port) if peers else None

    def find(self, endpoint: str, *roles: Role) -> Instance | None:
        """Returns the instance that is reached there, or None; of several data-parallel ranks the first.

        `roles`: of whom it must have one; none: any.
        """
        endpoint = _canonical(endpoint)
        for member in self._fleet.members:
            instance = member.instance
            if (not roles or instance.role in roles) and self.endpoint(instance) == endpoint:
                return instance
        return None

    def ids(self, endpoints: Iterable[str], *roles: Role) -> frozenset[str]:
        """Returns the ids of the instances that are reached at these endpoints. `roles`: as for `find`."""
        wanted = frozenset(map(_canonical, endpoints))
        instances = (each.instance for each in self._fleet.members if not roles or each.instance.role in roles)
        return frozenset(each.id for each in instances if self.endpoint(each) in wanted)


def _split(url: str) -> _URLParts:
    """Parses a URL, once for each instance: a request may ask for thousands."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    try:
        address = ip_address(host)
    except ValueError:
        return _URLParts(port, None)
    return _URLParts(port, _join(str(address), port))


def _canonical(endpoint: str) -> str:
    """Returns an endpoint as `EndpointNames` writes it: IPv6 addresses have several forms."""
    host, bracket, rest = endpoint[1:].partition("]")
    if not endpoint.startswith("[") or not bracket:
        return endpoint
    try:
        return f"[{ip_address(host)}]{rest}"
    except ValueError:
        return endpoint


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
