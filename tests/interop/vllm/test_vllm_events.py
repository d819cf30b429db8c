"""Tests KV events of the installed vLLM: its own classes, its own publisher over ZMQ, and an engine that computes."""

import json
import random
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from demo.processes import Processes
from kvparams.kv_events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    EventSource,
    SequenceCheck,
    SequenceTracker,
    decode_msgpack,
)
from kvparams.kv_events.plain_json import batch_to_json
from kvparams.kv_events.wire_structs import ClearedMap, RemovedMap, StoredMap
from kvparams.kv_events.zmq_frames import MessageFrames, read_live, read_replayed, replay_request
from kvparams.tokens import pack
from tests.interop.vllm.engines import PATIENCE_S, READY_S, complete, start_engine
from tests.interop.vllm.version import is_earlier

if TYPE_CHECKING:  # vLLM is not installed where types are checked
    kv_events: Any = None
    msgspec: Any = None
    zmq: Any = None
else:
    import msgspec
    import zmq

    with warnings.catch_warnings():  # what importing vLLM warns of is not ours
        warnings.simplefilter("ignore")
        from vllm.distributed import kv_events

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

_VECTORS: Final = Path(__file__).parents[3] / "spec" / "1.0" / "vectors" / "events.json"
_SOURCE: Final = EventSource("engine")
_WAIT_MS: Final = 120_000
_SINCE_032: Final[set[str]] = {"ownership", "session_id"} if is_earlier() else set()
"""Members that the vLLM that is installed does not have yet."""
_CASES: Final = [
    case
    for case in json.loads(_VECTORS.read_bytes())["cases"]
    if case.get("made_by", {}).get("engine") == "vLLM"
    and not any(_SINCE_032 & set(event) for event in case["given"]["events"])
]


def _real(value: Any) -> Any:
    """A value of a vector as vLLM has it."""
    if isinstance(value, dict):
        return bytes.fromhex(cast("dict[str, str]", value)["hex"])
    return [_real(one) for one in cast("list[object]", value)] if isinstance(value, list) else value


def _batch(given: dict[str, Any]) -> Any:
    events = [
        getattr(kv_events, event["type"])(**{name: _real(value) for name, value in event.items() if name != "type"})
        for event in given["events"]
    ]
    return kv_events.KVEventBatch(given["time"], events, given["rank"])


def test_events_have_the_members_that_are_known() -> None:
    """What is new in an event of vLLM fails here, by name; two members are other engines'."""
    for ours, theirs, only_ours in (
        (StoredMap, kv_events.BlockStored, ["cache_salt"]),
        (RemovedMap, kv_events.BlockRemoved, []),
        (ClearedMap, kv_events.AllBlocksCleared, ["ownership"]),
    ):
        known = [name for name in ours.__struct_fields__ if name not in _SINCE_032 or name in only_ours]
        assert known == [*theirs.__struct_fields__, *only_ours]
        assert ours.__struct_config__.tag == theirs.__struct_config__.tag
    assert {one.__name__ for one in kv_events.KVCacheEvent.__subclasses__()} == {
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    }
    assert kv_events.KVEventBatch.__struct_fields__ == ("ts", "events", "data_parallel_rank")
    names: list[str] = [name for name in dir(kv_events) if name.startswith("MEDIUM_")]
    assert {getattr(kv_events, name) for name in names} == {"GPU", "CPU", "STORAGE"}


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_vllm_encodes_what_the_vector_says(case: dict[str, Any]) -> None:
    assert msgspec.msgpack.Encoder().encode(_batch(case["given"])).hex() == case["payload"]


@contextmanager
def _sockets(folder: Path) -> Generator[tuple[Any, Any]]:
    """A subscriber of the publisher in this folder, and a socket to ask it for replays."""
    context = zmq.Context()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        live.connect(f"ipc://{folder}/events")
        replay.connect(f"ipc://{folder}/replay")
        yield live, replay
    finally:
        live.close(linger=0)
        replay.close(linger=0)
        context.term()


@contextmanager
def _publisher(folder: Path, buffer_steps: int = 10_000) -> Generator[Any]:
    made = kv_events.ZmqEventPublisher(
        0, f"ipc://{folder}/events", f"ipc://{folder}/replay", buffer_steps, topic="kv@pod@model"
    )
    try:
        yield made
    finally:
        made.shutdown()


def _hear(live: Any) -> MessageFrames:
    assert live.poll(_WAIT_MS), "nothing was published"
    return read_live(live.recv_multipart())


def _replayed(replay: Any, first: int) -> list[EventBatch]:
    replay.send_multipart(replay_request(first))
    found: list[EventBatch] = []
    while True:
        assert replay.poll(_WAIT_MS), "no answer to a request for replay"
        if (frames := read_replayed(replay.recv_multipart())) is None:
            return found
        assert frames.topic == b"kv@pod@model"
        found.append(decode_msgpack(frames.payload, _SOURCE, frames.sequence))


