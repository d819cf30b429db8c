"""A Llama-style decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU) over a paged KV cache.

The logits of a token depend on the tokens before it and on nothing else, however the work was cut up.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from reference_engine.cache import PagedCache
from reference_engine.shape import ModelShape
from reference_engine.tokenizer import OUTPUT_IDS, VOCABULARY

__all__ = ["Model", "Span", "attention"]

# Batching, chunking and prefix reuse change the order of sums, and so the last bits of every result. Sums are therefore
# taken in float64 and K and V are rounded to float32 as they enter the cache, and read back from it even by the step
# that wrote them: differences near 1e-16 vanish in a rounding step of 6e-8, and all ways to cut the work give the
# same K, V and tokens. (An element would have to lie within 1e-15 of a rounding boundary to differ, and a choice
# between two tokens within about 1e-8 to notice.) Production engines accept such differences; a proof by equality does
# not.
COMPUTE: Final = torch.float64

_NORM_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence that a step computes: positions `[start, start + len(tokens))`."""

    tokens: list[int]
    start: int
    blocks: list[int]
    """The sequence's block table from position 0; covers the span."""
    want_logits: bool
    """Whether the logits after the span's last token are needed."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans of one width, whose attention is computed together."""

    rows: slice
    table: Tensor
    """Block ids [spans, blocks], padded with 0."""
    mask: Tensor
    """True where a query may look: [spans, 1, heads per kv head * width, keys]."""


class Model:
    """Weights and the forward pass. Weights come from `shape.seed`: every process has the same ones."""

    def __init__(self, shape: ModelShape, max_tokens: int) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(shape.seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=COMPUTE) * (gain / rows**0.5)

        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._embedding = torch.randn(VOCABULARY, shape.hidden, generator=generator, dtype=COMPUTE)
        # Queries and keys are scaled so that attention is sharp: random weights of the usual scale attend to
        # everything alike, and one token among hundreds would not change the output.
        self._layers = [
            _Layer(
                qk=weight(shape.hidden, query + key_value, gain=1.7),
                v=weight(shape.hidden, key_value),
                out=weight(query, shape.hidden, gain=2.0),
                gate_up=weight(shape.hidden, 2 * shape.feed_forward),
                down=weight(shape.feed_forward, shape.hidden, gain=2.0),
            )
            for _ in range(shape.layers)
        ]
        self._head = weight(shape.hidden, len(OUTPUT_IDS), gain=3.0)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=COMPUTE) / shape.head_dim)
        angles = torch.outer(torch.arange(max_tokens, dtype=COMPUTE), frequencies)
        self._cos, self._sin = angles.cos(), angles.sin()

    @torch.inference_mode()
    def forward(self, spans: list[Span], cache: PagedCache) -> Tensor:
        """Compute the spans, write their K and V into `cache`, return logits [spans that want them, outputs].

        Spans may come in any order; those of equal width are best given next to each other.
        """
        hidden = self.hidden(spans, cache)
        ends: list[int] = []
        row = 0
        for span in spans:
            row += len(span.tokens)
            if span.want_logits:
                ends.append(row - 1)
        return hidden[torch.tensor(ends, dtype=torch.long)] @ self._head

    @torch.inference_mode()
    def hidden(self, spans: list[Span], cache: PagedCache) -> Tensor:
        """As `forward`, but the normed states of all tokens before the output head: [tokens, hidden]."""
        size = cache.block_size
        positions = torch.tensor([at for span in spans for at in range(span.start, span.start + len(span.tokens))])
        slots = torch.tensor(
            [
                span.blocks[at // size] * size + at % size
                for span in spans
                for at in range(span.start, span.start + len(span.tokens))
            ]
        )
        groups = _grouped(spans, positions, size, self.shape.heads // self.shape.kv_heads)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        hidden = self._embedding[torch.tensor([token for span in spans for token in span.tokens])]
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(layer, _normed(hidden), cos, sin, slots, groups, cache, index)
            gate, up = (_normed(hidden) @ layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + (functional.silu(gate) * up) @ layer.down
        return _normed(hidden)

    def _attend(
        self,
        layer: "_Layer",
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        groups: list[_Group],
        cache: PagedCache,
        index: int,
    ) -> Tensor:
        shape = self.shape
        both = _rotated((hidden @ layer.qk).view(len(hidden), -1, shape.head_dim), cos, sin)
        query, key = both[:, : shape.heads], both[:, shape.heads :]
        value = (hidden @ layer.v).view(len(hidden), shape.kv_heads, shape.head_dim)
        cache.write(index, slots, key, value)
        attended = [
            attention(query[group.rows], *cache.read(index, group.table), group.mask).flatten(1) for group in groups
        ]
        return torch.cat(attended) @ layer.out


@dataclass(frozen=True, slots=True)
class _Layer:
    qk: Tensor
    v: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of equally long spans.

    Args:
        query: [spans * width, heads, dim], span after span.
        keys, values: [spans, keys, kv heads, dim].
        mask: [spans, 1, heads // kv heads * width, keys], True where a query may look.

    Returns:
        [spans * width, heads, dim].
    """
    spans, _, kv_heads, dim = keys.shape
    width, heads = len(query) // spans, query.shape[1]
    # The query heads that share a kv head stand behind each other as further queries: K and V need no copies.
    folded = query.view(spans, width, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(
        folded.reshape(spans, kv_heads, -1, dim),
        keys.to(COMPUTE).transpose(1, 2),
        values.to(COMPUTE).transpose(1, 2),
        attn_mask=mask,
    )
    unfolded = mixed.view(spans, kv_heads, heads // kv_heads, width, dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(spans * width, heads, dim)


def _grouped(spans: list[Span], positions: Tensor, block_size: int, share: int) -> list[_Group]:
    groups: list[_Group] = []
    first, row = 0, 0
    while first < len(spans):
        width = len(spans[first].tokens)
        # Only single tokens (decoding) are put together: a chunk of a prompt is work enough alone, and padding costs.
        last = first + 1
        while width == 1 and last < len(spans) and len(spans[last].tokens) == 1:
            last += 1
        group = spans[first:last]
        count = max((span.start + width - 1) // block_size + 1 for span in group)
        table = torch.tensor([(span.blocks + [0] * count)[:count] for span in group])
        rows = slice(row, row + width * len(group))
        seen = torch.arange(count * block_size) <= positions[rows].view(len(group), 1, width, 1)
        groups.append(_Group(rows, table, seen.repeat(1, 1, share, 1)))
        first, row = last, rows.stop
    return groups


def _normed(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + _NORM_EPSILON)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
