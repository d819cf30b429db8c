"""Publishes KV events as vLLM does: PUB for new events, ROUTER for a replay of past ones, one thread for both."""

import threading
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

__all__ = ["Publisher", "removed", "stored"]

_END = (-1).to_bytes(8, "big", signed=True)


def stored(tokens: Sequence[int], *, block: int = 16, front: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """`BlockStored` of the full blocks of `tokens`, which follow `front`. A block is called by what leads to it."""
    blocks, names = len(tokens) // block, list[bytes]()
    name = sha256(array("I", front))
    for at in range(0, blocks * block, block):
        name.update(array("I", tokens[at : at + block]))
        names.append(name.digest())
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": _name(front) if front else None,
        "token_ids": list(tokens[: blocks * block]),
        "block_size": block,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(tokens: Sequence[int]) -> dict[str, Any]:
    """`BlockRemoved` of the block that ends with `tokens`."""
    return {"type": "BlockRemoved", "block_hashes": [_name(tokens)], "medium": "GPU"}


def _name(tokens: Sequence[int]) -> bytes:
    return sha256(array("I", tokens)).digest()


class Publisher:
    """Use it as a context."""

    def __init__(self, ports: tuple[int, int], buffer: int = 1000) -> None:
        self._ports = ports
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._jobs: SimpleQueue[tuple[bytes, bool]] = SimpleQueue()
        self._over = threading.Event()
        self.replays = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Publisher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def say(self, *events: dict[str, Any], lost: bool = False) -> None:
        """A batch; one that is lost is only found in the buffer."""
        self._jobs.put((msgspec.msgpack.encode([1.0, list(events), None]), lost))

    def garble(self) -> None:
        self._jobs.put((b"\xc1", False))

    def forget(self) -> None:
        """What was said can be asked for no more."""
        self._buffer.clear()

    def _run(self) -> None:
        context = zmq.Context()
        live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        live.bind(f"tcp://127.0.0.1:{self._ports[0]}")
        replay.bind(f"tcp://127.0.0.1:{self._ports[1]}")
        number = 0
        while not self._over.is_set():
            if replay.poll(0):
                self.replays += 1
                who, _, first = replay.recv_multipart()
                for one, payload in list(self._buffer):
                    if one >= int.from_bytes(first, "big"):
                        replay.send_multipart((who, b"", b"kv", one.to_bytes(8, "big"), payload))
                replay.send_multipart((who, b"", b"", _END, b""))
            with suppress(Empty):
                payload, lost = self._jobs.get(timeout=0.01)
                self._buffer.append((number, payload))
                if not lost:
                    live.send_multipart((b"kv", number.to_bytes(8, "big"), payload))
                number += 1
        live.close(linger=0)
        replay.close(linger=0)
        context.term()
