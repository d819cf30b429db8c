"""Describes where pages can be read: `host:port`, and which of these may be asked at all. Pure.

Nothing is looked up to find out whether it is allowed; a name is allowed by that name alone, an address by its network.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from kvparams_connectors.store_url import StoreError

__all__ = ["LOOPBACK_HOSTS", "AllowedPeers", "PeerAddress", "parse_peer_address"]

_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_MOST: Final = 1024


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A host, without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_peer_address(text: str) -> PeerAddress | None:
    """`10.0.0.5:7400`, `[fd00::5]:7400`, `node-5:7400`; None for anything else."""
    match = _PLACE.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65536:
        return None
    return PeerAddress(match[1].strip("[]"), int(match[2]))


class AllowedPeers:
    """Networks, host names and ports."""

    def __init__(self, hosts: str, ports: range = range(1, 65536)) -> None:
        """Parses the list of peers that may be read from.

        Args:
            hosts: networks, addresses and names, separated by commas: `10.0.0.0/8,fd00::/8,node-5`.
            ports: the ports that may be contacted.

        Raises:
            StoreError: an entry is no network, address or name, or there are too many entries.
        """
        self._ports: Final = ports
        self._networks: Final[list[IPv4Network | IPv6Network]] = []
        self._names: Final[set[str]] = set()
        given = hosts.split(",")
        if len(given) > _MOST:
            raise StoreError(
                f"peer store: peers has {len(given)} hosts, which are too many; write networks instead: 10.0.0.0/8"
            )
        for one in given:
            try:
                self._networks.append(ip_network(one))
            except ValueError as error:
                # What is made of digits, dots and a slash was meant as a network.
                if not _NAME.fullmatch(one) or not re.search("[A-Za-z]", one):
                    raise StoreError(
                        f"peer store: peers={one!r} is no network, address or name ({error}); write 10.0.0.0/8,node-5"
                    ) from error
                self._names.add(one.lower())

    def __contains__(self, place: PeerAddress) -> bool:
        return place.port in self._ports and self.host(place.host)

    def host(self, host: str) -> bool:
        """Returns whether this host may be asked at some port."""
        try:
            address = ip_address(host)
        except ValueError:
            return host.lower() in self._names
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        return any(address in network for network in self._networks)


LOOPBACK_HOSTS: Final = "127.0.0.0/8,::1/128,localhost"
"""What a store on this machine may ask if it is not told otherwise."""
