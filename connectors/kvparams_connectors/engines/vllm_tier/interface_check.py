"""Checks that the installed vLLM has the tier interface that this package knows.

vLLM calls its interface experimental, and has changed it with every version.

What differs is refused before anything is served, by name; a field that means something else would be somebody else's
KV.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvparams_connectors.store_url import StoreError

__all__ = [
    "ABSTRACT_SIGNATURES",
    "HOOK_SIGNATURES",
    "KNOWN_VERSION",
    "MEMBER_NAMES",
    "find_differences",
    "require_known_interface",
]

KNOWN_VERSION: Final = "0.32"
"""The version of vLLM."""

ABSTRACT_SIGNATURES: Final[Mapping[str, Sequence[str]]] = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "drain_jobs": (),
}
"""What a tier must have, with the parameters."""
HOOK_SIGNATURES: Final[Mapping[str, Sequence[str]]] = {
    "__init__": ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    "on_request_finished": ("req_context",),
    "on_schedule_end": ("context",),
    "shutdown": (),
    "build_metric_definitions": ("extra_config",),
    "get_stats": (),
}
"""What ours has besides."""
MEMBER_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "TransferJob": ("job_id", "keys", "chunk_ids"),
    "JobResult": ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    "ReqContext": ("req_id",),
    "LookupResult": ("MISS", "HIT", "RETRY"),
    "OffloadingConfig": (
        *("groups", "worker_kv_bytes_per_block", "model", "cache", "parallel", "canonical_layout", "kv_cache_layout"),
    ),
    "OffloadingGroupConfig": ("group_id", "tokens_per_block", "layer_names"),
    "OffloadingModelConfig": ("name", "dtype"),
    "OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    "OffloadingParallelConfig": ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"),
}
"""What is read of vLLM's other classes."""


def find_differences(base: Any, others: Mapping[str, Any]) -> list[str]:
    """Returns what is other than it is known here; nothing, if the interface is.

    Args:
        base: vLLM's `SecondaryTierManager`.
        others: its classes by name, those of `MEMBER_NAMES`; one that it does not have may be left out.
    """
    found: list[str] = []
    abstract: frozenset[str] = getattr(base, "__abstractmethods__", frozenset[str]())
    found += [f"a tier must have {name} as well" for name in sorted(abstract - set(ABSTRACT_SIGNATURES))]
    for name, parameters in {**ABSTRACT_SIGNATURES, **HOOK_SIGNATURES}.items():
        method = getattr(base, name, None)
        if method is None:
            found.append(f"{name} is not there")
            continue
        taken = tuple(one for one in inspect.signature(method).parameters if one != "self")
        if taken != tuple(parameters):
            found.append(f"{name} takes ({', '.join(taken)})")
    for name, members in MEMBER_NAMES.items():
        kind = others.get(name)
        has: set[str] = {*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "__members__", ())}
        found += [f"{name}.{member} is not there" for member in members if member not in has]
    return found


def require_known_interface(version: str, base: Any, others: Mapping[str, Any]) -> None:
    """Raises if the interface of the installed vLLM differs.

    Raises:
        StoreError: something differs.
    """
    found = find_differences(base, others)
    if found:
        raise StoreError(
            f"vLLM {version} has another tier interface than the supported version {KNOWN_VERSION}: "
            f"{'; '.join(found)}. Use vLLM {KNOWN_VERSION}, use a kvparams release for your vLLM, or remove "
            "KVParamsTier from secondary_tiers"
        )
