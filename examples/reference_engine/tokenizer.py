"""Text to token ids and back: one id per UTF-8 byte, and six markers.

Text that the engine generated has the same ids when it comes back in the next turn's prompt. Therefore only printable
ASCII and the end marker can be generated (`OUTPUT_IDS`), and a turn of a chat ends with that marker.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

__all__ = ["BOS", "EOS", "OUTPUT_IDS", "ROLES", "VOCABULARY", "Message", "decode", "encode", "encode_chat"]

BOS: Final = 256
"""Begins every prompt that is given as text."""
EOS: Final = 257
"""Ends an answer, and every message of a chat."""
ROLES: Final = {"system": 258, "developer": 258, "user": 259, "assistant": 260, "tool": 261}
VOCABULARY: Final = 264
OUTPUT_IDS: Final = (*range(0x20, 0x7F), EOS)
"""What can be generated: row i of the model's output head stands for `OUTPUT_IDS[i]`."""


class Message(NamedTuple):
    """A `Message` is a message of a chat; `role` is a key of `ROLES`."""

    role: str
    text: str


def encode(text: str, *, bos: bool = True) -> list[int]:
    """The ids of `text`; what UTF-8 cannot say (a lone surrogate from JSON) becomes `?`."""
    ids = list(text.encode("utf-8", "replace"))
    return [BOS, *ids] if bos else ids


def encode_chat(messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """The chat template: BOS, then role, text and EOS for each message, then the role that speaks next."""
    ids = [BOS]
    for message in messages:
        ids += [ROLES[message.role], *encode(message.text, bos=False), EOS]
    if add_generation_prompt:
        ids.append(ROLES["assistant"])
    return ids


def decode(ids: Iterable[int]) -> str:
    """The text of `ids`; markers have none, and bytes that are not UTF-8 become U+FFFD."""
    return bytes(token for token in ids if token < BOS).decode("utf-8", "replace")
