"""Tests laws of the event decoder: each dialect gives the same events, and no input crashes it."""

import json
import random
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvparams.kv_events import (
    AllBlocksCleared,
    BlockLocation,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSource,
    InvalidEvents,
    KVCacheEvent,
    decode_dynamo,
    decode_msgpack,
    decode_trtllm,
)
from kvparams.kv_events.model import MAX_PROBLEMS
from kvparams.kv_events.plain_json import batch_to_json
from kvparams.kv_events.zmq_frames import read_live, read_replayed
from kvparams.tokens import MAX_TOKENS, pack
from tests.system.fuzz.campaign import Campaign

VECTORS = Path(__file__).parents[4] / "spec" / "1.0" / "vectors" / "events.json"
SOURCE = EventSource("e")
MASK = 2**64 - 1
Said = dict[str, Any]
Json = Any

HASHES = st.integers(0, MASK)
NAMES = st.none() | st.text(min_size=1, max_size=8)
TOKENS = st.integers(0, 2**32 - 1)


@st.composite
def stored(draw: st.DrawFn) -> Said:
    """What every dialect can say of blocks that were stored."""
    size, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return {
        "op": "stored",
        "hashes": draw(st.lists(HASHES, min_size=blocks, max_size=blocks)),
        "parent": draw(st.none() | HASHES),
        "tokens": draw(st.lists(TOKENS, min_size=size * blocks, max_size=size * blocks)),
        "size": size,
    }


SAID = st.lists(
    stored()
    | st.fixed_dictionaries({"op": st.just("removed"), "hashes": st.lists(HASHES, min_size=1, max_size=4)})
    | st.just({"op": "cleared"}),
    max_size=5,
)


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def unsigned(number: int) -> int:
    return number


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def hexadecimal(number: int) -> str:
    return f"{number:064x}"


def as_map(said: Said, hash_as: Callable[[int], int | bytes], medium: str) -> Json:
    if said["op"] == "cleared":
        return {"type": "AllBlocksCleared"}
    hashes = [hash_as(one) for one in said["hashes"]]
    if said["op"] == "removed":
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    parent = None if said["parent"] is None else hash_as(said["parent"])
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": said["tokens"],
        "block_size": said["size"],
        "lora_id": None,
        "medium": medium,
    }


def as_array(said: Said, hash_as: Callable[[int], int | bytes], medium: str) -> Json:
    return list(as_map(said, hash_as, medium).values())


def expected(said: Said, width: int, place: BlockLocation) -> KVCacheEvent:
    if said["op"] == "cleared":
        return AllBlocksCleared()
    hashes = b"".join(one.to_bytes(width, "big") for one in said["hashes"])
    if said["op"] == "removed":
        return BlockRemoved(place, hashes, width)
    parent = None if said["parent"] is None else said["parent"].to_bytes(width, "big")
    return BlockStored(place, hashes, width, parent, pack(said["tokens"]), said["size"])


