"""Keys against poisoning: who does not have one cannot write a page that is used.

A store that others can write to holds whatever they put there, with a checksum that fits. So a page may carry a tag
over its header and payload, under a key that only the engines have. A key is used for one purpose. The key of a tag is
derived from the tenant's, anew for every page that is sealed; the tenant's is derived from the one in the key file.

    key id      = first 8 bytes of HMAC-SHA256(key, "kvparams key id 1\\n")
    tenant key  = HMAC-SHA256(key, "kvparams tenant 1\\n", then 0 where there is no cache salt, else 1 and it as UTF-8)
    page key    = HMAC-SHA256(tenant key, "kvparams seal 1\\n", u32 flags, the 32 random bytes in the page's header)
    tag         = hmac-sha256:  first 16 bytes of HMAC-SHA256(page key, what is covered)
                  aes-256-gmac: the tag of AES-256-GCM without plaintext, nonce 12 bytes zero, what is covered as
                                associated data

No page key is used for two pages (its 32 bytes are random), so that the fixed nonce is safe for any number of them.
"""

import hmac
from collections.abc import Callable, Iterable, Mapping
from secrets import token_bytes
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from kvparams.errors import KVParamsError

if TYPE_CHECKING:  # the extra `sealed`; imported where it is used
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

__all__ = [
    "KEY_BYTES",
    "KEY_ID_BYTES",
    "PAGE_AUTH_METHODS",
    "SALT_BYTES",
    "TAG_BYTES",
    "PageAuthError",
    "PageAuthKeys",
    "PageAuthMethod",
    "TenantPageAuthKeys",
]

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
SALT_BYTES: Final = 32
TAG_BYTES: Final = 16

PageAuthMethod = Literal["hmac-sha256", "aes-256-gmac"]
PAGE_AUTH_METHODS: Final[Mapping[PageAuthMethod, int]] = MappingProxyType({"hmac-sha256": 0x100, "aes-256-gmac": 0x200})
"""How a tag is made, and the flags of a page that say so. The first needs nothing but Python; the second needs the
extra `sealed` and takes a tenth of the time."""

_MAX_KEYS: Final = 16
_MAX_CHARS: Final = 64 << 10
_KEY_ID_DOMAIN: Final = b"kvparams key id 1\n"
_TENANT_DOMAIN: Final = b"kvparams tenant 1\n"
_SEAL_DOMAIN: Final = b"kvparams seal 1\n"
_NONCE: Final = bytes(12)


class PageAuthError(KVParamsError, ValueError):
    """Keys cannot be used; the message never holds one."""


