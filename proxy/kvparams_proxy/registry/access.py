"""How one engine is spoken to: the API key it wants to see and TLS, read from where an operator said they are.

The one rule: an entry names places; what is read there stays in memory and shows itself to nobody (`secret.py`).
"""

import os
import ssl
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvparams_proxy.registry.problems import Problems
from kvparams_proxy.secret import Secret, SecretError, secret_from_file, secret_from_variable
from kvparams_proxy.tls import EngineTLS, TLSError, engine_context

__all__ = ["NO_ACCESS", "NO_PLACES", "Access", "Places", "load_access"]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the key and the certificates for an engine are. Hashable: many engines share one."""

    key_file: Path | None = None
    """Holds the engine's API key, alone."""
    key_env: str | None = None
    """The environment variable that holds it instead."""
    tls: EngineTLS | None = None
    """For https."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that is named."""
        tls = self.tls or EngineTLS()
        return tuple(path for path in (self.key_file, tls.ca, tls.certificate, tls.key) if path is not None)


@dataclass(frozen=True, slots=True)
class Access:
    """What was read. Equal exactly if an engine would see no difference."""

    key: Secret | None = None
    """The engine's API key."""
    tls: ssl.SSLContext | None = field(default=None, compare=False)
    """For https; None for an engine that is spoken to in plain http."""
    server_name: str | None = None
    """What the engine's certificate must say, where that is not the host in its URL."""
    tls_digest: bytes = field(default=b"", repr=False)
    """Of what the TLS files hold."""


NO_PLACES: Final = Places()
NO_ACCESS: Final = Access()


def load_access(places: Places, where: str, problems: Problems) -> Access:
    """Read what `places` names. Blocks, for milliseconds. What is wrong is added to `problems` and left out."""
    key: Secret | None = None
    try:
        if places.key_file is not None:
            key = secret_from_file(places.key_file)
        elif places.key_env is not None:
            key = secret_from_variable(places.key_env, os.environ)
    except SecretError as error:
        problems.add(where, str(error))
    if places.tls is None:
        return Access(key)
    try:
        context = engine_context(places.tls)
        digest = blake2b(digest_size=16)
        for path in (places.tls.ca, places.tls.certificate, places.tls.key):
            content = b"" if path is None else path.read_bytes()  # its size was bounded a moment ago
            digest.update(b"%d:%b" % (len(content), content))
    except TLSError as error:
        problems.add(where, str(error))
    except OSError as error:  # taken away between the two
        problems.add(where, f"{error.filename} cannot be read: {error.strerror}")
    else:
        return Access(key, context, places.tls.server_name, digest.digest())
    return Access(key)