def _sequence(batch: EventBatch) -> int:
    assert batch.sequence is not None
    return batch.sequence


def test_its_publisher_is_heard_and_what_was_lost_is_replayed(tmp_path: Path) -> None:
    """Everything that the vectors say of vLLM goes through its own thread, sockets and buffer."""
    held: list[EventBatch] = []
    with _sockets(tmp_path) as (live, replay), _publisher(tmp_path) as publisher:
        publisher.publish(kv_events.KVEventBatch(0.0, []))
        while not live.poll(50):  # a subscriber joins late
            publisher.publish(kv_events.KVEventBatch(0.0, []))
        for case in _CASES:
            publisher.publish(_batch(case["given"]))
        publisher.publish(kv_events.KVEventBatch(99.0, []))
        while not held or held[-1].time != 99.0:
            frames = _hear(live)
            held.append(decode_msgpack(frames.payload, _SOURCE, frames.sequence))
        replayed = _replayed(replay, 0)
    tracker = SequenceTracker()
    if missed := _sequence(held[0]):
        assert tracker.observe(missed, held[0].mark) == SequenceCheck("gap", missed, 0)
    findings = [(tracker.observe(_sequence(batch), batch.mark).finding, batch) for batch in (*replayed, *held)]
    assert {finding for finding, _ in findings} == {"in_order", "duplicate"}
    taken = [batch for finding, batch in findings if finding == "in_order"]
    assert [_sequence(batch) for batch in taken] == list(range(tracker.next))
    for case, batch in zip(_CASES, taken[-1 - len(_CASES) : -1], strict=True):
        assert batch_to_json(batch)["events"] == case["batches"][0]["events"]
        assert batch.source.rank == case["batches"][0]["rank"]


def test_a_publisher_that_was_restarted_is_another_one(tmp_path: Path) -> None:
    tracker = SequenceTracker()
    lives: list[list[EventBatch]] = []
    for life in (1, 2):
        with _sockets(tmp_path) as (_, replay), _publisher(tmp_path) as publisher:
            for number in range(3):
                publisher.publish(kv_events.KVEventBatch(float(10 * life + number), []))
            batches = _replayed(replay, 0)
            while len(batches) < 3:
                batches = _replayed(replay, 0)
        lives.append(batches)
    first, second = lives
    assert [tracker.observe(_sequence(batch), batch.mark).finding for batch in first] == ["in_order"] * 3
    assert tracker.observe(_sequence(second[0]), second[0].mark).finding == "restart"
    assert [tracker.observe(_sequence(batch), batch.mark).finding for batch in second] == ["in_order"] * 3


@pytest.mark.slow
def test_an_engine_says_which_tokens_it_has_cached(make_tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A real engine: its blocks are those of the prompts, in one chain each, until the cache is reset."""
    chance = random.Random(3)
    prompts = [[chance.randrange(300, 2000) for _ in range(size)] for size in (100, 300, 31)]
    prompts.append(prompts[1][:64] + prompts[0][:64])
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@pod@model"}
    told |= {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    with Processes(tmp_path) as processes, _sockets(tmp_path) as (live, replay):
        engine = start_engine(
            processes,
            "engine",
            make_tiny(),
            *("--kv-events-config", json.dumps(told)),
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        processes.wait_ready(engine, within_s=READY_S)
        for prompt in prompts:
            complete(engine.url, prompt, max_tokens=1)
        httpx.post(f"{engine.url}/reset_prefix_cache", timeout=PATIENCE_S, verify=NO_CERTIFICATES).raise_for_status()
        complete(engine.url, prompts[2], max_tokens=2)
        frames = _hear(live)
        batches = _replayed(replay, 0)
        while not any(event == AllBlocksCleared() for batch in batches for event in batch.events):
            batches = _replayed(replay, 0)
    assert frames.topic == b"kv@pod@model"
    tracker = SequenceTracker()
    assert {tracker.observe(_sequence(batch), batch.mark).finding for batch in batches} == {"in_order"}
    assert tracker.observe(frames.sequence, decode_msgpack(frames.payload, _SOURCE).mark).finding == "duplicate"
    assert not any(batch.malformed or batch.unknown for batch in batches)
    events = [event for batch in batches for event in batch.events]
    known: dict[bytes, bytes] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            break
        assert isinstance(event, BlockStored)
        assert (event.place.medium, event.block_size, event.kind) == ("device", 32, "full_attention")
        assert event.tokens is not None
        prefix = b"" if event.parent is None else known[event.parent]
        for number in range(event.blocks):
            prefix += event.tokens[4 * 32 * number : 4 * 32 * (number + 1)]
            known[event.hashes[event.width * number : event.width * (number + 1)]] = prefix
    wanted = {pack(prompt[:end]) for prompt in prompts for end in range(32, len(prompt) + 1, 32)}
    assert set(known.values()) == wanted
