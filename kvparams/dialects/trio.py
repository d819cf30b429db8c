"""The three fields of vLLM pull request #12957: keys that the caller chose, in a store that both sides reach.

`kvparams.trio` reads them too, and those of several prompts; this is one prompt, beside the other dialects.
"""

from typing import Final

from kvparams.dialects.forms import TOKENS, Each, Text
from kvparams.dialects.table import Row, Table
from kvparams.fields import MAX_KEYS

__all__ = ["TRIO_TABLE"]

_KEYS: Final = Each(Text(128, r"[!-~]*", "a key in visible ASCII"), MAX_KEYS)

TRIO_TABLE: Final = Table(
    name="trio",
    title="vLLM pull request #12957",
    extension="ai.vllm.trio",
    mode="store",
    order="prefill first",
    carried=dict.fromkeys("PRD", "kv_transfer_params"),
    mints="nobody: the keys are the caller's",
    software="vLLM",
    source="vLLM pull request #12957 (February 2025) vllm/distributed/kv_transfer/kv_transfer_params.py",
    rows=(
        Row("prefix_prompt_ids", TOKENS, "PD", "the tokens that the KV belongs to", member="prefix"),
        Row("kvcache_load_keys", _KEYS, "PD", "where to find KV", member="load_keys", tells="D"),
        Row("kvcache_store_keys", _KEYS, "PD", "where to put KV", member="store_keys", tells="P"),
    ),
    notes=(
        "No release of vLLM has it: the fields were taken out before the pull request was merged.",
        "Prefill answers without native keys.",
        "The connector of the pull request used the first key only, as a prefix.",
    ),
)
