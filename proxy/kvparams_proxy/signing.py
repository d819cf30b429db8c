"""The proxy's signatures: which file of keys, for which pool, and keys that change while it runs.

The one rule: with a file of keys no leg leaves without a signature; what cannot be signed is not sent.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from kvparams.trust.keyfile import FollowedKeyring
from kvparams.trust.keyring import KeyringError
from kvparams.trust.signing import Signer

__all__ = ["FollowedSigner", "Signing"]

_log: Final = logging.getLogger(__name__)


class Signing(NamedTuple):
    """What an operator decides."""

    keys: Path
    """The file (`kvparams signing-keys`)."""
    audience: str
    """The pool of engines that the documents are for: 1 to 256 visible ASCII characters."""


class FollowedSigner:
    """A signer whose keys are those of a file, whatever becomes of it."""

    def __init__(self, signing: Signing, now: Callable[[], float] = time.time) -> None:
        """Read the keys. `now` is in seconds since 1970.

        Raises:
            KeyringError: they cannot be used.
            ValueError: the audience is not one.
        """
        self._keys = FollowedKeyring(signing.keys)
        self.signer: Final = Signer(self._keys.keyring, signing.audience, now)

    def look(self) -> None:
        """Take the keys of the file, if it has changed. What is wrong with it is logged, once. May be called in a
        thread of its own: the keys change all at once."""
        try:
            if self._keys.look():
                self.signer.use(self._keys.keyring)
                _log.warning("signing keys were read again: %d", len(self._keys.keyring))
        except KeyringError as error:
            _log.error("%s; the keys stay as they were", error)

    async def follow(self, every_s: float) -> NoReturn:
        """Look at the file from time to time, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self.look)
