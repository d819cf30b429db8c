"""Measures how fast KV events are read, against the bare decoders that only build Python objects.

The yardsticks read the same bytes in the same round. `bare msgspec` and `msgpack` know nothing of events: they build
lists and dictionaries, check nothing and pack nothing.

    python -m benchmarks.events_bench [--rounds 30]

A table of CPU microseconds per message (median over the rounds), events and blocks per second of CPU, and the ratio to
each yardstick with the quartiles of the rounds.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgpack import unpackb  # pyright: ignore[reportUnknownVariableType]

from kvparams.kv_events import EventBatch, EventSource, decode_dynamo, decode_msgpack, decode_trtllm

__all__ = ["main"]

_BLOCK: int = 16
_SOURCE = EventSource("engine-a")


@dataclass(frozen=True, slots=True)
class _Message:
    """A `_Message` is a message with the decoders that can read it."""

    name: str
    payload: bytes
    events: int
    blocks: int
    ours: Callable[[bytes], EventBatch | tuple[EventBatch, ...]]
    yardsticks: dict[str, Callable[[bytes], object]]
    unknown: int = 0
    """How many of the events are of a type that is not known."""


def _stored(dice: random.Random, blocks: int) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [dice.getrandbits(64) for _ in range(blocks)],
        "parent_block_hash": dice.getrandbits(64),
        "token_ids": [dice.randrange(128_000) for _ in range(_BLOCK * blocks)],
        "block_size": _BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _messages() -> list[_Message]:
    dice = random.Random(7)
    encode = msgspec.msgpack.encode
    bare = msgspec.msgpack.Decoder()
    yardsticks: dict[str, Callable[[bytes], object]] = {"bare msgspec": bare.decode, "msgpack": unpackb}

    def ours(payload: bytes) -> EventBatch:
        return decode_msgpack(payload, _SOURCE, 0)

    made: list[_Message] = []
    for events, blocks in ((1, 1), (64, 1), (16, 32), (1, 512)):
        payload = encode([1.5, [_stored(dice, blocks) for _ in range(events)], 0])
        made.append(_Message(f"{events} x {blocks} stored", payload, events, events * blocks, ours, yardsticks))
    arrays = [list(_stored(dice, 32).values())[:8] for _ in range(16)]  # as vLLM 0.14: up to the LoRA's name
    made.append(_Message("16 x 32 stored, arrays", encode([1.5, arrays]), 16, 512, ours, yardsticks))
    removed = {"type": "BlockRemoved", "block_hashes": [dice.getrandbits(64) for _ in range(512)], "medium": "GPU"}
    made.append(_Message("1 x 512 removed", encode([1.5, [removed], 0]), 1, 512, ours, yardsticks))
    mixed = [{"type": "Later"}, *[_stored(dice, 32) for _ in range(15)]]
    made.append(_Message("one unknown, 15 x 32 stored", encode([1.5, mixed, 0]), 16, 480, ours, yardsticks, 1))
    in_json: dict[str, Callable[[bytes], object]] = {"bare msgspec": msgspec.json.Decoder().decode, "json": json.loads}
    blocks_said = [
        {
            "type": "stored_block",
            "block_hash": dice.getrandbits(64),
            "tokens": [
                {"type": "unique_token", "token_id": dice.randrange(128_000), "token_extra_id": 0}
                for _ in range(_BLOCK)
            ],
            "cache_level": 0,
            "priority": 35,
        }
        for _ in range(64)
    ]
    event = {"event_id": 0, "data": {"type": "stored", "parent_hash": None, "blocks": blocks_said}, "window_size": 8192}
    text = json.dumps([event]).encode()
    made.append(_Message("TensorRT-LLM, 1 x 64", text, 1, 64, lambda raw: decode_trtllm(raw, _SOURCE), in_json))
    hashed = [{"block_hash": dice.getrandbits(64), "tokens_hash": dice.getrandbits(64)} for _ in range(64)]
    routed = {"worker_id": 1, "event": {"event_id": 0, "data": {"stored": {"blocks": hashed}}, "dp_rank": 0}}
    made.append(_Message("Dynamo, 1 x 64", json.dumps(routed).encode(), 1, 64, decode_dynamo, in_json))
    return made


def _seconds(read: Callable[[bytes], object], payload: bytes, times: int) -> float:
    begun = time.process_time()
    for _ in range(times):
        read(payload)
    return (time.process_time() - begun) / times


def _row(message: _Message, rounds: int) -> str:
    read = message.ours(message.payload)
    batches = (read,) if isinstance(read, EventBatch) else read
    assert sum(len(one.events) - one.malformed for one in batches) == message.events - message.unknown, message.name
    times = max(1, round(0.004 / _seconds(message.ours, message.payload, 3)))
    subjects = {"ours": message.ours, **message.yardsticks}
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds):
        order = list(subjects)[:: 1 if number % 2 else -1]
        for name in order:
            taken[name].append(_seconds(subjects[name], message.payload, times))
    median = statistics.median(taken["ours"])
    ratios: list[str] = []
    for name in message.yardsticks:
        each = [ours / theirs for ours, theirs in zip(taken["ours"], taken[name], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        ratios.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
    return (
        f"| {message.name} | {len(message.payload):,} | {1e6 * median:.1f} | {message.events / median:,.0f} "
        f"| {message.blocks / median / 1e6:.2f} | {' | '.join(ratios)} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How fast KV events are read")
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    print("| message | bytes | CPU us | events/s | million blocks/s | / bare msgspec | / msgpack (JSON: / json) |")
    print("|---|---|---|---|---|---|---|")
    for message in _messages():
        print(_row(message, rounds))


if __name__ == "__main__":
    main()