@pytest.mark.parametrize("form", [as_map, as_array])
@pytest.mark.parametrize(("hash_as", "width"), [(signed, 8), (unsigned, 8), (digest, 32)])
@given(said=SAID, ranked=st.booleans(), junk=st.booleans())
def test_what_an_engine_says_comes_out_in_messagepack(
    form: Callable[..., Json],
    hash_as: Callable[[int], int | bytes],
    width: int,
    said: list[Said],
    ranked: bool,
    junk: bool,
) -> None:
    """Spec-mandated, 1.0#14.2, 1.0#14.3, 1.0#14.7: unknown events between them change nothing but their count."""
    events: list[Json] = [form(one, hash_as, "CPU") for one in said]
    if junk:
        events.insert(len(events) // 2, {"type": "Later", "x": {"y": [1]}})
    batch = decode_msgpack(msgspec.msgpack.encode([2.5, events, *([3] if ranked else [])]), SOURCE, 9)
    place = BlockLocation("host", "CPU")
    assert batch.events == tuple(expected(one, width, place) for one in said)
    assert (batch.source, batch.sequence, batch.time) == (EventSource("e", 3 if ranked else 0), 9, 2.5)
    assert (batch.unknown, batch.malformed, batch.problems) == (int(junk), 0, ())


@given(st.lists(stored() | st.just({"op": "cleared"}), max_size=5), st.sampled_from([unsigned, hexadecimal]))
def test_what_an_engine_says_comes_out_of_tensorrt_llms_json(said: list[Said], hash_as: Callable[[int], Json]) -> None:
    """Spec-mandated, 1.0#14.9."""
    events: list[Json] = []
    for number, one in enumerate(said):
        if one["op"] == "cleared":
            data: Json = {"type": "created", "num_blocks_per_cache_level": [1]}
        else:
            size = one["size"]
            blocks = [
                {
                    "type": "stored_block",
                    "block_hash": hash_as(name),
                    "tokens": [{"token_id": token, "token_extra_id": 0} for token in one["tokens"][at : at + size]],
                    "cache_level": 1,
                    "priority": 35,
                }
                for name, at in zip(one["hashes"], range(0, len(one["tokens"]), size), strict=True)
            ]
            parent = None if one["parent"] is None else hash_as(one["parent"])
            data = {"type": "stored", "parent_hash": parent, "blocks": blocks}
        events.append({"event_id": number, "data": data, "attention_dp_rank": 2})
    batches = decode_trtllm(json.dumps(events), SOURCE)
    width = 8 if hash_as is unsigned else 32
    assert [batch.events for batch in batches] == [
        (expected(one, width, BlockLocation("host", "level 1")),) for one in said
    ]
    assert [(batch.sequence, batch.source.rank) for batch in batches] == [(number, 2) for number in range(len(said))]


@given(SAID, st.integers(0, MASK))
def test_what_a_router_event_says_comes_out_of_dynamos_json(said: list[Said], worker: int) -> None:
    """Spec-mandated, 1.0#14.9: tokens never do, for none were said."""
    events: list[Json] = []
    for number, one in enumerate(said):
        data: Json = "cleared"
        if one["op"] == "removed":
            data = {"removed": {"block_hashes": one["hashes"]}}
        elif one["op"] == "stored":
            blocks = [{"block_hash": name, "tokens_hash": name ^ 1} for name in one["hashes"]]
            data = {"stored": {"parent_hash": one["parent"], "blocks": blocks}}
        inner = {"event_id": number, "data": data, "dp_rank": 1}
        events.append({"worker_id": worker, "storage_tier": "disk", "event": inner})
    batches = decode_dynamo(json.dumps(events).encode())
    for number, (one, batch) in enumerate(zip(said, batches, strict=True)):
        wanted = expected(one, 8, BlockLocation("disk", "disk"))
        if isinstance(wanted, BlockStored):
            contents = b"".join((name ^ 1).to_bytes(8, "big") for name in one["hashes"])
            wanted = wanted._replace(tokens=None, block_size=None, contents=contents)
        assert batch.events == (wanted,)
        assert (batch.source, batch.sequence) == (EventSource(str(worker), 1), number)


def check(batch: EventBatch) -> None:
    """What holds of every batch, whatever it was made from."""
    assert len(batch.problems) == min(batch.malformed, MAX_PROBLEMS)
    assert 0 <= batch.source.rank < 2**16
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            continue
        assert 1 <= event.width <= 64
        assert 0 < len(event.hashes) == event.blocks * event.width
        assert event.blocks <= MAX_TOKENS
        if isinstance(event, BlockStored):
            assert event.parent is None or len(event.parent) == event.width
            assert event.tokens is None or len(event.tokens) == 4 * event.blocks * (event.block_size or 0)
            assert event.extras is None or len(event.extras) == event.blocks
            assert event.contents is None or len(event.contents) == 8 * event.blocks
    json.dumps(batch_to_json(batch))


def feed(message: bytes) -> int:
    """Everything that reads bytes reads these; how many readers found a message."""
    found = 0
    text = message.decode("utf-8", "surrogateescape")
    readers: list[Callable[[], tuple[EventBatch, ...]]] = [
        lambda: (decode_msgpack(message, SOURCE, 1),),
        lambda: decode_trtllm(message, SOURCE),
        lambda: decode_trtllm(text, SOURCE),
        lambda: decode_dynamo(message),
    ]
    for reader in readers:
        with suppress(InvalidEvents):
            for batch in reader():
                check(batch)
            found += 1
    for frames in ([message[:3], message[3:11], message[11:]], [b"", message[:2], message[2:10], message[10:]]):
        for take in (read_live, read_replayed):
            with suppress(InvalidEvents):
                take(frames)
    return found


@given(st.binary(max_size=64))
@example(b"")
@example(b"\x93\xcb\x7f\xf8\0\0\0\0\0\0\x90\0")
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    """Spec-mandated, 1.0#14.1."""
    feed(message)


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), MASK) | st.floats() | st.text(max_size=5) | st.binary(max_size=9)
)
WORDS = st.sampled_from(["type", "block_hashes", "token_ids", "block_size", "medium", "extra_keys", "BlockStored", "x"])
ANYTHING = st.recursive(
    LEAVES | WORDS, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(WORDS, inner, max_size=5), max_leaves=12
)
MEMBERS = st.dictionaries(WORDS, ANYTHING, max_size=4)


