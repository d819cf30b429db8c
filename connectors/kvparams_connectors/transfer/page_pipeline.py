"""Seals pages on their way to a store, and verifies what a store gives back.

Every way to a store goes through here: the connector's saves and loads, SGLang's pages, LMCache's and vLLM's chunks.
They differ in where a payload lies and who waits. What a good page is, and what becomes of one that is not, is the
same. Nothing here copies a payload.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvparams.page_auth import TenantPageAuthKeys
from kvparams.pages import (
    HEADER_BYTES,
    REASONS_USABLE_BY_OTHERS,
    PageIdentity,
    PageRefusal,
    PageRefusalReason,
    seal,
    seal_detached,
    unsealed_header,
    verify,
    verify_detached,
)
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results
from kvparams_connectors.transfer.incremental_sealer import IncrementalSealer
from kvparams_connectors.transfer.incremental_verifier import IncrementalVerifier

__all__ = ["PORTION_BYTES", "STORED_CODES", "PagePipeline", "is_answer"]

_LOGGER: Final = logging.getLogger(__name__)

PORTION_BYTES: Final = 8 << 20
"""Engines give a store about this much at a time, and seal the next or verify the last meanwhile."""
STORED_CODES: Final = frozenset({ResultCode.OK, ResultCode.EXISTS})
"""After a put with one of these results the page is in the store."""
_NO_ANSWER: Final = frozenset({ResultCode.UNAVAILABLE, ResultCode.TIMEOUT, ResultCode.DENIED, ResultCode.INTERNAL})


@dataclass(frozen=True, slots=True)
class PagePipeline:
    """Seals, verifies and rejects the pages of one tenant in one store."""

    store: KVStore
    keys: TenantPageAuthKeys | None
    """The tenant's keys, for pages with a tag."""
    deadline_s: float
    """How long deleting a damaged page may take."""
    page_name: str = "page"
    """What a page is called in the log."""
    verifies: bool = True
    """False: whatever the store gives back is used, if it has the right size."""

    def sealed_put(
        self, key: str, identity: PageIdentity, buffers: Sequence[memoryview], payload_checksum: int | None = None
    ) -> PutOp:
        """Seals a page and returns what puts it.

        Args:
            key: of the page in the store.
            identity: what its header says.
            buffers: the page in one piece, or its header and then the pieces of its payload. The payload stands there.
            payload_checksum: of the payload, where the caller knows it.

        Raises:
            ValueError: the buffers have other sizes than the page, or were released.
        """
        header, *payload = buffers if len(buffers) > 1 else (buffers[0][:HEADER_BYTES], buffers[0][HEADER_BYTES:])
        seal_detached(header, payload, identity, self.keys, payload_checksum=payload_checksum)
        return PutOp(key, buffers)

    def put_sealed_when_read(self, key: str, identity: PageIdentity, page: memoryview) -> PutOp:
        """Returns what puts a page that the store has sealed while it moves others, or right before it reads it.

        A page with a tag is sealed at once: that may take as long as the way to the store.
        """
        if self.keys is not None:
            return self.sealed_put(key, identity, (page,))
        header = unsealed_header(identity)
        sealer = IncrementalSealer(page, lambda checksum: seal(page, identity, payload_checksum=checksum))
        return PutOp(key, (page,), sealer.finish, sealer.advance, sealer.finish_copied, header)

    def get_verified_on_arrival(
        self, key: str, identity: PageIdentity, buffer: memoryview
    ) -> tuple[GetOp, IncrementalVerifier | None]:
        """Returns what gets a page, and what verifies it while it arrives.

        Args:
            key: of the page in the store.
            identity: of the page that is asked for.
            buffer: where it goes. It may be longer than the page, so that a longer value is seen as such.

        Returns:
            None as verifier where `why_unusable` looks at the page later: pages with a tag, whose verification takes as
            long as the way from the store, and all pages where nothing is verified.
        """
        if self.keys is not None or not self.verifies:
            return GetOp(key, (buffer,), caller_verifies=self.verifies), None

        def judge(nbytes: int, payload_checksum: int | None) -> PageRefusal | None:
            return verify(buffer[:nbytes], identity, payload_checksum=payload_checksum)

        verifier = IncrementalVerifier(buffer, judge)
        return GetOp(
            key, (buffer,), verifier.on_complete, verifier.on_progress, verifier.on_checksum, caller_verifies=True
        ), verifier

    def why_unusable(
        self, result: Result, identity: PageIdentity, buffers: Sequence[memoryview]
    ) -> ResultCode | PageRefusal | None:
        """Returns why a page that was asked for cannot be used, or None if it lies in `buffers`, whole and unchanged.

        Args:
            result: of the get.
            identity: of the page that was asked for.
            buffers: the get's: one for all of the page, or one for the header and one for the payload.

        Returns:
            The store's result if nothing came, or why what came is refused.
        """
        code, nbytes = result.code, result.nbytes
        if code is not ResultCode.OK and code is not ResultCode.TOO_LARGE:
            return code
        impossible = code is ResultCode.TOO_LARGE or nbytes < HEADER_BYTES
        if impossible or (not self.verifies and nbytes != identity.stored_bytes):
            return PageRefusal("torn", f"{nbytes} of {identity.stored_bytes} bytes")
        if not self.verifies:
            return None
        if len(buffers) == 1:
            header, payload = buffers[0][:HEADER_BYTES], buffers[0][HEADER_BYTES:nbytes]
        else:
            header, payload = buffers[0], buffers[1][: nbytes - HEADER_BYTES]
        return verify_detached(header, payload, identity, self.keys)

    def refuse(self, key: str, refusal: PageRefusal) -> None:
        """Logs that a page is not used, and discards it."""
        _LOGGER.warning("%s %s was not used: %s: %s", self.page_name, key, refusal.reason, refusal.message)
        self.discard(key, refusal.reason)

    def discard(self, key: str, reason: PageRefusalReason) -> None:
        """Deletes a page that was refused, so that a good one can take its place.

        A page that is good for readers with its key or version stays.
        """
        if reason not in REASONS_USABLE_BY_OTHERS:
            self.store.discard([key], self.deadline_s)


def is_answer(results: Results) -> bool:
    """Returns whether a store has answered for every key, if only that it does not have it."""
    return all(result.code not in _NO_ANSWER for result in results)
