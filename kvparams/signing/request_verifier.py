"""Verifies the KV parameters of a request before an engine acts on them, with keys from a file and a replay window.

An engine has one verifier for all its requests, and asks it once for each.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from kvparams.params import KVTransferParams
from kvparams.signing.keyring import SigningKeyringError
from kvparams.signing.keyring_file import WatchedKeyring
from kvparams.signing.replay_window import ReplayWindow
from kvparams.signing.verification import CLOCK_SKEW_S, UntrustedParams, UntrustedReason, verify_params

__all__ = ["RequestVerifier"]

_log: Final = logging.getLogger(__name__)
_LOOK_S: Final = 5.0
"""How often the file of keys is looked at."""


class RequestVerifier:
    """See the module. Not for several threads at once."""

    def __init__(
        self,
        keys: Path,
        audience: str,
        now: Callable[[], float],
        *,
        since: float,
        instance: str | None = None,
        skew_s: float = CLOCK_SKEW_S,
    ) -> None:
        """Creates a verifier and reads its keys.

        Args:
            keys: the file; read again when it changes.
            audience: the pool that this engine belongs to.
            now: the time, in seconds since 1970.
            since: when this process began. Whoever was here before may have accepted what was signed until `skew_s`
                after that, so it is refused; it is a warning in the log where that time is not over yet.
            instance: this engine's name in the deployment, where it knows it.
            skew_s: by how much its clock and a proxy's may differ.

        Raises:
            SigningKeyringError: the keys cannot be used.
        """
        self._keys = WatchedKeyring(keys)
        self._audience = audience
        self._now = now
        self._instance = instance
        self._skew_s = skew_s
        self._replay = ReplayWindow(since)
        self.ready: Final = since + skew_s
        """From when on what is signed is let in, in seconds since 1970."""
        if (left := self.ready - now()) > 0:
            _log.warning(
                "signed documents are refused for another %.0f s, because the process before a restart may have "
                "accepted them already",
                left,
            )
        self.refused: dict[UntrustedReason, int] = {}
        """How many were, and why."""

    def verify(
        self, kv_transfer_params: Mapping[str, object] | str | None, *, arrived: float | None = None, part: str = ""
    ) -> KVTransferParams | None:
        """See `kvparams.signing.verification.verify`, which raises what this does."""
        now = self._now()
        try:
            return verify_params(
                kv_transfer_params,
                self._keys.current(now, _LOOK_S, _complain),
                self._audience,
                now,
                self._replay,
                instance=self._instance,
                arrived=arrived,
                part=part,
                skew_s=self._skew_s,
            )
        except UntrustedParams as error:
            self.refused[error.reason] = self.refused.get(error.reason, 0) + 1
            raise


def _complain(error: SigningKeyringError) -> None:
    _log.error("%s; the old keys stay in use", error)
