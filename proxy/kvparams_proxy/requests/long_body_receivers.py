"""Receivers for long request bodies read in steps. They keep no more than the checks need.

A prompt of ids becomes an array as it comes. Of messages only their verdict is kept: whether each has a role, and
whether there is more than text in them.
"""

from array import array
from collections.abc import Sequence
from typing import Final, cast

from kvparams.jsontext.receivers import OPEN_LIST, OPEN_OBJECT, ListReceiver, Receiver
from kvparams.tokens import MAX_TOKENS
from kvparams_proxy.errors import ProxyError

__all__ = [
    "INVALID_MESSAGES_MESSAGE",
    "INVALID_PROMPT_MESSAGE",
    "MAX_PROMPTS",
    "CompletionPromptReceiver",
    "MessagesReceiver",
    "PromptInputReceiver",
    "TokenIdsReceiver",
    "has_role",
    "invalid_member_error",
    "is_text_message",
    "token_id_array",
]

MAX_PROMPTS: Final = 1024
INVALID_PROMPT_MESSAGE: Final = "`prompt` must be a string, a list of token ids, or a list of either, and not empty"
INVALID_MESSAGES_MESSAGE: Final = "`messages` must be a list of at least one message"


def invalid_member_error(name: str, message: str) -> ProxyError:
    """Returns the error for a member that is not what it should be."""
    return ProxyError(400, "invalid_request_error", message, param=name, code="invalid_value")


def has_role(message: object) -> bool:
    """Returns whether a message is an object with a role."""
    return isinstance(message, dict) and type(cast("dict[str, object]", message).get("role")) is str


def is_text_message(message: object) -> bool:
    """Returns whether a message is nothing but text: an image is not in the token ids."""
    content = cast("dict[str, object]", message).get("content") if isinstance(message, dict) else None
    parts = cast("list[object]", content) if isinstance(content, list) else []
    return all(cast("dict[str, object]", part).get("type") == "text" for part in parts if isinstance(part, dict))


def token_id_array(items: list[object], name: str, before: int = 0) -> "array[int]":
    """Returns a list of token ids as an array. `before`: how many stand in front of them.

    Raises:
        ProxyError: they are none, or too many.
    """
    if before + len(items) > MAX_TOKENS:
        raise invalid_member_error(name, f"`{name}` must hold at most {MAX_TOKENS} token ids")
    if set(map(type, items)) != {int}:
        raise invalid_member_error(name, f"`{name}` must hold whole numbers only: token ids")
    try:
        return array("I", cast("list[int]", items))
    except OverflowError as error:
        raise invalid_member_error(name, f"`{name}`: a token id is from 0 to 4294967295") from error


class PromptInputReceiver(ListReceiver):
    """Receives the prompts of a request, and tells what it may be refused for."""

    __slots__ = ("problem",)

    def __init__(self, stand_in: object = None) -> None:
        """See `ListReceiver`."""
        super().__init__(stand_in)
        self.problem: ProxyError | None = None
        """The first thing that is wrong. The text is read to its end all the same."""

    def prompts(self) -> tuple[int, Sequence[int] | None]:
        """Returns how many prompts there are, and the token ids where it is one prompt of ids.

        Raises:
            ProxyError: something is wrong with them.
        """
        if self.problem is not None:
            raise invalid_member_error(
                self.problem.param or "", self.problem.message
            )  # one that is kept must not hold its frames
        return 1, None


class TokenIdsReceiver(PromptInputReceiver):
    """Receives a list of token ids."""

    __slots__ = ("_name", "ids")

    def __init__(self, name: str) -> None:
        """`name`: what the list is called in errors."""
        super().__init__()
        self._name = name
        self.ids = array("I")

    def on_values(self, values: list[object]) -> None:
        """See `Receiver.on_values`."""
        if self.problem is None:
            try:
                self.ids.extend(token_id_array(values, self._name, len(self.ids)))
            except ProxyError as error:
                self.problem = error.with_traceback(None)
                self.problem.__cause__ = self.problem.__context__ = None

    def on_nested(self, name: str | None, opening: int) -> None:
        """See `Receiver.on_nested`."""
        if self.problem is None:
            self.problem = invalid_member_error(self._name, f"`{self._name}` must hold whole numbers only: token ids")

    def on_closed(self) -> None:
        """See `Receiver.on_closed`."""
        if self.problem is None and not self.ids:
            self.problem = invalid_member_error(self._name, f"`{self._name}` must be a list of at least one token id")

    def prompts(self) -> tuple[int, Sequence[int] | None]:
        """See `PromptInputReceiver.prompts`."""
        super().prompts()
        return 1, self.ids


