"""Determines which part of a model an engine's rank holds, and what its pages are called.

A layout that is not understood is refused before the engine serves, with a sentence that says what to do. Other engines
would find and use a page of half a model, or a page of two ranks under one name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvparams.keys import Geometry, KVShard, Namespace
from kvparams_connectors.transfer.cache_layouts import CacheSpec, LayoutError
from kvparams_connectors.transfer.shard_grid import ShardGrid

__all__ = ["ParallelRanks", "RankShard", "check_layer_range", "rank_shard"]


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """Describes how the engine is divided; this rank's place in it."""

    tensor: int = 1
    tensor_rank: int = 0
    pipeline: int = 1
    context: int = 1


@dataclass(frozen=True, slots=True)
class RankShard:
    """Describes what engines that share pages agree on, and this rank's part."""

    namespace: Namespace
    shard: KVShard
    grid: ShardGrid
    window: int | None = None
    """How many of the last tokens the engine keeps; None: all."""


def rank_shard(
    *,
    model: str,
    revision: str,
    page_tokens: int,
    spec: CacheSpec,
    layers: int,
    kv_heads: int,
    ranks: ParallelRanks,
    sizes: Sequence[int] | None,
    window: int | None = None,
) -> RankShard:
    """Names and part of one rank.

    Args:
        model: its name.
        revision: of its weights.
        page_tokens: of a stored page.
        spec: of this rank's cache.
        layers: of the whole model that have such a cache.
        kv_heads: of the whole model; MLA: 1.
        ranks: how the engine is divided.
        sizes: of tensor parallelism that shall share; None: this engine's.
        window: how many of the last tokens the engine keeps; None: all.

    Raises:
        LayoutError: the engine is divided in a way that is not known here.
    """
    if ranks.pipeline != 1:
        raise LayoutError("pipeline parallelism is not supported: start vLLM with --pipeline-parallel-size 1")
    if ranks.context != 1:
        raise LayoutError(
            "context parallelism is not supported, because its ranks hold parts of the tokens, not of the heads"
        )
    mine = kv_heads // ranks.tensor if kv_heads % ranks.tensor == 0 else 1
    if kv_heads % ranks.tensor and ranks.tensor % kv_heads:
        raise LayoutError(f"{kv_heads} KV heads cannot be divided equally over {ranks.tensor} ranks")
    if spec.kv_heads != mine:
        raise LayoutError(
            f"vLLM's cache has {spec.kv_heads} KV heads on this rank, but {kv_heads} heads on {ranks.tensor} "
            f"ranks would be {mine}. This model's distribution of heads is not supported; turn the store off for "
            "it"
        )
    first = ranks.tensor_rank * kv_heads // ranks.tensor
    geometry = Geometry(layers, kv_heads, spec.k_dim, spec.v_dim)
    try:
        grid = ShardGrid.shared(geometry, tensor=sizes or (ranks.tensor,))
    except ValueError as error:
        raise LayoutError(f"tensor_parallel_sizes: {error}") from error
    if mine % grid.head_unit:
        raise LayoutError(f"tensor_parallel_sizes {list(sizes or ())} must include this engine's size, {ranks.tensor}")
    namespace = Namespace(model, revision, spec.dtype, geometry, page_tokens)
    return RankShard(namespace, KVShard(0, layers, first, first + mine), grid, window)


def check_layer_range(indexes: Sequence[int], layers: int) -> None:
    """Refuse caches that are not one for each of the model's layers.

    Args:
        indexes: of the layers that have a cache, by their names.
        layers: of the model.

    Raises:
        LayoutError: some layer has none, or several.
    """
    if sorted(indexes) != list(range(layers)):
        raise LayoutError(
            f"the model has {layers} layers, but only the layers {sorted(indexes)} have caches, so pages would be "
            "incomplete. Turn the store off for this model"
        )
