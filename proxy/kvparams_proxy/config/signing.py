"""The proxy's signatures: which file of keys, for which pool, and keys that change while it runs.

With a file of keys no leg leaves without a signature; a leg that cannot be signed is not sent.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from kvparams.signing.keyring import SigningKeyring, SigningKeyringError
from kvparams.signing.keyring_file import WatchedKeyring
from kvparams.signing.signer import Signer

__all__ = ["ReloadingSigner", "SigningSettings"]

_log: Final = logging.getLogger(__name__)


class SigningSettings(NamedTuple):
    """The signing settings that an operator decides."""

    keys_file: Path
    """The file (`kvparams signing-keys`)."""
    audience: str
    """The pool of engines that the documents are for: 1 to 256 visible ASCII characters."""


class ReloadingSigner:
    """A signer whose keys are those of a file, whatever becomes of it."""

    def __init__(self, signing: SigningSettings, now: Callable[[], float] = time.time) -> None:
        """Read the keys. `now` is in seconds since 1970.

        Raises:
            SigningKeyringError: they cannot be used.
            ValueError: the audience is not one.
        """
        self._keys = WatchedKeyring(signing.keys_file)
        self.signer: Final = Signer(self._keys.keyring, signing.audience, now)

    def keyring(self) -> SigningKeyring:
        """Returns the keys of this moment."""
        return self._keys.keyring

    def reload_if_changed(self) -> None:
        """Reloads the keys if their file has changed.

        An error is logged once. May be called in a thread of its own: the keys change all at once.
        """
        try:
            if self._keys.reload_if_changed():
                self.signer.use_keyring(self._keys.keyring)
                _log.warning("signing keys were read again: %d", len(self._keys.keyring))
        except SigningKeyringError as error:
            _log.error("%s; the old keys stay in use", error)

    async def watch_file(self, every_s: float) -> NoReturn:
        """Look at the file from time to time, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self.reload_if_changed)
