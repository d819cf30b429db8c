"""Tests KV events of every engine against the vectors, bounds that are too large for vectors, and frames."""

import json
import pickle
import re
import time
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvparams import KVParamsError
from kvparams.kv_events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSource,
    InvalidEvents,
    decode_dynamo,
    decode_msgpack,
    decode_trtllm,
)
from kvparams.kv_events.model import MAX_EVENTS, MAX_PROBLEMS, MEDIA
from kvparams.kv_events.msgpack_batches import MAX_RANK
from kvparams.kv_events.plain_json import batch_to_json
from kvparams.kv_events.zmq_frames import MessageFrames, read_live, read_replayed, replay_request
from kvparams.tokens import MAX_TOKENS, unpack

VECTORS = Path(__file__).parents[4] / "spec" / "1.0" / "vectors" / "events.json"
SOURCE = EventSource("engine-a")
Case = dict[str, Any]


@cache
def cases() -> list[Case]:
    return json.loads(VECTORS.read_bytes())["cases"]


def name_of(case: Case) -> str:
    return case["name"]


def read(case: Case) -> tuple[EventBatch, ...]:
    if case["form"] == "msgpack":
        return (decode_msgpack(bytes.fromhex(case["payload"]), SOURCE, 7),)
    if case["form"] == "trtllm":
        return decode_trtllm(case["text"], SOURCE)
    return decode_dynamo(case["text"])


def stored(**members: object) -> dict[str, object]:
    """An event as vLLM writes it."""
    whole: dict[str, object] = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}
    return whole | {"token_ids": [1], "block_size": 1} | members


def packed(*events: object, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, events, rank])


def kinds(batch: EventBatch) -> list[tuple[tuple[str | int, ...], str]]:
    return [(problem.path, problem.kind) for problem in batch.problems]


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_every_message_is_read_as_the_vector_says(case: Case) -> None:
    """Spec-mandated, 1.0#14.1 to 1.0#14.9."""
    if case["valid"]:
        assert [batch_to_json(batch) for batch in read(case)] == case["batches"]
        return
    with pytest.raises(InvalidEvents) as caught:
        read(case)
    assert [{"path": list(one.path), "kind": one.kind} for one in caught.value.problems] == case["problems"]


@pytest.mark.parametrize("first", [1, {}, [], "text", [1.5]])
def test_what_is_no_batch_and_more_than_one_value_is_no_value(first: object) -> None:
    """Spec-mandated, 1.0#14.1: what stands behind the first value is judged before what that value is."""
    payload = msgspec.msgpack.encode(first)
    for told, kind in ((payload, "missing" if isinstance(first, list) else "type"), (payload + b"\xc0", "value")):
        with pytest.raises(InvalidEvents) as caught:
            decode_msgpack(told, SOURCE)
        assert [(one.path, one.kind) for one in caught.value.problems] == [((), kind)]


def test_every_medium_with_a_name_is_known() -> None:
    """Spec-mandated, 1.0#14.5: whatever the case of its letters."""
    for name, medium in MEDIA.items():
        for word in (name, name.upper()):
            (event,) = decode_msgpack(packed(stored(medium=word)), SOURCE).events
            assert isinstance(event, BlockStored)
            assert (event.place.medium, event.place.native) == (medium, word)


def test_a_block_is_removed_from_the_place_where_it_was_stored() -> None:
    """Spec-mandated, 1.0#14.5: groups, owners and media keep equal hashes apart."""
    where = {"medium": "CPU", "group_idx": 2, "ownership": "kvcr"}
    gone = {"type": "BlockRemoved", "block_hashes": [1]}
    came, left, other = decode_msgpack(
        packed(stored(**where), gone | where, gone | where | {"group_idx": 3}), SOURCE
    ).events
    assert isinstance(came, BlockStored)
    assert isinstance(left, BlockRemoved)
    assert isinstance(other, BlockRemoved)
    assert (came.place, came.hashes, came.blocks) == (left.place, left.hashes, left.blocks)
    assert came.place != other.place


def test_what_is_packed_needs_no_loop() -> None:
    """Ours: tokens are what `kvparams.tokens.pack` packs, hashes big-endian integers."""
    (event,) = decode_msgpack(
        packed(stored(block_hashes=[1, 2**63], token_ids=[70_000, 1, 2, 3], block_size=2)), SOURCE
    ).events
    assert isinstance(event, BlockStored)
    assert event.tokens is not None
    assert unpack(event.tokens) == array("I", [70_000, 1, 2, 3])
    assert memoryview(event.hashes).nbytes == event.blocks * event.width == 16
    assert [int.from_bytes(event.hashes[at : at + 8], "big") for at in (0, 8)] == [1, 2**63]


def test_events_are_cheap_to_keep_and_cannot_be_changed() -> None:
    batch = decode_msgpack(packed(stored()), SOURCE)
    (event,) = batch.events
    assert hash(event) == hash(decode_msgpack(packed(stored()), SOURCE).events[0])
    assert pickle.loads(pickle.dumps(batch)) == batch  # noqa: S301 (ours, for processes that share work)
    with pytest.raises(AttributeError):
        batch.sequence = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        event.place = None  # type: ignore[misc]


