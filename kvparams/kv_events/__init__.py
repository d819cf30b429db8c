"""KV events: what engines say about their caches, read into one canonical form. Needs the extra `events`.

    batch = decode_msgpack(payload, EventSource("prefill-0"), sequence)      # vLLM, SGLang, and whoever imitates them
    batches = decode_trtllm(text, EventSource("prefill-0"))          # TensorRT-LLM's JSON
    batches = decode_dynamo(text)                               # Dynamo's router events

`kvparams.kv_events.zmq_frames` takes messages over ZMQ apart, `kvparams.kv_events.sequence_tracker` finds gaps and
restarts, `kvparams.kv_events.plain_json` writes batches as JSON. The package opens nothing, waits for nothing, and
remembers nothing but a number. Any input may be an attack, and the only error that it raises is `InvalidEvents`.
"""

from kvparams.kv_events.dynamo import decode_dynamo
from kvparams.kv_events.model import (
    AllBlocksCleared,
    BlockLocation,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSource,
    InvalidEvents,
    KVCacheEvent,
    Medium,
)
from kvparams.kv_events.msgpack_batches import decode_msgpack
from kvparams.kv_events.sequence_tracker import SequenceCheck, SequenceTracker
from kvparams.kv_events.trtllm import decode_trtllm

__all__ = [
    "AllBlocksCleared",
    "BlockLocation",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventSource",
    "InvalidEvents",
    "KVCacheEvent",
    "Medium",
    "SequenceCheck",
    "SequenceTracker",
    "decode_dynamo",
    "decode_msgpack",
    "decode_trtllm",
]
