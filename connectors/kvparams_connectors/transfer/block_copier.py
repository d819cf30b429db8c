"""Copies KV from an engine's blocks into slots of the arena, and back.

On the CPU blocks are copied to slots at once. On a device a save is a snapshot: on the engine's own stream the blocks
are gathered into a bounce buffer, so that the engine may launch work that overwrites them as soon as the call returns;
behind that, on a stream of its own, the buffer goes to pinned memory. A load takes the way back on a third stream,
after what the engine had launched when it asked. A reader waits for the event that says that the bytes were written,
and a writer for the event that says that they were read.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple, Protocol

import torch

from kvparams.keys import KVShard
from kvparams_connectors.transfer.devices import CudaDevice, Device, DeviceEvent, DeviceStream
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.layout_copy import (
    BlockRanges,
    HostPage,
    device_gather,
    device_scatter,
    host_gather,
    host_scatter,
)

__all__ = ["BlockCopier", "HostBlockCopier", "PageCopy", "StagedBlockCopier", "make_block_copier"]

_ALIGNMENT: Final = 256
_HOST_BATCH: Final = 8 << 20
"""So many bytes go back to blocks on the CPU at a time, in less than a millisecond: while they do, the end of the wait
for a load is put off."""


class PageCopy(NamedTuple):
    """A `PageCopy` is a range of tokens of one part of a page."""

    unit: KVShard
    start_token: int
    """Position in the sequence of the first token to copy."""
    tokens: int
    """How many; on a save the whole page."""
    page: range
    """The positions that the payload holds."""
    payload: memoryview


class BlockCopier(Protocol):
    """Moves KV between blocks and host memory."""

    batch_size: int
    """How many copies are worth giving to `scatter` at a time."""
    allocate: Callable[[int], memoryview] | None
    """Where the host memory for it comes from; None: anywhere."""
    host: "HostBlockCopier | None"
    """This copier, if blocks lie in the host's memory, so that it copies between them and any other memory."""

    def gather(
        self, block_ids: Sequence[int], copies: Sequence[PageCopy], there: Callable[[int, int], None]
    ) -> DeviceEvent | None:
        """Begin to copy blocks to payloads, which belong to it until the event is done; None: it is done.

        When this returns, whatever the calling thread's stream does next cannot change what is copied. `there` is
        called for each copy whose payload has been written meanwhile, with its index and XXH3-64 of the payload.

        Raises:
            IndexError: a position lies behind the block table, or a block does not exist; nothing was begun.
        """
        ...

    def free_copies(self) -> int:
        """Returns how many copies `gather` takes now without making the engine's stream wait."""
        ...

    def fence(self) -> DeviceEvent | None:
        """Returns what the calling thread's stream has been given so far; for `scatter`."""
        ...

    def scatter(self, block_ids: Sequence[int], copies: Sequence[PageCopy], fence: DeviceEvent | None) -> None:
        """Copy payloads to blocks, after `fence`; they are there when this returns.

        Raises:
            IndexError: a position lies behind the block table, or a block does not exist; nothing was written.
        """
        ...


