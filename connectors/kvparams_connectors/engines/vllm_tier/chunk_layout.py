"""From vLLM's configuration to the form of its chunks.

A tier is told less than a connector: not which revision of the weights vLLM has loaded, not which attention backend
runs. Where that cannot be seen, and nobody has said it, the engine is refused in a sentence that says what to do;
chunks of other weights or of another order of bytes would be taken for its own.
"""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from kvparams_connectors.engines.vllm_tier.chunk_keys import OffloadChunkLayout, OffloadLayerGroup
from kvparams_connectors.engines.vllm_tier.interface import OffloadingSpec
from kvparams_connectors.engines.vllm_tier.settings import TierSettings
from kvparams_connectors.engines.weights_identity import folder_digest, model_name, revision_of
from kvparams_connectors.store_url import StoreError

__all__ = ["chunk_layout_of"]

_TRUSTED: Final = ("cuda",)
"""Platforms whose attention backends keep KV alike where `kv_cache_layout` is. On ROCm some shuffle it, and on a CPU it
depends on the instruction set."""


def chunk_layout_of(
    spec: OffloadingSpec, settings: TierSettings, *, vllm: str, platform: str, row_bytes: int
) -> OffloadChunkLayout:
    """The form of an engine's chunks.

    Args:
        spec: vLLM's.
        settings: of the tier.
        vllm: its version.
        platform: vLLM's name of it: `cuda`, `rocm`, `cpu`.
        row_bytes: of a chunk in host memory.

    Raises:
        StoreError: the engine keeps its KV in a way that is not known, or it cannot be told from others.
    """
    config = spec.config
    parallel = config.parallel
    if config.kv_cache_layout is None:
        raise StoreError("vLLM does not report its KV layout (kv_cache_layout), so the KV cannot be shared")
    if settings.revision is None and platform not in _TRUSTED:
        raise StoreError(
            f"on this platform ({platform}) the KV layout depends on the attention backend, which vLLM does not "
            "report to a tier. Set revision to a text that names the weights and the attention backend, "
            "different for each combination"
        )
    name = config.model.name
    try:
        form = OffloadChunkLayout(
            vllm=vllm.split("+")[0],
            platform=platform,
            model=settings.model or model_name(name),
            revision=_revision(settings.revision, name),
            dtype=config.model.dtype,
            layout=config.kv_cache_layout,
            groups=tuple(
                OffloadLayerGroup(group.group_id, group.tokens_per_block, tuple(group.layer_names))
                for group in config.groups
            ),
            hash_tokens=config.cache.tokens_per_hash,
            chunk_blocks=config.cache.blocks_per_chunk,
            block_bytes=config.worker_kv_bytes_per_block,
            ranks=(parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size),
            copies=1 if spec.replicated_layout else parallel.world_size,
            canonical=config.canonical_layout,
        )
    except ValueError as error:
        raise StoreError(f"vLLM's division of the KV is not supported: {error}") from error
    if row_bytes != -(-form.payload_bytes // mmap.PAGESIZE) * mmap.PAGESIZE:
        raise StoreError(
            f"a chunk has {row_bytes} bytes in vLLM's host memory, but {form.payload_bytes} bytes (rounded up to "
            "whole memory pages) were expected; this layout is not supported"
        )
    return form


def _revision(said: str | None, name: str) -> str:
    if said is not None:
        return revision_of(said, None, {})
    folder = Path(name)
    if not folder.is_dir():
        raise StoreError(
            f"{name} is not a folder, and vLLM does not report the loaded revision to a tier; set revision in "
            "secondary_tiers, for example to the commit"
        )
    config = folder / "config.json"
    told: object = json.loads(config.read_bytes()) if config.is_file() else {}
    return revision_of(
        folder_digest(folder), None, cast("Mapping[str, object]", told) if isinstance(told, dict) else {}
    )
