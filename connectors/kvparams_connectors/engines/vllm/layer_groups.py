"""Groups of layers: what vLLM's cache is made of, and what of it is known here.

vLLM gives each group of layers block tables of its own (vllm/v1/core/kv_cache_utils.py, 0.32). A group with a sliding
window keeps only the blocks that its window still reaches; before these its table has block 0, which holds nothing. A
group whose blocks cannot be told from its table is refused at start, in a sentence that says what to do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from kvparams_connectors.engines.vllm.interface import KVCacheConfig, VllmConfig
from kvparams_connectors.transfer.cache_layouts import CacheSpec, LayoutError, read_cache_spec

__all__ = ["LayerGroup", "group_revision", "layer_index", "read_groups"]

_CACHE_DTYPES: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""What `--kv-cache-dtype` means; the others say it themselves."""
_OFF: Final = "turn the store off for this model"
_ALIKE: Final = f"start vLLM with --disable-hybrid-kv-cache-manager, or {_OFF}"
"""Where layers with full attention and with windows can be kept alike."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that have one block table."""

    names: tuple[str, ...]
    """Of the layers, as vLLM has them."""
    spec: CacheSpec
    window: int | None
    """How many of the last tokens its blocks are kept for; None: for all."""


def read_groups(
    config: VllmConfig, cache: KVCacheConfig, *, page_tokens: int, tells_failures: bool
) -> tuple[LayerGroup, ...]:
    """The groups, in vLLM's order.

    Args:
        config: of the engine.
        cache: what vLLM gave the connector.
        page_tokens: of a stored page.
        tells_failures: whether this vLLM can be told that a load has failed as a whole. With windows it cannot be told
            up to where it was good: what comes before has no blocks.

    Raises:
        LayoutError: of a kind, or of kinds together, that is not known here.
    """
    dtype = _CACHE_DTYPES.get(config.cache_config.cache_dtype)
    groups = tuple(
        LayerGroup(
            tuple(one.layer_names),
            read_cache_spec(one.kv_cache_spec, cache_dtype=dtype, windows=True),
            _window(one.kv_cache_spec),
        )
        for one in cache.kv_cache_groups
    )
    if not groups:
        raise LayoutError("the model's cache has no groups of layers: turn the store off for this model")
    if len(groups) == 1 and groups[0].window is None:
        return groups
    off = _OFF if all(group.window is not None for group in groups) else _ALIKE
    kinds = ", ".join(type(one.kv_cache_spec).__name__ for one in cache.kv_cache_groups)
    if not tells_failures:
        raise LayoutError(
            f"the model's cache has {kinds}, and this version of vLLM (not 0.32) has no way to report failed "
            f"loads of single requests: {off}"
        )
    sizes = sorted({group.spec.block_size for group in groups})
    if len(sizes) > 1:
        raise LayoutError(f"the groups of layers ({kinds}) have blocks of different sizes, {sizes} tokens: {off}")
    least = min((group.window for group in groups if group.window is not None), default=page_tokens)
    if page_tokens > least or page_tokens % sizes[0]:
        raise LayoutError(
            f"layers with a sliding window of {least} tokens keep blocks of {sizes[0]} tokens no longer than that, so "
            f"pages must be whole blocks and no longer than the window: set page_tokens, which is {page_tokens}, "
            f"to {_page(least, sizes[0])} in kv_connector_extra_config of all engines that share, or {off}"
        )
    return groups


def group_revision(revision: str, groups: Sequence[LayerGroup], group: LayerGroup) -> str:
    """Returns what stands in the keys of a group's pages for the weights. Pages of other layers never match."""
    if len(groups) == 1:
        return revision
    layers = sorted(layer_index(name) for name in group.names)
    return blake2b(f"{revision} layers {layers}".encode(), digest_size=16).hexdigest()


def layer_index(name: str) -> int:
    """The number in a layer's name: `model.layers.7.self_attn.attn`.

    Raises:
        LayoutError: there is none, or several.
    """
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise LayoutError(f"the name of the layer {name!r} must have exactly one number in it")
    return int(numbers[0])


def _window(spec: object) -> int | None:
    window = getattr(spec, "sliding_window", None)
    if type(spec).__name__ != "SlidingWindowSpec":  # full attention keeps all blocks, whatever its layers look at
        return None
    if not isinstance(window, int) or window < 1:
        raise LayoutError(f"a cache with a sliding window of {window!r} tokens is not supported: {_OFF}")
    return window + int(getattr(spec, "extra_retained_tokens", 0))


def _page(window: int, block: int) -> str:
    return f"{window // block * block} or another multiple of {block} below" if window >= block else "less"
