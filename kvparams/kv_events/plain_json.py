"""A batch as plain JSON: hashes in hexadecimal, token ids as numbers, no member that is None. For vectors and tools.

Two batches are equal exactly if their JSON is equal; only the mark, which is about bytes, is left out.
"""

from typing import cast

from kvparams.kv_events.model import AllBlocksCleared, BlockLocation, BlockRemoved, EventBatch, KVCacheEvent
from kvparams.tokens import unpack

__all__ = ["batch_to_json", "event_to_json"]

_BYTES_IN_JSON = "hex"


def batch_to_json(batch: EventBatch) -> dict[str, object]:
    """The batch as a JSON object."""
    found: dict[str, object] = {"instance": batch.source.instance, "rank": batch.source.rank}
    if batch.sequence is not None:
        found["sequence"] = batch.sequence
    if batch.time is not None:
        found["time"] = batch.time
    found["events"] = [event_to_json(event) for event in batch.events]
    if batch.unknown:
        found["unknown"] = batch.unknown
    if batch.malformed:
        found["malformed"] = batch.malformed
        found["problems"] = [{"path": list(one.path), "kind": one.kind} for one in batch.problems]
    return found


def event_to_json(event: KVCacheEvent) -> dict[str, object]:
    """The event as a JSON object."""
    if isinstance(event, AllBlocksCleared):
        return _without_none({"type": "cleared", "owner": event.owner})
    hashes = [event.hashes[at : at + event.width].hex() for at in range(0, len(event.hashes), event.width)]
    if isinstance(event, BlockRemoved):
        return {"type": "removed", "place": _place(event.place), "hashes": hashes}
    contents = event.contents
    return _without_none(
        {
            "type": "stored",
            "place": _place(event.place),
            "hashes": hashes,
            "parent": None if event.parent is None else event.parent.hex(),
            "tokens": None if event.tokens is None else list(unpack(event.tokens)),
            "block_size": event.block_size,
            "following": event.following,
            "extras": _json(event.extras),
            "lora": event.lora,
            "lora_id": event.lora_id,
            "salt": event.salt,
            "kind": event.kind,
            "window": event.window,
            "session": event.session,
            "contents": None
            if contents is None
            else [contents[at : at + 8].hex() for at in range(0, len(contents), 8)],
        }
    )


def _place(place: BlockLocation) -> dict[str, object]:
    return _without_none(place._asdict())


def _without_none(members: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}


def _json(value: object) -> object:
    if isinstance(value, tuple):
        return [_json(one) for one in cast("tuple[object, ...]", value)]
    return {_BYTES_IN_JSON: value.hex()} if isinstance(value, bytes) else value
