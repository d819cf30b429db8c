"""What a dialect writes for one leg: members of a body at their places, headers, and the request id.

The one rule: a message is JSON that nobody has changed. What is taken out of a copy of it can be put back where it was.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final, cast

from kvparams.jsontext import loads

__all__ = ["ABSENT", "Message", "Path", "Tree", "look", "place", "put", "take", "unpacked"]

Path = tuple[str | int, ...]
Tree = dict[str, object]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""Where JSON has nothing at all; null is something."""


@dataclass(frozen=True, slots=True)
class Message:
    """One leg's request or answer, as far as the dialect goes."""

    request_id: str
    """`X-Request-Id` of the request; of an answer, that of the request it answers."""
    body: Mapping[str, object] = field(default_factory=dict[str, object])
    """Members of the body, at their places."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other headers, names in lower case."""

    def to_json(self) -> Tree:
        """As a JSON object of its own; `headers` only where there are any."""
        said: Tree = {"request_id": self.request_id, "body": deepcopy(dict(self.body))}
        return {**said, "headers": dict(self.headers)} if self.headers else said


def unpacked(message: Message) -> Message:
    """The same with `kv_transfer_params` as an object where some carrier has made text of it (spec, section 2)."""
    carrier = message.body.get("kv_transfer_params")
    if not isinstance(carrier, str):
        return message
    try:
        spelled = loads(carrier.encode())
    except ValueError:  # no JSON of ours: whoever judges the message says so
        return message
    if spelled is not None and not isinstance(spelled, dict):
        return message
    body: Tree = {**message.body, "kv_transfer_params": cast("Tree | None", spelled)}
    return Message(message.request_id, body, message.headers)


def place(dotted: str) -> Path:
    """`choices.0.disaggregated_params` as a path; empty for the body itself."""
    return tuple(int(part) if part.isdigit() else part for part in dotted.split(".")) if dotted else ()


def look(tree: object, path: Sequence[str | int]) -> object:
    """What stands there, or ABSENT."""
    for part in path:
        if isinstance(part, int):
            found = cast("list[object]", tree) if isinstance(tree, list) else []
            tree = found[part] if part < len(found) else ABSENT
        else:
            tree = cast("Tree", tree).get(part, ABSENT) if isinstance(tree, dict) else ABSENT
    return tree


def take(tree: Tree, path: Path) -> object:
    """What stands there, removed, and with it the objects (and lists of one) that are empty without it."""
    taken = look(tree, path)
    if taken is ABSENT:
        return taken
    holder = look(tree, path[:-1])
    last = path[-1]
    if isinstance(last, int):
        cast("list[object]", holder).pop(last)
    else:
        del cast("Tree", holder)[last]
    _prune(tree, path[:-1])
    return taken


def put(tree: Tree, path: Path, value: object) -> bool:
    """Puts it there, where nothing is, and makes the objects on the way; false where something else is in the way."""
    holder: object = tree
    for index, part in enumerate(path[:-1]):
        inner = look(holder, (part,))
        if inner is ABSENT:
            inner = list[object]() if isinstance(path[index + 1], int) else Tree()
            if not _set(holder, part, inner):
                return False
        holder = inner
    return look(holder, path[-1:]) is ABSENT and _set(holder, path[-1], value)


def _set(holder: object, part: str | int, value: object) -> bool:
    if isinstance(part, str) and isinstance(holder, dict):
        cast("Tree", holder)[part] = value
        return True
    if isinstance(part, int) and isinstance(holder, list) and len(cast("list[object]", holder)) == part:
        cast("list[object]", holder).append(value)
        return True
    return False


def _prune(tree: Tree, path: Path) -> None:
    while path:
        holder = look(tree, path[:-1])
        if look(tree, path):  # it still holds something
            return
        last = path[-1]
        if isinstance(last, int):
            entries = cast("list[object]", holder)
            if len(entries) > 1:  # the others keep their numbers
                return
            entries.pop()
        else:
            del cast("Tree", holder)[last]
        path = path[:-1]
