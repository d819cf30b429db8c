"""KV events: what engines say about their caches, read into one canonical form. Needs the extra `events`.

    batch = decode(payload, Source("prefill-0"), sequence)      # vLLM, SGLang, and whoever imitates them
    batches = decode_trtllm(text, Source("prefill-0"))          # TensorRT-LLM's JSON
    batches = decode_dynamo(text)                               # Dynamo's router events

`kvparams.events.frames` takes messages over ZMQ apart, `kvparams.events.sequence` finds gaps and restarts,
`kvparams.events.plain` writes batches as JSON. The one rule: nothing here opens, waits, or remembers anything but a
number; whatever comes in may be an attack, and the only error that goes out is `InvalidEvents`.
"""

from kvparams.events.batches import decode
from kvparams.events.dynamo import decode_dynamo
from kvparams.events.model import (
    Batch,
    Cleared,
    Event,
    InvalidEvents,
    Medium,
    Place,
    Removed,
    Source,
    Stored,
)
from kvparams.events.sequence import Order, SequenceTracker
from kvparams.events.trtllm import decode_trtllm

__all__ = [
    "Batch",
    "Cleared",
    "Event",
    "InvalidEvents",
    "Medium",
    "Order",
    "Place",
    "Removed",
    "SequenceTracker",
    "Source",
    "Stored",
    "decode",
    "decode_dynamo",
    "decode_trtllm",
]
