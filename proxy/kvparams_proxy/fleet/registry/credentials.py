"""Credentials for one engine: its API key and TLS settings, read from the places that an operator names.

An entry names only places; the secrets read there stay in memory (`secret.py`).
"""

import ssl
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.secret import Secret, SecretError, secret_from_file
from kvparams_proxy.tls import EngineTLSSettings, TLSError, engine_ssl_context

__all__ = ["NO_CREDENTIALS", "NO_CREDENTIAL_SOURCES", "CredentialSources", "EngineCredentials", "load_credentials"]


@dataclass(frozen=True, slots=True)
class CredentialSources:
    """The places of an engine's key and certificates. Hashable: many engines share one."""

    key_file: Path | None = None
    """Holds the engine's API key, alone."""
    tls: EngineTLSSettings | None = None
    """For https."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are named."""
        tls = self.tls or EngineTLSSettings()
        return tuple(path for path in (self.key_file, tls.ca, tls.certificate, tls.key) if path is not None)


@dataclass(frozen=True, slots=True)
class EngineCredentials:
    """The credentials that were read. Two are equal exactly if an engine would see no difference."""

    key: Secret | None = None
    """The engine's API key."""
    tls: ssl.SSLContext | None = field(default=None, compare=False)
    """For https; None for an engine that is spoken to in plain http."""
    server_name: str | None = None
    """What the engine's certificate must say, where that is not the host in its URL."""
    tls_digest: bytes = field(default=b"", repr=False)
    """Of what the TLS files hold."""


NO_CREDENTIAL_SOURCES: Final = CredentialSources()
NO_CREDENTIALS: Final = EngineCredentials()


def load_credentials(places: CredentialSources, where: str, problems: ConfigProblems) -> EngineCredentials:
    """Reads the files that `places` names.

    Blocks for milliseconds. Errors are added to `problems`, and their values left out.
    """
    key: Secret | None = None
    try:
        if places.key_file is not None:
            key = secret_from_file(places.key_file)
    except SecretError as error:
        problems.add(where, str(error))
    if places.tls is None:
        return EngineCredentials(key)
    try:
        context = engine_ssl_context(places.tls)
        digest = blake2b(digest_size=16)
        for path in (places.tls.ca, places.tls.certificate, places.tls.key):
            content = b"" if path is None else path.read_bytes()  # its size was bounded a moment ago
            digest.update(b"%d:%b" % (len(content), content))
    except TLSError as error:
        problems.add(where, str(error))
    except OSError as error:  # taken away between the two
        problems.add(where, f"{error.filename} cannot be read: {error.strerror}")
    else:
        return EngineCredentials(key, context, places.tls.server_name, digest.digest())
    return EngineCredentials(key)