def test_a_mark_tells_two_batches_of_one_number_apart() -> None:
    one, other = (decode_msgpack(packed(stored(token_ids=[token])), SOURCE, 4) for token in (1, 2))
    assert (one.sequence, one.mark) != (other.sequence, other.mark)
    assert one.mark == decode_msgpack(memoryview(bytearray(packed(stored(token_ids=[1])))), SOURCE).mark


def test_the_rank_of_a_batch_replaces_that_of_its_source() -> None:
    assert decode_msgpack(packed(rank=MAX_RANK), EventSource("e", 3)).source == EventSource("e", MAX_RANK)
    assert decode_msgpack(packed(rank=None), EventSource("e", 3)).source == EventSource("e", 3)


def test_too_many_bytes_are_refused_unread() -> None:
    """Spec-mandated, 1.0#14.10."""
    payload = packed(stored())
    assert decode_msgpack(payload, SOURCE, max_bytes=len(payload)).events
    with pytest.raises(InvalidEvents, match="at most") as caught:
        decode_msgpack(payload, SOURCE, max_bytes=len(payload) - 1)
    assert caught.value.problems[0].kind == "length"
    for read_text in (lambda: decode_trtllm("[]", SOURCE, max_bytes=1), lambda: decode_dynamo(b"[]", max_bytes=1)):
        with pytest.raises(InvalidEvents, match=r"\[length\]"):
            read_text()


def test_too_many_events_are_refused() -> None:
    """Spec-mandated, 1.0#14.10: and as many as there may be are not."""
    cleared = {"type": "AllBlocksCleared"}
    assert len(decode_msgpack(packed(*[cleared] * MAX_EVENTS), SOURCE).events) == MAX_EVENTS
    with pytest.raises(InvalidEvents) as caught:
        decode_msgpack(packed(*[cleared] * (MAX_EVENTS + 1)), SOURCE)
    assert [(one.path, one.kind) for one in caught.value.problems] == [((1,), "length")]
    with pytest.raises(InvalidEvents, match=r"\[length\]"):
        decode_trtllm("[" + "0," * MAX_EVENTS + "0]", SOURCE)
    with pytest.raises(InvalidEvents, match="commas"):
        decode_dynamo("[" + "0," * 2**21 + "0,0]")


def test_too_many_tokens_and_blocks_cost_the_event() -> None:
    """Spec-mandated, 1.0#14.10."""
    many = [1] * (MAX_TOKENS + 1)
    batch = decode_msgpack(
        packed(stored(token_ids=many), stored(block_hashes=many), stored(extra_keys=[["x" * 2**18]])), SOURCE
    )
    assert batch.events == ()
    assert kinds(batch) == [
        ((1, 0, "token_ids"), "length"),
        ((1, 1, "block_hashes"), "length"),
        ((1, 2, "extra_keys"), "length"),
    ]


def test_the_first_problems_are_described_and_all_are_counted() -> None:
    """Spec-mandated, 1.0#14.8; also where a batch has to be read event by event."""
    wrong = stored(token_ids=[-1])
    for also in ([], [{"type": "Later"}]):
        batch = decode_msgpack(packed(*also, *[wrong] * 40, stored()), SOURCE)
        assert (len(batch.events), batch.unknown, batch.malformed) == (1, len(also), 40)
        assert len(batch.problems) == MAX_PROBLEMS
    batch = decode_msgpack(packed(*[{"type": "BlockRemoved"}] * 40), SOURCE)
    assert (batch.malformed, len(batch.problems)) == (40, MAX_PROBLEMS)


def test_an_event_of_too_many_members_is_left_out() -> None:
    """Spec-mandated, 1.0#14.10: an event that is read as it should be may have as many as it likes."""
    fits, crowd = ({str(number): 0 for number in range(count)} for count in (255, 256))
    many = {"type": "Later"} | crowd, ["Later", *crowd], stored() | crowd
    batch = decode_msgpack(packed(*many, {"type": "Later"} | fits, ["Later", *fits]), SOURCE)
    assert (len(batch.events), batch.unknown) == (1, 2)
    assert kinds(batch) == [((1, 0), "length"), ((1, 1), "length")]


def test_the_bounds_are_those_of_the_spec() -> None:
    """Spec-mandated, 1.0#14.10: the tests above take them from the code."""
    assert (MAX_EVENTS, MAX_TOKENS, MAX_RANK) == (65_536, 2_097_152, 65_535)


