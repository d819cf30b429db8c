"""What only a proxy may say to an engine, as one table: whatever a client says of it is taken away.

An engine can be told where to fetch KV, under which key or id, from which rank. Each row names one way to tell it, and
who reads it. Members are removed from the body; of headers and request ids only what is known to be harmless is let
through, and the table says what that keeps back. The one rule: a way in that becomes known is a row here, and nothing
else has to change.

Not in it is what an engine fetches because the API says so, such as images by URL (vLLM: --allowed-media-domains).
"""

import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

__all__ = [
    "CARRIERS",
    "FORWARDED",
    "MEDIA_NAME",
    "STEERING",
    "STRIPPED",
    "SUSPICIOUS",
    "Steering",
    "harmless",
    "steering_hint",
]

Where = Literal["body", "nvext", "header", "request id", "medium", "features"]


class Steering(NamedTuple):
    """One way to steer an engine's KV."""

    where: Where
    """`body`: a member of the body, or of an object of `CARRIERS`; `nvext`: a member of that one; `header`: a header,
    by its name in lower case; `request id`: a part of X-Request-Id; `medium`: a member of a part of a message;
    `features`: a member of that object of `/inference/v1/generate`. `media.py` handles the last two."""
    name: str
    """In headers a `*` at the end stands for anything, in `nvext` one at the start."""
    source: str
    """Who reads it."""


_VLLM: Final = "vLLM 0.32.0 entrypoints/openai/*/protocol.py"
_SGLANG: Final = "SGLang 0.5.23 entrypoints/openai/protocol.py"
_SGLANG_NATIVE: Final = "SGLang 0.5.23 managers/io_struct.py"
_SGLANG_HEADERS: Final = "SGLang 0.5.23 entrypoints/request_headers.py"
_TRT: Final = "TensorRT-LLM serve/openai_protocol.py"
_DYNAMO: Final = "Dynamo 1.6.1 nvext"
_DYNAMO_INSIDE: Final = "Dynamo 1.6.1 PreprocessedRequest: between its own parts"
_DYNAMO_HEADERS: Final = "Dynamo 1.6.1: goes before nvext"
_LLMD: Final = "llm-d-router pkg/common/routing/common.go"
_MORIIO: Final = "vLLM 0.32.0 moriio_common.py; vLLM 0.20 p2p_nccl_connector.py"