class PageAuthKeys:
    """The keys of a deployment. The first seals; all of them open.

    To change the key without losing a page: put the new one last everywhere, then first everywhere, and take the old
    one away when its pages have been evicted.
    """

    __slots__ = ("_keys", "_method")

    def __init__(self, keys: Iterable[bytes], method: PageAuthMethod = "aes-256-gmac") -> None:
        """Validates the keys and creates the set.

        Args:
            keys: each of 32 random bytes; 1 to 16 different ones.
            method: how pages are sealed. Both kinds are opened.

        Raises:
            PageAuthError: a key is not one, or the method cannot be had here.
        """
        found = tuple(keys)
        if not 1 <= len(found) <= _MAX_KEYS:
            raise PageAuthError(f"{len(found)} keys; there must be 1 to {_MAX_KEYS}")
        if any(len(key) != KEY_BYTES for key in found):
            raise PageAuthError(f"a key has {KEY_BYTES} bytes")
        if len(set(found)) != len(found):
            raise PageAuthError("the same key stands there twice")
        if method not in PAGE_AUTH_METHODS:
            raise PageAuthError(f"unknown method {method!r}; known: {', '.join(PAGE_AUTH_METHODS)}")
        if method == "aes-256-gmac":
            _aes()
        self._keys = {_derive(key, _KEY_ID_DOMAIN)[:KEY_ID_BYTES]: key for key in found}
        if len(self._keys) != len(found):
            raise PageAuthError("two keys have the same id; make another one")
        self._method: PageAuthMethod = method

    @classmethod
    def parse(cls, text: str, method: PageAuthMethod = "aes-256-gmac") -> "PageAuthKeys":
        """Read the text of a key file: one key a line, as 64 hexadecimal digits; `#` starts a comment.

        `openssl rand -hex 32` makes a line.

        Raises:
            PageAuthError: with the number of the line, never its content.
        """
        if len(text) > _MAX_CHARS:
            raise PageAuthError(f"the key file is longer than {_MAX_CHARS} characters")
        keys: list[bytes] = []
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            if len(content) != 2 * KEY_BYTES or set(content) - set("0123456789abcdefABCDEF"):
                raise PageAuthError(f"line {number} is not a key of {2 * KEY_BYTES} hexadecimal digits")
            keys.append(bytes.fromhex(content))
        return cls(keys, method)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of the keys, the sealing one first; they are no secret."""
        return tuple(key_id.hex() for key_id in self._keys)

    @property
    def method(self) -> PageAuthMethod:
        """Returns the method by which pages are sealed."""
        return self._method

    def for_tenant(self, cache_salt: str | None) -> "TenantPageAuthKeys":
        """Returns the keys that seal and open the pages of one tenant: of the namespaces with this cache salt."""
        context = b"\0" if cache_salt is None else b"\1" + cache_salt.encode()
        return TenantPageAuthKeys(
            {key_id: _derive(key, _TENANT_DOMAIN + context) for key_id, key in self._keys.items()},
            PAGE_AUTH_METHODS[self._method],
        )

    def __repr__(self) -> str:
        return f"PageAuthKeys({len(self._keys)} keys, {self._method})"


class TenantPageAuthKeys:
    """The keys of one tenant; `kvparams.pages` puts them to use. Made by `PageAuthKeys.for_tenant`."""

    __slots__ = ("_keys", "flags", "key_id")

    def __init__(self, keys: Mapping[bytes, bytes], flags: int) -> None:
        """Creates the keys of one tenant.

        Args:
            keys: by their ids; the first one seals.
            flags: of the method by which pages are sealed.
        """
        self._keys = keys
        self.flags: Final = flags
        self.key_id: Final = next(iter(keys))
        """Of the key that seals."""

    def why_unverifiable(self, flags: int, key_id: bytes) -> str | None:
        """Why a tag of this kind by this key cannot be checked here; None if it can."""
        if key_id not in self._keys:
            return f"its tag is by the key {key_id.hex()}, which is not configured here"
        if flags == PAGE_AUTH_METHODS["aes-256-gmac"]:
            try:
                _aes()
            except PageAuthError as error:
                return str(error)
        return None

    def tag(self, flags: int, key_id: bytes, salt: bytes, covered: Iterable[bytes | memoryview]) -> bytes:
        """The tag over `covered`, one part after the other.

        Raises:
            PageAuthError: the method cannot be had here.
            KeyError: there is no such key, or no such method.
        """
        page_key = _derive(self._keys[key_id], _SEAL_DOMAIN + flags.to_bytes(4, "little") + salt)
        if flags == PAGE_AUTH_METHODS["hmac-sha256"]:
            code = hmac.new(page_key, digestmod="sha256")
            for part in covered:
                code.update(part)
            return code.digest()[:TAG_BYTES]
        if flags == PAGE_AUTH_METHODS["aes-256-gmac"]:
            cipher = _aes()(page_key)
            for part in covered:
                cipher.authenticate_additional_data(part)
            cipher.finalize()
            return cipher.tag
        raise KeyError(flags)

    def new_salt(self) -> bytes:
        """32 random bytes, for one page."""
        return token_bytes(SALT_BYTES)

    def __repr__(self) -> str:
        return f"TenantPageAuthKeys({len(self._keys)} keys)"


def _derive(key: bytes, context: bytes) -> bytes:
    return hmac.digest(key, context, "sha256")


def _aes() -> "Callable[[bytes], AEADEncryptionContext]":
    """Returns a function that begins a tag of AES-256-GCM under a key."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise PageAuthError(
            "aes-256-gmac needs the package cryptography: pip install 'kvparams[sealed]', or use hmac-sha256"
        ) from error
    return lambda key: Cipher(algorithms.AES(key), modes.GCM(_NONCE)).encryptor()
