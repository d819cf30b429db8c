"""An engine's paged KV tensors, and the way between their blocks and the canonical payload of a page.

The payload is `[layer][K, V][head][token][dim]` without gaps, whatever the engine's strides and block size are. The one
rule: tensors whose meaning is not certain are refused at start, in words; a guess would be stored under a valid key.
"""

from collections.abc import Sequence
from typing import Final

import torch

from kvparams.keys import DTYPE_BYTES, Namespace, Rectangle

__all__ = ["LayoutError", "PagedKVLayout"]

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Elements are moved as plain bits, so that every element type takes the same path and no value is changed by it."""


class LayoutError(ValueError):
    """These tensors cannot be read as paged KV; the message says why."""


class PagedKVLayout:
    """One K and one V tensor per layer, each `[num_blocks, block_size, kv_heads, head_dim]`, on the CPU."""

    def __init__(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *, rectangle: Rectangle | None = None
    ) -> None:
        """Args:
            keys: K per layer, in layer order.
            values: V per layer; head_dim may differ from K's.
            rectangle: which part of the model the tensors hold; None means all of it.

        Raises:
            LayoutError: the tensors do not fit together, or are something this class does not know.
        """
        if not keys or len(keys) != len(values):
            raise LayoutError(f"{len(keys)} K tensors and {len(values)} V tensors: one of each per layer is needed")
        for name, tensors in (("K", keys), ("V", values)):
            for layer, tensor in enumerate(tensors):
                _check(f"{name} of layer {layer}", tensor, like=tensors[0])
        first, value = keys[0], values[0]
        if first.shape[:3] != value.shape[:3] or first.dtype != value.dtype:
            raise LayoutError(
                f"K is {first.dtype} {list(first.shape)} and V is {value.dtype} {list(value.shape)}: "
                "they may differ in the last dimension only"
            )
        self.num_blocks: Final = int(first.shape[0])
        self.block_size: Final = int(first.shape[1])
        """Tokens per block."""
        self.heads: Final = int(first.shape[2])
        self.k_dim: Final = int(first.shape[3])
        self.v_dim: Final = int(value.shape[3])
        self.dtype: Final = str(first.dtype).removeprefix("torch.")
        self.rectangle: Final = rectangle or Rectangle(0, len(keys), 0, self.heads)
        if (self.rectangle.layers, self.rectangle.heads) != (len(keys), self.heads):
            raise LayoutError(f"{len(keys)} layers of {self.heads} heads do not fill {self.rectangle}")
        self._bits: Final = _BITS[first.element_size()]
        self._tensors: Final = [
            tensor.view(self._bits).view(-1, self.heads, tensor.shape[3])
            for pair in zip(keys, values, strict=True)
            for tensor in pair
        ]
        self._token_elements = len(keys) * self.heads * (self.k_dim + self.v_dim)

    @classmethod
    def from_stacked(cls, tensor: torch.Tensor, *, rectangle: Rectangle | None = None) -> "PagedKVLayout":
        """The same from one tensor `[layers, 2, num_blocks, block_size, kv_heads, head_dim]`, K before V."""
        if tensor.dim() != 6 or tensor.shape[1] != 2:
            raise LayoutError(
                f"a tensor of shape {list(tensor.shape)}; "
                "known is [layers, 2, num_blocks, block_size, kv_heads, head_dim]"
            )
        return cls(list(tensor[:, 0]), list(tensor[:, 1]), rectangle=rectangle)

    def check(self, namespace: Namespace) -> None:
        """Refuse a namespace that describes other tensors than these.

        Raises:
            LayoutError: with both sides in the message.
        """
        shape = namespace.geometry
        ours = (self.dtype, self.k_dim, self.v_dim)
        theirs = (namespace.dtype, shape.k_dim, shape.v_dim)
        if ours != theirs:
            raise LayoutError(f"dtype, K dim and V dim are {ours} in the tensors and {theirs} in the namespace")
        if self.rectangle.layer_end > shape.layers or self.rectangle.head_end > shape.kv_heads:
            raise LayoutError(
                f"{self.rectangle} lies outside of a model of {shape.layers} layers and {shape.kv_heads} KV heads"
            )

    def payload_bytes(self, tokens: int) -> int:
        """Bytes that `tokens` tokens take in a payload."""
        return tokens * self._token_elements * self._bits.itemsize

    @torch.inference_mode()  # an engine may have allocated its cache in it, and then it is written only in it
    def gather(self, block_ids: Sequence[int], start_token: int, tokens: int, payload: memoryview) -> None:
        """Copy the KV of `tokens` tokens from position `start_token` on into `payload`, in canonical order.

        Args:
            block_ids: the sequence's block table from token 0.
            start_token: position in the sequence.
            tokens: how many.
            payload: `payload_bytes(tokens)` writable bytes.

        Raises:
            IndexError: a position lies behind the block table, or a block does not exist.
        """
        rows = self._rows(block_ids, start_token, tokens)
        for tensor, part in zip(self._tensors, self._parts(payload, tokens), strict=True):
            part.copy_(tensor.index_select(0, rows).transpose(0, 1))

    @torch.inference_mode()
    def scatter(
        self, block_ids: Sequence[int], start_token: int, tokens: int, payload: memoryview, page: range
    ) -> None:
        """Copy the KV of `tokens` tokens from position `start_token` on out of a page's payload into the blocks.

        Args:
            block_ids: the sequence's block table from token 0.
            start_token: position in the sequence of the first token to write.
            tokens: how many.
            payload: a whole page, `payload_bytes(len(page))` bytes.
            page: the positions that the page holds; those to write are among them.

        Raises:
            IndexError: a position lies behind the block table, or a block does not exist.
        """
        rows = self._rows(block_ids, start_token, tokens)
        skip = start_token - page.start
        for tensor, part in zip(self._tensors, self._parts(payload, len(page)), strict=True):
            tensor.index_copy_(0, rows, part[:, skip : skip + tokens].transpose(0, 1))

    def _rows(self, block_ids: Sequence[int], start_token: int, tokens: int) -> torch.Tensor:
        """Row numbers in the tensors seen as `[num_blocks * block_size, kv_heads, head_dim]`."""
        size = self.block_size
        first, last = start_token // size, -(-(start_token + tokens) // size)
        if last > len(block_ids):
            raise IndexError(f"token {start_token + tokens - 1} lies behind a table of {len(block_ids)} blocks")
        blocks = torch.tensor(block_ids[first:last], dtype=torch.int64)
        if tokens and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.num_blocks:
            raise IndexError(f"a block id is not in [0, {self.num_blocks})")
        rows = blocks.unsqueeze(1) * size + torch.arange(size)
        skip = start_token - first * size
        return rows.flatten()[skip : skip + tokens]

    def _parts(self, payload: memoryview, tokens: int) -> list[torch.Tensor]:
        """The payload as one tensor `[head][token][dim]` for each of `self._tensors`."""
        if payload.nbytes != self.payload_bytes(tokens):
            raise ValueError(f"the payload has {payload.nbytes} bytes, {tokens} tokens {self.payload_bytes(tokens)}")
        whole = torch.frombuffer(payload, dtype=self._bits)
        per_layer = whole.view(self.rectangle.layers, -1)
        split = tokens * self.heads * self.k_dim
        parts: list[torch.Tensor] = []
        for layer in per_layer:
            parts.append(layer[:split].view(self.heads, tokens, self.k_dim))
            parts.append(layer[split:].view(self.heads, tokens, self.v_dim))
        return parts


def _check(name: str, tensor: torch.Tensor, *, like: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"{name}: element type {dtype} is not known; known: {', '.join(DTYPE_BYTES)}")
    if tensor.device.type != "cpu":
        raise LayoutError(f"{name}: it lies on {tensor.device}; known is the CPU")
    if tensor.dim() != 4 or 0 in tensor.shape:
        raise LayoutError(f"{name}: shape {list(tensor.shape)}; known is [num_blocks, block_size, kv_heads, head_dim]")
    if tensor.shape != like.shape or tensor.stride() != like.stride() or tensor.dtype != like.dtype:
        raise LayoutError(f"{name}: shape, strides or element type differ from those of layer 0")
    blocks, tokens, heads, dims = tensor.stride()
    if dims != 1 or heads < tensor.shape[3] or tokens < 1 or blocks != tokens * tensor.shape[1]:
        raise LayoutError(
            f"{name}: strides {list(tensor.stride())} of shape {list(tensor.shape)}; known are dense elements of a "
            "head, and blocks whose tokens follow one another at equal distances"
        )
