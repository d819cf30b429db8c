"""SGLang's PD disaggregation: one body goes to both engines, which meet in a room of prefill's bootstrap server."""

from typing import Final

from kvparams.dialects.forms import (
    HOST,
    ID,
    PORT,
    RANK,
    SIZE,
    TOKENS,
    Digits,
    Each,
    Either,
    Form,
    Text,
    Whole,
)
from kvparams.dialects.shared import CACHE_SALT, hints
from kvparams.dialects.table import AddressKind, Row, Table
from kvparams.fields import MAX_ITEMS, MAX_LABEL

__all__ = ["BOOTSTRAP_ROWS", "SGLANG_TABLE"]

_ROOM: Final = Whole(1, 2**63 - 1)
"""0 stands for a room that is not ready yet: SGLang 0.5.23 srt/disaggregation/decode.py."""

_LABEL: Final = Text(MAX_LABEL)


def _each(form: Form) -> Form:
    """For one sequence, or for each of several."""
    return Either((form, Each(form, MAX_ITEMS, null=True)))


BOOTSTRAP_ROWS: Final = (
    Row("bootstrap_host", _each(HOST), "PD", "the host of prefill's bootstrap server", address="host"),
    Row("bootstrap_port", _each(PORT), "PD", "its port, 8998 if not said", address="port"),
    Row("bootstrap_room", _each(_ROOM), "PD", "where the two engines meet", member="transfer.id"),
)


def _header(name: str, form: Form, says: str, address: AddressKind | None = None) -> Row:
    says = f"beats the body: {says}"
    return Row(f"x-override-{name}", form, "PD", says, where="headers", address=address, since="0.5.18")


SGLANG_TABLE: Final = Table(
    name="sglang",
    title="SGLang PD",
    extension="ai.sglang.pd",
    mode="rendezvous",
    order="together",
    family="bootstrap",
    carried=dict.fromkeys("PRD", ""),
    mints="the router: bootstrap_room, an integer of 63 bits",
    software="SGLang",
    since="0.4.6",
    source="SGLang 0.5.23 srt/entrypoints/openai/protocol.py (PDRoutingFields), srt/managers/io_struct.py "
    "(GenerateReqInput) and srt/entrypoints/request_headers.py",
    rows=(
        *BOOTSTRAP_ROWS,
        Row("bootstrap_pair_key", _each(ID), "PD", "pairs the two engines; /generate only", since="0.5.3"),
        Row("decode_tp_size", _each(SIZE), "PD", "tensor-parallel ranks of decode; /generate only", since="0.5.8"),
        Row("routed_dp_rank", RANK, "PD", "the data-parallel rank that shall take this leg", since="0.5.12"),
        Row("data_parallel_rank", RANK, "PD", "the same under its older name", since="0.4.10"),
        Row("disagg_prefill_dp_rank", RANK, "D", "prefill's rank that holds the KV", since="0.5.12"),
        Row("rid", _each(ID), "PD", "the request's id"),
        Row("input_ids", Either((TOKENS, Each(TOKENS, MAX_ITEMS))), "PD", "the prompt as token ids", member="prefix"),
        Row("extra_key", _each(_LABEL), "PD", "KV under other keys is not shared with this", since="0.5.3"),
        *hints("kv_hints", since="0.5.22"),
        CACHE_SALT,
        _header("rid", ID, "the request's id"),
        _header("bootstrap-host", HOST, "the host of prefill's bootstrap server", "host"),
        _header("bootstrap-port", Digits(1, 65_535), "its port", "port"),
        _header("bootstrap-room", Digits(1, 2**63 - 1), "where the two engines meet"),
        _header("conversation-id", ID, "the conversation"),
        _header("routed-dp-rank", Digits(0, 4095), "the rank that shall take this leg"),
        _header("disagg-prefill-dp-rank", Digits(0, 4095), "prefill's rank that holds the KV"),
        _header("priority", Digits(-(2**31), 2**31 - 1), "the priority"),
    ),
    notes=(
        "Neither answer says anything of KV.",
        "The room also chooses the data-parallel rank (room modulo ranks), where none is given.",
        "A list of rooms is one for each prompt; with n > 1 SGLang uses each of them several times.",
        "After 300 s both legs are aborted; decode cannot compute the prompt itself.",
    ),
)
