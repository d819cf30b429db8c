"""Builds the parts of the configuration that hold secrets: tokens, keys, certificates."""

import ssl
from importlib.util import find_spec
from pathlib import Path

from kvparams.signing.keyring import SigningKeyringError
from kvparams_proxy.config.options import ProxyOptions
from kvparams_proxy.config.sharing import SharingSettings, share_server
from kvparams_proxy.config.signing import ReloadingSigner, SigningSettings
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.requests.api_keys_file import APIKeysError, read_api_keys
from kvparams_proxy.secret import Secret, SecretError, is_accessible_by_others, secret_from_file
from kvparams_proxy.tls import ServerTLSSettings, TLSError, server_ssl_context

__all__ = [
    "admin_token",
    "check_client_keys",
    "notes_of_open_files",
    "server_tls",
    "sharing_settings",
    "signing_settings",
    "viewer_token",
]


def check_client_keys(path: Path | None, problems: ConfigProblems) -> None:
    if path is not None:
        try:
            read_api_keys(path)
        except APIKeysError as error:
            problems.add("--client-keys", str(error))


def notes_of_open_files(*paths: Path | None) -> list[str]:
    """Returns a note for each file of secrets that other users can read."""
    return [
        f"other users can read {path}; run: chmod 600 {path}"
        for path in dict.fromkeys(paths)
        if path and is_accessible_by_others(path)
    ]


def admin_token(options: ProxyOptions, problems: ConfigProblems) -> Secret | None:
    if options.admin_token_file is None:
        return None
    try:
        return secret_from_file(options.admin_token_file)
    except SecretError as error:
        problems.add("the admin API's token", str(error))
        return None


def viewer_token(options: ProxyOptions, problems: ConfigProblems) -> Secret | None:
    if options.viewer_token_file is None:
        return None
    try:
        return secret_from_file(options.viewer_token_file)
    except SecretError as error:
        problems.add("--viewer-token-file", str(error))
        return None


def server_tls(options: ProxyOptions, problems: ConfigProblems) -> ssl.SSLContext | None:
    certificate, key, authority = (options.tls_certificate, options.tls_key, options.tls_client_ca)
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None:
        problems.add("--tls-certificate, --tls-key", "https needs both")
        return None
    try:
        return server_ssl_context(ServerTLSSettings(certificate, key, authority))
    except TLSError as error:
        problems.add("https for clients", str(error))
        return None


def signing_settings(options: ProxyOptions, problems: ConfigProblems) -> SigningSettings | None:
    path, audience = options.sign_with, options.audience
    if path is None and audience is None:
        return None
    if path is None or audience is None:
        problems.add("--sign-with, --audience", "signed documents need both options")
        return None
    signing = SigningSettings(path, audience)
    try:
        ReloadingSigner(signing)
    except SigningKeyringError as error:
        problems.add("--sign-with", str(error))
    except ValueError as error:
        problems.add("--audience", str(error))
    return signing


def sharing_settings(options: ProxyOptions, problems: ConfigProblems) -> SharingSettings | None:
    keys = options.share_keys or options.sign_with
    if options.share is None:
        if options.share_keys is not None:
            problems.add("--share-keys", "is used with --share URL")
        return None
    if find_spec("valkey") is None:
        problems.add("--share", "needs the client of Valkey: pip install 'kvparams[valkey]'")
        return None
    if keys is None:
        problems.add("--share", "needs keys in common: --share-keys FILE; `kvparams signing-keys create` makes it")
        return None
    try:
        return share_server(options.share, keys)
    except SigningKeyringError as error:
        problems.add("--share-keys", str(error))
        return None
