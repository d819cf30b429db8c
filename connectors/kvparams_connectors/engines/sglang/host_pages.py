"""The memory of SGLang's host pool, page by page: stretches of it, never a copy.

SGLang's description of a page's memory is accepted only if it lies inside the pool's own tensors and follows one step
from page to page. Any other description is refused before a byte is moved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvparams_connectors.engines.sglang.interface import POOL_MODULE, HostKVCache, MHAHostPool, MLAHostPool
from kvparams_connectors.engines.sglang.page_buffers import PageBuffers, flat_bytes
from kvparams_connectors.engines.sglang.page_keys import AttentionKind
from kvparams_connectors.engines.sglang.settings import WHERE
from kvparams_connectors.transfer.cache_layouts import LayoutError

__all__ = ["KINDS", "LAYOUTS", "HostPages", "check_pool", "heads_and_dims"]

KINDS: Final[Mapping[str, AttentionKind]] = {
    "MHATokenToKVPoolHost": "mha",
    "AsymmetricMHATokenToKVPoolHost": "mha",
    "MLATokenToKVPoolHost": "mla",
}
"""Classes of pools whose memory is known here."""
LAYOUTS: Final = {
    "MHATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "AsymmetricMHATokenToKVPoolHost": ("page_first", "page_first_direct"),
    "MLATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct"),
}
"""Their layouts that are known here, as of `--hicache-mem-layout`."""


def check_pool(pool: HostKVCache) -> None:
    """Refuse a pool whose memory is not known here.

    Raises:
        LayoutError: it says what is not known, and what to do.
    """
    kind = type(pool)
    name = kind.__name__
    if name not in KINDS or not kind.__module__.startswith(POOL_MODULE):
        raise LayoutError(
            f"{WHERE}: the host pool {kind.__module__}.{name} is not supported; supported: {', '.join(KINDS)}. "
            "Run this model without this storage backend"
        )
    if pool.layout not in LAYOUTS[name]:
        raise LayoutError(
            f"{WHERE}: the layout {pool.layout!r} of a {name} is not supported; set --hicache-mem-layout to one "
            f"of {', '.join(LAYOUTS[name])}"
        )
    if pool.dcp_size != 1:
        raise LayoutError(f"{WHERE}: decode context parallelism is not supported; remove --dcp-size")
    if pool.shared_allocation_domain is not None or pool.stores_page_envelope:
        raise LayoutError(
            f"{WHERE}: the host pool moves its pages (unified memory), so a store cannot use their memory; remove "
            "--enable-unified-memory"
        )


@dataclass(frozen=True, slots=True)
class _PagePiece:
    """A `_PagePiece` is a contiguous stretch of page 0 in one of the buffers."""

    buffer: int
    offset: int
    nbytes: int
    step: int
    """From a page to the next."""


class HostPages:
    """A `HostPages` gives access to the pages of a pool, and keeps its memory alive.

    A page's pieces are in the order of the pool's tensors and of the addresses in them, which is that of
    `get_data_page`. Any thread may use it.
    """

    def __init__(self, pool: HostKVCache) -> None:
        """Checks the pool's memory.

        Args:
            pool: SGLang's host pool.

        Raises:
            LayoutError: `check_pool` refuses the pool, or SGLang's description does not fit the pool's memory.
        """
        check_pool(pool)
        self._page_size = pool.page_size
        self.pages: Final = pool.page_num
        """How many there are."""
        self._buffers = [_bytes(tensor) for tensor in _tensors(pool)]
        self._pieces = self._learn(pool)
        self.page_bytes: Final = sum(piece.nbytes for piece in self._pieces)
        """Of one page, all pieces together."""
        if self.page_bytes != pool.size_per_token * pool.page_size:
            raise LayoutError(
                f"{WHERE}: a page has {self.page_bytes} bytes, and SGLang counts "
                f"{pool.size_per_token * pool.page_size}: part of it would be lost"
            )

    def places(self, indices: torch.Tensor, expected: int) -> list[PageBuffers]:
        """Returns where the pages of these tokens lie.

        Raises:
            ValueError: they are not whole pages of this pool, as many as are expected.
        """
        size = self._page_size
        if indices.numel() != expected * size:
            raise ValueError(f"{indices.numel()} tokens are not {expected} pages of {size}")
        first = cast("list[int]", indices.reshape(-1)[::size].tolist())  # pyright: ignore[reportUnknownMemberType]
        if any(index % size or not 0 <= index // size < self.pages for index in first):
            raise ValueError("some tokens do not begin a page of this pool")
        return [self._place(index // size) for index in first]

    def _place(self, page: int) -> PageBuffers:
        return [
            self._buffers[piece.buffer][start : start + piece.nbytes]
            for piece in self._pieces
            for start in (piece.offset + page * piece.step,)
        ]

    def _learn(self, pool: HostKVCache) -> list[_PagePiece]:
        """Returns where the pieces are, from what SGLang says of the first, the second and the last page."""
        first, last = self._placed(pool, 0), self._placed(pool, self.pages - 1)
        second = self._placed(pool, min(1, self.pages - 1))
        pieces: list[_PagePiece] = []
        for one, two, end in zip(first, second, last, strict=True):
            piece = _PagePiece(one[0], one[1], one[2], two[1] - one[1])
            expected = (piece.buffer, piece.offset + (self.pages - 1) * piece.step, piece.nbytes)
            if (
                two[0] != one[0]
                or two[2] != one[2]
                or end != expected
                or (self.pages > 1 and piece.step < piece.nbytes)
            ):
                raise LayoutError(f"{WHERE}: the pages of this host pool do not lie evenly in its memory")
            pieces.append(piece)
        for before, after in pairwise(pieces):
            if before.buffer == after.buffer and before.offset + before.nbytes > after.offset:
                raise LayoutError(f"{WHERE}: two pieces of a page overlap")
        return pieces

    def _placed(self, pool: HostKVCache, page: int) -> list[tuple[int, int, int]]:
        """Buffer, offset and length of each piece of a page, sorted."""
        start = page * self._page_size
        addresses, sizes = pool.get_page_buffer_meta(torch.arange(start, start + self._page_size))
        found: list[tuple[int, int, int]] = []
        for address, nbytes in zip(addresses, sizes, strict=True):
            for number, buffer in enumerate(self._buffers):
                offset = address - int(buffer.ctypes.data)
                if offset >= 0 and offset + nbytes <= buffer.nbytes:
                    found.append((number, offset, int(nbytes)))
                    break
            else:
                raise LayoutError(f"{WHERE}: SGLang names memory outside of the host pool")
        return sorted(found)


def heads_and_dims(pool: HostKVCache) -> tuple[int, int, int]:
    """Heads of this rank, and elements per token and head of K and of V."""
    if KINDS[type(pool).__name__] == "mla":
        return 1, cast("MLAHostPool", pool).kv_cache_dim, 0
    heads = cast("MHAHostPool", pool)
    return heads.head_num, heads.head_dim, heads.v_head_dim


def _tensors(pool: HostKVCache) -> Sequence[torch.Tensor]:
    buffers = pool.kv_buffer
    if buffers is None:
        raise LayoutError(f"{WHERE}: the host pool has no memory of its own")
    return [buffers] if isinstance(buffers, torch.Tensor) else list(buffers)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise LayoutError(f"{WHERE}: the host pool's memory is not one stretch of this machine's own")
    return flat_bytes(tensor)
