"""Ids of responses of `/v1/responses` that tell the proxy, and nobody else, which engine has made each.

An engine keeps a stored response in its own memory. The proxy keeps nothing: it gives each answering leg an id that
ends with a keyed digest of tenant and instance. Whoever has the key finds the instance by trying those of the fleet,
so all workers and all proxies of a site can. A tenant finds no response of another one.
"""

from collections.abc import Iterable
from hashlib import blake2s
from hmac import compare_digest
from itertools import count
from secrets import token_bytes, token_hex
from typing import Final

from kvparams.instances import Instance

__all__ = ["ResponseIds"]

_PREFIX: Final = "resp_"
_RUN_BYTES: Final = 10
_COUNTER_CHARS: Final = 12
_TAG_BYTES: Final = 8
"""Nobody guesses so many: an id without keys is known only to those who were told it."""
_TAG_AT: Final = len(_PREFIX) + 2 * _RUN_BYTES + _COUNTER_CHARS
_ID_CHARS: Final = _TAG_AT + 2 * _TAG_BYTES


class ResponseIds:
    """Makes response ids, and finds the instances that they belong to."""

    def __init__(self, secret: bytes | None = None) -> None:
        """`secret` is what the proxies of a site have in common; without it, ids are of this process alone."""
        self._key: Final = token_bytes(32) if secret is None else secret
        self._run: Final = _PREFIX + token_hex(_RUN_BYTES)
        self._numbers: Final = count()

    def make(self, tenant: str, instance_id: str) -> str:
        """Returns a new id for a response that this instance makes for this tenant."""
        unique = f"{self._run}{next(self._numbers):0{_COUNTER_CHARS}x}"
        return unique + self._tag(unique, tenant, instance_id)

    def find(self, response_id: str, tenant: str, instances: Iterable[Instance]) -> Instance | None:
        """Returns the instance that has made this response for this tenant, or None if none of these has."""
        if len(response_id) != _ID_CHARS or not response_id.startswith(_PREFIX):
            return None
        if not response_id.isascii():
            return None
        unique, tag = response_id[:_TAG_AT], response_id[_TAG_AT:]
        return next((each for each in instances if compare_digest(self._tag(unique, tenant, each.id), tag)), None)

    def _tag(self, unique: str, tenant: str, instance_id: str) -> str:
        """Returns the digest. Two lengths are known and stand first, so no two sets of parts are the same text."""
        text = f"{unique}{len(tenant)} {tenant}{instance_id}".encode("utf-8", "surrogatepass")
        return blake2s(text, key=self._key, digest_size=_TAG_BYTES).hexdigest()
