"""A page, verified while it comes: its checksum is computed bit by bit, each while it is in the processor's caches.

Bytes are checksummed early only if the store has said that they are final. The other bytes are checksummed at the end.
So the verdict is always about the final content of the slot.
"""

from collections.abc import Callable

from xxhash import xxh3_64

from kvparams.pages import HEADER_BYTES, PageRefusal

__all__ = ["IncrementalVerifier"]

_Hash = xxh3_64


class IncrementalVerifier:
    """An `IncrementalVerifier` verifies one page; a store calls its `on_progress` and `on_complete`, see `GetOp`."""

    __slots__ = ("_hash", "_hashed", "_judge", "_page", "verified")

    def __init__(self, page: memoryview, judge: Callable[[int, int | None], PageRefusal | None]) -> None:
        """Begins without any bytes.

        Args:
            page: the memory that the page arrives in.
            judge: returns why the bytes are not the requested page, or None. Its arguments are the size of the page and
                the checksum of the payload, or None if that was not computed.
        """
        self._page = page
        self._judge = judge
        self._hash: _Hash | None = None
        self._hashed = 0
        """Up to which byte. No hash: the store has not said that it begins."""
        self.verified: tuple[int, PageRefusal | None] | None = None
        """What has arrived: its size, and why it is refused."""

    def on_progress(self, nbytes: int) -> None:
        """The first so many bytes lie there; 0: all of it begins anew."""
        if not nbytes:
            self._hash, self._hashed, self.verified = xxh3_64(), HEADER_BYTES, None
        elif self._hash is not None and self._hashed < nbytes:
            self._hash.update(self._page[self._hashed : nbytes])
            self._hashed = nbytes

    def on_checksum(self, nbytes: int, checksum: int) -> None:
        """Records that all bytes of the page have arrived, with the checksum of its payload as it was written."""
        self.verified = nbytes, self._judge(nbytes, checksum)

    def on_complete(self, nbytes: int) -> None:
        """Records that all bytes of the page have arrived."""
        checksum = None
        if self._hash is not None and nbytes:
            self.on_progress(nbytes)
            # Another number than that of the bytes that were announced is no reason to trust either.
            checksum = self._hash.intdigest() if self._hashed == nbytes else None
        self.verified = nbytes, self._judge(nbytes, checksum)
        self._hash = None
