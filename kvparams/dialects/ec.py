"""vLLM's encoder-cache connectors: an encode engine says in `ec_transfer_params` where encodings of media are.

The encode engine is the producer and the engine that computes the prompt the consumer, whatever its role. Encodings
are no KV, so no proxy routes prefill or decode legs with this dialect: it is that of encode instances.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, cast

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
_NAME: Final = re.compile(r"(?:[!-~]{1,256}:)?[0-9a-f]{32,128}")
"""The name of an encoding: a hexadecimal digest, behind a LoRA adapter's name where vLLM 0.32.0 encodes for that one
(multimodal/hasher.py; v1/engine/input_processor.py, `_get_mm_identifier`). No native key has such a name."""
_MOST_BYTES: Final = 64 << 10
"""The longest text. An encoding takes some 250 bytes, and that of a video a few thousand. To look through more would
hold the event loop for too long; prefill encodes the media of such a request."""

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
    "item_indices": ListType(IntegerType(0, 65_535), _MOST_ENCODINGS),
    "peer_host": HOST,
    "peer_port": PORT,
    "size_bytes": WHOLE,
    "shape": ListType(IntegerType(0, 2**31 - 1), 8),
}
"""The members of an encoding that are handed on, and their forms. No consumer of vLLM 0.32.0 reads `metadata`: it is
for programs that take media out of requests, and the engine that computes the prompt gets the whole request."""


def write_encodings(said: Mapping[str, object], verify: Callable[[Mapping[str, object]], None]) -> bytes:
    """Returns the text of an encode engine's `ec_transfer_params`, for the engine that computes the prompt.

    Args:
        said: the engine's own.
        verify: raises for an address that is not the engine's. It is given exactly what is handed on.

    Raises:
        HandoffMissing: a value is out of bounds, or `verify` raises it.
    """
    if len(said) > _MOST_ENCODINGS:
        raise _impossible(f"more than {_MOST_ENCODINGS} encodings")
    handed = {name: _known_members(name, encoding) for name, encoding in said.items()}
    text = write_json(handed)
    if len(text) > _MOST_BYTES:
        raise _impossible(f"more than {_MOST_BYTES} bytes")
    verify(handed)
    return text


def _known_members(name: str, encoding: object) -> Mapping[str, object]:
    """Returns what is handed on of one encoding.

    Raises:
        HandoffMissing: its name or a value is out of bounds.
    """
    if _NAME.fullmatch(name) is None:
        raise _impossible("a name that is no hash")
    if not isinstance(encoding, dict):
        raise _impossible("an encoding that is no object")
    members = cast("dict[str, object]", encoding)
    known: dict[str, object] = {}
    for member, form in _MEMBERS.items():
        value = members.get(member)
        if value is None:
            continue
        if form.find_problem(value, ()) is not None:
            raise _impossible(f"{member} is not {form.description}")
        known[member] = value
    return known


def _impossible(what: str) -> HandoffMissing:
    return HandoffMissing(f"the encode engine's ec_transfer_params cannot be handed on: {what}")