class CompletionPromptReceiver(PromptInputReceiver):
    """Receives the `prompt` of a completion: a list of token ids, of texts, or of lists of token ids."""

    __slots__ = ("_count", "_ids", "_kind")

    def __init__(self) -> None:
        super().__init__()
        self._kind: type | None = None
        """Of the elements."""
        self._count = 0
        """Elements that came, unless they are ids."""
        self._ids = TokenIdsReceiver("prompt")
        """The elements, if they are ids, or those of the last one."""

    def on_values(self, values: list[object]) -> None:
        """See `Receiver.on_values`."""
        if self._kind is None:
            self._kind = type(values[0])
        if self._kind is int:
            self._ids.on_values(values)
            return
        for value in values:
            if not self._begins(type(value), empty=not value):
                return
            if isinstance(value, list):
                self._ids.on_values(cast("list[object]", value))

    def on_nested(self, name: str | None, opening: int) -> Receiver | None:
        """See `Receiver.on_nested`."""
        kind = list if opening == OPEN_LIST else dict
        if self._kind is None:
            self._kind = kind
        if self._kind is int:
            self._ids.on_nested(None, opening)
            return None
        return self._ids if self._begins(kind) else None

    def _begins(self, kind: type, *, empty: bool = False) -> bool:
        """Returns whether an element of this kind may come next."""
        self.problem = self.problem or self._ids.problem
        if self.problem is not None:
            return False
        name = f"prompt[{self._count}]"
        if self._count == MAX_PROMPTS:
            self.problem = invalid_member_error("prompt", f"at most {MAX_PROMPTS} prompts fit in one request")
        elif kind is not self._kind or kind not in (str, list) or empty:
            self.problem = invalid_member_error(
                name, "prompts of one request must be all strings or all lists, none empty"
            )
        self._count += 1
        self._ids = TokenIdsReceiver(name)
        return self.problem is None

    def on_closed(self) -> None:
        """See `Receiver.on_closed`."""
        if self._kind is None:
            self.problem = invalid_member_error("prompt", INVALID_PROMPT_MESSAGE)

    def prompts(self) -> tuple[int, Sequence[int] | None]:
        """See `PromptInputReceiver.prompts`."""
        super().prompts()
        if self._kind is int or (self._kind is list and self._count == 1):
            return self._ids.prompts()
        if self._kind is list:
            self._ids.prompts()
        return self._count, None


class MessagesReceiver(PromptInputReceiver):
    """Receives the `messages` of a chat."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        super().__init__({"role": "user"})
        self._count = 0

    def on_values(self, values: list[object]) -> None:
        """See `Receiver.on_values`."""
        for message in values:
            if not has_role(message):
                self.record_missing_role(self._count)
            self._count += 1
            if not is_text_message(message):
                self.record_media()

    def on_nested(self, name: str | None, opening: int) -> Receiver | None:
        """See `Receiver.on_nested`."""
        self._count += 1
        if opening == OPEN_OBJECT:
            return _MessageReceiver(self, self._count - 1)
        self.record_missing_role(self._count - 1)
        return None

    def on_closed(self) -> None:
        """See `Receiver.on_closed`."""
        if not self._count:
            self.problem = invalid_member_error("messages", INVALID_MESSAGES_MESSAGE)

    def record_missing_role(self, index: int) -> None:
        """Notes that the message of this number has no role."""
        if self.problem is None:
            self.problem = invalid_member_error(f"messages[{index}]", "each message must be an object with a `role`")

    def record_media(self) -> None:
        """Notes that there is more than text in a message."""
        self.stand_in[:] = [{"role": "user", "content": [{"type": "media"}]}]


class _MessageReceiver(Receiver):
    """Receives one message that is long."""

    __slots__ = ("_has_role", "_index", "_messages")

    def __init__(self, messages: MessagesReceiver, index: int) -> None:
        super().__init__()
        self._messages = messages
        self._index = index
        self._has_role = False

    def on_members(self, members: dict[str, object]) -> None:
        """See `Receiver.on_members`."""
        self._has_role = self._has_role or has_role(members)
        if not is_text_message(members):
            self._messages.record_media()

    def on_nested(self, name: str | None, opening: int) -> Receiver | None:
        """See `Receiver.on_nested`."""
        return _PartsReceiver(self._messages) if name == "content" and opening == OPEN_LIST else None

    def on_closed(self) -> None:
        """See `Receiver.on_closed`."""
        if not self._has_role:
            self._messages.record_missing_role(self._index)


class _PartsReceiver(Receiver):
    """Receives the parts of a message's content."""

    __slots__ = ("_messages",)

    def __init__(self, messages: MessagesReceiver) -> None:
        super().__init__()
        self._messages = messages

    def on_values(self, values: list[object]) -> None:
        """See `Receiver.on_values`."""
        if not is_text_message({"content": values}):
            self._messages.record_media()

    def on_nested(self, name: str | None, opening: int) -> Receiver | None:
        """See `Receiver.on_nested`."""
        return _PartReceiver(self._messages) if opening == OPEN_OBJECT else None


class _PartReceiver(Receiver):
    """Receives one part that is long."""

    __slots__ = ("_is_text", "_messages")

    def __init__(self, messages: MessagesReceiver) -> None:
        super().__init__()
        self._messages = messages
        self._is_text = False

    def on_members(self, members: dict[str, object]) -> None:
        """See `Receiver.on_members`."""
        self._is_text = self._is_text or members.get("type") == "text"

    def on_closed(self) -> None:
        """See `Receiver.on_closed`."""
        if not self._is_text:
            self._messages.record_media()
