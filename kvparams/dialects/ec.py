"""vLLM's encoder-cache connectors: an encode engine says in `ec_transfer_params` where encodings of media are.

The encode engine is the producer and the engine that computes the prompt the consumer, whatever its role. Encodings
are no KV, so no proxy routes prefill or decode legs with this dialect: it is that of encode instances.
"""

from collections.abc import Mapping
from typing import Final, cast

from pydantic_core import PydanticSerializationError

from kvparams.dialects.interface import HandoffMissing
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import ANYTHING, HOST, ID, OBJECT, PORT, WHOLE, IntegerType, ListType, ValueType
from kvparams.jsontext.writing import write_json

__all__ = ["EC_NAME", "EC_TABLE", "write_encodings"]

EC_NAME: Final = "ec"
_ITEMS: Final = ListType(OBJECT, 1024)
_ITEM: Final = ("*",)
_MOST_ENCODINGS: Final = 256
"""Media of one request."""
_MOST_BYTES: Final = 64 << 10
"""Of the text. An encoding takes some 250 bytes, and that of a video a few thousand. To look through more would hold
the event loop for too long; prefill encodes the media of such a request."""

EC_TABLE: Final = DialectTable(
    name=EC_NAME,
    title="vLLM encoder-cache connectors (ECCPUConnector, ECExampleConnector, ECMooncakeConnector)",
    extension="ai.vllm.ec",
    mode="pull",
    order="prefill first",
    container_paths=dict.fromkeys("PRD", "ec_transfer_params"),
    transfer_id_source="nobody: encodings are named by the engine's hash of the medium",
    software="vLLM",
    source="vLLM 0.32.0 distributed/ec_transfer/ec_connector/utils.py (collect_ec_item_metadata), cpu/scheduler "
    "(request_finished, _admit_item), mooncake/scheduler.py (_request_transfer_id)",
    native_keys=(
        NativeKey("*", ANYTHING, "RD", "an object: one encoding, under the engine's hash of the medium"),
        NativeKey("ec_items", _ITEMS, "PD", "encodings that a Mooncake producer pushes, in the order of the media"),
        NativeKey("consumer_zmq", ID, "P", "where that producer reaches the consumer", address="url"),
        NativeKey("item_indices", ANYTHING, "RD", "which media of the prompt it is of", parents=_ITEM),
        NativeKey("metadata", ANYTHING, "RD", "what a consumer needs in place of the medium", parents=_ITEM),
        NativeKey("peer_host", ANYTHING, "RD", "who has the encoding", parents=_ITEM, address="host"),
        NativeKey("peer_port", ANYTHING, "RD", "where it is asked for it", parents=_ITEM, address="port"),
        NativeKey("size_bytes", ANYTHING, "RD", "how long it is", parents=_ITEM),
        NativeKey("shape", ANYTHING, "RD", "rows and width", parents=_ITEM),
    ),
    notes=(
        "The encode engine is the producer: prefill is the request to it, and decode the request to the engine that "
        "computes the prompt. Only ECMooncakeConnector, which pushes, has keys in the request to the encode engine.",
        "ECExampleConnector answers without peer_host, and ECCPUConnector without NIXL answers nothing: consumers find "
        "the encodings by the hash.",
        "Releases before 0.32 were not read.",
    ),
)
_MEMBERS: Final[Mapping[str, ValueType]] = {
    "item_indices": ListType(IntegerType(0, 65_535), 4096),
    "peer_host": HOST,
    "peer_port": PORT,
    "size_bytes": WHOLE,
    "shape": ListType(IntegerType(0, 2**31 - 1), 8),
}
"""The forms in which members of an encoding are handed on: a table judges no members of objects of any name. Of others
only their length is bounded."""


def write_encodings(said: Mapping[str, object]) -> bytes:
    """Returns the text of an encode engine's `ec_transfer_params`, for the engine that computes the prompt.

    Raises:
        HandoffMissing: a value is out of bounds.
    """
    try:
        text = write_json(said)
    except PydanticSerializationError:
        raise _impossible("no JSON") from None
    if len(said) > _MOST_ENCODINGS or len(text) > _MOST_BYTES:
        raise _impossible(f"more than {_MOST_ENCODINGS} encodings or {_MOST_BYTES} bytes")
    for name, encoding in said.items():
        if (problem := ID.find_problem(name, ())) is not None:
            raise _impossible(str(problem))
        if not isinstance(encoding, dict):
            raise _impossible("an encoding that is no object")
        members = cast("dict[str, object]", encoding)
        for member, form in _MEMBERS.items():
            value = members.get(member)
            if value is not None and (problem := form.find_problem(value, ("encoding", member))) is not None:
                raise _impossible(str(problem))
    return text


def _impossible(what: str) -> HandoffMissing:
    return HandoffMissing(f"the encode engine's ec_transfer_params cannot be handed on: {what}")
