"""TLS contexts: the proxy as a server to its clients, and as a client to each engine.

The other side is always verified: there is no setting that turns it off. Faulty files are found at the start,
and the error names the file and the reason.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from kvparams.errors import KVParamsError

__all__ = ["EngineTLSSettings", "ServerTLSSettings", "TLSError", "engine_ssl_context", "server_ssl_context"]

_MAX_BYTES: Final = 8 << 20
"""Of one file; a bundle of every public authority has about 200 KiB."""


class TLSError(KVParamsError, ValueError):
    """A TLS setting cannot work; the message names the file."""


@dataclass(frozen=True, slots=True)
class ServerTLSSettings:
    """TLS settings of the proxy as a server. All files are PEM."""

    certificate: Path
    """The proxy's certificate, then those that lead to its authority."""
    key: Path
    """The certificate's private key, not encrypted."""
    client_ca: Path | None = None
    """Clients must show a certificate of this authority (mTLS). None: clients show none."""


@dataclass(frozen=True, slots=True)
class EngineTLSSettings:
    """TLS settings between the proxy and one engine. All files are PEM. Hashable: engines may share a context."""

    ca: Path | None = None
    """The authorities that may vouch for the engine, instead of those the system trusts."""
    certificate: Path | None = None
    """What the proxy shows the engine (mTLS); `key` belongs to it."""
    key: Path | None = None
    server_name: str | None = None
    """The name that the engine's certificate must carry, where it is not the host in its URL."""

    def __post_init__(self) -> None:
        if (self.certificate is None) is not (self.key is None):
            raise TLSError("an engine's TLS needs both certificate and key, or neither")
        if self.server_name is not None and not 0 < len(self.server_name) <= 253:
            raise TLSError("an engine's TLS server_name must have 1 to 253 characters")


def server_ssl_context(settings: ServerTLSSettings) -> ssl.SSLContext:
    """Returns the context of the listener.

    Raises:
        TLSError: a file is missing, is not what it should be, or two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _common(context)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    _show(context, settings.certificate, settings.key)
    if settings.client_ca is not None:
        _trust(context, settings.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def engine_ssl_context(settings: EngineTLSSettings) -> ssl.SSLContext:
    """Returns the context for connections to an engine. Takes milliseconds where the system's authorities are read.

    Raises:
        TLSError: a file is missing, is not what it should be, or two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies certificate and name from the beginning
    _common(context)
    if settings.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _trust(context, settings.ca)
    if settings.certificate is not None and settings.key is not None:
        _show(context, settings.certificate, settings.key)
    return context


def _common(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])


def _trust(context: ssl.SSLContext, path: Path) -> None:
    text = _read(path, "authority")
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise TLSError(f"TLS authority {path}: the file has no PEM certificate")
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise TLSError(f"TLS authority {path}: {_why(error)}") from error


def _show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    if "-----BEGIN CERTIFICATE-----" not in _read(certificate, "certificate"):
        raise TLSError(f"TLS certificate {certificate}: the file has no PEM certificate")
    if "PRIVATE KEY-----" not in _read(key, "key"):
        raise TLSError(f"TLS key {key}: the file has no PEM private key")
    try:
        context.load_cert_chain(certificate, key, password=_encrypted)
    except _Encrypted:
        raise TLSError(f"TLS key {key}: it is encrypted; give a key without a password") from None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise TLSError(f"TLS key {key}: it does not belong to the certificate {certificate}") from error
        raise TLSError(f"TLS certificate {certificate} with key {key}: {_why(error)}") from error


class _Encrypted(Exception):
    pass


def _encrypted() -> NoReturn:
    """Refuses an encrypted key, for which OpenSSL would wait at the terminal."""
    raise _Encrypted


def _read(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise TLSError(f"TLS {what} {path}: {error.strerror or 'it cannot be read'}") from error
    if len(raw) > _MAX_BYTES:
        raise TLSError(f"TLS {what} {path}: it is larger than {_MAX_BYTES} bytes")
    return raw.decode("ascii", "ignore")  # bundles have comments in other alphabets


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it cannot be used").replace("_", " ").lower()
    return str(error)
