"""Defines what is known of a request when its head has been read."""

from dataclasses import dataclass

from kvparams.instances import InstanceRestriction
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.authentication import AuthenticatedClient

__all__ = ["Admission"]


@dataclass(slots=True)
class Admission:
    """The admission of a request, or the reason to refuse it."""

    request_id: str
    transfer_id: str
    forwarded: list[bytes]
    """Header lines for the engines."""
    authorization: bytes | None
    """For engines that have no key of their own."""
    client: AuthenticatedClient | None
    error: ProxyError | None
    session_id: str = ""
    """What the client calls its conversation; no engine hears it."""
    partner: InstanceRestriction | None = None
    """The prefill instance that an endpoint picker has chosen."""
