"""Copying between strided views of an engine's blocks and a page's payload.

Ways that must agree: native code for tensors on the CPU, and numpy where there is none or the elements of a token do
not follow each other (it copies any strides at once, lets go of the interpreter lock, allocates nothing); torch for
tensors on a device. Nothing is interpreted here; bits are moved.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from kvparams.native import NATIVE

__all__ = [
    "BlockRanges",
    "HostPage",
    "LayerSlice",
    "UnitSlices",
    "device_gather",
    "device_scatter",
    "host_gather",
    "host_scatter",
    "layer_columns",
]

BlockRanges = list[tuple[int, int, int]]
"""Tokens in order, as `(block, first token in it, how many)`."""

HostPage = tuple[memoryview, BlockRanges, int, int, int | None]
"""The payload of a page; the places of tokens in the blocks; how many tokens of the payload come before these; how many
tokens the payload has; the checksum without which it is not scattered, None if any will do. On a save the places are
those of all tokens."""

HostPlace = tuple[object, int, int]
"""K or V of some layers, and the offset and the distance of these layers in a payload, in bytes."""

_KEPT_PLACES: Final = 16
"""Full pages, and the last pages of some sequences."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are moved as plain bits, so that every element type takes the same path and no value is changed by it."""


@dataclass(frozen=True)
class LayerSlice:
    """A view of some layers' K or V, and where its elements stand in the payload of a unit."""

    view: torch.Tensor
    """`[layers, heads, blocks, tokens, dim]`, bits."""
    unit_layers: int
    unit_heads: int
    layer: int
    """Of the unit: the first one in the view."""
    head: int
    """Of the unit: the first one in the view."""
    row: int
    """Elements per token and head, K and V together."""
    skip: int
    """Elements per token and head that stand before this one: 0, or K's."""
    itemsize: int

    @cached_property
    def host(self) -> "npt.NDArray[Any]":
        """The view for numpy; tensors on the CPU only."""
        return self.view.numpy()

    def place(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape `[layers, heads, tokens, dim]`, strides and offset, in elements, of the view's place in a payload."""
        layers, heads, _, _, dim = self.view.shape
        layer_step, head_step = self.unit_heads * tokens * self.row, tokens * dim
        offset = self.layer * layer_step + self.unit_heads * tokens * self.skip + self.head * head_step
        return (layers, heads, tokens, dim), (layer_step, head_step, dim, 1), offset

    def host_place(self, tokens: int) -> HostPlace:
        """Returns the view's place in a payload of `tokens` tokens."""
        _, (layer_step, *_), offset = self.place(tokens)
        return self.host, offset * self.itemsize, layer_step * self.itemsize

    def in_bytes(self, payload: memoryview, tokens: int) -> "npt.NDArray[Any]":
        """The place in a payload of `tokens` tokens, for numpy."""
        shape, steps, offset = self.place(tokens)
        size = self.itemsize
        return np.ndarray(
            shape,
            dtype=self.host.dtype,
            buffer=payload,
            offset=offset * size,
            strides=[step * size for step in steps],
        )

    def in_rows(self, payloads: torch.Tensor, tokens: int) -> torch.Tensor:
        """The places in payloads of `tokens` tokens, one a row, aligned to 8: `[pages, layers, heads, tokens, dim]`."""
        shape, steps, offset = self.place(tokens)
        bits = payloads.view(_BITS[self.itemsize])
        return bits.as_strided((bits.shape[0], *shape), (bits.stride(0), *steps), bits.storage_offset() + offset)


class UnitSlices(list[LayerSlice]):
    """The slices that make up the payload of a unit."""

    def __init__(self, slices: Iterable[LayerSlice]) -> None:
        super().__init__(slices)
        self._host_places: dict[int, list[HostPlace]] = {}

    def host_places(self, tokens: int) -> list[HostPlace]:
        """Returns `LayerSlice.host_place` of each slice; an engine may have a hundred of them."""
        places = self._host_places.get(tokens)
        if places is None:
            if len(self._host_places) >= _KEPT_PLACES:
                self._host_places.clear()
            places = self._host_places[tokens] = [one.host_place(tokens) for one in self]
        return places


def layer_columns(tensors: Sequence[torch.Tensor], widest: int) -> list[tuple[int, torch.Tensor]]:
    """K or V of all layers as bits `[layers, heads, blocks, tokens, dim]`, each with its first layer.

    One, where all layers lie at equal distances in one piece of memory; else one per layer.
    """
    first = tensors[0]
    bits = [tensor.view(_BITS[first.element_size()]).permute(2, 0, 1, 3) for tensor in tensors]
    size = first.element_size()
    same = all(one.untyped_storage().data_ptr() == bits[0].untyped_storage().data_ptr() for one in bits)
    steps = {after.storage_offset() - before.storage_offset() for before, after in pairwise(bits)}
    if same and len(bits) > 1 and len(steps) == 1 and min(steps) > 0:
        joined = bits[0].as_strided((len(bits), *bits[0].shape), (min(steps), *bits[0].stride()))
        return [(0, _widened(joined, size, widest))]
    return [(layer, _widened(one.unsqueeze(0), size, widest)) for layer, one in enumerate(bits)]


def _widened(view: torch.Tensor, size: int, widest: int) -> torch.Tensor:
    """The same memory as fewer, larger elements: copying costs by the element."""
    fits = view.data_ptr() % widest == 0 and all(
        step * size % widest == 0 for step, count in zip(view.stride()[:-1], view.shape[:-1], strict=True) if count > 1
    )
    if widest <= size or view.stride(-1) != 1 or not fits:
        return view
    # A dimension of size 1 may have any stride; torch wants it to fit too.
    steps = [step - step % (widest // size) for step in view.stride()[:-1]]
    return view.as_strided(view.shape, (*steps, 1)).view(_BITS[widest])


def host_gather(spans: UnitSlices, pages: list[HostPage]) -> list[int]:
    """Copies blocks to the payloads of pages that have equally many tokens; returns XXH3-64 of each payload."""
    if NATIVE is not None and pages:
        checksums = NATIVE.gather_pages(spans.host_places(pages[0][3]), pages)
        if checksums is not None:
            return checksums
    for payload, pieces, _, tokens, _ in pages:
        for span in spans:
            source, target = span.host, span.in_bytes(payload, tokens)
            at = 0
            for block, first, count in pieces:
                target[:, :, at : at + count] = source[:, :, block, first : first + count]
                at += count
    return [xxh3_64_intdigest(payload) for payload, *_ in pages]


def host_scatter(spans: UnitSlices, pages: list[HostPage]) -> int:
    """Copies the payloads of pages that have equally many tokens to the blocks.

    Returns:
        How many were copied: all of them, or those before the first one that has another checksum than it should.
    """
    if NATIVE is not None and pages:
        written = NATIVE.scatter_pages(spans.host_places(pages[0][3]), pages)
        if written is not None:
            return written
    for number, (payload, pieces, skip, tokens, checksum) in enumerate(pages):
        if checksum is not None and xxh3_64_intdigest(payload) != checksum:
            return number
        for span in spans:
            target, source = span.host, span.in_bytes(payload, tokens)
            at = skip
            for block, first, count in pieces:
                target[:, :, block, first : first + count] = source[:, :, at : at + count]
                at += count
    return len(pages)


@torch.inference_mode()  # an engine may have allocated its cache in it, and then it is written only in it
def device_gather(
    spans: Sequence[LayerSlice], pages: Sequence[BlockRanges], tokens: int, payloads: torch.Tensor
) -> None:
    """As `host_gather` for several pages, to rows of bytes on the device of the blocks."""
    for span in spans:
        target = span.in_rows(payloads, tokens)
        for blocks, part in _launches(span, pages, target, 0):
            if isinstance(blocks, tuple):
                block, first, count = blocks
                part.copy_(span.view[:, :, block, first : first + count])
            else:
                torch.index_select(span.view, 2, blocks, out=part)


@torch.inference_mode()
def device_scatter(
    spans: Sequence[LayerSlice], pages: Sequence[BlockRanges], tokens: int, skip: int, payloads: torch.Tensor
) -> None:
    """As `host_scatter` for several pages, from rows of bytes on the device of the blocks."""
    for span in spans:
        source = span.in_rows(payloads, tokens)
        for blocks, part in _launches(span, pages, source, skip):
            if isinstance(blocks, tuple):
                block, first, count = blocks
                span.view[:, :, block, first : first + count].copy_(part)
            else:
                span.view.index_copy_(2, blocks, part)


def _launches(
    span: LayerSlice, pages: Sequence[BlockRanges], places: torch.Tensor, skip: int
) -> Iterator[tuple[torch.Tensor | tuple[int, int, int], torch.Tensor]]:
    """Returns the pieces to copy together with their places, in as few launches as possible.

    A piece is a part of a block, or several whole blocks.

    Whole blocks of one page go together, or, where that is more, the blocks that have the same place in every page.
    """
    size = int(span.view.shape[3])
    per_page = len(pages[0])
    regular = all(len(pieces) == per_page and all(count == size for _, _, count in pieces) for pieces in pages)
    if regular and len(pages) > per_page:
        for number in range(per_page):
            at = skip + number * size
            blocks = _index([pieces[number][0] for pieces in pages], span)
            yield blocks, places[:, :, :, at : at + size].permute(1, 2, 0, 3, 4)
        return
    for place, pieces in zip(places, pages, strict=True):
        at = skip
        for blocks, first, count in _batched(pieces, size):
            part = place[:, :, at : at + len(blocks) * count]
            if len(blocks) == 1:
                yield (blocks[0], first, count), part
            else:
                yield _index(blocks, span), _by_block(part, len(blocks))
            at += len(blocks) * count


def _index(blocks: Sequence[int], span: LayerSlice) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int64).to(span.view.device, non_blocking=True)


def _by_block(part: torch.Tensor, blocks: int) -> torch.Tensor:
    """`[layers, heads, tokens, dim]` as `[layers, heads, blocks, tokens, dim]`, the same memory."""
    layers, heads, tokens, dim = part.shape
    return part.view(layers, heads, blocks, tokens // blocks, dim)


def _batched(pieces: BlockRanges, block_size: int) -> list[tuple[list[int], int, int]]:
    """Whole blocks together, one launch for all of them; parts of blocks by themselves."""
    found: list[tuple[list[int], int, int]] = []
    for whole, group in groupby(pieces, key=lambda piece: piece[2] == block_size):
        if whole:
            found.append(([block for block, _, _ in group], 0, block_size))
        else:
            found += [([block], first, count) for block, first, count in group]
    return found
