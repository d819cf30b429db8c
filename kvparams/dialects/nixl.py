"""vLLM's NixlConnector: the decode engine pulls blocks that the prefill engine holds under a lease.

Prefill is asked with six keys; its answer names engine, address, request and blocks, and goes to decode verbatim.
"""

from collections.abc import Mapping
from typing import Final

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects.interface import BootstrapInfo, BootstrapProtocol, Dialect, HandoffMissing, ReleaseRequest
from kvparams.dialects.native_template import NativeKeysTemplate, required_native_keys
from kvparams.dialects.shared_keys import (
    CACHE_SALT,
    DATA_PARALLEL_RANK,
    KV_HINT,
    PROMPT_TOKEN_IDS,
    RANK_SUFFIX,
    leg_flags,
)
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import BLOCK_GROUPS, BLOCKS, HOST, ID, NUMBER, PORT, SIZE, WHOLE, EnumType
from kvparams.instances import RequestFacts, Role
from kvparams.params import Mode

__all__ = ["NIXL", "NIXL_TABLE", "NixlDialect"]

_NULL: Final = {"P": None}
_DECODE: Final = Role.DECODE
"""By a name of its own: in CPython 3.11 an attribute of an enumeration takes as long as a call."""

NIXL_TABLE: Final = DialectTable(
    name="nixl",
    title="vLLM NixlConnector / NixlPullConnector",
    extension="ai.vllm.nixl",
    mode="pull",
    order="prefill first",
    family="nixl",
    container_paths=dict.fromkeys("PRDA", "kv_transfer_params"),
    transfer_id_source="the prefill engine: remote_request_id, its internal id",
    software="vLLM",
    since="0.9",
    source="vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py (request_finished)",
    native_keys=(
        *leg_flags(),
        NativeKey(
            "remote_engine_id",
            ID,
            "PRDA",
            "who holds the KV",
            "RDA",
            member="producer.id",
            member_legs="RD",
            default_values=_NULL,
            rank_suffix=RANK_SUFFIX,
        ),
        NativeKey(
            "remote_block_ids", BLOCKS, "PRDA", "the blocks that hold it", "RDA", default_values=_NULL, until="0.20"
        ),
        NativeKey(
            "remote_block_ids",
            BLOCK_GROUPS,
            "PRDA",
            "the blocks, by KV-cache group",
            "RDA",
            default_values=_NULL,
            since="0.20",
        ),
        NativeKey(
            "remote_host", HOST, "PRDA", "where its side channel listens", "RDA", default_values=_NULL, address="host"
        ),
        NativeKey(
            "remote_port", PORT, "PRDA", "where its side channel listens", "RDA", default_values=_NULL, address="port"
        ),
        NativeKey("remote_request_id", ID, "RDA", "under which id it holds the KV", "RDA", since="0.14"),
        NativeKey("tp_size", SIZE, "RDA", "its tensor-parallel ranks"),
        NativeKey("dcp_size", SIZE, "RDA", "its decode-context-parallel ranks", since="0.32"),
        NativeKey("pp_size", SIZE, "RDA", "its pipeline stages", since="0.32"),
        NativeKey("remote_block_size", WHOLE, "D", "tokens of its blocks, where they differ", since="0.32"),
        NativeKey("remote_num_tokens", WHOLE, "RDA", "tokens whose KV it holds", since="0.26"),
        NativeKey("remote_blocks_expiry_time", NUMBER, "RDA", "until when, on its own clock", since="0.26"),
        NativeKey("transfer_mode", EnumType(("pull",)), "RDA", "who moves the blocks", since="0.32"),
        NativeKey(
            "remote_prefill_cached_tokens",
            WHOLE,
            "RD",
            "prompt tokens that prefill had cached",
            member="usage.cached_tokens",
            since="0.32",
        ),
        PROMPT_TOKEN_IDS,
        *KV_HINT,
        CACHE_SALT,
        DATA_PARALLEL_RANK,
    ),
    notes=(
        "An answer that is streamed loses the keys: the prefill leg must not be streamed.",
        "Only prompt 0 of a request is answered for, and only if it ended by length or a stop.",
        "The lease is 30 s; a decode engine that waits extends it, a proxy cannot.",
        "Decode computes the first token again.",
    ),
)


class NixlDialect(Dialect):
    """See the module."""

    table = NIXL_TABLE
    mode: Mode = NIXL_TABLE.mode
    sends_legs_together = carries_keys_in_body = False
    has_reusable_kv = False
    lease_s = 30.0
    """`kv_lease_duration`, which a decode engine that waits extends (vLLM 0.32.0 nixl/base_worker.py)."""
    bootstrap: BootstrapProtocol | None = None

    def __init__(self) -> None:
        self._prefill = NativeKeysTemplate(NIXL_TABLE, "prefill")
        self._needed = required_native_keys(NIXL_TABLE, "decode")

    def can_split(self, request: RequestFacts) -> bool:
        """The answer names the blocks of one sequence only (vLLM 0.32.0 completion/serving.py: prompt 0)."""
        return request.prompts == request.choices == 1

    def prefill_keys(self, transfer_id: str) -> bytes:
        """The six keys that routers conventionally send."""
        return self._prefill.fill(transfer_id)

    def decode_keys(
        self, answer: Mapping[str, object], transfer_id: str, place: BootstrapInfo | None
    ) -> Mapping[str, object]:
        """Returns the members of the prefill answer unchanged, without the project's own document."""
        if None in map(answer.get, self._needed):
            missing = [name for name in self._needed if answer.get(name) is None]
            raise HandoffMissing(
                f"the prefill engine's answer lacks {', '.join(missing)} in kv_transfer_params: "
                "is it started with a NixlConnector (--kv-transfer-config)?"
            )
        if DOCUMENT_KEY not in answer:
            return answer
        return {name: value for name, value in answer.items() if name != DOCUMENT_KEY}

    def release_request(self, native: bytes | None) -> ReleaseRequest | None:
        """Returns None before prefill has answered, and after that a decode leg of one token.

        An engine that sees its client leave frees its blocks. The engine of the decode leg fetches the blocks, or is
        aborted before, and tells the prefill engine to free them either way (vLLM 0.32.0 nixl/base_scheduler.py:
        request_finished).
        """
        return None if native is None else ReleaseRequest(_DECODE, native, True)


NIXL: Final = NixlDialect()
