"""`python -m line_reader`: answers the questions of `kvparams conformance translator` and `events-reader`.

Each line of the standard input is a question in JSON, and each line of the standard output an answer. It is meant to be
read: a reader in another language needs the same few functions.
"""

import json
import sys
from typing import Any, Final

from kvparams import InvalidParams, dump, parse
from kvparams.dialects.message import DialectMessage
from kvparams.dialects.registry import load_tables
from kvparams.dialects.translation import LossyTranslation, decode_message, encode_message
from kvparams.errors import Problem
from kvparams.kv_events import EventSource, InvalidEvents, SequenceTracker, decode_dynamo, decode_msgpack, decode_trtllm
from kvparams.kv_events.plain_json import batch_to_json
from kvparams.kv_events.zmq_frames import read_live, read_replayed

JSON = dict[str, Any]
Batch = tuple[int, str]
_TABLES: Final = load_tables()


def answer(question: JSON) -> JSON:
    """Returns the answer to a question."""
    try:
        match question:
            case {"do": "read" | "write", "dialect": dialect} if dialect not in _TABLES:
                return {"unknown": dialect}
            case {"do": "read", "dialect": dialect}:
                return {"document": read_message(dialect, question)}
            case {"do": "write", "dialect": dialect}:
                return {"message": write_message(dialect, question)}
            case {"do": "read", "form": _}:
                return {"batches": read_events(question)}
            case {"do": "frames"}:
                return read_frames(question)
            case {"do": "follow"}:
                return {"known": Follower().follow(question["messages"])}
            case _:
                return {"unknown": question.get("do")}
    except (InvalidParams, InvalidEvents) as error:
        return {"problems": [_problem(one) for one in error.problems]}
    except LossyTranslation as error:
        return {"lost": list(error.fields)}


def read_message(dialect: str, question: JSON) -> JSON:
    """Returns the document of a message."""
    told = question["message"]
    message = DialectMessage(told["request_id"], told["body"], told.get("headers", {}))
    return dump(decode_message(_TABLES[dialect], message, question["phase"], question.get("engine")))


def write_message(dialect: str, question: JSON) -> JSON:
    """Returns the message of a document."""
    return encode_message(_TABLES[dialect], parse(question["document"]), question.get("engine")).to_json()


def read_events(question: JSON) -> list[JSON]:
    """Returns the batches of a message."""
    source = EventSource(question["instance"])
    if question["form"] == "msgpack":
        return [batch_to_json(decode_msgpack(bytes.fromhex(question["payload"]), source, question["sequence"]))]
    if question["form"] == "trtllm":
        return [batch_to_json(batch) for batch in decode_trtllm(question["text"], source)]
    return [batch_to_json(batch) for batch in decode_dynamo(question["text"])]


def read_frames(question: JSON) -> JSON:
    """Returns what the frames of a message over ZMQ hold."""
    frames = [bytes.fromhex(frame) for frame in question["frames"]]
    found = read_replayed(frames) if question["replayed"] else read_live(frames)
    return {"end": True} if found is None else {"sequence": found.sequence, "payload": found.payload.hex()}


class Follower:
    """Follows the batches of one publisher, and asks it for what is missing."""

    def __init__(self) -> None:
        self._tracker = SequenceTracker()
        self._known: list[str] = []

    def follow(self, messages: list[JSON]) -> list[str]:
        """Returns what is known after all messages. Each says what the publisher can send again at that moment."""
        for message in messages:
            replay = [(number, content) for number, content in message["replay"]]
            self._take((message["sequence"], message["content"]), replay)
        return self._known

    def _take(self, batch: Batch, replay: list[Batch], *, asked: bool = False) -> None:
        check = self._tracker.observe(batch[0], int.from_bytes(batch[1].encode()[:8], "big"))
        match check.finding:
            case "in_order":
                self._known.append(batch[1])
            case "duplicate":
                pass
            case "restart":
                self._known.clear()
                self._take(batch, replay)
            case "gap" if asked:
                self._known.clear()
                self._tracker.resume(batch[0])
                self._take(batch, replay)
            case "gap":
                for again in replay:
                    if check.replay_from <= again[0] < batch[0]:
                        self._take(again, replay, asked=True)
                self._take(batch, replay, asked=True)


def _problem(problem: Problem) -> JSON:
    return {"path": list(problem.path), "kind": problem.kind}


def main() -> None:
    """Answers until the standard input ends."""
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
