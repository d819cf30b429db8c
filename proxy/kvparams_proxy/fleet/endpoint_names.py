"""Endpoints of instances as gateways name them, `ip:port`."""

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from kvparams.instances import Instance, Role
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.upstream_pools import UpstreamPools

__all__ = ["EndpointNames"]

_PORTS: Final = {"http": 80, "https": 443}
_REMEMBERED: Final = 4096
"""Endpoints: instances that have left do not fill the memory."""


class EndpointNames:
    """Translates between the instances of a fleet and their endpoints."""

    def __init__(self, fleet: Fleet, pools: UpstreamPools) -> None:
        self._fleet = fleet
        self._pools = pools
        self._known: dict[Instance, str] = {}
        """Endpoints of instances whose URL has an address; that of a name may change."""

    def endpoint(self, instance: Instance) -> str | None:
        """Returns where an instance is reached; None while its name has not led to an address."""
        known = self._known.get(instance)
        if known is not None:
            return known
        parts = urlsplit(instance.url)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        try:
            ip_address(host)
        except ValueError:
            pool = self._pools.get(instance.id)
            peers = () if pool is None else pool.peer_addresses
            return _join(peers[-1], port) if peers else None
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        endpoint = self._known[instance] = _join(host, port)
        return endpoint

    def find(self, endpoint: str, *roles: Role) -> Instance | None:
        """Returns the instance that is reached there, or None. `roles`: of whom it must have one; none: any."""
        for member in self._fleet.members:
            instance = member.instance
            if (not roles or instance.role in roles) and self.endpoint(instance) == endpoint:
                return instance
        return None

    def ids(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Returns the ids of the instances that are reached at these endpoints."""
        wanted = frozenset(endpoints)
        members = self._fleet.members
        return frozenset(each.instance.id for each in members if self.endpoint(each.instance) in wanted)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