@given(st.lists(st.tuples(stored(), MEMBERS), max_size=3), ANYTHING, ANYTHING)
def test_any_structure_is_read_or_refused(events: list[tuple[Said, Said]], time_said: Json, rank: Json) -> None:
    """Spec-mandated, 1.0#14.1, 1.0#14.7: members of any type in place of those that belong there."""
    wrong = [as_map(said, signed, "GPU") | members for said, members in events]
    message = msgspec.msgpack.encode([1.5, [*wrong, {"type": "AllBlocksCleared"}, *map(list, events)], 0])
    assert AllBlocksCleared() in decode_msgpack(message, SOURCE).events
    feed(message)
    feed(msgspec.msgpack.encode([time_said, wrong, rank]))


def seeds() -> list[bytes]:
    made: list[bytes] = []
    for case in json.loads(VECTORS.read_bytes())["cases"]:
        made.append(bytes.fromhex(case["payload"]) if "payload" in case else case["text"].encode("utf-8", "replace"))
    return made


HEADS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc1",
    b"\xc7\x01",
)


def spoiled(message: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """The message with a few changes: bytes flipped, cut, doubled, lengths that lie, pieces of other messages."""
    found = bytearray(message)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(found) + 1)
        match dice.randrange(6):
            case 0 if at < len(found):
                found[at] = dice.randrange(256)
            case 1:
                del found[at : at + dice.randint(1, 8)]
            case 2:
                found[at:at] = found[at : at + dice.randint(1, 40)]
            case 3:
                found[at:at] = dice.choice(HEADS)
            case 4:
                other = dice.choice(others)
                begin = dice.randrange(len(other) + 1)
                found[at : at + dice.randint(0, 9)] = other[begin : begin + dice.randint(1, 60)]
            case _:
                found[at:at] = dice.choice((b"\x91", b"\x81\xa1x", b"[", b'{"x":')) * dice.choice((1, 3, 600))
    return bytes(found)


def way(message: bytes) -> Hashable:
    """Everything that reads bytes reads these; in which way each ended."""
    feed(message)
    ways: list[Hashable] = []
    for reader in (lambda: (decode_msgpack(message, SOURCE, 1),), lambda: decode_trtllm(message, SOURCE)):
        try:
            ways.append(tuple(sorted({type(event).__name__ for batch in reader() for event in batch.events})))
        except InvalidEvents as error:
            ways.append(tuple((len(one.path), one.kind) for one in error.problems[:2]))
    return tuple(ways)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spoiled_messages_are_read_or_refused(
    effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    """Real messages with a few bytes changed, for as long as there is time; none may take long, or much memory."""
    messages = Campaign("events", lambda dice, known: spoiled(dice.choice(known), known, dice), way, seeds())
    seen = messages.last(effort(8, 600), seed=6)
    assert len(messages.ways) > 10
    record(seen)
