"""Finds engines by name: A and AAAA records, or SRV records, asked again when their time to live ends.

`dnspython` resolves, because the system's resolver (`getaddrinfo`) says neither times to live nor SRV records. A name
that has vanished or that nobody answers for changes nothing: the last good set stays in force.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, cast

from kvparams_proxy.config.discovery_url import DNSSource
from kvparams_proxy.config.spec_parsing import parse_specs
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules
from kvparams_proxy.fleet.registry.registry import Registry

if TYPE_CHECKING:
    from dns.resolver import Answer

__all__ = ["DNSProvider", "FoundAddress", "address_spec"]

_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 30.0
"""Between two questions, whatever the records' time to live is."""
_ANSWER_S: Final = 5.0
_MOST_ADDRESSES: Final = 1000


class FoundAddress(NamedTuple):
    """An address that a name has."""

    host: str
    port: int


class DNSProvider:
    """An `InstanceProvider`."""

    def __init__(self, source: DNSSource, rules: SpecRules) -> None:
        """Reads the system's list of name servers. Blocks.

        `rules`: how entries are read; they may not name credentials.

        Raises:
            ConfigError: dnspython is not installed, or the system names no server.
        """
        try:
            from dns.asyncresolver import Resolver
            from dns.exception import DNSException
        except ImportError:
            raise ConfigError(("dns:// needs dnspython: pip install 'kvparams[dns]'",)) from None
        try:
            self.resolver: Final = Resolver()
        except DNSException as error:
            raise ConfigError((f"no name server is known: {error}",)) from error
        self._failure = DNSException
        self.source: Final = f"dns:{source.name}"
        self._settings = source
        self._rules = replace(rules, may_name_credentials=False)

    def publish_initial(self, registry: Registry) -> None:
        """Publishes nothing: the first question follows at once."""

    async def watch(self, registry: Registry) -> NoReturn:
        """Asks for ever."""
        while True:
            try:
                found, ttl_s = await self._ask()
                registry.publish(self.source, _specs(found, self._settings, self._rules))
            except (self._failure, OSError, ValueError) as error:
                registry.report_unreachable(self.source, f"{type(error).__name__}: {error}"[:200])
                ttl_s = _SHORTEST_S
            await asyncio.sleep(min(max(ttl_s, _SHORTEST_S), _LONGEST_S))

    async def _ask(self) -> tuple[set[FoundAddress], float]:
        """Returns the addresses, at least one, and the seconds for which they hold.

        Raises:
            DNSException: there is no answer.
            ValueError: there are no addresses, or far too many.
        """
        settings = self._settings
        if settings.port is not None:
            found, ttl_s = await self._addresses(settings.name, settings.port)
        else:
            answer = await self.resolver.resolve(settings.name, "SRV", lifetime=_ANSWER_S)
            found, ttl_s = set[FoundAddress](), float(answer.rrset.ttl if answer.rrset is not None else 0)
            for record in list(answer)[:_MOST_ADDRESSES]:
                hosts, host_ttl_s = await self._addresses(str(record.target), int(record.port))
                found |= hosts
                ttl_s = min(ttl_s, host_ttl_s)
        if not found:
            raise ValueError("the name has no addresses")
        if len(found) > _MOST_ADDRESSES:
            raise ValueError(f"the name has more than {_MOST_ADDRESSES} addresses")
        return found, ttl_s

    async def _addresses(self, name: str, port: int) -> tuple[set[FoundAddress], float]:
        answer = await self.resolver.resolve_name(name, lifetime=_ANSWER_S)
        records = cast("Iterable[Answer]", answer.values())
        ttls = [float(one.rrset.ttl) for one in records if one.rrset is not None]
        return {FoundAddress(str(each), port) for each in answer.addresses()}, min(ttls, default=0.0)


def _specs(found: set[FoundAddress], source: DNSSource, rules: SpecRules) -> list[InstanceSpec]:
    return [address_spec(each, source, rules) for each in sorted(found)]


def address_spec(found: FoundAddress, source: DNSSource, rules: SpecRules) -> InstanceSpec:
    """Returns the instance at an address. Its id says the role and the address, so that all proxies call it the same.

    Raises:
        ConfigError: the address or the connector cannot be used.
    """
    address = ip_address(found.host)
    host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
    name = blake2b(str(address).encode(), digest_size=8).hexdigest() if isinstance(address, IPv6Address) else host
    document: dict[str, object] = {
        "id": f"{source.role}-{name}-{found.port}",
        "url": f"http://{host}:{found.port}",
        "role": source.role,
    }
    if source.connector is not None:
        document["connector"] = source.connector
    problems = ConfigProblems()
    specs = parse_specs(document, source.name, rules, problems)
    problems.raise_if_any()
    (spec,) = specs
    return spec
