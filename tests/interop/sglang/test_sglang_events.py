"""Tests KV events of the installed SGLang: its own classes, its own radix cache, its own publisher over ZMQ."""

import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvparams.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventSource, decode_msgpack
from kvparams.kv_events.model import MEDIA
from kvparams.kv_events.wire_structs import ClearedMap, RemovedMap, StoredMap
from kvparams.kv_events.zmq_frames import read_live, read_replayed, replay_request
from kvparams.tokens import pack

if TYPE_CHECKING:  # SGLang is not installed where types are checked
    base_prefix_cache: Any = None
    kv_events: Any = None
    msgspec: Any = None
    radix_cache: Any = None
    zmq: Any = None
else:
    import msgspec
    import zmq
    from sglang.srt.disaggregation import kv_events
    from sglang.srt.mem_cache import base_prefix_cache, radix_cache

pytestmark = pytest.mark.filterwarnings("ignore")

_VECTORS: Final = Path(__file__).parents[3] / "spec" / "1.0" / "vectors" / "events.json"
_SOURCE: Final = EventSource("engine")
_WAIT_MS: Final = 120_000
_CASES: Final = [
    case for case in json.loads(_VECTORS.read_bytes())["cases"] if case.get("made_by", {}).get("engine") == "SGLang"
]
_FIRST_PAGE: Final = "5d85718ec594b982"
"""Of tokens 0 to 15: the first half of its SHA-256 chain's integer, as SGLang computes it."""


def _batch(given: dict[str, Any]) -> Any:
    events = [
        getattr(kv_events, event["type"])(**{name: value for name, value in event.items() if name != "type"})
        for event in given["events"]
    ]
    return kv_events.KVEventBatch(given["time"], events, given["rank"])


def _encoded(events: list[Any]) -> bytes:
    return msgspec.msgpack.Encoder().encode(kv_events.KVEventBatch(1.5, events, None))


def test_events_have_the_members_that_are_known() -> None:
    """What is new in an event of SGLang fails here, by name."""
    for ours, theirs in (
        (StoredMap, kv_events.BlockStored),
        (RemovedMap, kv_events.BlockRemoved),
        (ClearedMap, kv_events.AllBlocksCleared),
    ):
        assert set(theirs.__struct_fields__) <= set(ours.__struct_fields__)
        assert ours.__struct_config__.tag == theirs.__struct_config__.tag
    assert kv_events.KVEventBatch.__struct_fields__ == ("ts", "events", "attn_dp_rank")
    assert {medium.value.lower() for medium in kv_events.StorageMedium} <= set(MEDIA)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_sglang_encodes_what_the_vector_says(case: dict[str, Any]) -> None:
    assert msgspec.msgpack.Encoder().encode(_batch(case["given"])).hex() == case["payload"]


def test_its_radix_cache_says_which_tokens_it_has() -> None:
    """Also in pairs, as for EAGLE, and under a salt."""
    ids = [*range(32), 7, 8]
    for pairs, salt in ((False, None), (True, None), (False, "tenant")):
        cache = radix_cache.RadixCache.create_simulated(page_size=16, enable_kv_cache_events=True)
        key = radix_cache.RadixKey(array("q", ids), is_bigram=pairs, cache_salt=salt).page_aligned(16)
        cache.insert(base_prefix_cache.InsertParams(key=key))
        events = decode_msgpack(_encoded(cache.take_events()), _SOURCE).events
        stored = [event for event in events if isinstance(event, BlockStored)]
        (event,) = stored
        assert (event.place.medium, event.block_size, event.blocks, event.parent) == ("device", 16, 2, None)
        assert event.tokens == pack(ids[:32])
        assert event.following == (7 if pairs else None)
        assert event.salt == salt
        assert (event.hashes[:8].hex() == _FIRST_PAGE) is (not pairs and salt is None)
        cache.reset()
        assert AllBlocksCleared() in decode_msgpack(_encoded(cache.take_events()), _SOURCE).events


def test_a_removal_is_of_the_place_of_the_store() -> None:
    for medium in kv_events.StorageMedium:
        both = [
            kv_events.BlockStored([5], None, [1], 1, None, medium=medium),
            kv_events.BlockRemoved([5], medium=medium),
        ]
        came, left = decode_msgpack(_encoded(both), _SOURCE).events
        assert isinstance(came, BlockStored)
        assert isinstance(left, BlockRemoved)
        assert (came.place, came.hashes) == (left.place, left.hashes)


def test_its_publisher_is_heard_and_replays(tmp_path: Path) -> None:
    live_at, replay_at = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = kv_events.ZmqEventPublisher(0, live_at, replay_at, topic="kv@pod@model")
    context = zmq.Context()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        live.connect(live_at)
        replay.connect(replay_at)
        publisher.publish(_batch(_CASES[0]["given"]))
        while not live.poll(50):
            publisher.publish(_batch(_CASES[0]["given"]))
        frames = read_live(live.recv_multipart())
        replay.send_multipart(replay_request(frames.sequence))
        assert replay.poll(_WAIT_MS)
        again = read_replayed(replay.recv_multipart())
        assert again == frames
        assert (
            decode_msgpack(frames.payload, _SOURCE).events
            == decode_msgpack(bytes.fromhex(_CASES[0]["payload"]), _SOURCE).events
        )
        while again is not None:
            assert replay.poll(_WAIT_MS)
            again = read_replayed(replay.recv_multipart())
    finally:
        publisher.shutdown()
        live.close(linger=0)
        replay.close(linger=0)
        context.term()
