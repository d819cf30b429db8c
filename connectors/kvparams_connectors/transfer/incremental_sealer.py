"""A page, sealed while others go: its checksum is computed bit by bit whenever the store has nothing better to do.

The payload must not change from the first checksum step until the page is stored.
"""

from collections.abc import Callable
from typing import Final

from xxhash import xxh3_64

from kvparams.pages import HEADER_BYTES

__all__ = ["IncrementalSealer"]

_STEP_BYTES: Final = 128 << 10
"""Some 10 to 20 us: so long may a socket that takes more again wait for it."""
_Hash = xxh3_64


class IncrementalSealer:
    """An `IncrementalSealer` seals one page; a store calls its `finish` and `advance`, see `PutOp`."""

    __slots__ = ("_hash", "_hashed", "_page", "_seal")

    def __init__(self, page: memoryview, seal: Callable[[int | None], object]) -> None:
        """Begins without a checksum.

        Args:
            page: the header and the payload, which is complete.
            seal: writes the header. Its argument is the checksum of the payload, or None if it was not computed.
        """
        self._page = page
        self._seal = seal
        self._hash: _Hash | None = None
        self._hashed = HEADER_BYTES

    def advance(self) -> bool:
        """Look at a little more of the payload; whether there is more to look at.

        Raises:
            ValueError: the page was released.
        """
        if self._hash is None:
            self._hash = xxh3_64()
        at, self._hashed = self._hashed, min(self._hashed + _STEP_BYTES, self._page.nbytes)
        self._hash.update(self._page[at : self._hashed])
        return self._hashed < self._page.nbytes

    def finish_copied(self, checksum: int) -> None:
        """Write the header of a page whose payload the store has copied and hashed.

        Args:
            checksum: XXH3-64 of the payload that the store has written.

        Raises:
            ValueError: the page was released.
        """
        self._seal(checksum)

    def finish(self) -> None:
        """Look at the rest, and write the header.

        Raises:
            ValueError: the page was released.
        """
        if self._hash is None:
            self._seal(None)
            return
        self._hash.update(self._page[self._hashed :])
        self._hashed = self._page.nbytes
        self._seal(self._hash.intdigest())
