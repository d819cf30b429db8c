"""SGLang's PD disaggregation: one body goes to both engines, which meet in a room of prefill's bootstrap server.

A room is a number that the proxy makes of the transfer's id. Prefill does not end before decode has met it, and decode
computes no prompt, so both legs are always sent at once.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

from kvparams.dialects.interface import BootstrapInfo, BootstrapProtocol, Dialect, HandoffMissing, ReleaseRequest
from kvparams.dialects.shared_keys import CACHE_SALT, hint_keys
from kvparams.dialects.table import AddressKind, DialectTable, NativeKey
from kvparams.dialects.value_types import (
    HOST,
    ID,
    PORT,
    RANK,
    SIZE,
    TOKENS,
    DecimalTextType,
    IntegerType,
    ListType,
    TextType,
    UnionType,
    ValueType,
)
from kvparams.field_types import MAX_ITEMS, MAX_LABEL
from kvparams.instances import DataParallelRank, RequestFacts
from kvparams.params import Mode

__all__ = ["BOOTSTRAP_KEYS", "SGLANG", "SGLANG_TABLE", "SGLangBootstrap", "SGLangDialect"]

_ROOM: Final = IntegerType(1, 2**63 - 1)
"""0 stands for a room that is not ready yet: SGLang 0.5.23 srt/disaggregation/decode.py."""

_LABEL: Final = TextType(MAX_LABEL)


def _each(form: ValueType) -> ValueType:
    """For one sequence, or for each of several."""
    return UnionType((form, ListType(form, MAX_ITEMS, null=True)))


BOOTSTRAP_KEYS: Final = (
    NativeKey("bootstrap_host", _each(HOST), "PD", "the host of prefill's bootstrap server", address="host"),
    NativeKey("bootstrap_port", _each(PORT), "PD", "its port, 8998 if not said", address="port"),
    NativeKey("bootstrap_room", _each(_ROOM), "PD", "where the two engines meet", member="transfer.id"),
)


def _header(name: str, form: ValueType, says: str, address: AddressKind | None = None) -> NativeKey:
    says = f"beats the body: {says}"
    return NativeKey(f"x-override-{name}", form, "PD", says, location="headers", address=address, since="0.5.18")


SGLANG_TABLE: Final = DialectTable(
    name="sglang",
    title="SGLang PD",
    extension="ai.sglang.pd",
    mode="rendezvous",
    order="together",
    family="bootstrap",
    container_paths=dict.fromkeys("PRD", ""),
    transfer_id_source="the router: bootstrap_room, an integer of 63 bits",
    software="SGLang",
    since="0.4.6",
    source="SGLang 0.5.23 srt/entrypoints/openai/protocol.py (PDRoutingFields), srt/managers/io_struct.py "
    "(GenerateReqInput) and srt/entrypoints/request_headers.py",
    native_keys=(
        *BOOTSTRAP_KEYS,
        NativeKey("bootstrap_pair_key", _each(ID), "PD", "pairs the two engines; /generate only", since="0.5.3"),
        NativeKey(
            "decode_tp_size", _each(SIZE), "PD", "tensor-parallel ranks of decode; /generate only", since="0.5.8"
        ),
        NativeKey("routed_dp_rank", RANK, "PD", "the data-parallel rank that shall take this leg", since="0.5.12"),
        NativeKey("data_parallel_rank", RANK, "PD", "the same under its older name", since="0.4.10"),
        NativeKey("disagg_prefill_dp_rank", RANK, "PD", "prefill's rank that holds the KV", since="0.5.12"),
        NativeKey("rid", _each(ID), "PD", "the request's id"),
        NativeKey(
            "input_ids",
            UnionType((TOKENS, ListType(TOKENS, MAX_ITEMS))),
            "PD",
            "the prompt as token ids",
            member="prefix",
        ),
        NativeKey("extra_key", _each(_LABEL), "PD", "KV under other keys is not shared with this", since="0.5.3"),
        *hint_keys("kv_hints", since="0.5.22"),
        CACHE_SALT,
        _header("rid", ID, "the request's id"),
        _header("bootstrap-host", HOST, "the host of prefill's bootstrap server", "host"),
        _header("bootstrap-port", DecimalTextType(1, 65_535), "its port", "port"),
        _header("bootstrap-room", DecimalTextType(1, 2**63 - 1), "where the two engines meet"),
        _header("conversation-id", ID, "the conversation"),
        _header("routed-dp-rank", DecimalTextType(0, 4095), "the rank that shall take this leg"),
        _header("disagg-prefill-dp-rank", DecimalTextType(0, 4095), "prefill's rank that holds the KV"),
        _header("priority", DecimalTextType(-(2**31), 2**31 - 1), "the priority"),
    ),
    notes=(
        "Neither answer says anything of KV.",
        "The room also chooses the data-parallel rank (room modulo ranks), where none is given.",
        "A list of rooms is one for each prompt; with n > 1 SGLang uses each of them several times.",
        "After 300 s both legs are aborted; decode cannot compute the prompt itself.",
    ),
)


class SGLangBootstrap:
    """Reads `CommonKVBootstrapServer`: the facts that the ranks of one prefill engine have in common.

    Source: SGLang 0.5.23 srt/disaggregation/common/conn.py, `_handle_route_get`.
    """

    path = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    port = 8998
    """`--disaggregation-bootstrap-port`."""

    def parse_info(self, url: str, answer: object, rank: DataParallelRank | None = None) -> BootstrapInfo:
        """Returns the address of the bootstrap server, which answers as soon as every rank has registered.

        Decode asks it for the rest, a room's data-parallel rank among it unless that is said.
        """
        if not isinstance(answer, dict) or "dp_size" not in answer:
            raise HandoffMissing("its bootstrap server names no ranks: is it that of an SGLang prefill engine?")
        there = urlsplit(url)
        place: dict[str, object] = {"bootstrap_host": there.hostname or "", "bootstrap_port": there.port or 80}
        return place if rank is None else place | {"disagg_prefill_dp_rank": rank.index}


class SGLangDialect(Dialect):
    """See the module."""

    table = SGLANG_TABLE
    mode: Mode = SGLANG_TABLE.mode
    sends_legs_together = carries_keys_in_body = True
    has_reusable_kv = False
    lease_s = 300.0
    """`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`: then both engines give up."""
    bootstrap: BootstrapProtocol | None = SGLangBootstrap()
    rank_key = "routed_dp_rank"

    def can_split(self, request: RequestFacts) -> bool:
        """Returns True for a request with one choice.

        Several prompts have consecutive rooms (io_struct.py, `normalize`). Several choices of one prompt share a room
        (tokenizer_manager.py, `_handle_batch_request`), in which only one can meet its prefill. The decode engine
        refuses such a request with an error.
        """
        return request.choices == 1

    def prefill_keys(self, transfer_id: str) -> bytes:
        """None in `kv_transfer_params`."""
        return b"{}"

    def decode_keys(
        self, answer: Mapping[str, object], transfer_id: str, place: BootstrapInfo | None
    ) -> Mapping[str, object]:
        """Returns the bootstrap address and the room in which the two engines meet."""
        if place is None:
            raise HandoffMissing("the prefill engine's bootstrap server has not been asked")
        return {**place, "bootstrap_room": _room(transfer_id)}

    def release_request(self, native: bytes | None) -> ReleaseRequest | None:
        """Returns None: an engine whose client leaves aborts its half, and with it the other one."""
        return None


def _room(transfer_id: str) -> int:
    """A number of 62 bits, above 0, for those after it to fit as well."""
    return (int.from_bytes(sha256(transfer_id.encode()).digest()[:8], "big") >> 2) + 1


SGLANG: Final = SGLangDialect()
