"""What vLLM's configuration says about the KV, in our terms: the same in the scheduler and in every worker.

The one rule: both halves read it here, from what both are given, so that they cannot disagree on a key.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvparams_connectors.engines.vllm.geometry import Ranks, Share, share_of
from kvparams_connectors.engines.vllm.identity import folder_digest, model_name, revision_of, snapshot_commit
from kvparams_connectors.engines.vllm.interface import CacheConfig, CacheGroup, EngineConfig
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.layout_forms import CacheSpec, LayoutError, read_spec

__all__ = ["cache_group", "cpu_form", "group_spec", "layer_index", "read_share"]

_CACHE_DTYPES: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""What `--kv-cache-dtype` means; the others say it themselves."""
_CPU_FORMS: Final = {"vec": "vllm_cpu_vec", "vec16": "vllm_cpu_vec"}
"""By the attention kernel of vllm/v1/attention/backends/cpu_attn.py."""


def cache_group(cache: CacheConfig) -> CacheGroup:
    """The one group of layers.

    Raises:
        LayoutError: there are several, so that blocks of one number hold different things.
    """
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
        raise LayoutError(
            f"the model's cache has {len(groups)} groups of layers ({kinds}); known is one group of full attention. "
            "Where the groups are full and sliding windows, start vLLM with --disable-hybrid-kv-cache-manager; "
            "otherwise switch the store off for this model"
        )
    return groups[0]


def group_spec(config: EngineConfig, group: CacheGroup) -> CacheSpec:
    """What the cache of each layer is.

    Raises:
        LayoutError: of a kind that is not known.
    """
    return read_spec(group.kv_cache_spec, cache_dtype=_CACHE_DTYPES.get(config.cache_config.cache_dtype))


def read_share(config: EngineConfig, cache: CacheConfig, settings: VLLMSettings, *, tensor_rank: int) -> Share:
    """Names and part of a rank.

    Args:
        config: of the engine.
        cache: what vLLM gave the connector.
        settings: of the connector.
        tensor_rank: 0 in the scheduler, which asks for all ranks' parts anyway.

    Raises:
        LayoutError: the engine keeps its KV in a way that is not known.
        StoreError: which weights these are cannot be seen.
    """
    model, parallel = config.model_config, config.parallel_config
    group = cache_group(cache)
    spec = group_spec(config, group)
    return share_of(
        model=settings.model or model_name(model.model),
        revision=revision_of(
            settings.revision or _weights(model.model, model.revision),
            None if model.quantization is None else str(model.quantization),
            model.hf_config.to_dict(),
        ),
        page_tokens=settings.page_tokens,
        spec=spec,
        layers=model.get_total_num_hidden_layers(),
        kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        ranks=Ranks(
            parallel.tensor_parallel_size,
            tensor_rank,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        ),
        sizes=settings.tensor_parallel_sizes,
    )


def layer_index(name: str) -> int:
    """The number in a layer's name: `model.layers.7.self_attn.attn`.

    Raises:
        LayoutError: there is none, or several.
    """
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise LayoutError(f"which layer is {name!r}? Known are names with one number in them")
    return int(numbers[0])


def cpu_form(kernel: str) -> str:
    """The form of the cache that vLLM's attention kernel on a CPU keeps.

    Raises:
        LayoutError: it is not known here.
    """
    form = _CPU_FORMS.get(kernel)
    if form is None:
        raise LayoutError(
            f"vLLM's attention on this CPU is `{kernel}`, whose cache is packed in a way that is not known; known: "
            f"{', '.join(_CPU_FORMS)}. On a CPU with AMX start vLLM with --dtype float32"
        )
    return form


def _weights(model: str, revision: str | None) -> str:
    folder = Path(model)
    if folder.is_dir():
        return folder_digest(folder)
    hub: Any = import_module("huggingface_hub")  # vLLM has it
    found: object = hub.try_to_load_from_cache(model, "config.json", revision=revision)
    return snapshot_commit(found if isinstance(found, str) else None)
