"""Defines what vLLM's configuration says about the KV, in our terms: the same in the scheduler and in every worker.

The scheduler's half and the workers' half both read the configuration here, so they cannot disagree on a key.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvparams_connectors.engines.vllm.interface import VllmConfig
from kvparams_connectors.engines.vllm.layer_groups import LayerGroup, group_revision, layer_index
from kvparams_connectors.engines.vllm.rank_geometry import ParallelRanks, RankShard, check_layer_range, rank_shard
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.weights_identity import folder_digest, model_name, revision_of, snapshot_commit
from kvparams_connectors.transfer.cache_layouts import LayoutError

__all__ = ["cpu_cache_layout", "read_rank_shards"]

_CPU_FORMS: Final = {"vec": "vllm_cpu_vec", "vec16": "vllm_cpu_vec"}
"""By the attention kernel of vllm/v1/attention/backends/cpu_attn.py."""


def read_rank_shards(
    config: VllmConfig, groups: Sequence[LayerGroup], settings: VLLMSettings, *, tensor_rank: int
) -> tuple[RankShard, ...]:
    """Names and part of a rank, for each group of layers.

    Args:
        config: of the engine.
        groups: of the layers.
        settings: of the connector.
        tensor_rank: 0 in the scheduler, which asks for all ranks' parts anyway.

    Raises:
        LayoutError: the engine keeps its KV in a way that is not known.
        StoreError: which weights these are cannot be seen.
    """
    model, parallel = config.model_config, config.parallel_config
    revision = revision_of(
        settings.revision or _weights(model.model, model.revision),
        None if model.quantization is None else str(model.quantization),
        model.hf_config.to_dict(),
    )
    ranks = ParallelRanks(
        parallel.tensor_parallel_size,
        tensor_rank,
        parallel.pipeline_parallel_size,
        parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
    )
    layers = model.get_total_num_hidden_layers()
    if len(groups) > 1:
        check_layer_range([layer_index(name) for group in groups for name in group.names], layers)
    return tuple(
        rank_shard(
            model=settings.model or model_name(model.model),
            revision=group_revision(revision, groups, group),
            page_tokens=settings.page_tokens,
            spec=group.spec,
            layers=layers if len(groups) == 1 else len(group.names),
            kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
            ranks=ranks,
            sizes=settings.tensor_parallel_sizes,
            window=group.window,
        )
        for group in groups
    )


def cpu_cache_layout(kernel: str) -> str:
    """The form of the cache that vLLM's attention kernel on a CPU keeps.

    Raises:
        LayoutError: it is not known here.
    """
    form = _CPU_FORMS.get(kernel)
    if form is None:
        raise LayoutError(
            f"vLLM's attention on this CPU is `{kernel}`, whose cache layout is not supported; supported: "
            f"{', '.join(_CPU_FORMS)}. On a CPU with AMX, start vLLM with --dtype float32"
        )
    return form


def _weights(model: str, revision: str | None) -> str:
    folder = Path(model)
    if folder.is_dir():
        return folder_digest(folder)
    hub: Any = import_module("huggingface_hub")  # vLLM has it
    found: object = hub.try_to_load_from_cache(model, "config.json", revision=revision)
    return snapshot_commit(found if isinstance(found, str) else None)
