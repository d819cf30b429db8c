"""Table of the fields that only a proxy may send to an engine. They are removed from clients' requests.

An engine can be told where to fetch KV, under which key or id, from which rank. Each row names one way to tell it, and
who reads it. Members are removed from the body; of headers and request ids only what is known to be harmless is let
through, and the table says what that keeps back. A newly found field needs a new row here and no other change.

Not in it is what an engine fetches because the API says so, such as images by URL (vLLM: --allowed-media-domains).
"""

import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

__all__ = [
    "FORBIDDEN_FIELDS",
    "FORBIDDEN_MEMBERS",
    "FORWARDED_HEADERS",
    "INSPECTED_MEMBERS",
    "MEDIA_UUID_MEMBER",
    "NESTED_CARRIERS",
    "ForbiddenField",
    "forbidden_nvext_members",
    "is_forbidden_header",
    "is_safe_request_id",
]

FieldLocation = Literal["body", "nvext", "header", "request id", "medium", "features"]


class ForbiddenField(NamedTuple):
    """A field that steers an engine's KV."""

    location: FieldLocation
    """`body`: a member of the body, or of an object of `NESTED_CARRIERS`; `nvext`: a member of that one; `header`: a
    header, by its name in lower case; `request id`: a part of X-Request-Id; `medium`: a member of a part of a message;
    `features`: a member of that object of `/inference/v1/generate`. `media_uuids.py` handles the last two."""
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

FORBIDDEN_FIELDS: Final = (
    ForbiddenField("body", "kv_transfer_params", _VLLM),
    ForbiddenField("body", "ec_transfer_params", _VLLM),
    ForbiddenField("body", "kv_hints", "vLLM 0.32.0 v1/kv_hints/protocol.py"),
    ForbiddenField("body", "kv_hint", "Dynamo 1.6.1 vllm/kv_hints.py"),
    ForbiddenField("body", "disaggregated_params", _TRT),
    ForbiddenField("body", "disagg_prefill_resp", "production-stack services/request_service/request.py; NeuronX"),
    ForbiddenField("body", "bootstrap_host", _SGLANG),
    ForbiddenField("body", "bootstrap_port", _SGLANG),
    ForbiddenField("body", "bootstrap_room", _SGLANG),
    ForbiddenField("body", "bootstrap_pair_key", _SGLANG_NATIVE),
    ForbiddenField("body", "decode_tp_size", _SGLANG_NATIVE),
    ForbiddenField("body", "routed_dp_rank", _SGLANG),
    ForbiddenField("body", "data_parallel_rank", _SGLANG),
    ForbiddenField("body", "disagg_prefill_dp_rank", _SGLANG),
    ForbiddenField("body", "session_params", f"{_SGLANG}: goes on from another session's KV"),
    ForbiddenField("body", "rid", f"{_SGLANG}: the id of a request"),
    ForbiddenField("body", "request_id", f"{_VLLM}: the id of a request, and of its KV"),
    ForbiddenField("body", "cache_hit_threshold", "llm-d-router, shared storage: decode before prefill"),
    ForbiddenField("body", "prefix_prompt_ids", "vLLM pull request #12957: the trio, where it is not nested"),
    ForbiddenField("body", "kvcache_load_keys", "vLLM pull request #12957"),
    ForbiddenField("body", "kvcache_store_keys", "vLLM pull request #12957"),
    ForbiddenField("body", "prefill_result", _DYNAMO_INSIDE),
    ForbiddenField("body", "bootstrap_info", _DYNAMO_INSIDE),
    ForbiddenField("body", "encoder_result", _DYNAMO_INSIDE),
    ForbiddenField("body", "routing", _DYNAMO_INSIDE),
    ForbiddenField("body", "mm_hashes", f"{_SGLANG_NATIVE}: taken for hashes of what is in the media"),
    ForbiddenField("body", "mm_content_hashes", _SGLANG_NATIVE),
    ForbiddenField("medium", "uuid", "vLLM 0.32.0 renderers/chat_utils.py: taken for a hash of what is in the medium"),
    ForbiddenField("features", "mm_hashes", "vLLM 0.32.0 scale_out/token_in_token_out/protocol.py: the same"),
    ForbiddenField("nvext", "backend_instance_id", _DYNAMO),
    ForbiddenField("nvext", "*worker_id", _DYNAMO),
    ForbiddenField("nvext", "*instance_id", _DYNAMO),
    ForbiddenField("nvext", "*worker_ids", _DYNAMO),
    ForbiddenField("nvext", "*dp_rank", _DYNAMO),
    ForbiddenField("nvext", "token_data", f"{_DYNAMO}: another prompt than the one that was sent"),
    ForbiddenField("nvext", "annotations", f"{_DYNAMO}: query_instance_id"),
    ForbiddenField("nvext", "session_control", f"{_DYNAMO}: whose KV is kept"),
    ForbiddenField("header", "x-override-*", _SGLANG_HEADERS),
    ForbiddenField("header", "x-data-parallel-rank", "vLLM 0.32.0 entrypoints/generate/base/serving.py"),
    ForbiddenField("header", "x-prefiller-host-port", _LLMD),
    ForbiddenField("header", "x-encoder-hosts-ports", _LLMD),
    ForbiddenField("header", "x-kv-cache-source-host-port", _LLMD),
    ForbiddenField("header", "x-data-parallel-host-port", _LLMD),
    ForbiddenField("header", "x-kvparams-prefill-partner", "kvparams sidecar: who computes the prompt"),
    ForbiddenField("header", "x-worker-instance-id", _DYNAMO_HEADERS),
    ForbiddenField("header", "x-prefill-instance-id", _DYNAMO_HEADERS),
    ForbiddenField("header", "x-dp-rank", _DYNAMO_HEADERS),
    ForbiddenField("header", "x-prefill-dp-rank", _DYNAMO_HEADERS),
    ForbiddenField("header", "x-trtllm-disagg-auth", "TensorRT-LLM serve/disagg_auth.py"),
    ForbiddenField("header", "x-session-id", "vLLM 0.32.0 entrypoints/generate/base/serving.py"),
    ForbiddenField("header", "x-vllm-priority", "vLLM 0.32.0 entrypoints/generate/base/serving.py"),
    ForbiddenField("header", "prefer", "llm-d coordinator: if-available"),
    ForbiddenField("request id", "___prefill_addr_", _MORIIO),
    ForbiddenField("request id", "___decode_addr_", _MORIIO),
)

