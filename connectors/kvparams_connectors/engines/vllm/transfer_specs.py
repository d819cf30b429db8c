"""From tokens to the orders of each group of layers.

Block 0 of a group with a window holds nothing: it is neither saved nor filled, nor is what stands before.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Final

from kvparams_connectors.engines.vllm.connector_metadata import LoadSpec, SaveSpec, TokenSequence
from kvparams_connectors.engines.vllm.request_state_machine import LoadRange, SaveRange

__all__ = ["NULL_BLOCK", "GroupBlockTables", "load_specs", "save_specs"]

GroupBlockTables = Tokens[Tokens[int]]
"""By group the block table from token 0."""
NULL_BLOCK: Final = 0
"""Stands in tables for blocks that are behind a window (vllm/v1/core/block_pool.py, 0.32)."""


def load_specs(
    request_id: str,
    sequence: TokenSequence,
    tables: GroupBlockTables,
    claim: LoadRange,
    *,
    block_tokens: int,
    windows: Tokens[int | None],
) -> list[LoadSpec]:
    """Returns what fills all blocks that the engine has for the tokens of a claim."""
    orders: list[LoadSpec] = []
    for group, (table, window) in enumerate(zip(tables, windows, strict=True)):
        start = claim.start if window is None else max(claim.start, _behind_nulls(table) * block_tokens)
        if start < claim.end:
            orders.append(LoadSpec(request_id, sequence, tuple(table), start, claim.end, group))
    return orders


def save_specs(
    sequence: TokenSequence,
    tables: GroupBlockTables,
    span: SaveRange,
    *,
    page_tokens: int,
    block_tokens: int,
    windows: Tokens[int | None],
    required: bool,
    hold: Callable[[Tokens[int]], int] | None,
    gaps: set[tuple[int, int]],
) -> list[SaveSpec]:
    """Returns what saves the pages of a span, as far as the engine still has their blocks.

    Args:
        sequence: up to the span's end.
        tables: of the request.
        span: whose pages.
        page_tokens: of a stored page.
        block_tokens: of a block.
        windows: by group.
        required: whether somebody has been promised them.
        hold: keeps blocks as they are; None: nobody can.
        gaps: group and end of pages of the request that could not be saved; brought up to now.
    """
    orders: list[SaveSpec] = []
    for group, (table, window) in enumerate(zip(tables, windows, strict=True)):
        start = span.start
        if window is not None:
            whole = -(-_behind_nulls(table) * block_tokens // page_tokens) * page_tokens
            start = max(start, whole)
            for end in range(span.start - span.start % page_tokens + page_tokens, span.end + page_tokens, page_tokens):
                (gaps.add if end <= start else gaps.discard)((group, min(end, span.end)))
            if start >= span.end:
                continue
        number = None
        if hold is not None:
            first = start // page_tokens * page_tokens // block_tokens
            number = hold(table[first : -(-span.end // block_tokens)])
        orders.append(SaveSpec(sequence, tuple(table), start, span.end, required, number, group))
    return orders


def _behind_nulls(table: Tokens[int]) -> int:
    """The first of the blocks behind the last that is none."""
    return next((at + 1 for at in range(len(table) - 1, -1, -1) if table[at] == NULL_BLOCK), 0)
