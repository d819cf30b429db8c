"""An engine's paged KV tensors, and the way between their blocks and the canonical payload of a page's parts.

The payload is `[layer][K, V][head][token][dim]` without gaps, whatever the engine's strides and block size are. Tensors
whose meaning is not certain are refused at start, in words; a guess would be stored under a valid key.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch

from kvparams.keys import Geometry, KVShard, Namespace
from kvparams_connectors.transfer.cache_layouts import (
    CacheLayout,
    CacheSpec,
    LayoutError,
    check_view,
    find_layout,
    kv_views,
)
from kvparams_connectors.transfer.layout_copy import (
    BlockRanges,
    HostPage,
    LayerSlice,
    UnitSlices,
    host_gather,
    host_scatter,
    layer_columns,
)
from kvparams_connectors.transfer.shard_grid import ShardGrid

__all__ = ["LayoutError", "PagedKVLayout"]


class PagedKVLayout:
    """A `PagedKVLayout` holds one K and one V tensor per layer.

    Each is a view `[num_blocks, block_size, kv_heads, head_dim]` of any strides.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        rectangle: KVShard | None = None,
        dtype: str | None = None,
    ) -> None:
        """Checks that the tensors fit together.

        Args:
            keys: the K tensor of each layer, in layer order. MLA: the latents, with one head.
            values: the V tensor of each layer; head_dim and strides may differ from K's. MLA: empty.
            rectangle: the part of the model that the tensors hold; None: the whole model.
            dtype: the type of the elements; None: that of the tensors. Engines keep fp8 in `torch.uint8`.

        Raises:
            LayoutError: the tensors do not fit together, or their form is unknown.
        """
        if not keys or (values and len(keys) != len(values)):
            raise LayoutError(
                f"{len(keys)} K tensors and {len(values)} V tensors: one of each per layer is needed, or no V for MLA"
            )
        first = keys[0]
        self.dtype: Final = dtype or str(first.dtype).removeprefix("torch.")
        for name, tensors in (("K", keys), ("V", values)):
            for layer, tensor in enumerate(tensors):
                check_view(f"{name} of layer {layer}", tensor, self.dtype)
                like = tensors[0]
                if (tensor.shape, tensor.stride(), tensor.dtype) != (like.shape, like.stride(), like.dtype):
                    raise LayoutError(f"{name} of layer {layer}: shape, strides or element type differ from layer 0's")
                if tensor.device != first.device:
                    raise LayoutError(
                        f"{name} of layer {layer} lies on {tensor.device}, K of layer 0 on {first.device}"
                    )
        if values and (first.shape[:3] != values[0].shape[:3] or first.dtype != values[0].dtype):
            raise LayoutError(
                f"K is {first.dtype} {list(first.shape)} and V is {values[0].dtype} {list(values[0].shape)}: "
                "they may differ in the last dimension only"
            )
        self.num_blocks: Final = int(first.shape[0])
        self.block_size: Final = int(first.shape[1])
        """Tokens per block."""
        self.heads: Final = int(first.shape[2])
        self.k_dim: Final = int(first.shape[3])
        self.v_dim: Final = int(values[0].shape[3]) if values else 0
        self.device: Final = first.device
        self.shard: Final = rectangle or KVShard(0, len(keys), 0, self.heads)
        if (self.shard.layers, self.shard.heads) != (len(keys), self.heads):
            raise LayoutError(f"{len(keys)} layers of {self.heads} heads do not fill {self.shard}")
        self._itemsize: Final = first.element_size()
        self._columns = [layer_columns(tensors, self._whole_bytes) for tensors in (keys, values) if tensors]
        self._spans: dict[KVShard, UnitSlices] = {}

    @classmethod
    def from_stacked(cls, tensor: torch.Tensor, *, rectangle: KVShard | None = None) -> "PagedKVLayout":
        """The same from one tensor `[layers, 2, num_blocks, block_size, kv_heads, head_dim]`, K before V."""
        if tensor.dim() != 6 or tensor.shape[1] != 2:
            raise LayoutError(
                f"the tensor has the shape {list(tensor.shape)}; it must be [layers, 2, num_blocks, block_size, "
                "kv_heads, head_dim]"
            )
        return cls(list(tensor[:, 0]), list(tensor[:, 1]), rectangle=rectangle)

    @classmethod
    def from_engine(
        cls,
        tensors: Sequence[torch.Tensor],
        spec: CacheSpec,
        *,
        form: str | CacheLayout | None = None,
        rectangle: KVShard | None = None,
    ) -> "PagedKVLayout":
        """The same from an engine's own tensors, one per layer, in layer order.

        Args:
            tensors: as the engine allocated them, strides and all.
            spec: what the engine says about its cache; see `read_cache_spec` for vLLM's.
            form: the name of the form in `layout_forms.FORMS`, where shape and strides leave it open. vLLM on a CPU
                has to be named: `vllm_cpu_vec`. None finds out, or refuses.
            rectangle: which part of the model the tensors hold; None means all of it.

        Raises:
            LayoutError: the tensors fit no form, or several; the message says what to do.
        """
        if not tensors:
            raise LayoutError("no tensors: one per layer is needed")
        found = find_layout(tensors[0], spec, form)
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            raise LayoutError("the layers have different shapes: one layout holds one group of equal layers")
        views = [kv_views(tensor, found, spec) for tensor in tensors]
        values = [value for _, value in views if value is not None]
        return cls([key for key, _ in views], values, rectangle=rectangle, dtype=spec.dtype)

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
        if self.shard.layer_end > shape.layers or self.shard.head_end > shape.kv_heads:
            raise LayoutError(
                f"{self.shard} lies outside of a model of {shape.layers} layers and {shape.kv_heads} KV heads"
            )

    def units(self, grid: ShardGrid | None, geometry: Geometry, *, load_only: bool = False) -> tuple[KVShard, ...]:
        """The units of the grid that these tensors store and load; without a grid one: all that they hold.

        Raises:
            LayoutError: a unit lies only partly in the tensors, so that they cannot store it.
        """
        if grid is None:
            return (self.shard,)
        units = grid.units_touching(self.shard, geometry)
        cut = [unit for unit in units if not _within(unit, self.shard)]
        if cut and not load_only:
            raise LayoutError(
                f"{self.shard} holds only a part of the unit {cut[0]}, so this engine could not store it: choose "
                "a grid whose units every engine holds whole (`ShardGrid.shared`), or load_only=True"
            )
        return units

    def payload_bytes(self, tokens: int, unit: KVShard | None = None) -> int:
        """Bytes that `tokens` tokens of `unit` take in a payload; None: of all that the tensors hold."""
        part = unit or self.shard
        return tokens * part.layers * part.heads * (self.k_dim + self.v_dim) * self._itemsize

    def gather(
        self,
        block_ids: Sequence[int],
        start_token: int,
        tokens: int,
        payload: memoryview,
        unit: KVShard | None = None,
    ) -> int:
        """Copy the KV of `tokens` tokens from position `start_token` on into `payload`, in canonical order.

        Tensors on the CPU only; `staging` has the way for others.

        Args:
            block_ids: the sequence's block table from token 0.
            start_token: position in the sequence.
            tokens: how many.
            payload: `payload_bytes(tokens, unit)` writable bytes.
            unit: the part of the model to copy, all of it in the tensors; None: all that the tensors hold.

        Returns:
            XXH3-64 of the payload.

        Raises:
            IndexError: a position lies behind the block table, or a block does not exist.
        """
        page = self.host_page(block_ids, start_token, tokens, payload, range(start_token, start_token + tokens), unit)
        return host_gather(self.spans(unit), [page])[0]

    def scatter(
        self,
        block_ids: Sequence[int],
        start_token: int,
        tokens: int,
        payload: memoryview,
        page: range,
        unit: KVShard | None = None,
    ) -> None:
        """Copy the KV of `tokens` tokens from position `start_token` on out of a page's payload into the blocks.

        Args:
            block_ids: the sequence's block table from token 0.
            start_token: position in the sequence of the first token to write.
            tokens: how many.
            payload: a whole page, `payload_bytes(len(page), unit)` bytes.
            page: the positions that the page holds; those to write are among them.
            unit: the part of the model that the payload holds. Of a unit that lies only partly in the tensors, that
                part is written.

        Raises:
            IndexError: a position lies behind the block table, or a block does not exist.
        """
        host_scatter(self.spans(unit), [self.host_page(block_ids, start_token, tokens, payload, page, unit)])

    def host_page(
        self,
        block_ids: Sequence[int],
        start_token: int,
        tokens: int,
        payload: memoryview,
        page: range,
        unit: KVShard | None = None,
        checksum: int | None = None,
    ) -> HostPage:
        """Returns what `host_gather` and `host_scatter` copy; for the arguments and errors see `scatter`.

        `checksum`: XXH3-64 of the payload; another payload is not scattered. None: whatever there is.
        """
        self._check_payload(payload.nbytes, len(page), unit)
        return payload, self.pieces(block_ids, start_token, tokens), start_token - page.start, len(page), checksum

    def pieces(self, block_ids: Sequence[int], start_token: int, tokens: int) -> BlockRanges:
        """Returns the places of `tokens` tokens from position `start_token` on, in order.

        Each is `(block, first token in it, count)`.

        Raises:
            IndexError: a position lies behind the block table, or a block does not exist.
        """
        size = self.block_size
        first, last = start_token // size, -(-(start_token + tokens) // size)
        if last > len(block_ids):
            raise IndexError(f"token {start_token + tokens - 1} lies behind a table of {len(block_ids)} blocks")
        pieces: BlockRanges = []
        at, end = start_token, start_token + tokens
        for block in block_ids[first:last]:
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"a block id is not in [0, {self.num_blocks})")
            inside = at % size
            count = min(size - inside, end - at)
            pieces.append((block, inside, count))
            at += count
        return pieces

    def spans(self, unit: KVShard | None = None) -> UnitSlices:
        """Returns what of the tensors a unit's payload holds."""
        part = unit or self.shard
        found = self._spans.get(part)
        if found is None:  # two threads may make it, and it is the same
            found = self._spans[part] = UnitSlices(self._make_spans(part))
        return found

    def _make_spans(self, unit: KVShard) -> list[LayerSlice]:
        ours = self.shard
        layers = max(unit.layer_start, ours.layer_start), min(unit.layer_end, ours.layer_end)
        heads = max(unit.head_start, ours.head_start), min(unit.head_end, ours.head_end)
        if layers[0] >= layers[1] or heads[0] >= heads[1]:
            raise LayoutError(f"nothing of the unit {unit} lies in {ours}")
        k_row, v_row = (dim * self._itemsize for dim in (self.k_dim, self.v_dim))
        spans: list[LayerSlice] = []
        for index, (dim, column) in enumerate(zip((self.k_dim, self.v_dim), self._columns, strict=False)):
            for first, view in column:  # [layer, head, block, token, dim]
                low = max(layers[0] - ours.layer_start, first)
                high = min(layers[1] - ours.layer_start, first + int(view.shape[0]))
                if low >= high:
                    continue
                kept = view[low - first : high - first, heads[0] - ours.head_start : heads[1] - ours.head_start]
                item = dim * self._itemsize // int(view.shape[4])
                spans.append(
                    LayerSlice(
                        kept,
                        unit_layers=unit.layers,
                        unit_heads=unit.heads,
                        layer=low + ours.layer_start - unit.layer_start,
                        head=heads[0] - unit.head_start,
                        row=(k_row + v_row) // item,
                        skip=index * k_row // item,
                        itemsize=item,
                    )
                )
        return spans

    @cached_property
    def _whole_bytes(self) -> int:
        """The widest element, at most 8 bytes, that a head's K and V are whole numbers of."""
        return next(
            size
            for size in (8, 4, 2, 1)
            if not (self.k_dim * self._itemsize % size or self.v_dim * self._itemsize % size)
        )

    def _check_payload(self, nbytes: int, tokens: int, unit: KVShard | None) -> None:
        if nbytes != self.payload_bytes(tokens, unit):
            raise ValueError(f"the payload has {nbytes} bytes, {tokens} tokens {self.payload_bytes(tokens, unit)}")


def _within(inner: KVShard, outer: KVShard) -> bool:
    return (
        outer.layer_start <= inner.layer_start
        and inner.layer_end <= outer.layer_end
        and outer.head_start <= inner.head_start
        and inner.head_end <= outer.head_end
    )
