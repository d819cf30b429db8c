"""Names of engines and stores for people who may not see addresses."""

from hashlib import blake2b
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from kvparams.instances import Instance

__all__ = ["former_engine_name", "public_engine_name", "store_name"]


def public_engine_name(instance: Instance) -> str:
    """Returns the id, or another name where the id contains the engine's address.

    Ids of engines that DNS names are made of addresses: see `kvparams_proxy.discovery.dns_provider`.
    """
    hosts = {urlsplit(url).hostname or "" for url in (instance.url, instance.bootstrap or "")}
    spellings = {host for host in (*hosts, *instance.addresses) if _is_address(host)}
    spellings |= {host.translate(_DASHED) for host in spellings}
    if not any(spelling in instance.id.lower() for spelling in spellings):
        return instance.id
    return f"{instance.role}-{_digest(instance.id)}"


def former_engine_name(id: str) -> str:
    """Returns a name for an engine of which only the id is known."""
    return f"engine-{_digest(id)}"


def store_name(name: str) -> str:
    """Returns the name of a store, or another name where it is an address."""
    return f"store-{_digest(name)}" if _is_address(name) else name


_DASHED: Final = str.maketrans(".:", "--")


def _is_address(host: str) -> bool:
    """Returns whether a host tells where it is: an IP address, or a name with a domain."""
    try:
        ip_address(host)
    except ValueError:
        return "." in host
    return True


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=3, person=b"kvparams ui").hexdigest()