STEERING: Final = (
    Steering("body", "kv_transfer_params", _VLLM),
    Steering("body", "ec_transfer_params", _VLLM),
    Steering("body", "kv_hints", "vLLM 0.32.0 v1/kv_hints/protocol.py"),
    Steering("body", "kv_hint", "Dynamo 1.6.1 vllm/kv_hints.py"),
    Steering("body", "disaggregated_params", _TRT),
    Steering("body", "disagg_prefill_resp", "production-stack services/request_service/request.py; NeuronX"),
    Steering("body", "bootstrap_host", _SGLANG),
    Steering("body", "bootstrap_port", _SGLANG),
    Steering("body", "bootstrap_room", _SGLANG),
    Steering("body", "bootstrap_pair_key", _SGLANG_NATIVE),
    Steering("body", "decode_tp_size", _SGLANG_NATIVE),
    Steering("body", "routed_dp_rank", _SGLANG),
    Steering("body", "data_parallel_rank", _SGLANG),
    Steering("body", "disagg_prefill_dp_rank", _SGLANG),
    Steering("body", "session_params", f"{_SGLANG}: goes on from another session's KV"),
    Steering("body", "rid", f"{_SGLANG}: the id of a request"),
    Steering("body", "request_id", f"{_VLLM}: the id of a request, and of its KV"),
    Steering("body", "cache_hit_threshold", "llm-d-router, shared storage: decode before prefill"),
    Steering("body", "prefix_prompt_ids", "vLLM pull request #12957: the trio, where it is not nested"),
    Steering("body", "kvcache_load_keys", "vLLM pull request #12957"),
    Steering("body", "kvcache_store_keys", "vLLM pull request #12957"),
    Steering("body", "prefill_result", _DYNAMO_INSIDE),
    Steering("body", "bootstrap_info", _DYNAMO_INSIDE),
    Steering("body", "encoder_result", _DYNAMO_INSIDE),
    Steering("body", "routing", _DYNAMO_INSIDE),
    Steering("body", "mm_hashes", f"{_SGLANG_NATIVE}: taken for hashes of what is in the media"),
    Steering("body", "mm_content_hashes", _SGLANG_NATIVE),
    Steering("medium", "uuid", "vLLM 0.32.0 renderers/chat_utils.py: taken for a hash of what is in the medium"),
    Steering("features", "mm_hashes", "vLLM 0.32.0 scale_out/token_in_token_out/protocol.py: the same"),
    Steering("nvext", "backend_instance_id", _DYNAMO),
    Steering("nvext", "*worker_id", _DYNAMO),
    Steering("nvext", "*instance_id", _DYNAMO),
    Steering("nvext", "*worker_ids", _DYNAMO),
    Steering("nvext", "*dp_rank", _DYNAMO),
    Steering("nvext", "token_data", f"{_DYNAMO}: another prompt than the one that was sent"),
    Steering("nvext", "annotations", f"{_DYNAMO}: query_instance_id"),
    Steering("nvext", "session_control", f"{_DYNAMO}: whose KV is kept"),
    Steering("header", "x-override-*", _SGLANG_HEADERS),
    Steering("header", "x-data-parallel-rank", "vLLM 0.32.0 entrypoints/generate/base/serving.py"),
    Steering("header", "x-prefiller-host-port", _LLMD),
    Steering("header", "x-encoder-hosts-ports", _LLMD),
    Steering("header", "x-kv-cache-source-host-port", _LLMD),
    Steering("header", "x-data-parallel-host-port", _LLMD),
    Steering("header", "x-worker-instance-id", _DYNAMO_HEADERS),
    Steering("header", "x-prefill-instance-id", _DYNAMO_HEADERS),
    Steering("header", "x-dp-rank", _DYNAMO_HEADERS),
    Steering("header", "x-prefill-dp-rank", _DYNAMO_HEADERS),
    Steering("header", "x-trtllm-disagg-auth", "TensorRT-LLM serve/disagg_auth.py"),
    Steering("header", "x-session-id", "vLLM 0.32.0 entrypoints/generate/base/serving.py"),
    Steering("header", "x-vllm-priority", "vLLM 0.32.0 entrypoints/generate/base/serving.py"),
    Steering("header", "prefer", "llm-d coordinator: if-available"),
    Steering("request id", "___prefill_addr_", _MORIIO),
    Steering("request id", "___decode_addr_", _MORIIO),
)

STRIPPED: Final = frozenset(row.name for row in STEERING if row.where == "body")
"""Members that are taken out of the body and of what is in `CARRIERS`."""

MEDIA_NAME: Final = next(row.name for row in STEERING if row.where == "medium")
"""The member of a part of a message by which a client names a medium."""

CARRIERS: Final = dict.fromkeys(("vllm_xargs", "sampling_params", "nvext"), ("extra_args",))
"""Members whose own members reach an engine's KV connector too, and which of these is an object that does (vLLM 0.32.0
chat_completion/protocol.py, scale_out/token_in_token_out/serving.py). That one is known of `sampling_params` alone; no
client has use for it in the others."""

SUSPICIOUS: Final = STRIPPED | CARRIERS.keys()
"""A body that has none of these members is left as it is."""

FORWARDED: Final = frozenset((b"traceparent", b"tracestate"))
"""The only client headers that engines see, beside Authorization where nobody here has use for it."""

_SAFE_ID: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEERING_IDS: Final = tuple(row.name.encode() for row in STEERING if row.where == "request id")
_HINTS: Final = frozenset(row.name for row in STEERING if row.where == "nvext")
_HINT_ENDS: Final = tuple(name[1:] for name in _HINTS if name.startswith("*"))


def harmless(request_id: bytes) -> bool:
    """Whether a client's X-Request-Id may reach engines as it is: engines have read addresses out of it."""
    return _SAFE_ID.fullmatch(request_id) is not None and not any(part in request_id for part in _STEERING_IDS)


def steering_hint(names: Iterable[str]) -> list[str]:
    """Which of these members of `nvext` steer an engine."""
    return [name for name in names if name in _HINTS or name.endswith(_HINT_ENDS)]