class HostBlockCopier:
    """Blocks on the CPU."""

    def __init__(self, layout: PagedKVLayout, *, payload_bytes: int) -> None:
        """Copies between tensors on the CPU and slots.

        Args:
            layout: the tensors of the engine's KV cache.
            payload_bytes: the size of the largest part of a page, in bytes.
        """
        self.batch_size: int = max(1, _HOST_BATCH // payload_bytes)
        self.host: HostBlockCopier | None = self
        self.allocate: Callable[[int], memoryview] | None = None
        self._layout = layout

    def gather(
        self, block_ids: Sequence[int], copies: Sequence[PageCopy], there: Callable[[int, int], None]
    ) -> DeviceEvent | None:
        """Copies pages out of blocks; see `BlockCopier.gather`."""
        pages = self._pages(block_ids, copies)
        for (unit, _), alike in _grouped(copies):
            checksums = host_gather(self._layout.spans(unit), [pages[index] for index in alike])
            for index, checksum in zip(alike, checksums, strict=True):
                there(index, checksum)
        return None

    def free_copies(self) -> int:
        """Returns how many copies have room now; see `BlockCopier.free_copies`."""
        return 1 << 30

    def fence(self) -> DeviceEvent | None:
        """Returns an event of the stream of the engine, or None; see `BlockCopier.fence`."""
        return None

    def scatter(self, block_ids: Sequence[int], copies: Sequence[PageCopy], fence: DeviceEvent | None) -> None:
        """Copies pages into blocks; see `BlockCopier.scatter`."""
        pages = self._pages(block_ids, copies)
        for (unit, _), alike in _grouped(copies):
            host_scatter(self._layout.spans(unit), [pages[index] for index in alike])

    def scatter_verified(
        self, block_ids: Sequence[int], copies: Sequence[PageCopy], checksums: Sequence[int | None]
    ) -> int:
        """Copies pages into blocks up to the first one whose payload is not what it should be.

        Each payload is verified before any of it is written, while it is in the processor's caches.

        Args:
            block_ids: as for `scatter`.
            copies: of pages of one unit, one after the other.
            checksums: XXH3-64 of the payload of each; None: it is not verified.

        Returns:
            How many were copied.

        Raises:
            IndexError: as `scatter`.
        """
        pages = self._pages(block_ids, copies, checksums)
        written = 0
        for (unit, _), alike in groupby(
            range(len(copies)), lambda index: (copies[index].unit, len(copies[index].page))
        ):
            wanted = [pages[index] for index in alike]
            written += (done := host_scatter(self._layout.spans(unit), wanted))
            if done < len(wanted):
                break
        return written

    def _pages(
        self, block_ids: Sequence[int], copies: Sequence[PageCopy], checksums: Sequence[int | None] | None = None
    ) -> list[HostPage]:
        make = self._layout.host_page
        wanted = [None] * len(copies) if checksums is None else checksums
        return [
            make(block_ids, copy.start_token, copy.tokens, copy.payload, copy.page, copy.unit, checksum)
            for copy, checksum in zip(copies, wanted, strict=True)
        ]


def _grouped(copies: Sequence[PageCopy]) -> list[tuple[tuple[KVShard, int], list[int]]]:
    """Returns the indexes of the copies of each unit whose pages have equally many tokens."""
    groups: dict[tuple[KVShard, int], list[int]] = {}
    for index, copy in enumerate(copies):
        groups.setdefault((copy.unit, len(copy.page)), []).append(index)
    return list(groups.items())


class StagedBlockCopier:
    """Blocks on a device."""

    def __init__(self, device: Device, layout: PagedKVLayout, *, payload_bytes: int, bounce_bytes: int) -> None:
        """Allocates two bounce buffers of device memory, and two streams.

        Args:
            device: where the blocks are.
            layout: the tensors of the engine's KV cache on `device`.
            payload_bytes: the size of the largest part of a page, in bytes.
            bounce_bytes: the size of each bounce buffer, in bytes; it holds at least one part.
        """
        stride = -(-payload_bytes // _ALIGNMENT) * _ALIGNMENT
        self.batch_size: int = max(1, bounce_bytes // stride)
        self.host: HostBlockCopier | None = None
        self.allocate: Callable[[int], memoryview] | None = device.host_memory
        self._device = device
        self._layout = layout
        self._to_host, self._to_device = device.new_stream(), device.new_stream()
        self._save_ring = device.device_memory(self.batch_size * stride).view(self.batch_size, stride)
        self._load_ring = device.device_memory(self.batch_size * stride).view(self.batch_size, stride)
        self._copied: list[DeviceEvent | None] = [None] * self.batch_size
        """Of each save buffer: when it has gone to the host."""
        self._next = 0
        self._saving, self._loading = threading.Lock(), threading.Lock()

    def free_copies(self) -> int:
        """Returns how many copies have room now; see `BlockCopier.free_copies`."""
        with self._saving:
            return sum(event is None or event.is_done() for event in self._copied)

    def gather(
        self, block_ids: Sequence[int], copies: Sequence[PageCopy], there: Callable[[int, int], None]
    ) -> DeviceEvent | None:
        """Copies pages out of blocks; see `BlockCopier.gather`."""
        layout = self._layout
        pieces = [layout.pieces(block_ids, copy.start_token, copy.tokens) for copy in copies]
        engine = self._device.current_stream()
        last: DeviceEvent | None = None
        with self._saving:
            for alike in _alike(copies, pieces):
                while alike:
                    first = self._next
                    now, alike = alike[: self.batch_size - first], alike[self.batch_size - first :]
                    self._next = (first + len(now)) % self.batch_size
                    last = self._save(engine, now, range(first, first + len(now)))
        return last

    def _save(self, engine: DeviceStream, alike: Sequence[tuple[PageCopy, BlockRanges]], buffers: range) -> DeviceEvent:
        """Gather copies that are alike to these bounce buffers, and send those to the host."""
        for index in buffers:
            before = self._copied[index]
            if before is not None:  # it still goes to the host: the engine's stream, not its thread, waits
                engine.wait_event(before)
        copy = alike[0][0]
        nbytes = copy.payload.nbytes
        bounce = self._save_ring[buffers.start : buffers.stop, :nbytes]
        places = [where for _, where in alike]
        engine.run(partial(device_gather, self._layout.spans(copy.unit), places, len(copy.page), bounce))
        self._to_host.wait_event(engine.record())
        for row, (one, _) in zip(bounce, alike, strict=True):
            self._to_host.run(partial(_copy, torch.frombuffer(one.payload, dtype=torch.uint8), row))
        copied = self._to_host.record()
        for index in buffers:
            self._copied[index] = copied
        return copied

    def fence(self) -> DeviceEvent | None:
        """Returns an event of the stream of the engine, or None; see `BlockCopier.fence`."""
        return self._device.current_stream().record()

    def scatter(self, block_ids: Sequence[int], copies: Sequence[PageCopy], fence: DeviceEvent | None) -> None:
        """Copies pages into blocks; see `BlockCopier.scatter`."""
        layout, stream = self._layout, self._to_device
        pieces = [layout.pieces(block_ids, copy.start_token, copy.tokens) for copy in copies]
        with self._loading:
            if fence is not None:
                stream.wait_event(fence)
            for alike in _alike(copies, pieces):
                # One stream does it all, so a buffer that is used again is read before it is written.
                for first in range(0, len(alike), self.batch_size):
                    self._load(alike[first : first + self.batch_size])
            done = stream.record()
        done.wait()

    def _load(self, alike: Sequence[tuple[PageCopy, BlockRanges]]) -> None:
        """Bring copies that are alike to the first bounce buffers, and scatter those."""
        stream, copy = self._to_device, alike[0][0]
        bounce = self._load_ring[: len(alike), : copy.payload.nbytes]
        for row, (one, _) in zip(bounce, alike, strict=True):
            stream.run(partial(_copy, row, torch.frombuffer(one.payload, dtype=torch.uint8)))
        spans, places = self._layout.spans(copy.unit), [where for _, where in alike]
        skip = copy.start_token - copy.page.start
        stream.run(partial(device_scatter, spans, places, len(copy.page), skip, bounce))


def _alike(copies: Sequence[PageCopy], pieces: Sequence[BlockRanges]) -> list[list[tuple[PageCopy, BlockRanges]]]:
    """Copies of the same unit and shape together, so that one launch moves many."""
    found: dict[tuple[object, ...], list[tuple[PageCopy, BlockRanges]]] = {}
    for copy, where in zip(copies, pieces, strict=True):
        shape = (copy.unit, copy.tokens, len(copy.page), copy.start_token - copy.page.start)
        found.setdefault(shape, []).append((copy, where))
    return list(found.values())


@torch.inference_mode()
def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def make_block_copier(layout: PagedKVLayout, *, payload_bytes: int, bounce_bytes: int) -> BlockCopier:
    """The way for tensors where these are.

    Raises:
        RuntimeError: they are said to be on a GPU, and there is none.
    """
    if layout.device.type == "cpu":
        return HostBlockCopier(layout, payload_bytes=payload_bytes)
    return StagedBlockCopier(CudaDevice(layout.device), layout, payload_bytes=payload_bytes, bounce_bytes=bounce_bytes)