def test_hashes_of_several_widths_are_a_conflict() -> None:
    """Spec-mandated, 1.0#14.3: of 1 to 64 bytes each is kept as it is."""
    for hashes in ([b"a", b"bc"], [1, b"c" * 32]):
        batch = decode_msgpack(packed(stored(block_hashes=hashes, token_ids=[1, 2])), SOURCE)
        assert (batch.events, kinds(batch)) == ((), [((1, 0, "block_hashes"), "conflict")])
    batch = decode_msgpack(packed(stored(parent_block_hash=b"c" * 9)), SOURCE)
    assert kinds(batch) == [((1, 0, "parent_block_hash"), "conflict")]
    kept = [b"a", b"b" * 20, b"c" * 64]
    batch = decode_msgpack(packed(*(stored(block_hashes=[one]) for one in kept)), SOURCE)
    assert [event.hashes for event in batch.events if isinstance(event, BlockStored)] == kept


@pytest.mark.slow
def test_a_hostile_batch_is_done_with_in_time() -> None:
    """Ours: what takes longest is many events that are all wrong; a generous bound, for a slow machine."""
    begun = time.process_time()
    batch = decode_msgpack(packed(*[{"type": "BlockRemoved", "block_hashes": "x"}] * MAX_EVENTS), SOURCE)
    assert time.process_time() - begun < 5
    assert batch.malformed == MAX_EVENTS


@pytest.mark.parametrize(
    "payload",
    [
        b"\x92" * 100_000 + b"\xc0",
        b"\x93\x01\x90" + b"\x92" * 100_000 + b"\xc0",
        b"\x93\x01\x91\x82\xa4type\xa1x\xa1y" + b"\x81\xa1x" * 100_000 + b"\xc0\x00",
    ],
)
def test_depth_is_refused(payload: bytes) -> None:
    """Spec-mandated, 1.0#14.10."""
    with pytest.raises(InvalidEvents, match="deep"):
        decode_msgpack(payload, SOURCE)


def test_deep_text_is_refused() -> None:
    """Spec-mandated, 1.0#14.10."""
    for text in ("[" * 100_000, '[{"x":' * 50_000):
        with pytest.raises(InvalidEvents):
            decode_trtllm(text, SOURCE)
        with pytest.raises(InvalidEvents):
            decode_dynamo(text)


def test_text_that_cannot_be_utf8_is_refused() -> None:
    for text in ("\ud800", '["\ud800"]', b"[\xff]"):
        with pytest.raises(InvalidEvents):
            decode_trtllm(text, SOURCE)


def test_the_error_is_ours_and_repeats_no_value() -> None:
    secret = "s3cr3t"
    batch = decode_msgpack(packed(stored(lora_id=secret), stored(lora_name=secret * 300)), SOURCE)
    assert batch.malformed == 2
    assert secret not in str(batch.problems)
    with pytest.raises(InvalidEvents) as caught:
        decode_msgpack(msgspec.msgpack.encode([secret, [], 0]), SOURCE)
    assert isinstance(caught.value, KVParamsError)
    assert isinstance(caught.value, ValueError)
    assert secret not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems  # noqa: S301 (ours)


def test_nothing_here_can_run_what_it_reads() -> None:
    """Spec-mandated, 1.0#14.15: no module of the ground imports such a decoder."""
    for module in (Path(__file__).parents[4] / "kvparams").rglob("*.py"):
        assert not re.search(r"\b(import|from) (pickle|marshal|shelve|dill)\b", module.read_text()), module


NUMBER = (7).to_bytes(8, "big")
END = b"\xff" * 8


def test_frames_of_a_live_message() -> None:
    """Spec-mandated, 1.0#14.11."""
    assert read_live([b"kv@pod@m", NUMBER, b"payload"]) == MessageFrames(b"kv@pod@m", 7, b"payload")
    for frames in (
        [],
        [NUMBER, b""],
        [b"", b"", NUMBER, b""],
        [b"", b"7", b""],
        [b"", END, b""],
        [b"x" * 1025, NUMBER, b""],
    ):
        with pytest.raises(InvalidEvents):
            read_live(frames)


@pytest.mark.parametrize("front", [[], [b""], [b"topic"], [b"", b"topic"], [b"", b""]])
def test_frames_of_a_replayed_message(front: list[bytes]) -> None:
    """Spec-mandated, 1.0#14.11: with the topic and without, behind an empty frame or not."""
    topic = front[-1] if front else b""
    assert read_replayed([*front, NUMBER, b"payload"]) == MessageFrames(topic, 7, b"payload")
    assert read_replayed([*front, END, b""]) is None


@pytest.mark.parametrize("frames", [[], [NUMBER], [b"x", b"", NUMBER, b""], [b""] * 5, [b"", b"", b"1234567", b""]])
def test_frames_that_answer_nothing(frames: list[bytes]) -> None:
    """Spec-mandated, 1.0#14.11."""
    with pytest.raises(InvalidEvents):
        read_replayed(frames)


def test_a_replay_is_asked_for_in_two_frames() -> None:
    """Behind a dealer socket: vLLM 0.32 and SGLang 0.5.23 want exactly these behind the sender's identity."""
    assert replay_request(258) == (b"", b"\0\0\0\0\0\0\1\2")
