"""The three fields of vLLM pull request #12957: keys that the caller chose, in a store that both sides reach.

`kvparams.legacy_params` reads them too, and those of several prompts; this is one prompt, beside the other dialects.
"""

from typing import Final

from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import TOKENS, ListType, TextType
from kvparams.field_types import MAX_KEYS

__all__ = ["TRIO_TABLE"]

_KEYS: Final = ListType(TextType(128, r"[!-~]*", "a key in visible ASCII"), MAX_KEYS)

TRIO_TABLE: Final = DialectTable(
    name="trio",
    title="vLLM pull request #12957",
    extension="ai.vllm.trio",
    mode="store",
    order="prefill first",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="nobody: the keys are the caller's",
    software="vLLM",
    source="vLLM pull request #12957 (February 2025) vllm/distributed/kv_transfer/kv_transfer_params.py",
    native_keys=(
        NativeKey("prefix_prompt_ids", TOKENS, "PD", "the tokens that the KV belongs to", member="prefix"),
        NativeKey("kvcache_load_keys", _KEYS, "PD", "where to find KV", member="load_keys", implied_leg="D"),
        NativeKey("kvcache_store_keys", _KEYS, "PD", "where to put KV", member="store_keys", implied_leg="P"),
    ),
    notes=(
        "No release of vLLM has it: the fields were taken out before the pull request was merged.",
        "Prefill answers without native keys.",
        "The connector of the pull request used the first key only, as a prefix.",
    ),
)
