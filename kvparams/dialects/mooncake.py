"""Implements the dialect of vLLM's MooncakeConnector.

Both legs carry a transfer id of the proxy, and decode finds the prefill engine by its bootstrap server.

Prefill's answer says nothing. An engine id is accepted only from the bootstrap server that the operator named.
"""

from collections.abc import Mapping
from typing import Final, cast

from kvparams.dialects.interface import BootstrapInfo, BootstrapProtocol, Dialect, HandoffMissing, ReleaseRequest
from kvparams.dialects.native_template import NativeKeysTemplate, constant_native_keys
from kvparams.dialects.shared_keys import (
    CACHE_SALT,
    DATA_PARALLEL_RANK,
    KV_HINT,
    PROMPT_TOKEN_IDS,
    RANK_SUFFIX,
    leg_flags,
)
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import ID, URL
from kvparams.instances import DataParallelRank, RequestFacts, Role
from kvparams.params import Mode

__all__ = ["MOONCAKE", "MOONCAKE_TABLE", "MooncakeBootstrap", "MooncakeDialect"]

MOONCAKE_TABLE: Final = DialectTable(
    name="mooncake",
    title="vLLM MooncakeConnector",
    extension="ai.vllm.mooncake",
    mode="rendezvous",
    order="together",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the router: transfer_id",
    software="vLLM",
    since="0.14",
    source="vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py and mooncake_utils.py",
    native_keys=(
        *leg_flags("P", "D"),
        NativeKey("transfer_id", ID, "PD", "by which both engines know the transfer", "PD", member="transfer.id"),
        NativeKey("remote_engine_id", ID, "D", "who holds the KV", "D", member="producer.id", rank_suffix=RANK_SUFFIX),
        NativeKey("remote_bootstrap_addr", URL, "D", "the bootstrap server that knows its workers", "D", address="url"),
        PROMPT_TOKEN_IDS,
        *KV_HINT,
        CACHE_SALT,
        DATA_PARALLEL_RANK,
    ),
    notes=(
        "Prefill answers without native keys; who it is, its bootstrap server says (GET /query).",
        "KV is kept only if prefill's one token ended by length: a stop frees it, and decode fails.",
        "Behind one URL there must be one data-parallel rank, or both legs are pinned to the same one.",
        "Prefill waits for decode for 480 s, and nothing extends that.",
    ),
)

_LONGEST: Final = 256
"""Characters of an engine id: a UUID by default, and what an operator may choose instead."""


class MooncakeBootstrap:
    """`MooncakeBootstrapServer`: ranks and addresses of one prefill engine's workers, by data-parallel rank."""

    path = "/query"
    port = 8998
    """`VLLM_MOONCAKE_BOOTSTRAP_PORT`."""

    def parse_info(self, url: str, answer: object, rank: DataParallelRank | None = None) -> BootstrapInfo:
        """Parses the part of a bootstrap server's answer that is about one data-parallel rank.

        The answer is `{"0": {"engine_id": ..., "worker_addr": {"0": {"0": "tcp://..."}}}}`. Where no rank is meant,
        there must be only one: the engine itself would choose among several, and decode would have to know which.
        """
        ranks = cast("dict[str, object]", answer) if isinstance(answer, dict) else {}
        if not ranks:
            raise HandoffMissing("its bootstrap server knows no worker yet")
        if rank is None and len(ranks) > 1:
            raise HandoffMissing(
                f"its bootstrap server names {len(ranks)} data-parallel ranks; say so with `ranks: {len(ranks)}` of "
                "the instance, or give each a URL and a server of its own (vLLM's --data-parallel-external-lb)"
            )
        if rank is not None and str(rank.index) not in ranks:
            raise HandoffMissing(f"its bootstrap server knows no data-parallel rank {rank.index} yet")
        part = next(iter(ranks.values())) if rank is None else ranks[str(rank.index)]
        members = cast("dict[str, object]", part) if isinstance(part, dict) else {}
        engine = members.get("engine_id")
        if not isinstance(engine, str) or not 0 < len(engine) <= _LONGEST or not engine.isprintable():
            raise HandoffMissing("its bootstrap server names no engine_id: is it that of a MooncakeConnector?")
        if not members.get("worker_addr"):
            raise HandoffMissing("its bootstrap server knows no worker yet")
        return {"remote_engine_id": engine, "remote_bootstrap_addr": url}


class MooncakeDialect(Dialect):
    """See the module."""

    table = MOONCAKE_TABLE
    mode: Mode = MOONCAKE_TABLE.mode
    sends_legs_together = carries_keys_in_body = False
    has_reusable_kv = False
    lease_s = 480.0
    """`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, which nothing extends."""
    bootstrap: BootstrapProtocol | None = MooncakeBootstrap()

    def __init__(self) -> None:
        self._prefill = NativeKeysTemplate(MOONCAKE_TABLE, "prefill")
        self._decode = constant_native_keys(MOONCAKE_TABLE, "decode")

    def can_split(self, request: RequestFacts) -> bool:
        """A transfer id stands for the blocks of one sequence, sent once."""
        return request.prompts == request.choices == 1

    def prefill_keys(self, transfer_id: str) -> bytes:
        """Prefill keeps its blocks under this id, if its one token ends because of its length."""
        return self._prefill.fill(transfer_id)

    def decode_keys(
        self, answer: Mapping[str, object], transfer_id: str, place: BootstrapInfo | None
    ) -> Mapping[str, object]:
        """The id, and where to ask for it."""
        if place is None:
            raise HandoffMissing("the prefill engine's bootstrap server has not been asked")
        return {**self._decode, "transfer_id": transfer_id, **place}

    def release_request(self, native: bytes | None) -> ReleaseRequest | None:
        """Returns a decode leg of one token once prefill has answered, as with NIXL.

        An engine that sees its client leave frees its blocks; later a decode leg of one token has the blocks sent, or
        is aborted before and has them freed (request_finished).
        """
        return None if native is None else ReleaseRequest(Role.DECODE, native, leg=True)


MOONCAKE: Final = MooncakeDialect()
