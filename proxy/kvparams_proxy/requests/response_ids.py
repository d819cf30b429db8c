"""Ids of responses of `/v1/responses` that tell the proxy, and nobody else, which engine has made each.

An engine keeps a stored response in its own memory. The proxy keeps nothing: it gives each answering leg an id that
ends with a keyed digest of tenant and instance. Whoever has the key finds the instance by trying those of the fleet,
so all workers and all proxies of a site can. A tenant finds no response of another one.
"""

from collections.abc import Iterable
from hashlib import blake2s
from secrets import token_bytes, token_hex
from typing import Final

from kvparams.instances import Instance

__all__ = ["ResponseIds"]

_PREFIX: Final = "resp_"
_RANDOM_BYTES: Final = 16
_TAG_BYTES: Final = 8
_ID_CHARS: Final = len(_PREFIX) + 2 * (_RANDOM_BYTES + _TAG_BYTES)


class ResponseIds:
    """Makes response ids, and finds the instances that they belong to."""

    def __init__(self, secret: bytes | None = None) -> None:
        """`secret` is what the proxies of a site have in common; without it, ids are of this process alone."""
        self._key: Final = token_bytes(32) if secret is None else secret

    def make(self, tenant: str, instance_id: str) -> str:
        """Returns a new id for a response that this instance makes for this tenant."""
        random = token_hex(_RANDOM_BYTES)
        return f"{_PREFIX}{random}{self._tag(random, tenant, instance_id)}"

    def find(self, response_id: str, tenant: str, instances: Iterable[Instance]) -> Instance | None:
        """Returns the instance that has made this response for this tenant, or None if none of these has."""
        if len(response_id) != _ID_CHARS or not response_id.startswith(_PREFIX):
            return None
        end = len(response_id) - 2 * _TAG_BYTES
        random, tag = response_id[len(_PREFIX) : end], response_id[end:]
        return next((each for each in instances if self._tag(random, tenant, each.id) == tag), None)

    def _tag(self, random: str, tenant: str, instance_id: str) -> str:
        """Returns the digest. Lengths stand before the parts, so that no two sets of parts are the same text."""
        parts = (random, tenant, instance_id)
        text = b"".join(
            b"%d:%b" % (len(part), part) for part in (each.encode("utf-8", "surrogatepass") for each in parts)
        )
        return blake2s(text, key=self._key, digest_size=_TAG_BYTES).hexdigest()