FORBIDDEN_MEMBERS: Final = frozenset(row.name for row in FORBIDDEN_FIELDS if row.location == "body")
"""Members that are taken out of the body and of what is in `NESTED_CARRIERS`."""

MEDIA_UUID_MEMBER: Final = next(row.name for row in FORBIDDEN_FIELDS if row.location == "medium")
"""The member of a part of a message by which a client names a medium."""

NESTED_CARRIERS: Final = dict.fromkeys(("vllm_xargs", "sampling_params", "nvext"), ("extra_args",))
"""Members whose own members reach an engine's KV connector too, and which of these is an object that does (vLLM 0.32.0
chat_completion/protocol.py, scale_out/token_in_token_out/serving.py). That one is known of `sampling_params` alone; no
client has use for it in the others."""

INSPECTED_MEMBERS: Final = FORBIDDEN_MEMBERS | NESTED_CARRIERS.keys()
"""A body that has none of these members is left as it is."""

FORWARDED_HEADERS: Final = frozenset((b"traceparent", b"tracestate"))
"""The only client headers that engines see, beside Authorization where nobody here has use for it."""

_SAFE_ID: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEERING_IDS: Final = tuple(row.name.encode() for row in FORBIDDEN_FIELDS if row.location == "request id")
_HEADERS: Final = tuple(row.name.encode() for row in FORBIDDEN_FIELDS if row.location == "header")
_STEERING_HEADERS: Final = frozenset(name for name in _HEADERS if not name.endswith(b"*"))
_STEERING_STARTS: Final = tuple(name[:-1] for name in _HEADERS if name.endswith(b"*"))
_HINTS: Final = frozenset(row.name for row in FORBIDDEN_FIELDS if row.location == "nvext")
_HINT_ENDS: Final = tuple(name[1:] for name in _HINTS if name.startswith("*"))


def is_safe_request_id(request_id: bytes) -> bool:
    """Returns whether a client's X-Request-Id may reach engines unchanged: engines have read addresses out of it."""
    return _SAFE_ID.fullmatch(request_id) is not None and not any(part in request_id for part in _STEERING_IDS)


def is_forbidden_header(name: bytes) -> bool:
    """Returns whether a header, whose name is in lower case, steers an engine or a sidecar."""
    return name in _STEERING_HEADERS or name.startswith(_STEERING_STARTS)


def forbidden_nvext_members(names: Iterable[str]) -> list[str]:
    """Returns the names among these members of `nvext` that steer an engine."""
    return [name for name in names if name in _HINTS or name.endswith(_HINT_ENDS)]
